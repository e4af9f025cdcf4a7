/** What was asked and answered, in order. */

/**
 * @typedef {object} Turn a prompt and its answer
 * @property {string} prompt
 * @property {string} answer
 * @property {import("./pace.js").Figures} figures
 * @property {string} outcome
 * @property {boolean} [isJson] the answer is JSON
 *
 * @typedef {object} Record what the browser keeps of a conversation, or of one completion
 * @property {string} id
 * @property {import("./request.js").Mode} mode
 * @property {number} at milliseconds since 1970 of its last change
 * @property {string} model
 * @property {string} [system] prompt of the conversation
 * @property {Turn[]} turns
 */

/** @param {import("./request.js").Mode} mode @param {string} model @param {Turn[]} turns @returns {Record} */
export function newRecord(mode, model, turns = []) {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, mode, at: Date.now(), model, turns };
}

/** The conversation so far, as the API wants it. @param {Turn[]} turns @returns {import("./request.js").Message[]} */
export function messages(turns) {
  return turns.flatMap(({ prompt, answer }) => [
    { role: /** @type {const} */ ("user"), content: prompt },
    { role: /** @type {const} */ ("assistant"), content: answer },
  ]);
}
