/**
 * The same answer twice: as it arrives, and at a fixed pace beside it. Both start at the first token, and the slow one never runs
 * ahead of what has arrived.
 */

import { seconds } from "./numbers.js";

/** Tokens per second of the comparison. */
export const REPLAY_RATE = 100;

/** Hands out the pieces of an answer at a fixed pace. */
export class Replay {
  #pieces = /** @type {import("./stream.js").Piece[]} */ ([]);
  #nextIdx = 0;
  #startedAt = /** @type {number | null} */ (null);
  #numReceived = 0;
  #complete = false;
  numShown = 0;
  /** Milliseconds after the start at which the last token was shown. */
  finishedMs = /** @type {number | null} */ (null);

  /** @param {number} [tokensPerS] */
  constructor(tokensPerS = REPLAY_RATE) {
    this.tokensPerS = tokensPerS;
  }

  /** @param {number} at @param {import("./stream.js").Piece[]} pieces */
  receive(at, pieces) {
    if (pieces.length === 0) return;
    this.#startedAt ??= at;
    for (const piece of pieces) {
      this.#pieces.push(piece);
      this.#numReceived += piece.numTokens;
    }
  }

  /** No piece will follow. */
  complete() {
    this.#complete = true;
  }

  /** Milliseconds that an answer of so many tokens takes at this pace, counted from its first token. @param {number} numTokens */
  lengthMs(numTokens) {
    return (Math.max(0, numTokens - 1) * 1000) / this.tokensPerS;
  }

  /** @param {number} now @returns {string} the text that is due and was not handed out yet */
  due(now) {
    if (this.#startedAt === null) return "";
    const elapsedMs = Math.max(0, now - this.#startedAt);
    const numDue = 1 + Math.floor((elapsedMs * this.tokensPerS) / 1000);
    let text = "";
    while (this.#nextIdx < this.#pieces.length && this.numShown + this.#pieces[this.#nextIdx].numTokens <= numDue) {
      const piece = this.#pieces[this.#nextIdx];
      this.#pieces[this.#nextIdx++] = { text: "", numTokens: 0 }; // shown: its text is on the page
      this.numShown += piece.numTokens;
      text += piece.text;
    }
    if (this.over && this.finishedMs === null) this.finishedMs = Math.max(this.lengthMs(this.numShown), 0);
    return text;
  }

  get over() {
    return this.#complete && this.#nextIdx === this.#pieces.length;
  }
}

/** The two tracks and the sentence above them; nothing at all for an engine that does not win. */
export class RaceView {
  #section = /** @type {HTMLElement} */ (document.getElementById("race"));
  #live = new Track("track-live", "time-live");
  #slow = new Track("track-replay", "time-replay");
  #verdict = /** @type {HTMLElement} */ (document.getElementById("verdict"));
  #goal = 1;

  /** @param {number} maxTokens where the tracks end until the length of the answer is known */
  begin(maxTokens) {
    this.#goal = Math.max(1, maxTokens);
    this.#live.reset();
    this.#slow.reset();
    this.#verdict.textContent = "Both start at the first token.";
    this.#section.hidden = true;
  }

  /** @param {import("./pace.js").Figures} figures so far */
  watch({ tokensPerS }) {
    this.#section.hidden = !(tokensPerS !== null && tokensPerS > REPLAY_RATE);
  }

  /** @param {number} numLive @param {number} numSlow tokens shown @param {number} elapsedMs since the first token */
  move(numLive, numSlow, elapsedMs) {
    this.#goal = Math.max(this.#goal, numLive);
    this.#live.move(numLive / this.#goal, elapsedMs);
    this.#slow.move(numSlow / this.#goal, elapsedMs);
  }

  /** The answer is complete. @param {import("./pace.js").Figures} figures @param {Replay} replay */
  finishLive(figures, replay) {
    const { numTokens, decodeMs } = figures;
    const liveMs = decodeMs ?? 0;
    this.watch(figures);
    this.#goal = Math.max(1, numTokens);
    this.#live.finish(seconds(liveMs));
    const slowMs = replay.lengthMs(numTokens);
    this.#verdict.textContent = verdict(liveMs, slowMs, replay.tokensPerS);
  }

  /** @param {number} ms */
  finishSlow(ms) {
    this.#slow.finish(seconds(ms));
  }
}

class Track {
  /** @param {string} id @param {string} timeId */
  constructor(id, timeId) {
    this.finished = false;
    this.element = /** @type {HTMLElement} */ (document.getElementById(id));
    this.time = /** @type {HTMLElement} */ (document.getElementById(timeId));
  }

  reset() {
    this.finished = false;
    this.#show(0, "–");
  }

  /** @param {number} share of the way @param {number} elapsedMs the clock runs until the finish */
  move(share, elapsedMs) {
    if (!this.finished) this.#show(share, `${(elapsedMs / 1000).toFixed(1)} s`);
  }

  /** @param {string} time */
  finish(time) {
    this.finished = true;
    this.#show(1, time);
  }

  #show(share, time) {
    this.element.style.setProperty("--progress", Math.min(1, share).toFixed(4));
    if (this.time.textContent !== time) this.time.textContent = time;
  }
}

/** @param {number} liveMs @param {number} slowMs @param {number} tokensPerS */
function verdict(liveMs, slowMs, tokensPerS) {
  if (liveMs <= 0 || slowMs <= 0) return "";
  return `${seconds(liveMs)} here, ${seconds(slowMs)} at ${tokensPerS} tokens/s: ${times(slowMs / liveMs)} as long.`;
}

function times(factor) {
  return `${factor < 10 ? factor.toFixed(1) : Math.round(factor)} times`;
}
