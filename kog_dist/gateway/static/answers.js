/** What is asked and answered: where it stands on the page, what of it goes on, and what the browser keeps. */

import { Completion } from "./completion.js";
import { messages, newRecord } from "./conversation.js";
import { download } from "./files.js";
import { Follower } from "./follow.js";
import { History } from "./history.js";
import { Listing } from "./listing.js";
import { Prose } from "./prose.js";
import { Records } from "./records.js";
import { refresh, setSystem } from "./settings.js";
import { made } from "./text.js";
import { Transcript } from "./transcript.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @typedef {import("./conversation.js").Record} Record
 * @typedef {import("./conversation.js").Turn} Turn
 *
 * @typedef {import("./conversation.js").Question} Question
 *
 * @typedef {object} Asked one prompt on its way
 * @property {import("./request.js").Mode} mode
 * @property {Question} question
 * @property {Turn[]} replaced turns that were here before, and come back if there is no answer
 * @property {string} system prompt that goes with it
 * @property {boolean} isJson
 * @property {{live: Completion | import("./transcript.js").Exchange, slow: Listing | Prose}} views of the answer and of its slow twin
 *
 * @typedef {{id: string, question: Question}} Place of a turn: conversation, and what is asked there again
 *
 * @typedef {object} Actions
 * @property {(text: string, from: HTMLElement) => void} copy
 * @property {(question: Question) => void} ask
 * @property {() => void} changed called when what goes before the next message is another one
 * @property {() => void} anew called when another conversation begins
 * @property {() => boolean} isBusy
 */

export class Answers {
  #composer;
  #actions;
  #records = new Records(() => this.#showHistory());
  #history;
  #follower = new Follower(element("scroll"));
  #transcript;
  #completionView;
  #replayFollower = new Follower(element("replay"));
  #slowListing = new Listing(element("replay"), this.#replayFollower);
  #conversation = newRecord("conversation", "");
  #completion = newRecord("completion", "");
  #editedIdx = /** @type {number | null} */ (null);
  #card;
  model = "";

