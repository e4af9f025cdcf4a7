/** The large figure, the table beside it, and the trace: what `pace.js` computes, shown ten times a second. */

import { count, duration, rate } from "./numbers.js";

const REFRESH_MS = 100;
const SHOWN_QUEUE_MS = 10; // less is not worth a word
const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

export class SpeedView {
  #shownAt = -Infinity;

  begin() {
    this.#shownAt = -Infinity;
    for (const id of ["ttft", "itl-p50", "itl-p99", "num-tokens"]) element(id).textContent = "–";
    this.showEngine(null, null);
    element("rate").textContent = "0";
  }

  /** @param {import("./pace.js").Figures} figures @param {number} now @param {boolean} [last] show at once */
  show(figures, now, last = false) {
    if (!last && now - this.#shownAt < REFRESH_MS) return;
    this.#shownAt = now;
    element("rate").textContent = figures.tokensPerS === null && !last ? "0" : rate(figures.tokensPerS);
    element("ttft").textContent = duration(figures.ttftMs);
    element("itl-p50").textContent = duration(figures.itlP50Ms);
    element("itl-p99").textContent = duration(figures.itlP99Ms);
    element("num-tokens").textContent = count(figures.numTokens);
  }

  /**
   * What the engine measured itself; what it does not say is not shown.
   * @param {import("./stream.js").Usage | null} usage
   * @param {Record<string, number> | null} timings
   */
  showEngine(usage, timings) {
    const queue = timings?.queue_ms >= SHOWN_QUEUE_MS ? ` after ${duration(timings.queue_ms)} in the queue` : "";
    const said = {
      rate: timings?.predicted_per_second && rate(timings.predicted_per_second),
      ttft: timings?.prompt_ms && duration(timings.prompt_ms) + queue,
      "itl-p50": timings?.predicted_per_token_ms && duration(timings.predicted_per_token_ms),
      "num-tokens": usage && count(usage.completion_tokens),
    };
    for (const [id, text] of Object.entries(said)) {
      const figure = element(`engine-${id}`);
      figure.textContent = text || "";
      /** @type {HTMLElement} */ (figure.parentElement).hidden = !text;
    }
  }
}

/** Tokens received over time, as bars: from 25 ms each; whenever the width is used up, neighbours merge and the bars stand for twice the time. */
export class Trace {
  static #kBars = 64;
  static #kSliceMs = 25;
  #canvas;
  #counts = /** @type {number[]} */ ([]);
  #sliceMs = Trace.#kSliceMs;
  #beganAt = 0;
  #colour = "";
  #drawnAt = -Infinity;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.#measure()).observe(canvas);
    new MutationObserver(() => this.#recolour()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#recolour());
    this.#recolour();
  }

  /** @param {number} at the first token's moment, or the request's */
  begin(at) {
    this.#counts = [];
    this.#sliceMs = Trace.#kSliceMs;
    this.#beganAt = at;
    this.#drawnAt = -Infinity;
    this.draw();
  }

  /** @param {number} at @param {number} numTokens */
  receive(at, numTokens) {
    let idx = Math.floor((at - this.#beganAt) / this.#sliceMs);
    while (idx >= Trace.#kBars) {
      this.#counts = Array.from({ length: Trace.#kBars / 2 }, (_, half) => (this.#counts[2 * half] ?? 0) + (this.#counts[2 * half + 1] ?? 0));
      this.#sliceMs *= 2;
      idx = Math.floor((at - this.#beganAt) / this.#sliceMs);
    }
    this.#counts[idx] = (this.#counts[idx] ?? 0) + numTokens;
  }

  /** @param {number} now */
  refresh(now) {
    if (now - this.#drawnAt < REFRESH_MS) return;
    this.#drawnAt = now;
    this.draw();
  }

  #recolour() {
    this.#colour = getComputedStyle(this.#canvas).color;
    this.draw();
  }

  /** As many pixels as the screen has. Asks for the layout, so only when the size has changed. */
  #measure() {
    this.#canvas.width = Math.round(this.#canvas.clientWidth * devicePixelRatio);
    this.#canvas.height = Math.round(this.#canvas.clientHeight * devicePixelRatio);
    this.draw();
  }

  draw() {
    const context = this.#canvas.getContext("2d");
    if (!context) return;
    const { width, height: tallest } = this.#canvas;
    context.clearRect(0, 0, width, tallest);
    context.fillStyle = this.#colour;
    const highest = this.#counts.reduce((most, value) => Math.max(most, value ?? 0), 1);
    const pitch = width / Trace.#kBars;
    for (let idx = 0; idx < this.#counts.length; idx++) {
      const height = ((this.#counts[idx] ?? 0) / highest) * tallest;
      context.fillRect(idx * pitch, tallest - height, Math.max(1, pitch - 2 * devicePixelRatio), height);
    }
  }
}
