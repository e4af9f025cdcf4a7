/** How much of the context the next request would take, and how much a running one has taken. */

import { count } from "./numbers.js";

const QUIET_MS = 350; // typing rests for so long before the draft is counted
const MOST_CHARACTERS = 200_000; // a longer draft is counted when it is sent
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/**
 * @typedef {object} Draft what would be sent
 * @property {{prompt: string} | {messages: import("./request.js").Message[]}} text
 * @property {number | null} maxTokens
 */

export class ContextMeter {
  #key;
  #draft;
  #timer = 0;
  #turn = 0;
  #limit = 0;
  #isRunning = false;

  /** @param {import("./engine.js").ApiKey} key @param {() => Draft} draft */
  constructor(key, draft) {
    this.#key = key;
    this.#draft = draft;
  }

  /** @param {number} tokens of prompt and answer together */
  setLimit(tokens) {
    if (tokens === this.#limit) return;
    this.#limit = tokens;
    this.changed(0);
  }

  /** The draft may have become another one. @param {number} [afterMs] */
  changed(afterMs = QUIET_MS) {
    clearTimeout(this.#timer);
    if (!this.#isRunning) this.#timer = setTimeout(() => this.#count(), afterMs);
  }

  /** @param {boolean} isRunning while it does, what has been used counts, not the draft */
  setRunning(isRunning) {
    this.#isRunning = isRunning;
    this.#turn++;
    clearTimeout(this.#timer);
    if (!isRunning) this.changed(1_500); // so that one can read what the answer has used
  }

  /** @param {import("./stream.js").Usage} usage so far */
  used({ prompt_tokens: prompt, completion_tokens: answer }) {
    if (!this.#limit || !Number.isFinite(prompt + answer)) return;
    this.#show(prompt + answer, 0, `${count(prompt + answer)} of ${count(this.#limit)} tokens of context used`);
  }

  async #count() {
    const turn = ++this.#turn;
    const { text, maxTokens } = this.#draft();
    const numTokens = this.#limit ? await tokenCount(text, this.#key) : null;
    if (turn !== this.#turn) return;
    element("context").hidden = numTokens === null;
    if (numTokens === null) return;
    const room = maxTokens ?? Math.max(0, this.#limit - numTokens);
    const both = `${count(numTokens)} ${numTokens === 1 ? "token" : "tokens"} and ${maxTokens === null ? "an answer of" : "up to"} ${count(room)}`;
    const fits = numTokens + Math.max(1, room) <= this.#limit;
    this.#show(numTokens, room, fits ? `${both} of ${count(this.#limit)}` : `${both} do not fit the context of ${count(this.#limit)}`);
  }

  /** @param {number} used @param {number} room for the answer @param {string} words */
  #show(used, room, words) {
    const meter = element("context");
    meter.hidden = false;
    meter.toggleAttribute("data-over", used + room > this.#limit);
    meter.style.setProperty("--used", Math.min(1, used / this.#limit).toFixed(4));
    meter.style.setProperty("--room", Math.min(1, (used + room) / this.#limit).toFixed(4));
    meter.setAttribute("aria-valuemax", String(this.#limit));
    meter.setAttribute("aria-valuenow", String(Math.min(used, this.#limit)));
    meter.setAttribute("aria-valuetext", words);
    element("context-words").textContent = words;
  }
}

/** @returns {Promise<number | null>} null where the server cannot tell */
async function tokenCount(text, key) {
  const body = JSON.stringify(text);
  if (body.length > MOST_CHARACTERS) return null;
  try {
    const headers = { "Content-Type": "application/json", ...key.headers() };
    const response = await fetch("/tokenize", { method: "POST", headers, body, signal: AbortSignal.timeout(3_000) });
    const said = response.ok ? await response.json() : null;
    return Number.isFinite(said?.count) ? said.count : null;
  } catch {
    return null;
  }
}
