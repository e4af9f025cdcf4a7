/**
 * What can go wrong, in sentences: each failure has a cause and a remedy, and says whether what is on the page may be trusted.
 */

/** A request that did not get its whole answer. */
export class Failure extends Error {
  /**
   * @param {string} title a few words
   * @param {string} cause one sentence
   * @param {string} remedy one sentence
   * @param {{needsKey?: boolean, retryAfterS?: number | null, isCut?: boolean}} [more] isCut: the answer has a beginning
   */
  constructor(title, cause, remedy, { needsKey = false, retryAfterS = null, isCut = false } = {}) {
    super(`${title}: ${cause}`);
    this.name = "Failure";
    this.title = title;
    this.cause = cause;
    this.remedy = remedy;
    this.needsKey = needsKey;
    this.retryAfterS = retryAfterS;
    this.isCut = isCut;
  }

  /** The server answered, but not with a stream. @param {Response} response @returns {Promise<Failure>} */
  static async ofResponse(response) {
    const said = await message(response);
    const retryAfterS = Number(response.headers.get("Retry-After")) || null;
    switch (response.status) {
      case 401:
      case 403:
        return new Failure("The server wants an API key", said ?? "The request had no key, or another one than the server expects.",
          "Enter the key that the server was started with (--api-key), then try again.", { needsKey: true });
      case 404:
        return new Failure("Not found", said ?? "The server does not know this model or this address.",
          "Reload the page; if that does not help, this page and the server are of different versions.");
      case 413:
        return new Failure("The request is too large", said ?? "The prompt is longer than the server takes.",
          "Shorten the prompt, or clear the conversation.");
      case 429:
        return new Failure("The engine is busy", said ?? "Its queue is full.",
          retryAfterS ? `Try again in ${retryAfterS} s.` : "Try again in a moment.", { retryAfterS });
      case 503:
        return new Failure("The engine is not ready", said ?? "It is loading, draining or has failed.",
          "Wait until the state at the top says ready, then try again.", { retryAfterS });
    }
    if (response.status < 500) {
      return new Failure("The request was refused", said ?? `The server answered with status ${response.status}.`,
        "Change what the sentence names, then try again.");
    }
    return new Failure("The server failed", said ?? `It answered with status ${response.status}.`,
      "Try again; if it repeats, the log of kog-launch has the reason.");
  }

  /** The connection could not be made, or broke. @param {unknown} error */
  static ofNetwork(error) {
    const detail = error instanceof Error ? error.message : String(error);
    return new Failure("No connection", `The connection to ${location.host} could not be made, or it broke (${detail}).`,
      "Check that kog-launch is running and reachable, then try again.");
  }

  /** The server ended the stream with an error. @param {{message?: unknown, code?: unknown}} error */
  static ofEvent(error) {
    const code = typeof error.code === "string" ? ` (${error.code})` : "";
    return new Failure("The answer was cut off", sentence(`${text(error.message) ?? "The engine reported an error"}${code}`),
      "What is shown is an exact beginning of the answer. Try again to get all of it.", { isCut: true });
  }

  /** The same, where nothing of an answer had come: there is nothing to doubt. @returns {Failure} */
  beforeAnything() {
    if (!this.isCut) return this;
    return new Failure("Nothing of the answer had begun", this.cause,
      "The request only waited, and nothing of it was computed or shown. Send it again once the state at the top says ready.");
  }

  /** The connection closed in the middle, without a word. */
  static cutOff() {
    return new Failure("The answer was cut off", "The server closed the connection before the answer was complete; it may have stopped.",
      "What is shown is an exact beginning of the answer. Check that kog-launch is running, then try again.", { isCut: true });
  }

  /** @param {number} limitMs */
  static silent(limitMs) {
    return new Failure("The server went silent", `Nothing arrived for ${limitMs / 1000} s, so the request was cancelled.`,
      "Check the log of kog-launch, then try again.");
  }

  /** @param {string} what what came instead of a chunk */
  static unreadable(what) {
    return new Failure("The answer cannot be read", `The server sent something that is not part of its protocol: ${what}`,
      "Reload the page; a proxy between this page and the server may have changed the stream.");
  }
}

/** The sentence of an OpenAI error body, if there is one. @param {Response} response */
async function message(response) {
  try {
    const said = text((await response.json()).error?.message);
    return said && sentence(said);
  } catch {
    return null; // an HTML page of some proxy, or nothing
  }
}

/** With a capital and a full stop, whoever wrote it. @param {string} words */
function sentence(words) {
  const begun = words[0].toUpperCase() + words.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun.replace(/\.(?= \([a-z_]+\)$)/, "")}.`;
}

/** @param {unknown} value @returns {string | null} */
function text(value) {
  return typeof value === "string" && value.trim() ? value.trim().slice(0, 600) : null;
}
