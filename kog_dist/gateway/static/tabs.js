/** The two views: chat and speed. Arrow keys go from one to the other, as in any list of tabs. */

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const NAMES = /** @type {const} */ ({ chat: "chat", speed: "speed-panel" });

/** @typedef {keyof typeof NAMES} Tab */

export class Tabs {
  constructor() {
    for (const name of this.#names()) {
      const tab = element(`tab-${name}`);
      tab.addEventListener("click", () => this.show(name));
      tab.addEventListener("keydown", ({ key }) => {
        if (key !== "ArrowLeft" && key !== "ArrowRight") return;
        const other = name === "chat" ? "speed" : "chat";
        this.show(other);
        element(`tab-${other}`).focus();
      });
    }
  }

  /** @param {Tab} shown */
  show(shown) {
    document.body.dataset.tab = shown;
    for (const name of this.#names()) {
      element(NAMES[name]).hidden = name !== shown;
      element(`tab-${name}`).setAttribute("aria-selected", String(name === shown));
      element(`tab-${name}`).tabIndex = name === shown ? 0 : -1;
    }
  }

  #names() {
    return /** @type {Tab[]} */ (Object.keys(NAMES));
  }
}
