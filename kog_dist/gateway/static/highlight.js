/**
 * Syntax colours, line by line: a line and the state at its beginning give coloured runs and the state at its end. Nothing looks
 * back, so a stream is coloured as it comes, and each finished line once.
 *
 * Colours are a help to the eye, not a parser: what is not recognised stays plain.
 */

/**
 * @typedef {"keyword" | "constant" | "string" | "comment" | "number" | "name" | "call" | "decorator" | "heading" | null} Colour
 * @typedef {[Colour, string]} Run
 * @typedef {object} State
 * @property {string} language
 * @property {string | null} until what ends the string or comment in which the line begins
 * @property {Colour} colour of that string or comment
 * @property {string | null} fence in prose: the language of the code block in which the line begins
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

const LANGUAGES = /** @type {Record<string, typeof PYTHON>} */ ({ python: PYTHON, "c-like": C_LIKE });
const FENCE_NAMES = /^(py|python|python3|pycon)$/i;

/** @param {string} language "python", "c-like", "prose" (text with fenced code) or "plain" @returns {State} */
export function beginning(language) {
  return { language, until: null, colour: null, fence: null };
}

/**
 * The language that a text is probably written in.
 * @param {string} text
 */
export function guessLanguage(text) {
  const python = text.match(/^\s*(def |class \w+.*:|import |from \w|@\w|#|async def |if .*:$|for .*:$|""")/gm)?.length ?? 0;
  const cLike = text.match(/^\s*(function\b|const |let |var |#include|\/\/|\/\*|struct |template|public |fn |func |package |using )|[;{]\s*$/gm)?.length ?? 0;
  return cLike > python ? "c-like" : "python";
}

/**
 * @param {State} state at the beginning of the line
 * @param {string} line without its end
 * @returns {{runs: Run[], state: State}}
 */
export function colourLine(state, line) {
  if (state.language === "prose") return proseLine(state, line);
  const language = LANGUAGES[state.language];
  return language ? codeLine(language, state, line) : { runs: [[null, line]], state };
}

/** @returns {{runs: Run[], state: State}} */
function codeLine(language, state, line) {
  const runs = /** @type {Run[]} */ ([]);
  let position = 0;
  if (state.until !== null) {
    position = endOf(state.until, line, 0);
    if (position === -1) return { runs: [[state.colour, line]], state };
    runs.push([state.colour, line.slice(0, position)]);
    state = { ...state, until: null, colour: null };
  }
  let naming = false;
  language.token.lastIndex = position;
  for (let match = language.token.exec(line); match !== null; match = language.token.exec(line)) {
    const groups = /** @type {Record<string, string | undefined>} */ (match.groups);
    let found = match[0];
    let colour = /** @type {Colour} */ (null);
    if (groups.open !== undefined) {
      colour = found.startsWith("/") ? "comment" : "string";
      const until = language.end(found);
      const end = endOf(until, line, match.index + found.length);
      if (end === -1) state = { ...state, until, colour };
      found = line.slice(match.index, end === -1 ? line.length : end);
    } else if (groups.word !== undefined) {
      colour = wordColour(language, found, naming, line, match.index + found.length);
      naming = language.naming.has(found);
    } else {
      colour = /** @type {Colour} */ (["comment", "string", "decorator", "number"].find((name) => groups[name] !== undefined) ?? null);
    }
    if (match.index > position) runs.push([null, line.slice(position, match.index)]);
    runs.push([colour, found]);
    position = match.index + found.length;
    language.token.lastIndex = position;
  }
  if (position < line.length) runs.push([null, line.slice(position)]);
  return { runs, state };
}

/** @returns {Colour} */
function wordColour(language, word, naming, line, end) {
  if (naming) return "name";
  if (language.keywords.has(word)) return "keyword";
  if (language.constants.has(word)) return "constant";
  return line[end] === "(" ? "call" : null;
}

/** Index after the next `until` that no backslash escapes, or -1. */
function endOf(until, line, from) {
  for (let at = line.indexOf(until, from); at !== -1; at = line.indexOf(until, at + 1)) {
    let backslashes = 0;
    while (line[at - 1 - backslashes] === "\\") backslashes++;
    if (until === "*/" || backslashes % 2 === 0) return at + until.length;
  }
  return -1;
}

/** Prose with fenced code blocks. @returns {{runs: Run[], state: State}} */
function proseLine(state, line) {
  const fence = /^\s*(?:```|~~~)\s*([\w+#-]*)/.exec(line);
  if (fence) {
    const opened = state.fence === null ? (FENCE_NAMES.test(fence[1]) ? "python" : "c-like") : null;
    return { runs: [["comment", line]], state: { ...beginning("prose"), fence: opened } };
  }
  if (state.fence !== null) {
    const inside = codeLine(LANGUAGES[state.fence], state, line);
    return { runs: inside.runs, state: inside.state };
  }
  if (/^#{1,6} /.test(line)) return { runs: [["heading", line]], state };
  const runs = /** @type {Run[]} */ (line.split(/(`[^`]+`)/).map((part, idx) => [idx % 2 ? "string" : null, part]));
  return { runs: runs.filter(([, part]) => part !== ""), state };
}
