/**
 * Code on the page that grows by thousands of tokens a second.
 *
 * Text is queued as it arrives and painted once per frame, a bounded amount each time. Finished lines are coloured once and go into
 * blocks of lines that the browser lays out only while they are in sight; only the unfinished last line is ever painted again.
 * Everything is a text node: nothing that a model writes can become an element. Characters that cannot be seen, or that would turn
 * the direction of the text, are kept where they are and named.
 */

import { beginning, colourLine } from "./highlight.js";

const LINES_PER_BLOCK = 50;
const CHARACTERS_PER_FRAME = 12_000;
/** A longer line is no longer painted again from its beginning. */
const LONGEST_LAST_LINE = 600;
/** Beyond this, text is plain: colours cost memory for each word. */
const COLOURED_CHARACTERS = 1_500_000;
/** Control characters but tab and newline, invisible ones, and those that change the direction of text; joiners shape scripts and stay. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;
const UNSEEN_RUNS = new RegExp(`(${UNSEEN.source})`);

export class Listing {
  #scroller;
  #block = /** @type {HTMLElement | null} */ (null);
  #numLines = 0;
  #tail;
  #lastLine = "";
  #queue = /** @type {string[]} */ ([]);
  #state = beginning("plain");
  #numPainted = 0;
  #follows = true;
  #grown = false;
  #lastTop = 0;

  /** @param {HTMLElement} scroller becomes the view; it scrolls along until the reader scrolls up */
  constructor(scroller) {
    this.#scroller = scroller;
    this.#tail = document.createElement("span");
    scroller.addEventListener("scroll", () => this.#noticeScrolling(), { passive: true });
    this.begin("plain");
  }

  /** Empty the view. @param {string} language see `highlight.js` @param {string} given shown before the text, dimmed: the prompt */
  begin(language, given = "") {
    this.#state = beginning(language);
    this.#queue = [];
    this.#lastLine = "";
    this.#numPainted = 0;
    this.#follows = true;
    this.#tail = document.createElement("span");
    this.#tail.className = "tail";
    this.#scroller.replaceChildren();
    if (given) this.#showGiven(given);
    this.#newBlock();
  }

  /** @param {string} text painted with the next frames */
  append(text) {
    if (text) this.#queue.push(text);
  }

  /** Whether everything that was appended is on the page. */
  get settled() {
    return this.#queue.length === 0;
  }

  /** Paint what fits in one frame. */
  paint() {
    if (this.settled) return;
    const text = this.#take();
    this.#numPainted += text.length;
    const lines = (this.#lastLine + text).split("\n");
    this.#lastLine = /** @type {string} */ (lines.pop());
    for (const line of lines) this.#finishLine(line, "\n");
    if (this.#lastLine.length > LONGEST_LAST_LINE) {
      this.#finishLine(this.#lastLine, "");
      this.#lastLine = "";
    }
    this.#tail.replaceChildren(...nodes(colourLine(this.#state, this.#lastLine).runs));
    this.#grown = true;
  }

  /** Scroll to the end, unless the reader has scrolled up. Needs the layout: call it when nothing else changes in this frame. */
  follow() {
    if (!this.#follows || !this.#grown) return;
    this.#grown = false;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop;
  }

  #showGiven(given) {
    const element = document.createElement("span");
    element.className = "given";
    const lines = given.split("\n");
    lines.forEach((line, idx) => {
      const coloured = colourLine(this.#state, line);
      const last = idx === lines.length - 1;
      element.append(...nodes(coloured.runs), last ? "" : "\n");
      if (!last) this.#state = coloured.state; // the answer goes on in the last line
    });
    this.#scroller.append(element);
  }

  /** The queue's text, at most a frame's worth. */
  #take() {
    const taken = [];
    let room = CHARACTERS_PER_FRAME;
    let idx = 0;
    for (; idx < this.#queue.length && this.#queue[idx].length <= room; idx++) {
      taken.push(this.#queue[idx]);
      room -= this.#queue[idx].length;
    }
    this.#queue.splice(0, idx);
    if (taken.length === 0) {
      taken.push(this.#queue[0].slice(0, room));
      this.#queue[0] = this.#queue[0].slice(room);
    }
    return taken.join("");
  }

  #finishLine(line, end) {
    const { runs, state } = colourLine(this.#state, line);
    this.#state = state;
    const plain = this.#numPainted > COLOURED_CHARACTERS;
    this.#tail.before(...nodes(plain ? [[null, line]] : runs), end);
    if (end && ++this.#numLines % LINES_PER_BLOCK === 0) this.#newBlock();
  }

  #newBlock() {
    this.#block?.classList.add("whole"); // its height is final
    this.#block = document.createElement("span");
    this.#block.className = "block";
    this.#block.append(this.#tail);
    this.#scroller.append(this.#block);
  }

  #noticeScrolling() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const atEnd = scrollHeight - clientHeight - scrollTop < 32;
    if (atEnd) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false;
    this.#lastTop = scrollTop;
  }
}

/** @param {import("./highlight.js").Run[]} runs @returns {Node[]} */
function nodes(runs) {
  return runs.flatMap(([colour, text]) => {
    const parts = UNSEEN.test(text) ? text.split(UNSEEN_RUNS).map(visible) : [document.createTextNode(text)];
    if (colour === null) return parts;
    const element = document.createElement("span");
    element.className = colour;
    element.append(...parts);
    return [element];
  });
}

/** @param {string} part @param {number} idx odd: a character that cannot be seen @returns {Node} */
function visible(part, idx) {
  if (idx % 2 === 0) return document.createTextNode(part);
  const element = document.createElement("span");
  element.className = "unseen";
  element.dataset.code = `U+${part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  element.textContent = part;
  return element;
}
