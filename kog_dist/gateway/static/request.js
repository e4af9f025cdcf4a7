/** A request: what is sent, and the same as a shell command or a Python program. */

/**
 * @typedef {"completion" | "conversation"} Mode
 * @typedef {{role: "system" | "user" | "assistant", content: string}} Message
 *
 * @typedef {object} Request
 * @property {Mode} mode
 * @property {string} path
 * @property {Record<string, unknown>} body as it goes over the wire
 */

/** Fields that the `openai` package has no argument for. */
const OPENAI_LACKS = {
  completion: new Set(["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "response_format"]),
  conversation: new Set(["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"]),
};
const PATHS = { completion: "/v1/completions", conversation: "/v1/chat/completions" };

/**
 * @param {Mode} mode
 * @param {string} prompt
 * @param {Message[]} earlier messages of the conversation
 * @param {import("./settings.js").Settings} settings
 * @returns {Request}
 */
export function makeRequest(mode, prompt, earlier, { system, fields, numLogprobs }) {
  const body = {
    model: "default",
    ...(mode === "completion" ? { prompt } : { messages: conversation(system, earlier, prompt) }),
    ...fields,
    ...(numLogprobs === null ? {} : mode === "completion" ? { logprobs: numLogprobs } : { logprobs: true, top_logprobs: numLogprobs }),
    stream: true,
    stream_options: { include_usage: true },
  };
  return { mode, path: PATHS[mode], body };
}

/** @returns {Message[]} */
export function conversation(system, earlier, prompt) {
  const first = system.trim() === "" ? [] : [{ role: /** @type {const} */ ("system"), content: system }];
  return [...first, ...earlier, { role: "user", content: prompt }];
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
