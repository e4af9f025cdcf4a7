/**
 * One run: a request, its stream, and everything on the page that moves with it. Reads are taken as they come; the page changes once
 * per frame, or four times a second for visitors who prefer less motion.
 */

import { Calls } from "./calls.js";
import { Failure } from "./failures.js";
import { Pace } from "./pace.js";
import { Replay } from "./race.js";
import { receipts } from "./stream.js";

const CALM_MS = 250;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/**
 * @typedef {object} Views
 * @property {import("./completion.js").Completion | import("./transcript.js").Exchange} live
 * @property {import("./listing.js").Listing | import("./prose.js").Prose} slow the same at 100 tokens/s
 * @property {import("./speed.js").SpeedView} speed
 * @property {import("./speed.js").Trace} trace
 * @property {import("./race.js").RaceView} race
 * @property {import("./ranks.js").RankStrip} ranks
 * @property {import("./context.js").ContextMeter} context
 *
 * @typedef {object} Outcome
 * @property {string} reason the engine's finish reason, or "stopped"
 * @property {string} answer
 * @property {string} thought in front of it
 * @property {import("./conversation.js").Call[]} calls behind it
 * @property {import("./pace.js").Figures} figures
 * @property {Failure | null} failure
 */

export class Run {
  #abort = new AbortController();
  #replay = new Replay();
  #pace;
  #views;
  #answer = /** @type {string[]} */ ([]);
  #thought = /** @type {string[]} */ ([]);
  #calls = new Calls();
  #streaming = true;
  #abandoned = false;
  #slowIsWhole = false;
  #paintedAt = -Infinity;
  #usage = /** @type {import("./stream.js").Usage | null} */ (null);
  #timings = /** @type {Record<string, number> | null} */ (null);
  #reason = /** @type {string | null} */ (null);

  /** @param {Views} views @param {number} maxTokens */
  constructor(views, maxTokens) {
    this.#views = views;
    this.#pace = new Pace(performance.now());
    views.speed.begin();
    views.trace.begin(performance.now());
    views.race.begin(maxTokens);
  }

  get streaming() {
    return this.#streaming;
  }

  /** Figures up to now. */
  figures() {
    return this.#pace.figures();
  }

  /** Cancel the request; what has arrived stays. */
  stop() {
    this.#abort.abort();
  }

  /** Another run takes over the page: stop painting, too. */
  abandon() {
    this.#abandoned = true;
    this.stop();
  }

  /**
   * Send the request and follow it to its end, whatever that is.
   *
   * @param {import("./request.js").Request} request
   * @param {Record<string, string>} headers
   * @param {(receipt: import("./stream.js").Receipt) => void} [onReceipt]
   * @returns {Promise<Outcome>} resolves when the stream has ended; the page may be a few frames behind, the replay much longer
   */
  async follow(request, headers, onReceipt) {
    requestAnimationFrame((now) => this.#frame(now));
    /** @type {Failure | null} */
    let failure = null;
    try {
      const body = { ...request.body, stream_options: { include_usage: true, continuous_usage_stats: true } }; // counts every token
      for await (const receipt of receipts(request.path, body, { headers, signal: this.#abort.signal })) {
        this.#take(receipt);
        onReceipt?.(receipt);
      }
    } catch (error) {
      if (!this.#abort.signal.aborted) failure = error instanceof Failure ? error : Failure.unreadable(String(error));
    }
    this.#streaming = false;
    this.#views.live.complete();
    this.#replay.complete();
    const figures = { ...this.#pace.figures(), ...this.#told() };
    if (!this.#abandoned) this.#showEnd(figures);
    const said = { answer: this.#answer.join(""), thought: this.#thought.join(""), calls: this.#calls.all };
    return { reason: this.#reason ?? "stopped", ...said, figures, failure };
  }

  /** What the server alone knows. */
  #told() {
    const { draft_n: drafted, draft_n_accepted: accepted, queue_ms: queueMs } = this.#timings ?? {};
    return { ...(drafted && { drafted, accepted }), ...(queueMs && { queueMs }) };
  }

  /** @param {import("./stream.js").Receipt} receipt */
  #take(receipt) {
    const numTokens = receipt.pieces.reduce((total, piece) => total + piece.numTokens, 0);
    const text = receipt.pieces.map((piece) => piece.text).join("");
    const thought = receipt.pieces.map((piece) => piece.thought ?? "").join("");
    const calls = receipt.pieces.flatMap((piece) => piece.calls ?? []);
    this.#calls.take(calls);
    this.#pace.receive(receipt.at, numTokens);
    this.#replay.receive(receipt.at, receipt.pieces);
    if (!this.#abandoned) {
      if (thought) this.#views.live.think(thought);
      this.#views.live.append(text, receipt.pieces.flatMap(({ chances }) => chances ?? []));
      if (calls.length) this.#views.live.call(this.#calls.all);
      if (numTokens) this.#views.trace.receive(receipt.at, numTokens);
    }
    this.#answer.push(text);
    this.#thought.push(thought);
    this.#usage = receipt.usage ?? this.#usage;
    this.#timings = receipt.timings ?? this.#timings;
    this.#reason = receipt.finishReason ?? this.#reason;
  }

  /** @param {import("./pace.js").Figures} figures */
  #showEnd(figures) {
    const now = performance.now();
    const { speed, trace, race, ranks, context } = this.#views;
    if (this.#usage) context.used(this.#usage);
    speed.show(figures, now, true);
    speed.showEngine(this.#usage, this.#timings);
    trace.draw();
    ranks.flow(null, now);
    if (figures.numTokens > 0) race.finishLive(figures, this.#replay);
  }

  #frame(now) {
    if (this.#abandoned) return;
    if (!calm.matches || now - this.#paintedAt >= CALM_MS) {
      this.#paintedAt = now;
      this.#paint(now);
    }
    if (this.#streaming || !this.#replay.over || !this.#views.live.settled || !this.#views.slow.settled) {
      requestAnimationFrame((next) => this.#frame(next));
    }
  }

  /** @param {number} now */
  #paint(now) {
    const { live, slow, speed, trace, race, ranks, context } = this.#views;
    live.paint();
    slow.append(this.#replay.due(now));
    if (this.#replay.over && !this.#slowIsWhole) {
      this.#slowIsWhole = true;
      slow.complete();
    }
    slow.paint();
    if (this.#pace.firstAt !== null) race.move(this.#pace.numTokens, this.#replay.numShown, Math.max(0, now - this.#pace.firstAt));
    if (this.#replay.finishedMs !== null && this.#pace.numTokens > 0) race.finishSlow(this.#replay.finishedMs);
    if (this.#streaming) {
      const figures = this.#pace.figures();
      speed.show(figures, now);
      race.watch(figures);
      trace.refresh(now);
      if (this.#usage) context.used(this.#usage);
      if (figures.tokensPerS !== null) ranks.flow(figures.tokensPerS, now);
    }
    live.follow(); // last: one layout for everything
    slow.follow();
  }
}
