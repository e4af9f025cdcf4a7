/**
 * Markdown as nodes. `marked` cuts the text into tokens; what becomes of them is decided here: elements of our own choice, the
 * model's words in text nodes. HTML stays visible text, pictures are links, and links lead to http, https and mail only.
 */

import { ColouredText } from "./coloured.js";
import { languageNamed } from "./languages.js";
import { Lexer } from "./marked.esm.js";
import { made, madeButton, textNodes } from "./text.js";

/** @typedef {import("./marked.esm.js").Token} Token */

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
/** Quotes and lists within each other, as deep as anybody writes them. */
const DEEPEST = 12;
/** What takes the library long, and no reader misses: quotes within quotes, and words of a thousand letters. Code may have them. */
const SLOW = /^(?:[ \t]*>){20}|\S{1000}/m;
const WITHIN = new Set(["blockquote", "list_item"]);
const INLINE = { strong: "strong", em: "em", del: "del" };

/** @param {string} source @returns {Token[]} whose `raw` together are the source */
export function parsed(source) {
  try {
    if (!SLOW.test(source.split(/```|~~~/, 1)[0])) return new Lexer({ gfm: true }).lex(source);
  } catch {
    // thousands of lists within each other: too deep for the stack
  }
  return [{ type: "text", raw: source, text: source }];
}

/**
 * @typedef {object} Shown a block on the page
 * @property {string} raw
 * @property {HTMLElement | null} node null for what nobody sees
 * @property {Blocks | null} items what is within a list, item or quote
 * @property {string} kind lists of one kind differ in their items alone
 * @property {number} level of a heading
 */

/** Blocks of a text that grows: a block, or item of a list, whose source is the same as before stays as it is on the page. */
export class Blocks {
  #parent;
  #shown = /** @type {Shown[]} */ ([]);
  #numFixed = 0;
  #depth;

  /** @param {HTMLElement} parent gets one element for each block, after what is in it @param {number} depth */
  constructor(parent, depth = 0) {
    this.#parent = parent;
    this.#depth = depth;
  }

  /** @param {Token[]} tokens all blocks after the fixed ones */
  show(tokens) {
    let same = 0;
    const old = this.#shown.slice(this.#numFixed);
    while (same < old.length && same < tokens.length && old[same].raw === tokens[same].raw) same++;
    if (old[same]?.items && tokens[same]?.items && old[same].kind === kindOf(tokens[same])) {
      old[same].items?.show(tokens[same].items);
      old[same].raw = tokens[same].raw;
      same++;
    }
    for (const { node } of old.slice(same)) node?.remove();
    this.#shown.length = this.#numFixed + same;
    for (const token of tokens.slice(same)) this.#add(token);
  }

  /** Blocks that will not change any more. @param {number} count of those shown last */
  fix(count) {
    this.#numFixed += count;
  }

  /** @param {HTMLElement} node a block of somebody else's, after those that are fixed */
  append(node) {
    this.#parent.append(node);
    this.#shown.push({ raw: "", node, items: null, kind: "", level: 0 });
    this.fix(1);
  }

  /** @param {Token} token */
  #add(token) {
    const level = token.type === "heading" ? Math.min(6, token.depth + 2, this.#level() + 1) : 0;
    const node = this.#depth > DEEPEST ? made("p", "html", token.raw) : block(token, level);
    if (node) this.#parent.append(node);
    const inside = token.items ?? (WITHIN.has(token.type) ? token.tokens : null);
    const items = inside && node && this.#depth <= DEEPEST ? new Blocks(node, this.#depth + 1) : null;
    items?.show(inside);
    this.#shown.push({ raw: token.raw, node, items, kind: kindOf(token), level });
  }

  /** Of the last heading: the next one is at most one level below it, or readers of headings would look for what is between. */
  #level() {
    return this.#shown.findLast(({ level }) => level > 0)?.level ?? 2;
  }
}

/** A fenced block of code, with the name of its language and a button that copies it. */
export class CodeBlock {
  element = made("figure", "code");
  #text;

  /** @param {string} info what stands behind the fence */
  constructor(info) {
    const name = info.trim().split(/[\s{,:]/)[0];
    const pre = made("pre");
    const head = made("figcaption", "", name || "code");
    const copy = madeButton("Copy", async () => {
      try {
        await navigator.clipboard.writeText(pre.textContent ?? "");
        copy.textContent = "Copied";
      } catch {
        getSelection()?.selectAllChildren(pre);
        copy.textContent = "Selected";
      }
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    head.append(copy);
    this.element.append(head, pre);
    this.#text = new ColouredText(pre, languageNamed(name));
  }

  /** @param {string} text */
  write(text) {
    this.#text.write(text);
  }
}

const kindOf = (token) => (token.type === "list" ? `${token.ordered ? "ol" : "ul"} ${token.start} ${token.loose}` : "");

/** @param {Token} token @param {number} level of a heading @returns {HTMLElement | null} null for what nobody sees */
function block(token, level) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "code": {
      const code = new CodeBlock(token.lang ?? "");
      code.write(token.text);
      return code.element;
    }
    case "heading":
      return filled(document.createElement(`h${level}`), token.tokens);
    case "hr":
      return document.createElement("hr");
    case "blockquote":
      return document.createElement("blockquote"); // like a list, it is filled block by block
    case "list": {
      const list = document.createElement(token.ordered ? "ol" : "ul");
      if (token.ordered && token.start !== 1) list.setAttribute("start", String(token.start));
      return list;
    }
    case "list_item":
      return document.createElement("li");
    case "table":
      return table(token);
    case "text": // the words of a list item
      return filled(made("span"), token.tokens ?? [token]);
    case "checkbox":
      return made("span", "", token.checked ? "☑ " : "☐ ");
    default:
      return token.tokens ? filled(made("p"), token.tokens) : made("p", "html", token.raw);
  }
}

function table(token) {
  const element = document.createElement("table");
  const row = (cells, tag, parent) => {
    const line = document.createElement("tr");
    for (const cell of cells) {
      const element = filled(document.createElement(tag), cell.tokens);
      if (cell.align) element.className = `align-${cell.align}`;
      line.append(element);
    }
    parent.append(line);
  };
  const [head, body] = [document.createElement("thead"), document.createElement("tbody")];
  row(token.header, "th", head);
  for (const cells of token.rows) row(cells, "td", body);
  element.append(head, body);
  return element;
}

/** @param {HTMLElement} element @param {Token[]} tokens words and what is within lines @returns {HTMLElement} */
function filled(element, tokens) {
  for (const token of tokens) element.append(...inline(token));
  return element;
}

/** @param {Token} token @returns {Node[]} */
function inline(token) {
  switch (token.type) {
    case "strong":
    case "em":
    case "del":
      return [filled(document.createElement(INLINE[token.type]), token.tokens)];
    case "codespan":
      return [made("code", "", token.text)];
    case "br":
      return [document.createElement("br")];
    case "checkbox":
      return textNodes(token.checked ? "☑ " : "☐ ");
    case "link":
    case "image":
      return link(token);
    case "text":
      return token.tokens ? token.tokens.flatMap(inline) : textNodes(decoded(token.text));
    case "escape":
      return textNodes(token.text);
    default:
      return textNodes(token.raw);
  }
}

/** @returns {Node[]} */
function link(token) {
  const words = token.tokens?.length ? token.tokens.flatMap(inline) : textNodes(token.text || token.href);
  let address = "";
  try {
    const url = new URL(token.href);
    if (["http:", "https:", "mailto:"].includes(url.protocol)) address = url.href;
  } catch {
    // a path of nowhere: its words stay
  }
  if (!address) return words;
  const element = document.createElement("a");
  element.href = address;
  element.title = address; // whoever points at it sees where it leads
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  element.append(...words);
  return [element];
}

/** @param {string} text with character references @returns {string} */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/g, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name];
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}
