/** How likely each token was, out of the two forms that the APIs have for it. */

/**
 * @typedef {object} Chance a token that was taken
 * @property {string} name its text, or what it is called without one
 * @property {Uint8Array | null} bytes that it stands for; null for none: the end, for example
 * @property {number} logprob
 * @property {[string, number][]} others the most likely tokens with their log-probabilities, best first
 */

/** @param {any} choice of a chunk @returns {Chance[]} none where they were not asked for */
export function chancesOf(choice) {
  const said = choice?.logprobs;
  if (Array.isArray(said?.content)) return said.content.map(ofChat);
  if (!Array.isArray(said?.tokens)) return [];
  return said.tokens.map((name, idx) => ({
    name: shownName(name),
    bytes: bytesOf(name),
    logprob: Number(said.token_logprobs?.[idx]),
    others: Object.entries(said.top_logprobs?.[idx] ?? {}).map(([other, logprob]) => [shownName(other), Number(logprob)]),
  }));
}

/** @returns {Chance} */
function ofChat({ token, bytes, logprob, top_logprobs: others }) {
  return {
    name: String(token),
    bytes: Array.isArray(bytes) ? Uint8Array.from(bytes) : null,
    logprob: Number(logprob),
    others: (others ?? []).map((other) => [String(other.token), Number(other.logprob)]),
  };
}

/** `token_id:N` stands for a token without text, `bytes:\xe2\x82` for one that is no whole character. @param {string} name */
function bytesOf(name) {
  if (/^token_id:\d+$/.test(name)) return null;
  const escaped = /^bytes:((?:\\x[\da-f]{2})+)$/.exec(name);
  return escaped ? Uint8Array.from(escaped[1].split("\\x").slice(1), (hex) => parseInt(hex, 16)) : new TextEncoder().encode(name);
}

/** @param {string} name */
function shownName(name) {
  return name.startsWith("bytes:\\x") ? new TextDecoder().decode(bytesOf(name) ?? undefined) : name;
}
