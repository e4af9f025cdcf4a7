/** The page: wires the modules to the elements. Everything else is in the module that has its name. */

import { Announcer } from "./announce.js";
import { RequestDialog, askForKey } from "./dialogs.js";
import { ApiKey, engineInfo, readiness } from "./engine.js";
import { COMPLETIONS, QUESTIONS } from "./examples.js";
import { guessLanguage } from "./highlight.js";
import { Listing } from "./listing.js";
import { ProblemView } from "./problem.js";
import { RaceView } from "./race.js";
import { RankStrip } from "./ranks.js";
import { makeRequest } from "./request.js";
import { Run } from "./run.js";
import { sampling, summariseSampling } from "./sampling.js";
import { SpeedView, Trace } from "./speed.js";
import { Turns } from "./turns.js";

const ASK_EVERY_MS = 5_000;
const OUTCOMES = {
  stop: "Finished", length: "Reached the maximum of tokens", stopped: "Stopped", deadline: "Ended by its deadline", cancelled: "Cancelled",
};

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const button = (id) => /** @type {HTMLButtonElement} */ (document.getElementById(id));
const form = /** @type {HTMLFormElement} */ (document.getElementById("ask"));
const prompt = /** @type {HTMLTextAreaElement} */ (document.getElementById("prompt"));

const key = new ApiKey();
const announcer = new Announcer();
const problem = new ProblemView({ retry: () => form.requestSubmit(), enterKey: () => enterKey(true) });
const requestDialog = new RequestDialog();
const turns = new Turns((turn) => {
  chooseMode(turn.mode);
  setPrompt(turn.prompt);
});
const views = {
  live: new Listing(element("live")),
  slow: new Listing(element("replay")),
  speed: new SpeedView(),
  trace: new Trace(/** @type {HTMLCanvasElement} */ (document.getElementById("trace"))),
  race: new RaceView(),
  ranks: new RankStrip(),
};

let run = /** @type {Run | null} */ (null);
let sent = /** @type {import("./request.js").Request | null} */ (null);
let latest = { prompt: "", answer: "" };
let drafts = { completion: COMPLETIONS[0].prompt, conversation: "" };
let needsKey = false;
let chatStyle = /** @type {string | null} */ (null);

/** @returns {import("./request.js").Mode} */
function mode() {
  return new FormData(form).get("mode") === "conversation" ? "conversation" : "completion";
}

/** @param {import("./request.js").Mode} chosen */
function chooseMode(chosen) {
  const radio = /** @type {HTMLInputElement} */ (form.querySelector(`input[value="${chosen}"]`));
  if (!radio.checked) {
    radio.checked = true;
    modeChosen();
  }
}

function modeChosen() {
  const chat = mode() === "conversation";
  drafts = { ...drafts, [chat ? "completion" : "conversation"]: prompt.value };
  prompt.value = chat ? drafts.conversation : drafts.completion;
  prompt.placeholder = chat ? "Ask for code" : "Code for the model to continue";
  element("prompt-label").textContent = chat ? "Message" : "Code to continue";
  showExamples(chat ? QUESTIONS : COMPLETIONS);
  showChatNote();
}

/** A base model gets messages as plain text, and should not be taken for an assistant. */
function showChatNote() {
  element("chat-note").hidden = mode() !== "conversation" || chatStyle !== "plain";
}

/** @param {import("./examples.js").Example[]} examples */
function showExamples(examples) {
  element("examples").replaceChildren(...examples.map(({ title, prompt: text }) => {
    const choice = document.createElement("button");
    choice.type = "button";
    choice.textContent = title;
    choice.addEventListener("click", () => setPrompt(text));
    return choice;
  }));
}

/** @param {string} text */
function setPrompt(text) {
  prompt.value = text;
  prompt.focus();
  prompt.setSelectionRange(text.length, text.length);
}

function currentRequest() {
  return makeRequest(mode(), prompt.value, turns.messages(), sampling());
}

async function start() {
  if (run?.streaming) return;
  if (prompt.value.trim() === "") {
    prompt.focus();
    announcer.say("The prompt is empty.");
    return;
  }
  run?.abandon();
  problem.hide();
  const request = currentRequest();
  sent = request;
  const asked = { mode: request.mode, prompt: prompt.value };
  const chat = request.mode === "conversation";
  for (const listing of [views.live, views.slow]) {
    listing.begin(chat ? "prose" : guessLanguage(asked.prompt), chat ? `${asked.prompt}\n\n` : asked.prompt);
  }
  const mine = new Run(views, sampling().maxTokens);
  run = mine;
  showRunning(true, "Waiting for the first token");
  announcer.began(() => mine.figures());
  showAnswer();
  if (chat) setPrompt("");
  let waits = true;
  const outcome = await mine.follow(request, key.headers(), (receipt) => {
    if (receipt.pieces.length) waits = false;
    const before = receipt.numBefore ? `Waiting: ${receipt.numBefore} before this one` : "Waiting for the first token";
    element("outcome").textContent = waits ? before : "";
  });
  if (run === mine) finished(asked, outcome);
}

