/** What opens and closes beside the conversation: the list of chats, settings, the system prompt, menus. */

import { keep, kept } from "./lasting.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const narrow = matchMedia("(max-width: 56rem)");
const BUTTONS = /** @type {const} */ ({ sampling: "settings-button", "system-field": "system-button" });

/** @typedef {keyof typeof BUTTONS} Panel */

export class Panels {
  #tabs;

  /** @param {import("./tabs.js").Tabs} tabs */
  constructor(tabs) {
    this.#tabs = tabs;
    for (const panel of /** @type {Panel[]} */ (Object.keys(BUTTONS))) {
      element(BUTTONS[panel]).addEventListener("click", () => this.show(panel, element(panel).hidden));
    }
    element("settings-close").addEventListener("click", () => this.show("sampling", false, true));
    element("side-button").addEventListener("click", () => this.#showSide(!document.body.hasAttribute("data-side")));
    element("side-close").addEventListener("click", () => this.#showSide(false));
    element("side").addEventListener("click", ({ target }) => {
      if (narrow.matches && /** @type {HTMLElement} */ (target).closest(".turn-open, #new")) this.#showSide(false);
    });
    document.addEventListener("keydown", ({ key }) => {
      if (key !== "Escape") return;
      this.show("sampling", false, element("sampling").contains(document.activeElement));
      if (narrow.matches) this.#showSide(false);
    });
    document.addEventListener("click", ({ target }) => this.#closeMenus(/** @type {HTMLElement} */ (target)));
    this.#showSide(!narrow.matches && kept("side") !== "closed");
  }

  /** @param {Panel} panel @param {boolean} isShown @param {boolean} [givesFocusBack] */
  show(panel, isShown, givesFocusBack = false) {
    if (isShown) this.#tabs.show("chat");
    element(panel).hidden = !isShown;
    element(BUTTONS[panel]).setAttribute("aria-expanded", String(isShown));
    if (isShown) /** @type {HTMLElement} */ (element(panel).querySelector("input, textarea"))?.focus();
    else if (givesFocusBack) element(BUTTONS[panel]).focus();
  }

  /** @param {boolean} isShown */
  #showSide(isShown) {
    document.body.toggleAttribute("data-side", isShown);
    element("side-button").setAttribute("aria-expanded", String(isShown));
    if (!narrow.matches) keep("side", isShown ? "" : "closed");
  }

  /** A click elsewhere, or on what a menu offers, closes it. @param {HTMLElement} target */
  #closeMenus(target) {
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(target) || target.closest("button")) menu.removeAttribute("open");
    }
  }
}
