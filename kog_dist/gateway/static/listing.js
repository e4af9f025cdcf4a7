/** A completion on the page: code that grows by thousands of tokens a second, painted once per frame, a bounded amount each time. */

import { ColouredText } from "./coloured.js";
import { Follower } from "./follow.js";
import { TextQueue } from "./queue.js";

const CHARACTERS_PER_FRAME = 12_000;

export class Listing {
  #scroller;
  #follower;
  #queue = new TextQueue();
  #text;
  #grown = false;

  /** @param {HTMLElement} scroller becomes the view @param {Follower} follower */
  constructor(scroller, follower = new Follower(scroller)) {
    this.#scroller = scroller;
    this.#follower = follower;
    this.#text = new ColouredText(scroller, "plain");
  }

  /** Empty the view. @param {string} language see `languages.js` @param {string} given shown before the text, dimmed: the prompt */
  begin(language, given = "") {
    this.#queue.clear();
    this.#scroller.replaceChildren();
    this.#text = new ColouredText(this.#scroller, language, given);
    this.#follower.begin();
  }

  /** @param {string} text painted with the next frames */
  append(text) {
    this.#queue.push(text);
  }

  /** Nothing will follow. */
  complete() {}

  /** Whether everything that was appended is on the page. */
  get settled() {
    return this.#queue.isEmpty;
  }

  /** Paint what fits in one frame. */
  paint() {
    if (this.settled) return;
    this.#text.write(this.#queue.take(CHARACTERS_PER_FRAME));
    this.#grown = true;
  }

  /** Scroll to the end. Needs the layout: call it when nothing else changes in this frame. */
  follow() {
    if (this.#grown) this.#follower.follow();
    this.#grown = false;
  }
}
