/** The list of what was asked and answered so far. Texts go onto the page when somebody wants to see them. */

import { count, duration, rate } from "./numbers.js";
import { made, madeButton } from "./text.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

/**
 * @typedef {import("./conversation.js").Record} Record
 *
 * @typedef {object} Actions
 * @property {(record: Record) => void} open put it back onto the page
 * @property {(record: Record, form: "text" | "json") => void} save as a file
 * @property {(record: Record) => void} remove
 */

export class History {
  #section = /** @type {HTMLElement} */ (document.getElementById("turns"));
  #list = /** @type {HTMLElement} */ (document.getElementById("turn-list"));
  #actions;

  /** @param {Actions} actions */
  constructor(actions) {
    this.#actions = actions;
  }

  /** @param {Record[]} records newest first */
  show(records) {
    this.#section.hidden = records.length === 0;
    this.#list.replaceChildren(...records.map((record) => this.#entry(record)));
  }

  /** @param {Record} record @returns {HTMLElement} */
  #entry(record) {
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.append(made("span", "turn-prompt", title(record)), made("span", "turn-figures", figures(record)));
    details.append(summary);
    details.addEventListener("toggle", () => this.#open(details, record), { once: true });
    const entry = made("li", "turn");
    entry.append(details);
    return entry;
  }

  #open(details, record) {
    const text = made("pre");
    text.tabIndex = 0;
    text.setAttribute("aria-label", "Prompt and answer");
    for (const { prompt, answer } of record.turns) {
      if (record.mode === "completion") text.append(made("span", "given", prompt), made("span", "", answer));
      else text.append(made("span", "given", `${prompt}\n\n`), made("span", "", `${answer}\n\n`));
    }
    const { open, save, remove } = this.#actions;
    const actions = made("div", "actions");
    actions.append(
      madeButton(record.mode === "completion" ? "Use this prompt again" : "Open this conversation", () => open(record)),
      madeButton(record.mode === "completion" ? "Export as text" : "Export as Markdown", () => save(record, "text")),
      madeButton("Export as JSON", () => save(record, "json")),
      madeButton("Delete", () => remove(record)),
    );
    details.append(text, actions);
  }
}

/** @param {Record} record */
function figures({ mode, turns, at }) {
  const { numTokens, tokensPerS, ttftMs } = turns[turns.length - 1].figures;
  const speed = `${count(numTokens)} tokens · ${rate(tokensPerS)} tokens/s · first token ${duration(ttftMs)}`;
  const many = mode === "conversation" ? `${turns.length} ${turns.length === 1 ? "turn" : "turns"} · last: ` : "";
  return `${many}${speed} · ${turns[turns.length - 1].outcome} · ${when.format(at)}`;
}

/** The line of a prompt that says most: the first definition, or the first line. @param {Record} record */
export function title({ turns }) {
  const lines = turns[0].prompt.split("\n").filter((line) => line.trim() !== "");
  return (lines.find((line) => /^\s*(def|class|async def|function)\b/.test(line)) ?? lines[0] ?? "(empty)").trim().slice(0, 120);
}
