/** A text that a model continues: the prompt, dimmed, and the answer behind it; or the answer token by token. */

import { guessLanguage } from "./highlight.js";
import { Listing } from "./listing.js";
import { made, madeButton } from "./text.js";
import { TokenText } from "./tokens.js";
import { quiet } from "./transcript.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @typedef {object} Actions
 * @property {(text: string, from: HTMLElement) => void} copy
 * @property {() => void} goOn behind the answer
 * @property {(prompt: string) => void} edit
 */

export class Completion {
  #listing;
  #tokens;
  #follower;
  #actions;
  #hasTokens = false;
  language = "plain";

  /** @param {import("./follow.js").Follower} follower of what scrolls around it @param {import("./tokens.js").ChanceCard} card @param {Actions} actions */
  constructor(follower, card, actions) {
    this.#follower = follower;
    this.#listing = new Listing(element("live"), follower);
    this.#tokens = new TokenText(element("live-tokens"), follower, card);
    this.#actions = actions;
  }

  /** @param {string} given the prompt @param {boolean} isJson @param {boolean} hasTokens whether each token is told */
  begin(given, isJson, hasTokens) {
    this.language = isJson ? "c-like" : guessLanguage(given);
    this.#listing.begin(this.language, given);
    this.#hasTokens = hasTokens;
    if (hasTokens) this.#tokens.begin(given);
    element("live").hidden = hasTokens;
    element("live-tokens").hidden = !hasTokens;
    element("completion-foot").replaceChildren();
    this.#follower.begin();
  }

  /** @param {string} text @param {import("./chances.js").Chance[]} [chances] */
  append(text, chances = []) {
    this.#listing.append(text);
    if (this.#hasTokens) this.#tokens.append(chances);
  }

  /** Completions have neither thoughts nor calls. */
  think() {}
  call() {}

  complete() {
    this.#listing.complete();
  }

  get settled() {
    return this.#listing.settled && (!this.#hasTokens || this.#tokens.settled);
  }

  paint() {
    this.#listing.paint();
    if (this.#hasTokens) this.#tokens.paint();
  }

  follow() {
    this.#listing.follow();
    this.#tokens.follow();
  }

  /** @param {import("./conversation.js").Turn} turn as it has become */
  end(turn) {
    const copies = madeButton("Copy", () => this.#actions.copy(turn.answer, copies));
    const more = madeButton("Continue", this.#actions.goOn);
    const edits = madeButton("Edit", () => this.#actions.edit(turn.prompt));
    element("completion-foot").replaceChildren(made("p", "", quiet(turn)), ...this.#switch(), more, copies, edits);
  }

  /** Show a turn that was kept. @param {import("./conversation.js").Turn} turn */
  replay(turn) {
    this.begin(turn.prompt, turn.isJson ?? false, false);
    this.append(turn.answer);
    this.complete();
    this.end(turn);
    const settle = () => {
      this.paint();
      this.follow();
      if (!this.settled) requestAnimationFrame(settle);
    };
    settle();
  }

  /** @returns {HTMLElement[]} a button between tokens and text, where there are both */
  #switch() {
    if (!this.#hasTokens) return [];
    const button = madeButton("Tokens", () => {
      const asTokens = element("live-tokens").hidden;
      element("live-tokens").hidden = !asTokens;
      element("live").hidden = asTokens;
      button.setAttribute("aria-pressed", String(asTokens));
    });
    button.setAttribute("aria-pressed", "true");
    return [button];
  }
}
