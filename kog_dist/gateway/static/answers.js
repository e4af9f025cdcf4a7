/** What is asked and answered: where it stands on the page, what of it goes on, and what the browser keeps. */

import { messages, newRecord } from "./conversation.js";
import { download } from "./files.js";
import { Follower } from "./follow.js";
import { guessLanguage } from "./highlight.js";
import { History } from "./history.js";
import { Listing } from "./listing.js";
import { Prose } from "./prose.js";
import { Records } from "./records.js";
import { refresh, setSystem } from "./settings.js";
import { made } from "./text.js";
import { TokenText, TwoViews } from "./tokens.js";
import { Transcript } from "./transcript.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @typedef {import("./conversation.js").Record} Record
 *
 * @typedef {object} Asked one prompt on its way
 * @property {import("./request.js").Mode} mode
 * @property {string} prompt
 * @property {import("./transcript.js").Exchange | null} exchange of a conversation
 * @property {import("./conversation.js").Turn[]} replaced turns that were here before, and come back if there is no answer
 * @property {string} system prompt that goes with it
 * @property {boolean} isJson
 * @property {{live: Listing | Prose | TwoViews, slow: Listing | Prose}} views of the answer and of its slow twin
 *
 * @typedef {{id: string, prompt: string, from: number}} Place of a turn: conversation, question, index
 *
 * @typedef {object} Actions
 * @property {(text: string, from: HTMLElement) => void} copy
 * @property {(prompt: string, from: number) => void} ask again, in place of the turns from that index on
 * @property {() => void} changed called when what goes before the next message is another one
 * @property {() => boolean} isBusy
 */

export class Answers {
  #composer;
  #actions;
  #records = new Records(() => this.#showHistory());
  #history;
  #transcript;
  #listing = new Listing(element("live"));
  #replayFollower = new Follower(element("replay"));
  #slowListing = new Listing(element("replay"), this.#replayFollower);
  #conversation = newRecord("conversation", "");
  #completion = newRecord("completion", "");
  #editedIdx = /** @type {number | null} */ (null);
  #card;
  #tokens;
  #hasTokens = false;
  model = "";

