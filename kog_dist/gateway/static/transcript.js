/** The conversation on the page: each question with its answer below it, and what may be done with both. */

import { CallCard } from "./call_card.js";
import { Listing } from "./listing.js";
import { count, duration, rate } from "./numbers.js";
import { Prose } from "./prose.js";
import { made, madeButton } from "./text.js";
import { Thought } from "./thought.js";
import { TokenText, TwoViews } from "./tokens.js";

/**
 * @typedef {import("./conversation.js").Turn} Turn
 * @typedef {import("./conversation.js").Call} Call
 *
 * @typedef {object} Actions
 * @property {(text: string, from: HTMLElement) => void} copy
 * @property {(idx: number) => void} edit the question of a turn
 * @property {() => void} regenerate the last answer
 * @property {() => void} goOn with the last answer
 * @property {(results: {id: string, content: string}[]) => void} giveResults of the last answer's calls
 */

export class Transcript {
  #element;
  #follower;
  #actions;
  #exchanges = /** @type {Exchange[]} */ ([]);

  /** @param {HTMLElement} element @param {import("./follow.js").Follower} follower of what scrolls around it @param {Actions} actions */
  constructor(element, follower, actions) {
    this.#element = element;
    this.#follower = follower;
    this.#actions = actions;
  }

  /** A question, whose answer goes into the exchange that comes back. @param {Pick<Turn, "prompt" | "results">} turn @param {boolean} isMarkdown @returns {Exchange} */
  begin(turn, isMarkdown) {
    const exchange = new Exchange(turn, isMarkdown, this.#exchanges.length, this.#follower, this.#actions);
    this.#exchanges.push(exchange);
    this.#element.append(exchange.element);
    this.#follower.begin();
    this.#follower.follow();
    return exchange;
  }

  get last() {
    return this.#exchanges.at(-1) ?? null;
  }

  /** Take away the turn with this index, and all after it. @param {number} idx */
  cut(idx) {
    for (const { element } of this.#exchanges.splice(idx)) element.remove();
  }

  /** @param {Turn[]} turns instead of what is shown @param {boolean} isMarkdown */
  show(turns, isMarkdown) {
    this.cut(0);
    for (const turn of turns) this.begin(turn, isMarkdown).replay(turn);
  }
}

/** A question and its answer, which grows: thought, text, calls. */
export class Exchange {
  element = made("article", "exchange");
  #actions;
  #idx;
  #isMarkdown;
  #follower;
  #answer = made("div");
  #view;
  #tokens = /** @type {HTMLElement | null} */ (null);
  #thought;
  #calls = /** @type {CallCard[]} */ ([]);
  #foot = made("footer");

  /** @param {Pick<Turn, "prompt" | "results">} turn @param {boolean} isMarkdown @param {number} idx @param {import("./follow.js").Follower} follower @param {Actions} actions */
  constructor({ prompt, results }, isMarkdown, idx, follower, actions) {
    this.#actions = actions;
    this.#idx = idx;
    this.#isMarkdown = isMarkdown;
    this.#follower = follower;
    this.#thought = new Thought(follower);
    this.element.setAttribute("aria-label", `Turn ${idx + 1}`);
    this.element.append(made("h2", "unseen-label", `Turn ${idx + 1}`));
    this.element.append(made("p", "question", results ? prompt || "Results of the calls" : prompt), this.#thought.element, this.#answer, this.#foot);
    this.#view = this.#newView();
  }

  /** @returns {Prose | Listing | TwoViews} */
  #newView() {
    this.#answer.className = this.#isMarkdown ? "prose" : "plain";
    this.#answer.replaceChildren();
    if (this.#isMarkdown) return new Prose(this.#answer, this.#follower);
    const view = new Listing(this.#answer, this.#follower);
    view.begin("plain");
    return view;
  }

  /** The answer is JSON. */
  beginJson() {
    this.#isMarkdown = true;
    const view = new Prose(this.#answer, this.#follower);
    this.#answer.className = "prose";
    this.#answer.replaceChildren();
    view.beginCode("json");
    this.#view = view;
  }

  /** Show the answer token by token; its text is a button away. @param {import("./tokens.js").ChanceCard} card */
  withTokens(card) {
    this.#tokens = made("div", "tokens");
    this.#tokens.setAttribute("role", "group");
    this.#tokens.setAttribute("aria-label", "Answer, token by token; arrow keys say how likely each was");
    this.#answer.after(this.#tokens);
    this.#answer.hidden = true;
    this.#view = new TwoViews(/** @type {Prose} */ (this.#view), new TokenText(this.#tokens, this.#follower, card));
  }

  /** Go on behind an answer that was cut off. @param {Turn} turn */
  reopen({ answer }) {
    this.#foot.replaceChildren();
    this.#view = this.#newView();
    this.#view.append(answer);
    this.#follower.begin();
  }

  /** @param {string} text @param {import("./chances.js").Chance[]} [chances] */
  append(text, chances) {
    this.#view.append(text, chances);
    if (text) this.#thought.end();
  }

  /** @param {string} text that the model does not say */
  think(text) {
    this.#thought.append(text);
  }

  /** @param {Call[]} calls as they have become */
  call(calls) {
    calls.forEach((call, idx) => {
      this.#calls[idx] ??= this.#newCard(call);
      this.#calls[idx].show(call);
    });
    if (calls.length) this.#thought.end();
  }

  /** @param {Call} call */
  #newCard(call) {
    const card = new CallCard(call);
    this.#foot.before(card.element);
    return card;
  }

  complete() {
    this.#view.complete();
    this.#thought.end();
  }

  get settled() {
    return this.#view.settled && this.#thought.settled;
  }

  paint() {
    this.#thought.paint();
    this.#view.paint();
  }

  follow() {
    this.#view.follow();
  }

  /** Show a turn that was kept. @param {Turn} turn */
  replay(turn) {
    if (turn.isJson) this.beginJson();
    if (turn.thought) this.think(turn.thought);
    this.append(turn.answer);
    this.call(turn.calls ?? []);
    this.complete();
    this.end(turn);
    settle(this);
  }

  /** @param {Turn} turn as it has become */
  end(turn) {
    const { copy, edit, regenerate, goOn, giveResults } = this.#actions;
    const copies = madeButton("Copy", () => copy(turn.answer, copies));
    const again = madeButton("Regenerate", regenerate);
    const more = madeButton("Continue", goOn);
    for (const button of [again, more]) button.classList.add("only-last");
    const mayGoOn = turn.isCut && turn.answer !== "" && !turn.isJson && !turn.calls?.length;
    const editing = turn.results ? [] : [madeButton("Edit", () => edit(this.#idx))];
    this.#foot.replaceChildren(made("p", "", quiet(turn)), ...this.#switch(), ...(mayGoOn ? [more] : []), copies, again, ...editing);
    if (turn.calls?.length) this.#askForResults(turn.calls, giveResults);
  }

  /** @param {Call[]} calls @param {Actions["giveResults"]} give */
  #askForResults(calls, give) {
    const boxes = calls.map((call, idx) => this.#calls[idx].askForResult(call));
    const button = madeButton(calls.length === 1 ? "Give the result" : "Give the results", () =>
      give(calls.map(({ id }, idx) => ({ id, content: boxes[idx].value }))));
    button.classList.add("only-last");
    this.#foot.prepend(button);
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

/** The figures of an answer, in a line. @param {Turn} turn */
export function quiet({ outcome, figures }) {
  const { numTokens, tokensPerS, ttftMs, itlP50Ms, drafted, accepted, queueMs } = figures;
  return [
    outcome, `${rate(tokensPerS)} tokens/s`, `first token ${duration(ttftMs)}`, `gaps ${duration(itlP50Ms)}`, `${count(numTokens)} tokens`,
    drafted ? `${count(accepted)} of ${count(drafted)} drafted accepted` : "", queueMs >= 10 ? `${duration(queueMs)} in the queue` : "",
  ].filter(Boolean).join(" · ");
}

/** Paint, frame by frame, all that was appended. @param {Exchange} exchange */
function settle(exchange) {
  exchange.paint();
  exchange.follow();
  if (!exchange.settled) requestAnimationFrame(() => settle(exchange));
}
