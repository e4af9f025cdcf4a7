/** The page: wires the modules to the elements. Everything else is in the module that has its name. */

import { Announcer } from "./announce.js";
import { Answers } from "./answers.js";
import { Composer } from "./composer.js";
import { ContextMeter } from "./context.js";
import { RequestDialog, askForKey } from "./dialogs.js";
import { ApiKey } from "./engine.js";
import { Header } from "./header.js";
import { Panels } from "./panels.js";
import { ProblemView } from "./problem.js";
import { Pulse } from "./pulse.js";
import { RaceView } from "./race.js";
import { RankStrip } from "./ranks.js";
import { conversation, makeRequest } from "./request.js";
import { Run } from "./run.js";
import { setOwnSampling, settings, watchSettings } from "./settings.js";
import { SpeedView, Trace } from "./speed.js";
import { Tabs } from "./tabs.js";
import { ChanceCard } from "./tokens.js";

const OUTCOMES = {
  stop: "Finished", length: "Reached the maximum of tokens", stopped: "Stopped", deadline: "Ended by its deadline", cancelled: "Cancelled",
  tool_calls: "Called a tool",
};
const CUT = new Set(["length", "stopped", "deadline", "cancelled"]);

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const button = (id) => /** @type {HTMLButtonElement} */ (document.getElementById(id));
const form = /** @type {HTMLFormElement} */ (document.getElementById("ask"));

/** @typedef {import("./conversation.js").Question} Question */

let run = /** @type {Run | null} */ (null);
const key = new ApiKey();
const announcer = new Announcer();
const tabs = new Tabs();
const panels = new Panels(tabs);
const composer = new Composer(() => {
  answers.showMode();
  instruments.context.changed(0);
});
const answers = new Answers(composer, new ChanceCard((sentence) => announcer.say(sentence)), {
  copy,
  ask: start,
  changed: () => instruments.context.changed(),
  anew,
  isBusy: () => run?.streaming ?? false,
});
const problem = new ProblemView({ retry, enterKey: () => enterKey(true) });
const requestDialog = new RequestDialog();
const header = new Header();
const pulse = new Pulse(key, { onAnswer: engineSaid, onAge: (ageMs, isFresh) => header.age(ageMs, isFresh) });
const instruments = {
  speed: new SpeedView(),
  trace: new Trace(/** @type {HTMLCanvasElement} */ (document.getElementById("trace"))),
  race: new RaceView(),
  ranks: new RankStrip(),
  context: new ContextMeter(key, draft),
};

let sent = /** @type {import("./request.js").Request | null} */ (null);
let failed = /** @type {import("./answers.js").Place | null} */ (null); // of an answer that trying again replaces
let needsKey = false;
let contextTokens = 2048; // of prompt and answer together, until the server has said it
let chatStyle = /** @type {string | null} */ (null);

/** What the box and the settings would send. @returns {import("./context.js").Draft} */
function draft() {
  const { system, maxTokens } = settings();
  if (composer.mode === "completion") return { text: { prompt: composer.text }, maxTokens };
  const messages = conversation(system, answers.messages(), { prompt: composer.text });
  if (composer.chatStyle === "template") return { text: { messages }, maxTokens };
  return { text: { prompt: messages.map(({ content }) => content).join("\n\n") }, maxTokens }; // as the gateway joins them
}

/** The request that asks a question where the conversation stands. @param {Question} question @param {import("./settings.js").Settings} chosen */
function requestFor(question, chosen) {
  const [last] = answers.shown.turns.slice(-1);
  if (!question.goesOn) return makeRequest(composer.mode, question, answers.messages(question.from ?? null), chosen);
  if (composer.mode === "completion") return makeRequest("completion", { prompt: last.prompt + last.answer }, [], chosen);
  return makeRequest("conversation", question, answers.messages(null), chosen);
}

/** @param {Question} question */
async function start(question) {
  if (run?.streaming) return;
  if (question.prompt.trim() === "" && !question.results) {
    composer.focus();
    announcer.say("The message is empty.");
    return;
  }
  run?.abandon();
  problem.hide();
  const chosen = settings();
  const request = requestFor(question, chosen);
  sent = request;
  const asked = answers.begin(question, chosen);
  const mine = new Run({ ...instruments, ...asked.views }, chosen.maxTokens ?? contextTokens);
  run = mine;
  if (question.prompt === composer.text) composer.text = "";
  if (!matchMedia("(pointer: coarse)").matches) composer.focus(); // on a phone the keyboard would cover the answer
  showRunning(true, "Waiting for the first token");
  announcer.began(() => mine.figures());
  let waits = true;
  let reasons = false;
  const outcome = await mine.follow(request, key.headers(), (receipt) => {
    if (receipt.pieces.length) waits = false;
    reasons = receipt.reasons ?? reasons;
    element("outcome").textContent = waits ? waitingFor(receipt) : reasons ? "Thinking" : "";
  });
  if (run === mine) finished(asked, outcome);
}

