/** What is about to be sent: the mode, the message box with a draft for each mode that outlives a reload, and examples. */

import { COMPLETIONS, QUESTIONS } from "./examples.js";
import { keep, kept } from "./lasting.js";
import { madeButton } from "./text.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

export class Composer {
  #form = /** @type {HTMLFormElement} */ (document.getElementById("ask"));
  #box = /** @type {HTMLTextAreaElement} */ (document.getElementById("prompt"));
  #onMode;
  #chatStyle = /** @type {string | null} */ (null);
  #model = "";

  /** @param {(mode: import("./request.js").Mode) => void} onMode called when another mode is chosen */
  constructor(onMode) {
    this.#onMode = onMode;
    this.#form.addEventListener("change", (event) => {
      if (/** @type {HTMLInputElement} */ (event.target).name === "mode") this.#modeChosen();
    });
    this.#box.addEventListener("input", () => keep(`draft-${this.mode}`, this.#box.value));
    this.#box.addEventListener("keydown", (event) => {
      if (!this.#sends(event)) return;
      event.preventDefault();
      this.#form.requestSubmit();
    });
    if (kept("draft-conversation") && !kept("draft-completion")) this.choose("conversation");
    else this.#show();
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

  focus() {
    this.#box.focus();
  }

  /** @returns {string | null} how messages become a prompt, see `engine.js` */
  get chatStyle() {
    return this.#chatStyle;
  }

  /** Whether answers are Markdown: those of a model that was made to be talked to. */
  get isMarkdown() {
    return this.#chatStyle !== "plain";
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

  /** A base model gets messages as plain text, and should not be taken for an assistant. @param {string | null} style see `engine.js` @param {string} model */
  setModel(style, model) {
    this.#chatStyle = style;
    this.#model = model;
    this.#label();
  }

  /** Enter sends a message; in a text to be continued it is a new line, and Control Enter sends. @param {KeyboardEvent} event */
  #sends({ key, shiftKey, ctrlKey, metaKey, isComposing }) {
    if (key !== "Enter" || isComposing) return false;
    return ctrlKey || metaKey || (this.mode === "conversation" && !shiftKey);
  }

  #modeChosen() {
    this.#show();
    this.#onMode(this.mode);
  }

  #show() {
    this.#box.value = kept(`draft-${this.mode}`);
    this.#box.spellcheck = this.mode === "conversation";
    const examples = this.mode === "conversation" ? QUESTIONS : COMPLETIONS;
    element("examples").replaceChildren(...examples.map(({ title, prompt }) => madeButton(title, () => this.edit(prompt))));
    this.#label();
  }

  #label() {
    const chat = this.mode === "conversation";
    this.#box.placeholder = chat ? `Message ${this.#model || "the model"}` : "A text for the model to continue";
    element("prompt-label").textContent = chat ? "Message" : "Text to continue";
    element("welcome-title").textContent = chat ? "What do you want to know?" : "What shall it continue?";
    element("keys").textContent = chat ? "Enter sends, Shift Enter is a new line" : "Control Enter sends";
    element("chat-note").hidden = !chat || this.isMarkdown;
  }
}
