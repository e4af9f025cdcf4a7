/** What was asked and answered, in order. */

/**
 * @typedef {object} Call of a tool
 * @property {string} id
 * @property {string} name
 * @property {string} arguments JSON
 *
 * @typedef {object} Turn a prompt and its answer
 * @property {string} prompt
 * @property {{id: string, content: string}[]} [results] of the calls in the turn before, in place of a prompt
 * @property {string} answer
 * @property {string} [thought] in front of it
 * @property {Call[]} [calls] behind it
 * @property {import("./pace.js").Figures} figures
 * @property {string} outcome
 * @property {boolean} [isCut] the answer could go on
 * @property {boolean} [isJson] the answer is JSON
 *
 * @typedef {object} Question what is asked next
 * @property {string} prompt
 * @property {Turn["results"]} [results] of calls, in place of a prompt
 * @property {number | null} [from] answers from this turn on are replaced
 * @property {boolean} [goesOn] behind the last answer, which was cut off
 *
 * @typedef {object} Record what the browser keeps of a conversation, or of one completion
 * @property {string} id
 * @property {import("./request.js").Mode} mode
 * @property {number} at milliseconds since 1970 of its last change
 * @property {string} model
 * @property {string} [title] that somebody chose
 * @property {string} [system] prompt of the conversation
 * @property {Turn[]} turns
 */

/** @param {import("./request.js").Mode} mode @param {string} model @param {Turn[]} turns @returns {Record} */
export function newRecord(mode, model, turns = []) {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, mode, at: Date.now(), model, turns };
}

/** The conversation so far, as the API wants it. @param {Turn[]} turns @returns {import("./request.js").Message[]} */
export function messages(turns) {
  return turns.flatMap((turn) => [...asked(turn.prompt, turn.results), answered(turn)]);
}

/** A question, or the results of calls. @param {string} prompt @param {Turn["results"]} results @returns {import("./request.js").Message[]} */
export function asked(prompt, results) {
  if (!results) return [{ role: "user", content: prompt }];
  return results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
}

/** @param {Turn} turn @returns {import("./request.js").Message} */
function answered({ answer, calls }) {
  if (!calls?.length) return { role: "assistant", content: answer };
  const toolCalls = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content: answer, tool_calls: toolCalls };
}
