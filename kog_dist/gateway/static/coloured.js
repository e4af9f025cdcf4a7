/**
 * Code that grows, in syntax colours.
 *
 * Finished lines are coloured once and go into blocks of lines that the browser lays out only while they are in sight; only the
 * unfinished last line is ever painted again. Everything is a text node: nothing that a model writes can become an element.
 */

import { beginning, colourLine } from "./highlight.js";
import { textNodes } from "./text.js";

const LINES_PER_BLOCK = 50;
/** A longer line is no longer painted again from its beginning. */
const LONGEST_LAST_LINE = 600;
/** Beyond this, text is plain: colours cost memory for each word. */
const COLOURED_CHARACTERS = 1_500_000;

export class ColouredText {
  #parent;
  #state;
  #block = /** @type {HTMLElement | null} */ (null);
  #tail = document.createElement("span");
  #lastLine = "";
  #numLines = 0;
  #numWritten = 0;

  /**
   * @param {HTMLElement} parent gets the text after what is in it
   * @param {string} language see `languages.js`
   * @param {string} given shown before the text, dimmed: the prompt
   */
  constructor(parent, language, given = "") {
    this.#parent = parent;
    this.#state = beginning(language);
    this.#tail.className = "tail";
    if (given) this.#showGiven(given);
    this.#newBlock();
  }

  /** @param {string} text */
  write(text) {
    this.#numWritten += text.length;
    const lines = (this.#lastLine + text).split("\n");
    this.#lastLine = /** @type {string} */ (lines.pop());
    for (const line of lines) this.#finishLine(line, "\n");
    if (this.#lastLine.length > LONGEST_LAST_LINE) {
      this.#finishLine(this.#lastLine, "");
      this.#lastLine = "";
    }
    this.#tail.replaceChildren(...nodes(colourLine(this.#state, this.#lastLine).runs));
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
    this.#parent.append(element);
  }

  #finishLine(line, end) {
    const { runs, state } = colourLine(this.#state, line);
    this.#state = state;
    const plain = this.#numWritten > COLOURED_CHARACTERS;
    this.#tail.before(...nodes(plain ? [[null, line]] : runs), end);
    if (end && ++this.#numLines % LINES_PER_BLOCK === 0) this.#newBlock();
  }

  #newBlock() {
    this.#block?.classList.add("whole"); // its height is final
    this.#block = document.createElement("span");
    this.#block.className = "block";
    this.#block.append(this.#tail);
    this.#parent.append(this.#block);
  }
}

/** @param {import("./highlight.js").Run[]} runs @returns {Node[]} */
function nodes(runs) {
  return runs.flatMap(([colour, text]) => {
    if (colour === null) return textNodes(text);
    const element = document.createElement("span");
    element.className = colour;
    element.append(...textNodes(text));
    return [element];
  });
}