/** @param {{mode: import("./request.js").Mode, prompt: string}} asked @param {import("./run.js").Outcome} outcome */
function finished(asked, outcome) {
  const words = outcome.failure ? outcome.failure.title : OUTCOMES[outcome.reason] ?? `Ended (${outcome.reason})`;
  showRunning(false, outcome.answer || !outcome.failure ? words : "");
  latest = { prompt: asked.mode === "completion" ? asked.prompt : "", answer: outcome.answer };
  button("continue").hidden = asked.mode !== "completion" || !outcome.answer;
  button("copy-answer").hidden = !outcome.answer;
  if (outcome.answer) turns.add({ ...asked, answer: outcome.answer, figures: outcome.figures, outcome: words });
  if (asked.mode === "conversation" && outcome.failure && !outcome.answer && prompt.value === "") prompt.value = asked.prompt;
  if (!outcome.failure) {
    announcer.ended(words, outcome.figures);
    return;
  }
  announcer.ended();
  needsKey ||= outcome.failure.needsKey;
  problem.show(outcome.failure);
  askEngine();
}

/** On a small screen the answer is below the prompt: bring it into sight, with the figures above it. */
function showAnswer() {
  if (element("live").getBoundingClientRect().bottom > innerHeight) element("speed").scrollIntoView({ block: "start" });
}

/** @param {boolean} running @param {string} words */
function showRunning(running, words) {
  const hadFocus = document.activeElement; // a disabled button would lose it
  document.body.toggleAttribute("data-running", running);
  element("live").setAttribute("aria-busy", String(running));
  button("run").disabled = running;
  button("stop").disabled = !running;
  button("stop-here").hidden = !running;
  if (hadFocus === button("run") || hadFocus === button("stop")) button(running ? "stop" : "run").focus({ preventScroll: true });
  element("outcome").textContent = words;
  if (running) for (const id of ["continue", "copy-answer"]) button(id).hidden = true;
}

/** @param {boolean} retry run again once there is a key */
async function enterKey(retry) {
  const entered = await askForKey();
  if (entered === null) return;
  key.set(entered);
  askEngine();
  if (retry && entered) form.requestSubmit();
}

async function askEngine() {
  const { state, reason } = await readiness(key);
  const told = state === "unreachable" ? null : await engineInfo(key);
  const info = told === "locked" ? null : told;
  needsKey ||= told === "locked";
  element("engine").dataset.state = state;
  const what = [info?.model?.id, number(info?.ranks, "rank"), number(info?.replicas, "replica")].filter(Boolean).join(", ");
  const words = state === "ready" ? [what, "ready", told === "locked" && "the server wants an API key"] : [state, reason];
  element("engine-sentence").textContent = words.filter(Boolean).join(state === "ready" ? " · " : ": ");
  if (info === null) return;
  views.ranks.describe(info);
  const untouched = chatStyle === null && turns.length === 0 && prompt.value === COMPLETIONS[0].prompt && !run;
  chatStyle = info.model?.chat ?? chatStyle;
  if (untouched && chatStyle === "template") chooseMode("conversation"); // a model that was made to be talked to
  showChatNote();
}

/** "2 ranks", or nothing where there are none. @param {unknown[] | undefined} things @param {string} name */
function number(things, name) {
  return things?.length ? `${things.length} ${name}${things.length === 1 ? "" : "s"}` : "";
}

/** @param {string} text @param {HTMLElement} from its label says for a moment that it worked */
async function copy(text, from) {
  const label = from.textContent;
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Select and copy it"; // without https the browser does not let a page write to the clipboard
  }
  setTimeout(() => (from.textContent = label), 1500);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
form.addEventListener("invalid", () => {
  element("sampling").setAttribute("open", ""); // a browser says nothing about a field that it cannot show
}, { capture: true });
form.addEventListener("change", (event) => {
  if (/** @type {HTMLInputElement} */ (event.target).name === "mode") modeChosen();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && run?.streaming && !document.querySelector("dialog[open]")) {
    run.stop();
  }
});
addEventListener("pagehide", () => run?.abandon());

for (const id of ["stop", "stop-here"]) button(id).addEventListener("click", () => run?.stop());
button("key-button").addEventListener("click", () => enterKey(false));
button("copy-request").addEventListener("click", () => {
  const request = prompt.value === "" && sent !== null ? sent : currentRequest(); // a message that was sent is no longer in its box
  requestDialog.show(request, needsKey || key.isSet);
});
button("copy-answer").addEventListener("click", () => copy(latest.answer, button("copy-answer")));
button("continue").addEventListener("click", () => setPrompt(latest.prompt + latest.answer));
button("clear").addEventListener("click", () => {
  turns.clear();
  announcer.say("History cleared.");
  prompt.focus();
});

prompt.value = drafts.completion;
showExamples(COMPLETIONS);
summariseSampling();
askEngine();
setInterval(() => {
  if (!document.hidden && !run?.streaming) askEngine();
}, ASK_EVERY_MS);
