/**
 * The speed of one answer, from what this page received and when.
 *
 *   time to first token   request sent -> first read that brought a token
 *   tokens per second     tokens after the first read / time from the first to the last read that brought tokens
 *   inter-token latency   time between two such reads, shared evenly by the tokens of the later one; median and 99th percentile
 *
 * Several tokens may come with one read. The first read's tokens are left out of the rate since nobody knows when they began.
 */

/**
 * @typedef {object} Figures milliseconds; null where there is nothing to say yet
 * @property {number} numTokens
 * @property {number | null} ttftMs
 * @property {number | null} tokensPerS
 * @property {number | null} itlP50Ms
 * @property {number | null} itlP99Ms
 * @property {number | null} decodeMs first to last read
 * @property {number} [drafted] tokens that were proposed and verified, if the server says so
 * @property {number} [accepted] of these
 * @property {number} [queueMs] what the request waited behind others, if the server says so
 */

export class Pace {
  #sentAt;
  #firstAt = /** @type {number | null} */ (null);
  #lastAt = 0;
  #numFirst = 0;
  #gaps = new Gaps();
  numTokens = 0;

  /** @param {number} sentAt milliseconds of `performance.now()`, like all moments here */
  constructor(sentAt) {
    this.#sentAt = sentAt;
  }

  get firstAt() {
    return this.#firstAt;
  }

  /** @param {number} at @param {number} numTokens */
  receive(at, numTokens) {
    if (numTokens === 0) return;
    this.numTokens += numTokens;
    if (this.#firstAt === null) {
      this.#firstAt = at;
      this.#numFirst = numTokens;
    } else {
      this.#gaps.add((at - this.#lastAt) / numTokens, numTokens);
    }
    this.#lastAt = at;
  }

  /** @returns {Figures} */
  figures() {
    const decodeMs = this.#firstAt === null ? null : this.#lastAt - this.#firstAt;
    return {
      numTokens: this.numTokens,
      ttftMs: this.#firstAt === null ? null : this.#firstAt - this.#sentAt,
      tokensPerS: decodeMs ? ((this.numTokens - this.#numFirst) * 1000) / decodeMs : null,
      itlP50Ms: this.#gaps.percentile(0.5),
      itlP99Ms: this.#gaps.percentile(0.99),
      decodeMs,
    };
  }
}

/** Percentiles of durations in fixed memory: counts in buckets 2% wide, from 1 us to over a minute. */
class Gaps {
  static #kSmallestMs = 0.001;
  static #kGrowth = Math.log(1.02);
  #counts = new Uint32Array(1024);
  #total = 0;

  /** @param {number} ms @param {number} times */
  add(ms, times) {
    const bucket = Math.round(Math.log(Math.max(ms, Gaps.#kSmallestMs) / Gaps.#kSmallestMs) / Gaps.#kGrowth);
    this.#counts[Math.min(bucket, this.#counts.length - 1)] += times;
    this.#total += times;
  }

  /** @param {number} share @returns {number | null} milliseconds, within 1% */
  percentile(share) {
    if (this.#total === 0) return null;
    let left = Math.ceil(this.#total * share);
    const bucket = this.#counts.findIndex((count) => (left -= count) <= 0);
    return Gaps.#kSmallestMs * Math.exp(bucket * Gaps.#kGrowth);
  }
}
