/** The list of chats and completions at the side: found, opened, renamed, exported, deleted. */

import { count, rate } from "./numbers.js";
import { made, madeButton } from "./text.js";

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @typedef {import("./conversation.js").Record} Record
 *
 * @typedef {object} Actions
 * @property {(record: Record) => void} open put it back onto the page
 * @property {(record: Record, form: "text" | "json") => void} save as a file
 * @property {(record: Record, title: string) => void} rename
 * @property {(record: Record) => void} remove
 */

export class History {
  #search = /** @type {HTMLInputElement} */ (document.getElementById("search"));
  #actions;
  #records = /** @type {Record[]} */ ([]);
  #currentId = "";

  /** @param {Actions} actions */
  constructor(actions) {
    this.#actions = actions;
    this.#search.addEventListener("input", () => this.#draw());
  }

  /** @param {Record[]} records newest first @param {string} currentId of what is on the page */
  show(records, currentId) {
    this.#records = records;
    this.#currentId = currentId;
    this.#draw();
  }

  #draw() {
    const words = this.#search.value.trim().toLowerCase();
    const found = this.#records.filter((record) => !words || searched(record).includes(words));
    element("turn-list").replaceChildren(...found.map((record) => this.#entry(record)));
    element("no-turns").hidden = found.length > 0;
    element("no-turns").textContent = this.#records.length ? "No chat has these words." : "Nothing yet.";
    element("clear").hidden = this.#records.length === 0;
  }

  /** @param {Record} record @returns {HTMLElement} */
  #entry(record) {
    const { open, save, remove } = this.#actions;
    const entry = made("li", "turn");
    entry.toggleAttribute("data-current", record.id === this.#currentId);
    const opener = madeButton("", () => open(record));
    opener.className = "turn-open";
    opener.append(made("span", "turn-prompt", title(record)), made("span", "turn-figures", figures(record)));
    const menu = made("details", "menu");
    const summary = made("summary", "", "⋯");
    summary.setAttribute("aria-label", `What can be done with ${title(record)}`);
    const choices = made("div");
    choices.append(
      madeButton("Rename", () => this.#rename(entry, record)),
      madeButton(record.mode === "completion" ? "Export as text" : "Export as Markdown", () => save(record, "text")),
      madeButton("Export as JSON", () => save(record, "json")),
      madeButton("Delete", () => remove(record)),
    );
    menu.append(summary, choices);
    entry.append(opener, menu);
    return entry;
  }

  /** @param {HTMLElement} entry @param {Record} record */
  #rename(entry, record) {
    const box = document.createElement("input");
    box.type = "text";
    box.value = title(record);
    box.setAttribute("aria-label", "Title");
    let isOver = false;
    /** @param {boolean} keeps */
    const end = (keeps) => {
      if (isOver) return;
      isOver = true;
      const chosen = box.value.trim();
      if (keeps && chosen) this.#actions.rename(record, chosen.slice(0, 120));
      else this.#draw();
    };
    box.addEventListener("blur", () => end(true));
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    entry.replaceChildren(box);
    box.focus();
    box.select();
  }
}

/** @param {Record} record */
function searched(record) {
  return [title(record), ...record.turns.flatMap(({ prompt, answer }) => [prompt, answer])].join("\n").toLowerCase();
}

/** @param {Record} record */
function figures({ mode, turns, at }) {
  const { tokensPerS, numTokens } = turns[turns.length - 1].figures;
  const many = mode === "conversation" ? `${turns.length} ${turns.length === 1 ? "turn" : "turns"}` : `${count(numTokens)} tokens`;
  return `${many} · ${rate(tokensPerS)} tokens/s · ${when.format(at)}`;
}

/** What somebody called it, else the line of a prompt that says most: the first definition, or the first line. @param {Record} record */
export function title({ title: chosen, turns }) {
  if (chosen) return chosen;
  const lines = turns[0].prompt.split("\n").filter((line) => line.trim() !== "");
  return (lines.find((line) => /^\s*(def|class|async def|function)\b/.test(line)) ?? lines[0] ?? "(empty)").trim().slice(0, 120);
}
