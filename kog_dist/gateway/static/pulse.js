/** Asks the server how its engine is, twice a second, and notices when no answer comes. */

import { engineInfo, readiness } from "./engine.js";

const ASK_EVERY_MS = 500;
/** What was said longer ago is no longer shown as if it were so. */
const FRESH_MS = 1_000;
const LOOK_EVERY_MS = 200;

/**
 * @typedef {object} Listener
 * @property {(state: import("./engine.js").Readiness, info: import("./engine.js").EngineInfo | "locked" | null) => void} onAnswer
 * @property {(ageMs: number, isFresh: boolean) => void} onAge called all the time; the age of the last answer that came from the server
 */

export class Pulse {
  #key;
  #listener;
  #heardAt = -Infinity;
  #timer = 0;
  #turn = 0;

  /** @param {import("./engine.js").ApiKey} key @param {Listener} listener */
  constructor(key, listener) {
    this.#key = key;
    this.#listener = listener;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
    setInterval(() => document.hidden || this.#look(), LOOK_EVERY_MS);
  }

  /** Ask now, and from now on. */
  async ask() {
    const turn = ++this.#turn;
    clearTimeout(this.#timer);
    const [state, info] = await Promise.all([readiness(this.#key), engineInfo(this.#key)]);
    if (turn !== this.#turn) return; // asked again meanwhile
    if (state.state !== "unreachable") this.#heardAt = performance.now();
    this.#listener.onAnswer(state, info);
    this.#look();
    this.#timer = setTimeout(() => document.hidden || this.ask(), ASK_EVERY_MS);
  }

  #look() {
    const ageMs = performance.now() - this.#heardAt;
    this.#listener.onAge(ageMs, ageMs <= FRESH_MS);
  }
}