  /** @param {import("./composer.js").Composer} composer @param {import("./tokens.js").ChanceCard} card @param {Actions} actions */
  constructor(composer, card, actions) {
    this.#card = card;
    this.#tokens = new TokenText(element("live-tokens"), new Follower(element("live-tokens")), card);
    this.#composer = composer;
    this.#actions = actions;
    this.#history = new History({ open: (record) => this.#open(record), save: download, remove: (record) => this.#remove(record) });
    this.#transcript = new Transcript(element("transcript"), {
      copy: actions.copy,
      edit: (idx) => this.#edit(idx),
      regenerate: () => this.#askAgain(),
    });
    element("export-text").addEventListener("click", () => download(this.shown, "text"));
    element("export-json").addEventListener("click", () => download(this.shown, "json"));
    element("as-tokens").addEventListener("click", ({ currentTarget }) => {
      const button = /** @type {HTMLElement} */ (currentTarget);
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      this.showMode();
    });
    element("new").addEventListener("click", () => this.startAnew());
    element("edit-cancel").addEventListener("click", () => this.#stopEditing());
  }

  /** Show what the browser has kept, and go on with a conversation that was last. */
  restore() {
    this.#showHistory();
    this.showMode();
    const [newest] = this.#records.all();
    if (newest?.mode === "conversation") this.#open(newest);
  }

  get isEmpty() {
    return this.#records.all().length === 0;
  }

  /** The index of the turn that the next message replaces, if one is being edited. */
  get editedIdx() {
    return this.#editedIdx;
  }

  /** What the mode's view shows. @returns {Record} */
  get shown() {
    return this.#composer.mode === "conversation" ? this.#conversation : this.#completion;
  }

  /** Messages before the next one. @param {number | null} from that turn is about to be replaced */
  messages(from = this.#editedIdx) {
    return messages(this.#conversation.turns.slice(0, from ?? undefined));
  }

  /**
   * Make room for an answer.
   * @param {string} prompt
   * @param {number | null} from answers from this turn on are replaced
   * @param {import("./settings.js").Settings} settings
   * @returns {Asked}
   */
  begin(prompt, from, { system, isJson, numLogprobs }) {
    const mode = this.#composer.mode;
    const asked = { mode, prompt, system, isJson };
    if (mode === "completion") {
      for (const view of [this.#listing, this.#slowListing]) view.begin(isJson ? "c-like" : guessLanguage(prompt), prompt);
      this.#hasTokens = numLogprobs !== null;
      if (this.#hasTokens) this.#tokens.begin(prompt);
      const live = this.#hasTokens ? new TwoViews(this.#listing, this.#tokens) : this.#listing;
      return { ...asked, exchange: null, replaced: [], views: { live, slow: this.#slowListing } };
    }
    const replaced = from === null ? [] : this.#conversation.turns.splice(from);
    this.#stopEditing();
    this.#transcript.cut(this.#conversation.turns.length);
    const exchange = this.#transcript.begin(prompt);
    const column = made("div", "prose");
    element("replay").replaceChildren(column);
    this.#replayFollower.begin();
    const slow = new Prose(column, this.#replayFollower);
    if (isJson) for (const prose of [exchange.prose, slow]) prose.beginCode("json");
    const live = numLogprobs === null ? exchange.prose : exchange.withTokens(this.#card);
    return { ...asked, exchange, replaced, views: { live, slow } };
  }

  /** Keep the turn; without an answer it is as if nothing had been asked. @param {Asked} asked @param {import("./conversation.js").Turn} turn */
  keep({ mode, prompt, system, exchange, replaced }, turn) {
    if (turn.answer !== "") {
      exchange?.end(turn);
      const at = Date.now();
      if (mode === "completion") this.#completion = newRecord(mode, this.model, [turn]);
      else this.#conversation = { ...this.#conversation, model: this.model, at, system, turns: [...this.#conversation.turns, turn] };
      this.#records.save(mode === "completion" ? this.#completion : this.#conversation);
      this.#showHistory();
    } else if (mode === "conversation") {
      this.#conversation.turns.push(...replaced);
      this.#transcript.show(this.#conversation.turns);
      if (this.#composer.text === "" && replaced.at(0)?.prompt !== prompt) this.#composer.text = prompt;
    }
    this.showMode();
  }

  /**
   * Where a turn of the conversation is asked again, once it has been kept; null for a question that is back in its box.
   * @param {Asked} asked
   * @param {string} answer
   * @returns {Place | null}
   */
  placeOf({ prompt, replaced }, answer) {
    const { id, turns } = this.#conversation;
    if (answer !== "") return { id, prompt, from: turns.length - 1 };
    return replaced.length ? { id, prompt, from: turns.length - replaced.length } : null;
  }

  /** Each mode has its own view of answers, and what can be done with them. */
  showMode() {
    const chat = this.#composer.mode === "conversation";
    const empty = this.shown.turns.length === 0 || this.#actions.isBusy();
    const asTokens = this.#hasTokens && element("as-tokens").getAttribute("aria-pressed") === "true";
    element("live").hidden = chat || asTokens;
    element("live-tokens").hidden = chat || !asTokens;
    element("as-tokens").hidden = chat || !this.#hasTokens;
    element("transcript").hidden = !chat;
    element("system-field").hidden = !chat;
    refresh();
    element("edit-note").hidden = !chat || this.#editedIdx === null;
    element("new").hidden = !chat || empty;
    for (const id of ["continue", "copy-answer"]) element(id).hidden = chat || empty;
    element("export").hidden = empty;
    element("export-text").textContent = chat ? "As Markdown" : "As text";
  }

  /** Begin another conversation; the one before is in the history. */
  startAnew() {
    this.#conversation = newRecord("conversation", this.model);
    this.#transcript.show([]);
    this.#stopEditing();
    this.#composer.focus();
  }

  /** Forget everything, also what is on the page. */
  clear() {
    this.#records.clear();
    this.#completion = newRecord("completion", this.model);
    this.startAnew();
    this.#showHistory();
  }

  #showHistory() {
    this.#history.show(this.#records.all());
  }

  /** @param {number} idx of a turn, whose prompt goes back into the box */
  #edit(idx) {
    if (this.#actions.isBusy()) return;
    const { turns } = this.#conversation;
    this.#editedIdx = idx;
    element("edit-words").textContent = `This replaces turn ${idx + 1}${idx + 1 < turns.length ? " and those after it" : ""}.`;
    this.#composer.edit(turns[idx].prompt);
    this.showMode();
  }

  #stopEditing() {
    this.#editedIdx = null;
    this.showMode();
    this.#actions.changed();
  }

  #askAgain() {
    const last = this.#conversation.turns.length - 1;
    if (last >= 0 && !this.#actions.isBusy()) this.#actions.ask(this.#conversation.turns[last].prompt, last);
  }

  /** Put a conversation back, or a completion's prompt. @param {Record} record */
  #open(record) {
    if (this.#actions.isBusy()) return;
    this.#composer.choose(record.mode);
    if (record.mode === "completion") {
      this.#composer.edit(record.turns[0].prompt);
      return;
    }
    this.#conversation = { ...record, turns: [...record.turns] };
    setSystem(typeof record.system === "string" ? record.system : "");
    this.#transcript.show(this.#conversation.turns);
    this.#stopEditing();
  }

  /** @param {Record} record */
  #remove(record) {
    this.#records.remove(record.id);
    if (record.id === this.#conversation.id) this.startAnew();
    this.#showHistory();
  }
}
