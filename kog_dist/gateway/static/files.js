/** Conversations and completions as files: text to read, and JSON whose messages any OpenAI client takes. */

import { messages } from "./conversation.js";
import { title } from "./history.js";

/** @typedef {import("./conversation.js").Record} Record */

/** A completion as it is; a conversation as Markdown. @param {Record} record @returns {string} */
export function asText(record) {
  const [first] = record.turns;
  if (record.mode === "completion") return first.prompt + first.answer;
  const turns = record.turns.map(({ prompt, answer }) => `## Question\n\n${prompt}\n\n## Answer\n\n${answer.trimEnd()}\n`);
  const head = `# ${title(record)}\n\n${record.model || "A model"}, ${new Date(record.at).toISOString()}\n`;
  const system = instructions(record).map(({ content }) => `## System prompt\n\n${content}\n`);
  return [head, ...system, ...turns].join("\n");
}

/** @param {Record} record @returns {string} */
export function asJson(record) {
  const { mode, model, at, turns } = record;
  const said = mode === "completion" ? { prompt: turns[0].prompt, completion: turns[0].answer } : { messages: [...instructions(record), ...messages(turns)] };
  const measured = turns.map(({ figures, outcome }) => ({ outcome, ...figures }));
  return `${JSON.stringify({ model, saved_at: new Date(at).toISOString(), ...said, figures: measured }, null, 2)}\n`;
}

/** @param {Record} record */
function instructions({ system }) {
  return system?.trim() ? [{ role: "system", content: system }] : [];
}

/** Hand a file to the browser, which keeps it where it keeps downloads. @param {Record} record @param {"text" | "json"} form */
export function download(record, form) {
  const json = form === "json";
  const ending = json ? "json" : record.mode === "completion" ? "txt" : "md";
  const name = title(record).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40).toLowerCase() || "kog";
  const address = URL.createObjectURL(new Blob([json ? asJson(record) : asText(record)], { type: json ? "application/json" : "text/plain" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
