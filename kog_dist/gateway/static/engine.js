/** What the server says about its engine: readiness and `/kog/info`, asked now and then; and the API key for all of it. */

const KEY_NAME = "kog-api-key";
const ANSWER_WITHIN_MS = 3_000;

/**
 * @typedef {object} RankInfo every field but `rank` may be missing
 * @property {number} rank
 * @property {string} [state]
 * @property {string} [place] device and processors
 * @property {number} [num_lanes] model lanes that the rank computes
 *
 * @typedef {object} ModelInfo
 * @property {string} [id]
 * @property {"template" | "plain" | "none"} [chat] how messages become a prompt
 * @property {number} [num_parameters]
 * @property {number} [num_lanes]
 * @property {string} [format] in which weights are published
 * @property {number} [max_model_len] tokens of prompt and answer together
 *
 * @typedef {object} EngineInfo what the page reads of `/kog/info`; every field may be missing or null
 * @property {ModelInfo} [model]
 * @property {{bytes_per_token?: number, peak_bytes_s?: number, peak_source?: string}} [speed] of all ranks together
 * @property {{name: string, count: number}[]} [devices]
 * @property {{own_sampling?: string}} [engine]
 * @property {RankInfo[]} [ranks]
 * @property {{name: string, state: string, is_running: boolean}[]} [replicas] engines behind a router
 *
 * @typedef {object} Readiness
 * @property {string} state loading, ready, degraded, draining, failed; or unreachable
 * @property {string} reason
 */

/** The key lives in this tab: in the session's storage, or in memory where there is none. */
export class ApiKey {
  #value = "";

  constructor() {
    try {
      this.#value = sessionStorage.getItem(KEY_NAME) ?? "";
    } catch {
      // no storage: the key lasts until the page is left
    }
  }

  get isSet() {
    return this.#value !== "";
  }

  /** @param {string} value "" forgets it */
  set(value) {
    this.#value = value.trim();
    try {
      if (this.#value) sessionStorage.setItem(KEY_NAME, this.#value);
      else sessionStorage.removeItem(KEY_NAME);
    } catch {
      // see above
    }
  }

  /** @returns {Record<string, string>} */
  headers() {
    return this.isSet ? { Authorization: `Bearer ${this.#value}` } : {};
  }
}

/** @param {ApiKey} key @returns {Promise<Readiness>} */
export async function readiness(key) {
  let response;
  try {
    response = await ask("/readyz", key);
  } catch {
    return { state: "unreachable", reason: "The server does not answer. Is kog-launch running?" };
  }
  const said = await response.json().catch(() => ({}));
  const state = typeof said.state === "string" ? said.state : response.ok ? "ready" : "failed";
  return { state, reason: typeof said.reason === "string" ? said.reason : "" };
}

/** @param {ApiKey} key @returns {Promise<EngineInfo | "locked" | null>} null where the server has nothing to tell; locked: it wants a key */
export async function engineInfo(key) {
  try {
    const response = await ask("/kog/info", key);
    if (response.status === 401 || response.status === 403) return "locked";
    const info = response.ok ? await response.json() : null;
    return typeof info === "object" ? info : null;
  } catch {
    return null; // the readiness says why
  }
}

/** @param {string} path @param {ApiKey} key */
function ask(path, key) {
  return fetch(path, { headers: key.headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
}