  /** @param {import("./composer.js").Composer} composer @param {import("./tokens.js").ChanceCard} card @param {Actions} actions */
  constructor(composer, card, actions) {
    this.#card = card;
    this.#composer = composer;
    this.#actions = actions;
    this.#history = new History({
      open: (record) => this.#open(record), save: download, remove: (record) => this.#remove(record),
      rename: (record, title) => this.#rename(record, title),
    });
    this.#transcript = new Transcript(element("transcript"), this.#follower, {
      copy: actions.copy,
      edit: (idx) => this.#edit(idx),
      regenerate: () => this.#askAgain(),
      goOn: () => this.#goOn(),
      giveResults: (results) => this.#actions.ask({ prompt: results.map(({ content }) => content).join("\n"), results }),
    });
    this.#completionView = new Completion(this.#follower, card, {
      copy: actions.copy, goOn: () => this.#goOn(), edit: (prompt) => composer.edit(prompt),
    });
    element("new").addEventListener("click", () => this.startAnew());
    element("edit-cancel").addEventListener("click", () => this.#stopEditing());
  }

  /** Show what the browser has kept, and go on with a conversation that was last. */
  restore() {
    const [newest] = this.#records.all();
    if (newest?.mode === "conversation") this.#open(newest);
    else this.showMode();
  }

  get isEmpty() {
    return this.#records.all().length === 0;
  }

  /** Of the turn that the next message replaces, if one is being edited. */
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

  /** Make room for an answer. @param {Question} question @param {import("./settings.js").Settings} settings @returns {Asked} */
  begin(question, { system, isJson, numLogprobs }) {
    const mode = this.#composer.mode;
    const asked = { mode, question, system, isJson };
    const card = numLogprobs === null ? null : this.#card;
    if (mode === "completion") {
      const given = question.goesOn ? this.#completion.turns[0].prompt + this.#completion.turns[0].answer : question.prompt;
      this.#completionView.begin(given, isJson, card !== null);
      this.#slowListing.begin(isJson ? "c-like" : this.#completionView.language, given);
      this.showMode(true);
      return { ...asked, replaced: [], views: { live: this.#completionView, slow: this.#slowListing } };
    }
    const { turns } = this.#conversation;
    const from = question.from ?? turns.length;
    const replaced = turns.slice(from);
    this.#conversation = { ...this.#conversation, turns: turns.slice(0, from) };
    this.#stopEditing();
    const live = this.#exchange(question);
    if (isJson) live.beginJson();
    if (card) live.withTokens(card);
    this.showMode(true);
    return { ...asked, replaced, views: { live, slow: this.#slowTwin(isJson) } };
  }

  /** Where the answer goes: behind an earlier one, or below the question. @param {Question} question */
  #exchange(question) {
    const last = this.#transcript.last;
    if (question.goesOn && last) {
      last.reopen(this.#conversation.turns[this.#conversation.turns.length - 1]);
      return last;
    }
    this.#transcript.cut(this.#conversation.turns.length);
    return this.#transcript.begin(question, this.#composer.isMarkdown);
  }

  /** @param {boolean} isJson @returns {Prose} */
  #slowTwin(isJson) {
    const column = made("div", "prose");
    element("replay").replaceChildren(column);
    this.#replayFollower.begin();
    const slow = new Prose(column, this.#replayFollower);
    if (isJson) slow.beginCode("json");
    return slow;
  }

  /** Keep the turn; without an answer it is as if nothing had been asked. @param {Asked} asked @param {Turn} turn */
  keep({ mode, system, question, replaced, views }, turn) {
    const isAny = turn.answer !== "" || Boolean(turn.thought || turn.calls?.length);
    const record = mode === "completion" ? this.#completion : this.#conversation;
    const before = question.goesOn ? record.turns[record.turns.length - 1] : null;
    const whole = before ? { ...turn, prompt: before.prompt, results: before.results, thought: before.thought, answer: before.answer + turn.answer } : turn;
    if (isAny || before) {
      views.live.end(isAny ? whole : /** @type {Turn} */ (before));
      if (isAny) this.#save(mode, system, whole, before !== null);
    } else {
      this.#takeBack(mode, question, replaced);
    }
    this.showMode();
  }

  /** @param {import("./request.js").Mode} mode @param {string} system @param {Turn} turn @param {boolean} replacesLast */
  #save(mode, system, turn, replacesLast) {
    const [model, at] = [this.model, Date.now()];
    if (mode === "completion") {
      this.#completion = replacesLast ? { ...this.#completion, model, at, turns: [turn] } : newRecord(mode, model, [turn]);
    } else {
      const earlier = replacesLast ? this.#conversation.turns.slice(0, -1) : this.#conversation.turns;
      this.#conversation = { ...this.#conversation, model, at, system, turns: [...earlier, turn] };
    }
    this.#records.save(mode === "completion" ? this.#completion : this.#conversation);
    this.#showHistory();
  }

  /** Nothing came: the question goes back into its box. @param {import("./request.js").Mode} mode @param {Question} question @param {Turn[]} replaced */
  #takeBack(mode, { prompt, results }, replaced) {
    if (mode === "conversation") {
      this.#conversation = { ...this.#conversation, turns: [...this.#conversation.turns, ...replaced] };
      this.#transcript.show(this.#conversation.turns, this.#composer.isMarkdown);
    }
    if (this.#composer.text === "" && !results && replaced.at(0)?.prompt !== prompt) this.#composer.text = prompt;
  }

  /**
   * Where a turn is asked again, once it has been kept; null for a question that is back in its box.
   * @param {Asked} asked
   * @param {string} answer
   * @returns {Place | null}
   */
  placeOf({ question, replaced }, answer) {
    const { id, turns } = this.#conversation;
    if (question.goesOn) return { id, question };
    if (answer !== "") return { id, question: { ...question, from: turns.length - 1 } };
    if (question.results) return { id, question };
    return replaced.length ? { id, question: { ...question, from: turns.length - replaced.length } } : null;
  }

  /** Each mode has its own view of answers. @param {boolean} [isAsking] */
  showMode(isAsking = this.#actions.isBusy()) {
    const chat = this.#composer.mode === "conversation";
    const isEmpty = this.shown.turns.length === 0 && !isAsking;
    element("welcome").hidden = !isEmpty;
    element("transcript").hidden = !chat || isEmpty;
    element("completion").hidden = chat || isEmpty;
    element("edit-note").hidden = !chat || this.#editedIdx === null;
    element("system-button").hidden = !chat;
    if (!chat) element("system-field").hidden = true;
    refresh();
    this.#showHistory();
  }

  /** Begin another conversation or completion; the one before is in the list. */
  startAnew() {
    if (this.#actions.isBusy()) return;
    this.#conversation = newRecord("conversation", this.model);
    this.#completion = newRecord("completion", this.model);
    this.#transcript.show([], true);
    this.#slowListing.begin("plain");
    this.#stopEditing();
    this.#actions.anew();
    this.#composer.focus();
  }

  /** Forget everything, also what is on the page. */
  clear() {
    this.#records.clear();
    this.startAnew();
  }

  /** How answers look has become known. */
  redraw() {
    if (!this.#actions.isBusy()) this.#transcript.show(this.#conversation.turns, this.#composer.isMarkdown);
  }

  #showHistory() {
    this.#history.show(this.#records.all(), this.shown.id);
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
    const from = this.#conversation.turns.length - 1;
    const { prompt, results } = this.#conversation.turns[from];
    this.#actions.ask({ prompt, results, from });
  }

  #goOn() {
    const { prompt, results } = this.shown.turns[this.shown.turns.length - 1];
    this.#actions.ask({ prompt, results, goesOn: true });
  }

  /** Put a conversation back, or a completion. @param {Record} record */
  #open(record) {
    if (this.#actions.isBusy()) return;
    this.#actions.anew();
    this.#composer.choose(record.mode);
    if (record.mode === "completion") {
      this.#completion = record;
      this.#completionView.replay(record.turns[0]);
    } else {
      this.#conversation = { ...record, turns: [...record.turns] };
      setSystem(typeof record.system === "string" ? record.system : "");
      this.#transcript.show(this.#conversation.turns, this.#composer.isMarkdown);
    }
    this.#stopEditing();
  }

  /** @param {Record} record @param {string} title */
  #rename(record, title) {
    this.#records.save({ ...record, title });
    if (record.id === this.#conversation.id) this.#conversation = { ...this.#conversation, title };
    if (record.id === this.#completion.id) this.#completion = { ...this.#completion, title };
    this.#showHistory();
  }

  /** @param {Record} record */
  #remove(record) {
    this.#records.remove(record.id);
    if (record.id === this.shown.id) this.startAnew();
    this.#showHistory();
  }
}
