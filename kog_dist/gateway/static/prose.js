/**
 * An answer in Markdown that grows by thousands of tokens a second.
 *
 * Only its unfinished last block is ever rendered again: a block is finished once another one follows it. Code behind a fence grows
 * line by line, as a listing does. A frame paints a bounded amount, and a block that is slow to render rests before it is rendered
 * again.
 */

import { Blocks, CodeBlock, parsed } from "./markdown.js";
import { TextQueue } from "./queue.js";

/** A block that is longer is cut, so that rendering it again stays cheap. */
const LONGEST_BLOCK = 6_000;
const CHARACTERS_PER_FRAME = 3_000;
const SLOW_MS = 6;
/** Of the time, what rendering a slow block may take. */
const SHARE = 0.2;
const FENCE = /^(?:[ \t]*\n)*( {0,3})(`{3,}|~{3,})([^\n`]*)\n/;
const BULLET = /^\s*(?:[-*+]|\d+[.)])\s/;
const MAY_CLOSE = /^ {0,3}[`~]*[ \t]*$/;

/** @typedef {{code: CodeBlock, closing: RegExp | null, isWithinLine: boolean}} Fence */

export class Prose {
  #element;
  #follower;
  #queue = new TextQueue();
  #blocks;
  #fence = /** @type {Fence | null} */ (null);
  #open = ""; // what may still change its look
  #isStale = false; // the open text has changed since it was rendered
  #restsUntil = -Infinity;
  #isComplete = false;
  #grown = false;

  /** @param {HTMLElement} element gets the blocks @param {import("./follow.js").Follower} follower of what scrolls around it */
  constructor(element, follower) {
    this.#element = element;
    this.#follower = follower;
    this.#blocks = new Blocks(element);
  }

  /** All of the answer is code. @param {string} language as behind a fence */
  beginCode(language) {
    this.#beginFence(language, null);
  }

  /** @param {string} text painted with the next frames */
  append(text) {
    this.#queue.push(text);
  }

  /** Nothing will follow. */
  complete() {
    this.#isComplete = true;
    this.#isStale = true;
  }

  /** Whether everything that was appended is on the page. */
  get settled() {
    return this.#queue.isEmpty && !this.#isStale;
  }

  /** Paint what fits in one frame. */
  paint() {
    const began = performance.now();
    if (this.settled || began < this.#restsUntil) return;
    this.#open += this.#queue.take(CHARACTERS_PER_FRAME);
    if (this.#open.includes("\r")) this.#open = this.#open.replace(/\r\n?(?!$)/g, "\n"); // the last one may be half of a line's end
    while (this.#fence ? this.#writeCode(this.#fence) : this.#showBlocks());
    const tookMs = performance.now() - began;
    if (tookMs > SLOW_MS) this.#restsUntil = began + tookMs / SHARE;
    this.#isStale = false;
    this.#grown = true;
  }

  /** Scroll to the end. Needs the layout: call it when nothing else changes in this frame. */
  follow() {
    if (this.#grown) this.#follower.follow();
    this.#grown = false;
  }

  /** @param {string} language @param {RegExp | null} closing */
  #beginFence(language, closing) {
    this.#fence = { code: new CodeBlock(language), closing, isWithinLine: false };
    this.#blocks.show([]);
    this.#blocks.append(this.#fence.code.element);
  }

  /** Write the open text as code. @param {Fence} fence @returns {boolean} whether the code has ended and something follows */
  #writeCode(fence) {
    const { code, closing } = fence;
    let begin = 0;
    for (let end = this.#open.indexOf("\n"); end !== -1; end = this.#open.indexOf("\n", begin)) {
      if (!fence.isWithinLine && closing?.test(this.#open.slice(begin, end))) return this.#endFence(begin, end + 1);
      fence.isWithinLine = false;
      begin = end + 1;
    }
    const rest = this.#open.slice(begin);
    const mayClose = closing !== null && !fence.isWithinLine && MAY_CLOSE.test(rest);
    if (mayClose && this.#isComplete && closing.test(rest)) return this.#endFence(begin, this.#open.length);
    const isHeld = mayClose && !this.#isComplete;
    code.write(isHeld ? this.#open.slice(0, begin) : this.#open);
    fence.isWithinLine ||= !isHeld && rest !== "";
    this.#open = isHeld ? rest : "";
    return false;
  }

  /** @param {number} codeEnd @param {number} fenceEnd */
  #endFence(codeEnd, fenceEnd) {
    this.#fence?.code.write(this.#open.slice(0, codeEnd));
    this.#fence = null;
    this.#open = this.#open.slice(fenceEnd);
    return this.#open !== "";
  }

  /** Show the open text, and let go of what is finished. @returns {boolean} whether there is more to show */
  #showBlocks() {
    const fence = FENCE.exec(this.#open);
    if (fence) {
      this.#open = this.#open.slice(fence[0].length);
      this.#beginFence(fence[3], new RegExp(`^ {0,3}${fence[2][0]}{${fence[2].length},}[ \\t]*$`));
      return true;
    }
    const tokens = parsed(this.#open);
    const { count, length } = finished(tokens, this.#open.lastIndexOf("\n") + 1);
    const fenced = FENCE.test(this.#open.slice(length)); // what is behind it grows in another way
    this.#blocks.show(fenced ? tokens.slice(0, count) : tokens);
    this.#blocks.fix(count);
    this.#open = this.#open.slice(length);
    if (!fenced && this.#open.length > LONGEST_BLOCK) return this.#cut(tokens.slice(count));
    return fenced;
  }

  /** The open text is one block that has become too long. @param {import("./markdown.js").Token[]} tokens */
  #cut(tokens) {
    let length = this.#open.lastIndexOf("\n") + 1 || this.#open.lastIndexOf(" ") + 1 || this.#open.length;
    const last = tokens.at(-1);
    if (last?.type === "list") {
      const lastItem = this.#open.length - last.raw.length + sum(last.items.slice(0, -1));
      if (last.items.length > 1 && BULLET.test(this.#open.slice(lastItem))) length = lastItem;
    }
    const whole = parsed(this.#open.slice(0, length));
    this.#blocks.show(whole);
    this.#blocks.fix(whole.length);
    this.#open = this.#open.slice(length);
    return this.#open !== "";
  }
}

/** The blocks that another one follows, counting complete lines only: half a line may still join the block before it. */
function finished(tokens, linesEnd) {
  let length = 0;
  let found = { count: 0, length: 0 };
  for (const [idx, { type, raw, codeBlockStyle }] of tokens.entries()) {
    const begunFence = type === "code" && codeBlockStyle !== "indented" && raw.includes("\n");
    if (length + raw.length > linesEnd && !begunFence) break;
    if (type !== "space") found = { count: idx, length };
    if (begunFence) break; // its lines are written as they come
    length += raw.length;
  }
  return found;
}

/** @param {{raw: string}[]} tokens */
function sum(tokens) {
  return tokens.reduce((total, { raw }) => total + raw.length, 0);
}
