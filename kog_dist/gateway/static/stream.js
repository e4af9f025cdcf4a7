/**
 * One answer as it arrives: a request is posted, and each network read of the event stream becomes one `Receipt`.
 *
 * A receipt carries the moment of its read, so whoever measures never has to guess when something came. Events that arrived in
 * one read share a moment; the page does not pretend to know more than that.
 */

import { chancesOf } from "./chances.js";
import { Failure } from "./failures.js";

/**
 * @typedef {object} Piece text as one event brought it
 * @property {string} text may be empty: a token whose text is held back
 * @property {number} numTokens
 * @property {string} [thought] what the model thinks and does not say
 * @property {object[]} [calls] changes of calls, as a chunk has them
 * @property {import("./chances.js").Chance[]} [chances] of its tokens, where the request asked for them
 *
 * @typedef {object} Receipt what one network read brought
 * @property {number} at milliseconds of `performance.now()`
 * @property {Piece[]} pieces
 * @property {string | null} finishReason
 * @property {Usage | null} usage the last one of the read
 * @property {Record<string, number> | null} timings of the server, in the keys of llama.cpp
 * @property {number | null} numBefore requests that the engine takes before this one
 * @property {boolean | null} reasons whether its last piece was a thought; null: it has none
 * @property {[number, number] | null} promptRead tokens of the prompt that have been read, and all of them
 * @property {Failure | null} failure what ended the answer after these pieces
 *
 * @typedef {object} Usage
 * @property {number} prompt_tokens
 * @property {number} completion_tokens
 * @property {{cached_tokens?: number}} [prompt_tokens_details]
 */

/** Give up on a server that sends nothing at all, not even a comment, for this long. */
const SILENCE_LIMIT_MS = 60_000;

const PLACE = /^: (\d{1,9}) before this one$/;
const PROMPT = /^: (\d{1,9}) of (\d{1,9}) prompt tokens$/;

/** Longest event that is put together from pieces; a server that never ends its line must not fill the memory. */
const EVENT_LIMIT = 4 * 1024 * 1024;

/** Cuts a stream of text into the `data` of its server-sent events, wherever the network has cut it. */
export class EventReader {
  #rest = "";
  #lines = /** @type {string[]} */ ([]);
  /** Requests that the engine takes before this one, as a comment of our own service said last. */
  numBefore = /** @type {number | null} */ (null);
  /** Tokens of the prompt that have been read, and all of them, as another comment said last. */
  promptRead = /** @type {[number, number] | null} */ (null);

