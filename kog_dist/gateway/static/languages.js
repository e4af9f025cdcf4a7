/** What `highlight.js` knows of languages, and the names that people write behind a fence. */

/**
 * @typedef {object} Language
 * @property {RegExp} token one group for each kind: comment, open (of a string or comment that may go on), string, decorator, number, name, word
 * @property {Set<string>} keywords
 * @property {Set<string>} constants
 * @property {Set<string>} naming keywords after which a new name stands
 * @property {(open: string) => string} end what ends `open`
 * @property {boolean} [anyCase] keywords may be written in capitals
 */

const words = (text) => new Set(text.split(" "));

const PYTHON = {
  token: /(?<comment>#.*)|(?<open>(?:\b[rbfuRBFU]{1,2})?(?:"""|'''))|(?<string>(?:\b[rbfuRBFU]{1,2})?(?:"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?))|(?<decorator>@[A-Za-z_][\w.]*)|(?<number>\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*\.?[\d_]*(?:[eE][+-]?\d+)?)j?)|(?<word>[A-Za-z_]\w*)/g,
  keywords: words("and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield"),
  constants: words("None True False self cls NotImplemented Ellipsis __name__"),
  naming: words("def class"),
  end: (open) => open.slice(-3),
};

const C_LIKE = {
  token: /(?<comment>\/\/.*)|(?<open>\/\*|`)|(?<string>"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?)|(?<decorator>^\s*#\s*[a-z]+|@[A-Za-z_]\w*)|(?<number>\b(?:0[xXbB][\da-fA-F_']+|\d[\d_']*\.?[\d_]*(?:[eE][+-]?\d+)?)[a-zA-Z]*)|(?<word>[A-Za-z_$][\w$]*)/g,
  keywords: words("abstract as async auto await bool break case catch char class const constexpr continue default delete do double else enum export extends extern final float fn for from func function go goto if impl implements import in inline instanceof int interface let long match mod mut namespace new of operator package private protected pub public return short signed sizeof static struct super switch template throw try type typedef typename typeof union unsigned use using var virtual void volatile where while with yield"),
  constants: words("null nullptr undefined true false NULL this self None nil NaN Infinity"),
  naming: words("class enum fn func function interface struct"),
  end: (open) => (open === "`" ? "`" : "*/"),
};

const SHELL = {
  token: /(?<comment>(?<=^|\s)#.*)|(?<string>"(?:\\.|[^"\\])*"?|'[^']*'?)|(?<decorator>\$\{[^}]*\}?|\$[\w@*#?!]+)|(?<number>(?<![\w.-])\d+(?![\w.-]))|(?<word>[A-Za-z_][\w-]*)/g,
  keywords: words("if then else elif fi for while until do done case esac in function return exit export local readonly set unset source alias sudo cd echo FROM RUN COPY ADD CMD ENTRYPOINT ENV ARG WORKDIR EXPOSE"),
  constants: words("true false"),
  naming: words("function"),
  end: (open) => open,
};

const CONFIG = {
  token: /(?<comment>(?<=^|\s)[#;].*)|(?<name>^\s*(?:- )?(?:\[[^\]]*\]|[\w."-]+(?=\s*[:=])))|(?<string>"(?:\\.|[^"\\])*"?|'[^']*'?)|(?<number>(?<![\w.-])-?\d[\d_.]*(?![\w.-]))|(?<word>[A-Za-z_][\w-]*)/g,
  keywords: words(""),
  constants: words("true false null yes no on off"),
  naming: words(""),
  end: (open) => open,
};

const SQL = {
  token: /(?<comment>--.*)|(?<open>\/\*)|(?<string>'(?:''|[^'])*'?|"[^"]*"?)|(?<number>\b\d[\d.]*)|(?<word>[A-Za-z_]\w*)/g,
  keywords: words("add all alter and as asc begin between by case check column commit constraint create cross default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer over partition primary references returning right rollback select set table then union unique update using values view when where window with"),
  constants: words("true false"),
  naming: words(""),
  end: () => "*/",
  anyCase: true,
};

const MARKUP = {
  token: /(?<open><!--)|(?<string>"[^"]*"?|'[^']*'(?=[\s/>]))|(?<name>[\w:-]+(?==))|(?<decorator>&#?\w+;)|(?<word><\/?[A-Za-z!][\w:-]*|\/?>)/g,
  keywords: { has: (/** @type {string} */ word) => /[<>]/.test(word) },
  constants: words(""),
  naming: words(""),
  end: () => "-->",
};

export const LANGUAGES = /** @type {Record<string, Language>} */ ({
  python: PYTHON, "c-like": C_LIKE, shell: SHELL, config: CONFIG, sql: SQL, markup: MARKUP,
});

const NAMES = {
  python: "py python python3 pycon",
  shell: "bash sh zsh shell console terminal dockerfile docker make makefile fish",
  config: "yaml yml toml ini conf properties",
  sql: "sql postgresql mysql sqlite",
  markup: "html xml svg vue xhtml",
  plain: "text txt plain plaintext output none markdown md diff csv log",
};
const LANGUAGE_OF = new Map(Object.entries(NAMES).flatMap(([language, names]) => names.split(" ").map((name) => [name, language])));

/** The language of fenced code: most have braces and slashes as C has. @param {string} name as written behind the fence */
export function languageNamed(name) {
  return name === "" ? "plain" : LANGUAGE_OF.get(name.toLowerCase()) ?? "c-like";
}
