/** A call of a tool: its name, its arguments, and room for what it gave. */

import { made } from "./text.js";

/** @typedef {import("./conversation.js").Call} Call */

export class CallCard {
  element = made("section", "tool-call");
  #name = made("p");
  #arguments = made("pre");

  /** @param {Call} call */
  constructor(call) {
    this.element.append(this.#name, this.#arguments);
    this.show(call);
  }

  /** @param {Call} call */
  show({ name, arguments: given }) {
    this.#name.replaceChildren(...made("span", "", `${name || "…"}()`).childNodes);
    this.#arguments.replaceChildren(...made("span", "", readable(given)).childNodes);
  }

  /** @param {Call} call @returns {HTMLTextAreaElement} */
  askForResult({ name }) {
    const box = document.createElement("textarea");
    box.rows = 1;
    box.placeholder = "What it gave";
    box.setAttribute("aria-label", `Result of ${name}`);
    box.className = "only-last";
    this.element.append(box);
    return box;
  }
}

/** Arguments as one reads them, while they are still being written, too. @param {string} given */
function readable(given) {
  try {
    return JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    return given;
  }
}
