/** The conversation on the page: each question with its answer below it, in Markdown, and what may be done with both. */

import { Follower } from "./follow.js";
import { count, duration, rate } from "./numbers.js";
import { Prose } from "./prose.js";
import { made, madeButton } from "./text.js";
import { TokenText, TwoViews } from "./tokens.js";

/**
 * @typedef {object} Actions
 * @property {(text: string, from: HTMLElement) => void} copy
 * @property {(idx: number) => void} edit the question of a turn
 * @property {() => void} regenerate the last answer
 */

export class Transcript {
  #scroller;
  #follower;
  #actions;
  #exchanges = /** @type {Exchange[]} */ ([]);

  /** @param {HTMLElement} scroller becomes the view @param {Actions} actions */
  constructor(scroller, actions) {
    this.#scroller = scroller;
    this.#follower = new Follower(scroller);
    this.#actions = actions;
  }

  /** A question, whose answer goes into the exchange that comes back. @param {string} prompt @returns {Exchange} */
  begin(prompt) {
    const exchange = new Exchange(prompt, this.#exchanges.length, this.#follower, this.#actions);
    this.#exchanges.push(exchange);
    this.#scroller.append(exchange.element);
    this.#follower.begin();
    this.#follower.follow();
    return exchange;
  }

  /** Take away the turn with this index, and all after it. @param {number} idx */
  cut(idx) {
    for (const { element } of this.#exchanges.splice(idx)) element.remove();
  }

  /** @param {import("./conversation.js").Turn[]} turns instead of what is shown */
  show(turns) {
    this.cut(0);
    for (const turn of turns) {
      const exchange = this.begin(turn.prompt);
      if (turn.isJson) exchange.prose.beginCode("json");
      exchange.prose.append(turn.answer);
      exchange.prose.complete();
      exchange.end(turn);
      settle(exchange.prose);
    }
  }
}

/** A question and its answer. */
export class Exchange {
  element = made("article", "exchange");
  #actions;
  #idx;
  #follower;
  #answer = made("div", "prose");
  #tokens = /** @type {HTMLElement | null} */ (null);

  /** @param {string} prompt @param {number} idx @param {Follower} follower @param {Actions} actions */
  constructor(prompt, idx, follower, actions) {
    this.#actions = actions;
    this.#idx = idx;
    this.element.setAttribute("aria-label", `Turn ${idx + 1}`);
    this.#follower = follower;
    this.element.append(made("p", "question", prompt), this.#answer);
    this.prose = new Prose(this.#answer, follower);
  }

  /** Show the answer token by token; its text is a button away. @param {import("./tokens.js").ChanceCard} card @returns {TwoViews} */
  withTokens(card) {
    this.#tokens = made("div", "tokens");
    this.#tokens.setAttribute("role", "group");
    this.#tokens.setAttribute("aria-label", "Answer, token by token; arrow keys say how likely each was");
    this.element.append(this.#tokens);
    this.#answer.hidden = true;
    return new TwoViews(this.prose, new TokenText(this.#tokens, this.#follower, card));
  }

  /** @param {import("./conversation.js").Turn} turn as it has become */
  end(turn) {
    const { copy, edit, regenerate } = this.#actions;
    const { numTokens, tokensPerS, ttftMs } = turn.figures;
    const words = `${turn.outcome} · ${count(numTokens)} tokens · ${rate(tokensPerS)} tokens/s · first token ${duration(ttftMs)}`;
    const foot = made("footer");
    const copies = madeButton("Copy", () => copy(turn.answer, copies));
    const again = madeButton("Regenerate", regenerate);
    again.classList.add("only-last");
    foot.append(made("p", "", words), ...this.#switch(), copies, again, madeButton("Edit", () => edit(this.#idx)));
    this.element.append(foot);
  }

  /** @returns {HTMLElement[]} a button between tokens and text, where there are both */
  #switch() {
    const tokens = this.#tokens;
    if (!tokens) return [];
    const button = madeButton("Tokens", () => {
      tokens.hidden = !tokens.hidden;
      this.#answer.hidden = !tokens.hidden;
      button.setAttribute("aria-pressed", String(!tokens.hidden));
    });
    button.setAttribute("aria-pressed", "true");
    return [button];
  }
}

/** Paint, frame by frame, all that was appended. @param {Prose} prose */
function settle(prose) {
  prose.paint();
  prose.follow();
  if (!prose.settled) requestAnimationFrame(() => settle(prose));
}
