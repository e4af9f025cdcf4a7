/** What a screen reader hears: a sentence when something begins or ends, and now and then while a long answer goes on. */

import { count, duration, rate } from "./numbers.js";

const EVERY_MS = 15_000;

export class Announcer {
  #element = /** @type {HTMLElement} */ (document.getElementById("announcement"));
  #timer = 0;

  /** @param {string} sentence */
  say(sentence) {
    this.#element.textContent = sentence;
  }

  /** @param {() => import("./pace.js").Figures} figures asked every quarter of a minute until `ended` */
  began(figures) {
    this.ended();
    this.say("Started.");
    this.#timer = setInterval(() => {
      const { numTokens, tokensPerS } = figures();
      this.say(numTokens ? `${count(numTokens)} tokens so far, ${rate(tokensPerS)} per second.` : "Still waiting for the first token.");
    }, EVERY_MS);
  }

  /** @param {string} [outcome] @param {import("./pace.js").Figures} [figures] */
  ended(outcome, figures) {
    clearInterval(this.#timer);
    if (!outcome || !figures) return;
    const speed = figures.tokensPerS === null ? "" : `, ${rate(figures.tokensPerS)} tokens per second`;
    this.say(`${outcome}: ${count(figures.numTokens)} tokens${speed}. First token after ${duration(figures.ttftMs)}.`);
  }
}
