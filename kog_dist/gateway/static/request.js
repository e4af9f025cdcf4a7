/** A request: what is sent, and the same as a shell command or a Python program. */

import { asked } from "./conversation.js";

/**
 * @typedef {"completion" | "conversation"} Mode
 * @typedef {object} Message
 * @property {"system" | "user" | "assistant" | "tool"} role
 * @property {string} content
 * @property {object[]} [tool_calls]
 * @property {string} [tool_call_id]
 *
 * @typedef {object} Request
 * @property {Mode} mode
 * @property {string} path
 * @property {Record<string, unknown>} body as it goes over the wire
 */

/** Fields that the `openai` package has no argument for. */
const OPENAI_LACKS = {
  completion: new Set(["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "response_format", "speculate"]),
  conversation: new Set(["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "continue_final_message", "add_generation_prompt", "speculate"]),
};
const PATHS = { completion: "/v1/completions", conversation: "/v1/chat/completions" };

/**
 * @param {Mode} mode
 * @param {import("./conversation.js").Question} question
 * @param {Message[]} earlier messages of the conversation; of a question that goes on also its own, and the beginning of its answer
 * @param {import("./settings.js").Settings} settings
 * @returns {Request}
 */
export function makeRequest(mode, question, earlier, { system, fields, tools, numLogprobs }) {
  const chat = {
    messages: question.goesOn ? withSystem(system, earlier) : conversation(system, earlier, question),
    ...(question.goesOn && { continue_final_message: true, add_generation_prompt: false }),
    ...(tools && { tools }),
  };
  const body = {
    model: "default",
    ...(mode === "completion" ? { prompt: question.prompt } : chat),
    ...fields,
    ...(numLogprobs === null ? {} : mode === "completion" ? { logprobs: numLogprobs } : { logprobs: true, top_logprobs: numLogprobs }),
    stream: true,
    stream_options: { include_usage: true },
  };
  return { mode, path: PATHS[mode], body };
}

/** @param {string} system @param {Message[]} earlier @param {import("./conversation.js").Question} question @returns {Message[]} */
export function conversation(system, earlier, { prompt, results }) {
  return withSystem(system, [...earlier, ...asked(prompt, results)]);
}

/** @param {string} system @param {Message[]} all @returns {Message[]} */
function withSystem(system, all) {
  return system.trim() === "" ? all : [{ role: "system", content: system }, ...all];
}

/** @param {Request} request @param {string} origin @param {boolean} needsKey @returns {string} */
export function asCurl(request, origin, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $KOG_API_KEY"' : "";
  return `curl -N ${shellQuoted(origin + request.path)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${shellQuoted(JSON.stringify(request.body, null, 2))}\n`;
}

/** @param {Request} request @param {string} origin @param {boolean} needsKey @returns {string} */
export function asPython(request, origin, needsKey) {
  const { stream, ...fields } = request.body;
  const chat = request.mode === "conversation";
  const lacks = OPENAI_LACKS[request.mode];
  const own = Object.fromEntries(Object.entries(fields).filter(([name]) => !lacks.has(name)));
  const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => lacks.has(name)));
  const all = { ...own, stream, ...(Object.keys(extra).length ? { extra_body: extra } : {}) };
  const lines = Object.entries(all).map(([name, value]) => `    ${name}=${pythonLiteral(value)},\n`);
  return [
    "import os\n\n".repeat(Number(needsKey)), "from openai import OpenAI\n\n",
    `client = OpenAI(base_url=${pythonLiteral(`${origin}/v1`)}, api_key=${needsKey ? 'os.environ["KOG_API_KEY"]' : '"none"'})\n`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(\n`, ...lines, ")\n",
    "for chunk in stream:\n    if chunk.choices:\n",
    `        print(chunk.choices[0].${chat ? 'delta.content or ""' : "text"}, end="", flush=True)\n`,
  ].join("");
}

/** @param {string} text */
function shellQuoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** JSON is Python but for three words; strings, numbers, lists and objects are written alike. @param {unknown} value @returns {string} */
function pythonLiteral(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(pythonLiteral).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(/** @type {object} */ (value)).map(([name, inner]) => `${JSON.stringify(name)}: ${pythonLiteral(inner)}`);
    return `{${entries.join(", ")}}`;
  }
  return JSON.stringify(value);
}
