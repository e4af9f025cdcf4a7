/** The sampling controls. */

const input = (id) => /** @type {HTMLInputElement} */ (document.getElementById(id));
const FIELDS = ["temperature", "top-p", "max-tokens", "seed", "stop-texts"];

/** @returns {import("./request.js").Sampling} */
export function sampling() {
  return {
    temperature: input("temperature").valueAsNumber,
    topP: input("top-p").valueAsNumber,
    maxTokens: input("max-tokens").valueAsNumber,
    seed: Number.isNaN(input("seed").valueAsNumber) ? null : input("seed").valueAsNumber,
    stop: input("stop-texts").value.split("|").filter((text) => text !== "").map(unescaped),
  };
}

/** Keep the line that stands for the folded controls true. */
export function summariseSampling() {
  const summary = /** @type {HTMLElement} */ (document.getElementById("sampling-summary"));
  const show = () => {
    const { temperature, topP, maxTokens, seed, stop } = sampling();
    const parts = [`temperature ${temperature}`, `at most ${maxTokens} tokens`];
    if (topP < 1) parts.push(`top-p ${topP}`);
    if (seed !== null) parts.push(`seed ${seed}`);
    if (stop.length) parts.push(`${stop.length} stop ${stop.length === 1 ? "text" : "texts"}`);
    summary.textContent = `· ${parts.join(", ")}`;
  };
  for (const id of FIELDS) input(id).addEventListener("input", show);
  show();
}

/** `\n` and `\t` as one types them. @param {string} text */
function unescaped(text) {
  return text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter] ?? letter);
}