  /**
   * @param {string} text
   * @returns {string[]} the data of each event that is now complete
   */
  push(text) {
    const complete = [];
    let begin = 0;
    const all = this.#rest + text;
    for (let end = all.indexOf("\n"); end !== -1; end = all.indexOf("\n", begin)) {
      const line = all.charCodeAt(end - 1) === 13 && end > begin ? all.slice(begin, end - 1) : all.slice(begin, end);
      begin = end + 1;
      if (line === "") {
        if (this.#lines.length) complete.push(this.#lines.join("\n"));
        this.#lines = [];
      } else if (line.startsWith("data:")) {
        this.#lines.push(line.slice(line.charCodeAt(5) === 32 ? 6 : 5));
      } else if (line.startsWith(":")) {
        const place = PLACE.exec(line);
        if (place) this.numBefore = Number(place[1]);
        const read = PROMPT.exec(line);
        if (read) this.promptRead = [Number(read[1]), Number(read[2])];
      } // other comments keep the connection alive; other fields are not used by this API
    }
    this.#rest = all.slice(begin);
    if (this.#rest.length > EVENT_LIMIT) throw Failure.unreadable(`an event of more than ${EVENT_LIMIT} characters`);
    return complete;
  }
}

/** Turns events into pieces, and counts tokens: by the running usage where the server sends it, else one per event with text. */
export class ChunkReader {
  #counted = 0;
  done = false;

  /**
   * @param {string[]} events
   * @param {number} at
   * @returns {Receipt}
   */
  receipt(events, at) {
    /** @type {Receipt} */
    const receipt = { at, pieces: [], finishReason: null, usage: null, timings: null, numBefore: null, reasons: null, promptRead: null, failure: null };
    try {
      for (const event of events) this.#take(event, receipt);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      receipt.failure = error; // what came before it in the same read is part of the answer
    }
    return receipt;
  }

  /** @param {string} event @param {Receipt} receipt */
  #take(event, receipt) {
    if (event === "[DONE]") {
      this.done = true;
      return;
    }
    const chunk = parsed(event);
    if (chunk.error) throw Failure.ofEvent(chunk.error);
    const choice = chunk.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    if (typeof text !== "string") throw Failure.unreadable("a chunk whose text is no text");
    const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning;
    const calls = choice?.delta?.tool_calls;
    const reasons = !text && typeof thought === "string" && thought !== "";
    if (text || reasons) receipt.reasons = reasons;
    const numTokens = this.#numTokens(chunk, Boolean(text) || reasons || Array.isArray(calls));
    const chances = chancesOf(choice);
    if (text || reasons || calls || numTokens || chances.length) {
      receipt.pieces.push({
        text, numTokens, ...(chances.length && { chances }), ...(reasons && { thought }), ...(Array.isArray(calls) && { calls }),
      });
    }
    receipt.finishReason = choice?.finish_reason ?? receipt.finishReason;
    receipt.usage = chunk.usage ?? receipt.usage;
    receipt.timings = chunk.timings ?? receipt.timings;
  }

  /** Tokens that the chunk adds. A last chunk without a choice only sums up. */
  #numTokens(chunk, isAny) {
    const running = chunk.choices?.length ? chunk.usage?.completion_tokens : undefined;
    const numTokens = typeof running === "number" ? Math.max(0, running - this.#counted) : isAny ? 1 : 0;
    this.#counted += numTokens;
    return numTokens;
  }
}

/**
 * Post `body` and hand out what comes back.
 *
 * @param {string} path
 * @param {object} body
 * @param {{headers: Record<string, string>, signal: AbortSignal, onOpen?: () => void, silenceLimitMs?: number}} options
 * @returns {AsyncGenerator<Receipt>}
 * @throws {Failure} for everything that is not a whole answer; an aborted `signal` throws what `fetch` throws
 */
export async function* receipts(path, body, { headers, signal, onOpen, silenceLimitMs = SILENCE_LIMIT_MS }) {
  const silence = new Silence(silenceLimitMs);
  const both = AbortSignal.any([signal, silence.signal]);
  try {
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...headers },
      body: JSON.stringify(body),
      signal: both,
    });
    if (!response.ok) throw await Failure.ofResponse(response);
    if (!response.body || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
      throw Failure.unreadable("an answer that is no event stream");
    }
    onOpen?.();
    yield* read(response.body.pipeThrough(new TextDecoderStream()).getReader(), silence);
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
    throw silence.signal.aborted ? Failure.silent(silenceLimitMs) : Failure.ofNetwork(error);
  } finally {
    silence.end();
  }
}

/** @param {ReadableStreamDefaultReader<string>} reader @param {Silence} silence */
async function* read(reader, silence) {
  const events = new EventReader();
  const chunks = new ChunkReader();
  let finished = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      silence.broken();
      const receipt = chunks.receipt(events.push(value), performance.now());
      receipt.numBefore = events.numBefore;
      receipt.promptRead = events.promptRead;
      finished ||= receipt.finishReason !== null;
      yield receipt;
      if (receipt.failure) throw receipt.failure;
      if (chunks.done) return;
    }
    if (!finished) throw Failure.cutOff();
  } finally {
    reader.cancel().catch(() => {}); // already closed or failed: nothing is left to cancel
  }
}

/** Aborts its signal when `broken` was not called for so long. */
class Silence {
  #controller = new AbortController();
  #lastSign = performance.now();
  #timer;

  constructor(limitMs) {
    this.#timer = setInterval(() => {
      if (performance.now() - this.#lastSign > limitMs) this.#controller.abort();
    }, Math.min(1000, limitMs));
  }

  get signal() {
    return this.#controller.signal;
  }

  broken() {
    this.#lastSign = performance.now();
  }

  end() {
    clearInterval(this.#timer);
  }
}

function parsed(event) {
  try {
    const chunk = JSON.parse(event);
    if (chunk !== null && typeof chunk === "object") return chunk;
  } catch {
    // falls through: both mean that this is not our protocol
  }
  throw Failure.unreadable(event.slice(0, 80));
}
