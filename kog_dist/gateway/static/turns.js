/** What was asked and answered in this page so far. It is kept in memory and gone after a reload. */

import { count, duration, rate } from "./numbers.js";

/**
 * @typedef {object} Turn
 * @property {import("./request.js").Mode} mode
 * @property {string} prompt
 * @property {string} answer
 * @property {import("./pace.js").Figures} figures
 * @property {string} outcome
 */

export class Turns {
  #turns = /** @type {Turn[]} */ ([]);
  #section = /** @type {HTMLElement} */ (document.getElementById("turns"));
  #list = /** @type {HTMLElement} */ (document.getElementById("turn-list"));
  #note = /** @type {HTMLElement} */ (document.getElementById("turns-note"));
  #useAgain;

  /** @param {(turn: Turn) => void} useAgain */
  constructor(useAgain) {
    this.#useAgain = useAgain;
  }

  /** @param {Turn} turn */
  add(turn) {
    this.#turns.push(turn);
    this.#list.prepend(this.#entry(turn));
    this.#refresh();
  }

  clear() {
    this.#turns = [];
    this.#list.replaceChildren();
    this.#refresh();
  }

  get length() {
    return this.#turns.length;
  }

  /** The conversation so far, as the API wants it. @returns {import("./request.js").Message[]} */
  messages() {
    return this.#turns.filter((turn) => turn.mode === "conversation").flatMap(({ prompt, answer }) => [
      { role: /** @type {const} */ ("user"), content: prompt },
      { role: /** @type {const} */ ("assistant"), content: answer },
    ]);
  }

  #refresh() {
    const numSaid = this.messages().length / 2;
    this.#section.hidden = this.#turns.length === 0;
    this.#note.textContent = numSaid ? `The next message continues a conversation of ${numSaid} ${numSaid === 1 ? "turn" : "turns"}.` : "";
  }

  /** @param {Turn} turn @returns {HTMLElement} */
  #entry(turn) {
    const entry = document.createElement("li");
    entry.className = "turn";
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    const { numTokens, tokensPerS, ttftMs } = turn.figures;
    const figures = `${count(numTokens)} tokens · ${rate(tokensPerS)} tokens/s · first token ${duration(ttftMs)} · ${turn.outcome}`;
    summary.append(span("turn-prompt", title(turn.prompt)), span("turn-figures", figures));
    details.append(summary);
    details.addEventListener("toggle", () => this.#open(details, turn), { once: true });
    entry.append(details);
    return entry;
  }

  /** The text goes onto the page when somebody wants to see it. */
  #open(details, turn) {
    const text = document.createElement("pre");
    text.tabIndex = 0;
    text.setAttribute("aria-label", "Prompt and answer");
    text.append(span("given", turn.mode === "completion" ? turn.prompt : `${turn.prompt}\n\n`), turn.answer);
    const again = document.createElement("button");
    again.type = "button";
    again.className = "quiet";
    again.textContent = "Use this prompt again";
    again.addEventListener("click", () => this.#useAgain(turn));
    details.append(text, again);
  }
}

/** The line of a prompt that says most: the first definition, or the first line. @param {string} prompt */
function title(prompt) {
  const lines = prompt.split("\n").filter((line) => line.trim() !== "");
  return (lines.find((line) => /^\s*(def|class|async def|function)\b/.test(line)) ?? lines[0] ?? "(empty)").trim().slice(0, 120);
}

function span(className, text) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}
