/** The two dialogs: the API key, and a request as code. */

import { asCurl, asPython } from "./request.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const dialog = (id) => /** @type {HTMLDialogElement} */ (document.getElementById(id));

/** @returns {Promise<string | null>} the key, "" to forget it, null where the visitor changed nothing */
export function askForKey() {
  const asking = dialog("key-dialog");
  const input = /** @type {HTMLInputElement} */ (element("key"));
  input.value = "";
  asking.returnValue = "cancel";
  asking.showModal();
  return new Promise((resolve) => {
    asking.addEventListener("close", () => {
      const entered = input.value.trim();
      input.value = "";
      if (asking.returnValue === "forget") resolve("");
      else resolve(asking.returnValue === "use" && entered ? entered : null);
    }, { once: true });
  });
}

export class RequestDialog {
  #request = /** @type {import("./request.js").Request | null} */ (null);
  #needsKey = false;

  constructor() {
    element("as-curl").addEventListener("click", () => this.#write("as-curl"));
    element("as-python").addEventListener("click", () => this.#write("as-python"));
    element("copy-snippet").addEventListener("click", () => this.#copy());
  }

  /** @param {import("./request.js").Request} request @param {boolean} needsKey the key itself is never written out */
  show(request, needsKey) {
    this.#request = request;
    this.#needsKey = needsKey;
    this.#write("as-curl");
    dialog("request-dialog").showModal();
  }

  #write(form) {
    if (this.#request === null) return;
    const written = form === "as-curl" ? asCurl : asPython;
    element("snippet").textContent = written(this.#request, location.origin, this.#needsKey);
    element("copied").textContent = "";
    for (const id of ["as-curl", "as-python"]) element(id).setAttribute("aria-pressed", String(id === form));
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(element("snippet").textContent ?? "");
      element("copied").textContent = "Copied.";
    } catch {
      getSelection()?.selectAllChildren(element("snippet"));
      element("copied").textContent = "This browser lets the page not write to the clipboard. The text is selected: press Ctrl C.";
    }
  }
}