/** @param {import("./stream.js").Receipt} receipt */
function waitingFor({ numBefore, promptRead }) {
  if (promptRead) return `Reading the prompt: ${promptRead[0]} of ${promptRead[1]} tokens`;
  return numBefore ? `Waiting: ${numBefore} before this one` : "Waiting for the first token";
}

/** @param {import("./answers.js").Asked} asked @param {import("./run.js").Outcome} outcome */
function finished(asked, { answer, thought, calls, figures, failure: whole, reason }) {
  const failure = answer || thought || calls.length ? whole : whole?.beforeAnything() ?? null;
  const words = failure ? failure.title : OUTCOMES[reason] ?? `Ended (${reason})`;
  const { prompt, results } = asked.question;
  answers.keep(asked, {
    prompt, answer, figures, outcome: words, ...(results && { results }), ...(thought && { thought }), ...(calls.length && { calls }),
    ...(asked.isJson && { isJson: true }), ...((failure || CUT.has(reason)) && { isCut: true }),
  });
  failed = failure && asked.mode === "conversation" ? answers.placeOf(asked, answer) : null;
  showRunning(false, answer || calls.length || failure ? "" : words);
  if (!failure) {
    announcer.ended(words, figures);
    return;
  }
  announcer.ended();
  needsKey ||= failure.needsKey;
  problem.show(failure);
  pulse.ask();
}

function retry() {
  if (failed?.id === answers.shown.id) start(failed.question);
  else form.requestSubmit(); // the prompt may have been changed, as the remedy says
}

/** Nothing of an earlier answer stays: neither figures nor a comparison nor a word. */
function anew() {
  run?.abandon();
  run = null;
  failed = null;
  problem.hide();
  instruments.speed.begin();
  instruments.trace.begin(performance.now());
  instruments.race.begin(1);
  element("outcome").textContent = "";
  element("replay").replaceChildren();
}

/** @param {boolean} running @param {string} words */
function showRunning(running, words) {
  const hadFocus = document.activeElement; // a hidden button would lose it
  document.body.toggleAttribute("data-running", running);
  for (const id of ["live", "transcript"]) element(id).setAttribute("aria-busy", String(running));
  button("run").hidden = running;
  button("stop").hidden = !running;
  if (hadFocus === button("run") || hadFocus === button("stop")) button(running ? "stop" : "run").focus({ preventScroll: true });
  element("outcome").textContent = words;
  instruments.context.setRunning(running);
  answers.showMode();
}

/** @param {boolean} isRetry run again once there is a key */
async function enterKey(isRetry) {
  const entered = await askForKey();
  if (entered === null) return;
  key.set(entered);
  pulse.ask();
  if (isRetry && entered) retry();
}

/** @param {import("./engine.js").Readiness} readiness @param {import("./engine.js").EngineInfo | "locked" | null} told */
function engineSaid(readiness, told) {
  header.show(readiness, told);
  needsKey ||= told === "locked";
  if (["failed", "unreachable"].includes(readiness.state)) instruments.ranks.lost(readiness.state === "failed" ? "lost" : "unknown");
  else if (told !== null && told !== "locked") instruments.ranks.describe(told);
  if (told === null || told === "locked") return;
  answers.model = told.model?.id ?? answers.model;
  contextTokens = told.model?.max_model_len ?? contextTokens;
  if (told.model?.max_model_len) instruments.context.setLimit(told.model.max_model_len);
  setOwnSampling(told.engine?.own_sampling ?? "");
  const [before, isUntouched] = [chatStyle, answers.isEmpty && composer.text === "" && !run];
  chatStyle = told.model?.chat ?? chatStyle;
  composer.setModel(chatStyle, answers.model);
  if (before === null && isUntouched && chatStyle === "template") composer.choose("conversation"); // a model that was made to be talked to
  if (before !== chatStyle && (before === "plain" || chatStyle === "plain")) answers.redraw();
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
  start({ prompt: composer.text, from: composer.mode === "conversation" ? answers.editedIdx : null });
});
form.addEventListener("invalid", () => panels.show("sampling", true), { capture: true }); // a browser says nothing about a field that it cannot show
document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target !== element("prompt")) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && run?.streaming) {
    run.stop();
  }
});
addEventListener("pagehide", () => run?.abandon());

button("stop").addEventListener("click", () => run?.stop());
button("key-button").addEventListener("click", () => enterKey(false));
button("copy-request").addEventListener("click", () => {
  const next = requestFor({ prompt: composer.text, from: answers.editedIdx }, settings());
  requestDialog.show(composer.text === "" && sent !== null ? sent : next, needsKey || key.isSet); // a message that was sent is no longer in its box
});
button("clear").addEventListener("click", () => {
  answers.clear();
  announcer.say("All chats are forgotten.");
});

answers.restore();
watchSettings(() => instruments.context.changed());
form.addEventListener("input", () => instruments.context.changed());
pulse.ask();
