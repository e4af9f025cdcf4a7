/** What a model thinks, folded; it is shown to whoever opens it. */

import { Listing } from "./listing.js";
import { duration } from "./numbers.js";
import { made } from "./text.js";

export class Thought {
  element = /** @type {HTMLDetailsElement} */ (made("details", "thought"));
  #summary = made("summary", "", "Thinking…");
  #listing;
  #beganAt = 0;
  #isOver = false;

  /** @param {import("./follow.js").Follower} follower */
  constructor(follower) {
    const text = made("div", "plain");
    this.element.hidden = true;
    this.element.append(this.#summary, text);
    this.#listing = new Listing(text, follower);
    this.#listing.begin("plain");
  }

  /** @param {string} text */
  append(text) {
    if (!text) return;
    if (this.element.hidden) this.#beganAt = performance.now();
    this.element.hidden = false;
    this.#listing.append(text);
  }

  /** What follows is the answer. */
  end() {
    if (this.element.hidden || this.#isOver) return;
    this.#isOver = true;
    const tookMs = performance.now() - this.#beganAt;
    this.#summary.textContent = tookMs > 50 ? `Thought for ${duration(tookMs)}` : "Thought";
  }

  get settled() {
    return this.#listing.settled;
  }

  paint() {
    this.#listing.paint();
  }
}
