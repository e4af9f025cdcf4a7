/** How an answer is asked for: the system prompt, sampling parameters, the form of the answer. An empty field is not sent. */

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const input = (id) => /** @type {HTMLInputElement} */ (document.getElementById(id));

/**
 * @typedef {object} Settings
 * @property {string} system "" for none
 * @property {Record<string, unknown>} fields of the request's body, by their names there
 * @property {number | null} maxTokens null: what fits the context
 * @property {object[] | null} tools that the model may call
 * @property {boolean} isJson whether the answer is JSON
 * @property {number | null} numLogprobs alternatives to each token, null for no log-probabilities at all
 */

let own = "";

/** Numbers, flags and choices by the names of the API; the elements say their limits. @returns {(HTMLInputElement & {dataset: {field: string}})[]} */
const simple = () => [...document.querySelectorAll("#sampling [data-field]")];

/** @returns {Settings} */
export function settings() {
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const { dataset, type, checked, value, valueAsNumber } of simple()) {
    if (type === "checkbox") {
      if (checked) fields[dataset.field] = true;
    } else if (type === "select-one") {
      if (value) fields[dataset.field] = value;
    } else if (!Number.isNaN(valueAsNumber)) fields[dataset.field] = valueAsNumber;
  }
  const maxTokens = /** @type {number | undefined} */ (fields.max_tokens) ?? null;
  fields.max_tokens ??= -1;
  const stop = input("stop-texts").value.split("|").filter((text) => text !== "").map(unescaped);
  if (stop.length) fields.stop = stop;
  const bias = biases();
  if (bias && Object.keys(bias).length) fields.logit_bias = bias;
  const format = responseFormat();
  if (format) fields.response_format = format;
  return { system: input("system").value, fields, maxTokens, tools: tools(), isJson: format !== null, numLogprobs: numLogprobs() };
}

/** @param {string} text */
export function setSystem(text) {
  input("system").value = text;
  refresh();
}

/** Keep the line that stands for the folded fields true, and say what is wrong in them. @param {() => void} onChange */
export function watchSettings(onChange) {
  for (const type of ["input", "change"]) {
    for (const id of ["sampling", "system"]) {
      element(id).addEventListener(type, () => {
        refresh();
        onChange();
      });
    }
  }
  element("defaults").addEventListener("click", () => {
    for (const field of element("sampling").querySelectorAll("input, textarea, select")) reset(field);
    refresh();
    onChange();
  });
  refresh();
}

/** The summary tells of system prompts in conversations only. */
export function refresh() {
  const format = input("format").value;
  element("schema-field").hidden = format !== "json_schema";
  input("schema").setCustomValidity(format !== "json_schema" || schema() ? "" : "This is no JSON object.");
  input("tools").setCustomValidity(input("tools").value.trim() && !tools() ? "This is no JSON list of tools." : "");
  input("logit-bias").setCustomValidity(biases() ? "" : "Write pairs such as 199: -2, 42: 1.5.");
  element("sampling-summary").textContent = summary().join(", ");
  element("system-button").toggleAttribute("data-set", input("system").value.trim() !== "");
}

/** @returns {string[]} */
function summary() {
  const { fields, maxTokens, tools: all, numLogprobs: alternatives } = settings();
  const { temperature, max_tokens: _, stop, logit_bias: bias, response_format: format, ...others } = fields;
  const parts = [temperature === undefined ? own || "temperature of the model" : `temperature ${temperature}`];
  parts.push(maxTokens === null ? "as many tokens as fit" : `at most ${maxTokens} tokens`);
  for (const { dataset, type } of simple()) {
    if (dataset.field in others) parts.push(dataset.field.replaceAll("_", "-") + (type === "checkbox" ? "" : ` ${others[dataset.field]}`));
  }
  if (Array.isArray(stop)) parts.push(`${stop.length} stop ${stop.length === 1 ? "text" : "texts"}`);
  if (bias) parts.push("logit-bias");
  if (format) parts.push(format.type === "json_object" ? "JSON" : "JSON schema");
  if (alternatives !== null) parts.push("log-probabilities");
  if (all) parts.push(`${all.length} ${all.length === 1 ? "tool" : "tools"}`);
  return parts;
}

/** What the model answers with where a request says nothing. @param {string} words as the server writes them: `temperature 0.6, top_p 0.95` */
export function setOwnSampling(words) {
  if (words === own) return;
  own = words;
  for (const [name, value] of words.split(", ").map((part) => part.split(" "))) {
    const field = element("sampling").querySelector(`[data-field="${name}"]`);
    if (field instanceof HTMLInputElement && value) field.placeholder = `model's: ${value}`;
  }
  refresh();
}

/** @returns {object[] | null} null where there are none, or what stands there is no list */
function tools() {
  try {
    const found = JSON.parse(input("tools").value);
    return Array.isArray(found) && found.length && found.every((tool) => tool && typeof tool === "object") ? found : null;
  } catch {
    return null;
  }
}

/** @returns {object | null} of JSON */
function responseFormat() {
  const type = input("format").value;
  if (type === "text") return null;
  return type === "json_object" ? { type } : { type, json_schema: { name: "answer", schema: schema() } };
}

/** @returns {object | null} null where it is none */
function schema() {
  try {
    const found = JSON.parse(input("schema").value);
    return typeof found === "object" && !Array.isArray(found) ? found : null;
  } catch {
    return null;
  }
}

/** "199: -2, 42: 1.5" @returns {Record<string, number> | null} null where it says something else */
function biases() {
  const pairs = input("logit-bias").value.split(/[,;\n]/).map((pair) => pair.trim()).filter((pair) => pair !== "");
  const found = pairs.map((pair) => /^(\d{1,9})\s*[:=]\s*([+-]?\d+(?:\.\d+)?)$/.exec(pair));
  const whole = found.every((match) => match && Math.abs(Number(match[2])) <= 100);
  return whole ? Object.fromEntries(found.map((match) => [match?.[1], Number(match?.[2])])) : null;
}

function numLogprobs() {
  const { value } = input("num-logprobs");
  return value === "" ? null : Number(value);
}

/** @param {HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement} field */
function reset(field) {
  if (field instanceof HTMLSelectElement) field.selectedIndex = 0;
  else if (field instanceof HTMLInputElement && field.type === "checkbox") field.checked = field.defaultChecked;
  else field.value = /** @type {HTMLInputElement | HTMLTextAreaElement} */ (field).defaultValue;
}

/** `\n` and `\t` as one types them. @param {string} text */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter] ?? letter);
}
