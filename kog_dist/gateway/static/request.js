/** A request: what is sent, and the same as a shell command or a Python program. */

/**
 * @typedef {"completion" | "conversation"} Mode
 * @typedef {{role: "user" | "assistant", content: string}} Message
 *
 * @typedef {object} Sampling
 * @property {number} temperature
 * @property {number} topP
 * @property {number} maxTokens
 * @property {number | null} seed
 * @property {string[]} stop
 *
 * @typedef {object} Request
 * @property {Mode} mode
 * @property {string} path
 * @property {Record<string, unknown>} body as it goes over the wire
 */

const PATHS = { completion: "/v1/completions", conversation: "/v1/chat/completions" };

/**
 * @param {Mode} mode
 * @param {string} prompt
 * @param {Message[]} earlier messages of the conversation
 * @param {Sampling} sampling
 * @returns {Request}
 */
export function makeRequest(mode, prompt, earlier, sampling) {
  /** @type {Record<string, unknown>} */
  const body = { model: "default" };
  if (mode === "completion") body.prompt = prompt;
  else body.messages = [...earlier, { role: "user", content: prompt }];
  body.max_tokens = sampling.maxTokens;
  body.temperature = sampling.temperature;
  if (sampling.topP < 1) body.top_p = sampling.topP;
  if (sampling.seed !== null) body.seed = sampling.seed;
  if (sampling.stop.length) body.stop = sampling.stop;
  body.stream = true;
  body.stream_options = { include_usage: true };
  return { mode, path: PATHS[mode], body };
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
  const lines = Object.entries({ ...fields, stream }).map(([name, value]) => `    ${name}=${pythonLiteral(value)},\n`);
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
