/**
 * The strip of ranks: who works, on which lanes, and which share of its memory's bandwidth that takes.
 *
 * A lane is lit while its rank decodes. The flow is computed: bytes that the rank reads per token x tokens per second received.
 */

import { bandwidth } from "./numbers.js";

const REFRESH_MS = 250;

/** @typedef {{element: HTMLElement, state: HTMLElement, share: HTMLElement, flow: HTMLElement, percent: HTMLElement, bytesPerToken: number, peak: number}} Row */

export class RankStrip {
  #section = /** @type {HTMLElement} */ (document.getElementById("ranks"));
  #list = /** @type {HTMLElement} */ (document.getElementById("rank-list"));
  #note = /** @type {HTMLElement} */ (document.getElementById("ranks-note"));
  #rows = /** @type {Row[]} */ ([]);
  #shownAt = -Infinity;
  #described = "";

  /** @param {import("./engine.js").EngineInfo} info */
  describe(info) {
    const ranks = Array.isArray(info.ranks) ? info.ranks : [];
    const speed = info.speed ?? {};
    const described = JSON.stringify([ranks.map(({ rank, state, place, num_lanes }) => [rank, state, place, num_lanes]), info.model, speed.bytes_per_token]);
    if (described === this.#described) return;
    this.#described = described;
    this.#section.hidden = ranks.length === 0;
    const [bytesPerToken, peak] = [speed.bytes_per_token, speed.peak_bytes_s].map((total) => (total ?? 0) / ranks.length);
    this.#rows = ranks.map((rank) => row(rank, rank.num_lanes ?? (info.model?.num_lanes ?? 0) / ranks.length, bytesPerToken, peak));
    this.#list.replaceChildren(...this.#rows.map((made) => made.element));
    this.#note.textContent = [
      bytesPerToken && `${(bytesPerToken / 1e6).toFixed(1)} MB of weights read by each for a token`,
      peak && `peak: ${speed.peak_source ?? bandwidth(peak)}`,
    ].filter(Boolean).join(" · ");
  }

  /** The engine is gone: what its ranks said last is not so any more. @param {string} state what they are now */
  lost(state) {
    this.#described = "";
    for (const { element, state: words } of this.#rows) {
      element.dataset.active = "false";
      words.textContent = state;
    }
  }

  /** @param {number | null} tokensPerS null: nothing is being decoded @param {number} now */
  flow(tokensPerS, now) {
    if (tokensPerS !== null && now - this.#shownAt < REFRESH_MS) return;
    this.#shownAt = tokensPerS === null ? -Infinity : now;
    for (const { element, share, flow, percent, bytesPerToken, peak } of this.#rows) {
      const bytesPerS = bytesPerToken * (tokensPerS ?? 0);
      element.dataset.active = String(tokensPerS !== null);
      share.style.setProperty("--share", Math.min(1, peak ? bytesPerS / peak : 0).toFixed(4));
      flow.textContent = bytesPerS ? bandwidth(bytesPerS) : "";
      percent.textContent = bytesPerS && peak ? `${((100 * bytesPerS) / peak).toFixed(1)}% of peak` : "";
    }
  }
}

/** @returns {Row} */
function row(rank, lanes, bytesPerToken, peak) {
  const element = made("li", "rank");
  element.title = [rank.place, rank.state].filter(Boolean).join(", ");
  const name = made("p", "");
  const state = made("span", "", rank.state ?? "");
  name.append(made("b", "", `rank ${rank.rank}`), state);
  const strip = made("div", "lanes");
  strip.append(...Array.from({ length: Math.min(Math.max(1, Math.floor(lanes)), 64) }, () => made("i", ""))); // unknown: one for all
  if (lanes >= 1) {
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", `${lanes} ${lanes === 1 ? "lane" : "lanes"}`);
  }
  const share = made("div", "share");
  share.append(made("i", ""));
  const line = made("p", "rank-flow");
  const [flow, percent] = [made("span", ""), made("span", "")];
  line.append(flow, percent);
  element.append(name, strip, share, line);
  return { element, state, share, flow, percent, bytesPerToken, peak };
}

function made(tag, className, text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
