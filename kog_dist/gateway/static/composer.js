/** What is about to be sent: the mode, the prompt box with a draft for each mode, and examples to start from. */

import { COMPLETIONS, QUESTIONS } from "./examples.js";
import { madeButton } from "./text.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

export class Composer {
  #form = /** @type {HTMLFormElement} */ (document.getElementById("ask"));
  #box = /** @type {HTMLTextAreaElement} */ (document.getElementById("prompt"));
  #drafts = { completion: COMPLETIONS[0].prompt, conversation: "" };
  #onMode;
  #chatStyle = /** @type {string | null} */ (null);

  /** @param {(mode: import("./request.js").Mode) => void} onMode called when another mode is chosen */
  constructor(onMode) {
    this.#onMode = onMode;
    this.#form.addEventListener("change", (event) => {
      if (/** @type {HTMLInputElement} */ (event.target).name === "mode") this.#modeChosen();
    });
    this.#box.value = this.#drafts.completion;
    this.#showExamples(COMPLETIONS);
  }

  /** @returns {import("./request.js").Mode} */
  get mode() {
    return new FormData(this.#form).get("mode") === "conversation" ? "conversation" : "completion";
  }

  get text() {
    return this.#box.value;
  }

  /** @param {string} text */
  set text(text) {
    this.#box.value = text;
    this.#box.dispatchEvent(new Event("input", { bubbles: true })); // whoever counts its tokens shall hear of it
  }

  /** Whether the box has what the page opened with. */
  get isUntouched() {
    return this.#box.value === COMPLETIONS[0].prompt;
  }

  focus() {
    this.#box.focus();
  }

  /** @returns {string | null} how messages become a prompt, see `engine.js` */
  get chatStyle() {
    return this.#chatStyle;
  }

  /** Put a text into the box, ready to be changed. @param {string} text */
  edit(text) {
    this.text = text;
    this.#box.focus();
    this.#box.setSelectionRange(text.length, text.length);
  }

  /** @param {import("./request.js").Mode} mode */
  choose(mode) {
    const radio = /** @type {HTMLInputElement} */ (this.#form.querySelector(`input[value="${mode}"]`));
    if (radio.checked) return;
    radio.checked = true;
    this.#modeChosen();
  }

  /** A base model gets messages as plain text, and should not be taken for an assistant. @param {string | null} style see `engine.js` */
  setChatStyle(style) {
    this.#chatStyle = style;
    element("chat-note").hidden = this.mode !== "conversation" || this.#chatStyle !== "plain";
  }

  #modeChosen() {
    const chat = this.mode === "conversation";
    this.#drafts[chat ? "completion" : "conversation"] = this.#box.value;
    this.#box.value = this.#drafts[this.mode];
    this.#box.placeholder = chat ? "Ask for code" : "Code for the model to continue";
    element("prompt-label").textContent = chat ? "Message" : "Code to continue";
    this.#showExamples(chat ? QUESTIONS : COMPLETIONS);
    this.setChatStyle(this.#chatStyle);
    this.#onMode(this.mode);
  }

  /** @param {import("./examples.js").Example[]} examples */
  #showExamples(examples) {
    const choices = examples.map(({ title, prompt }) => madeButton(title, () => this.edit(prompt)));
    element("examples").replaceChildren(...choices);
  }
}
