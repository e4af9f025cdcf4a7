/** The page: wires the modules to the elements. Everything else is in the module that has its name. */

import { Announcer } from "./announce.js";
import { Answers } from "./answers.js";
import { Composer } from "./composer.js";
import { ContextMeter } from "./context.js";
import { RequestDialog, askForKey } from "./dialogs.js";
import { ApiKey } from "./engine.js";
import { Header } from "./header.js";
import { ProblemView } from "./problem.js";
import { Pulse } from "./pulse.js";
import { RaceView } from "./race.js";
import { RankStrip } from "./ranks.js";
import { conversation, makeRequest } from "./request.js";
import { Run } from "./run.js";
import { settings, watchSettings } from "./settings.js";
import { SpeedView, Trace } from "./speed.js";
import { ChanceCard } from "./tokens.js";

const OUTCOMES = {
  stop: "Finished", length: "Reached the maximum of tokens", stopped: "Stopped", deadline: "Ended by its deadline", cancelled: "Cancelled",
};

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));
const button = (id) => /** @type {HTMLButtonElement} */ (document.getElementById(id));
const form = /** @type {HTMLFormElement} */ (document.getElementById("ask"));

let run = /** @type {Run | null} */ (null);
const key = new ApiKey();
const announcer = new Announcer();
const composer = new Composer(() => {
  answers.showMode();
  instruments.context.changed(0);
});
const answers = new Answers(composer, new ChanceCard((sentence) => announcer.say(sentence)), {
  copy,
  ask: start,
  changed: () => instruments.context.changed(),
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
  const messages = conversation(system, answers.messages(), composer.text);
  if (composer.chatStyle === "template") return { text: { messages }, maxTokens };
  return { text: { prompt: messages.map(({ content }) => content).join("\n\n") }, maxTokens }; // as the gateway joins them
}

/** @param {string} prompt @param {number | null} [from] in a conversation: answers from this turn on are replaced */
async function start(prompt, from = answers.editedIdx) {
  if (run?.streaming) return;
  if (prompt.trim() === "") {
    composer.focus();
    announcer.say("The prompt is empty.");
    return;
  }
  run?.abandon();
  problem.hide();
  const chosen = settings();
  const request = makeRequest(composer.mode, prompt, answers.messages(from), chosen);
  sent = request;
  const asked = answers.begin(prompt, from, chosen);
  const mine = new Run({ ...instruments, ...asked.views }, chosen.maxTokens ?? contextTokens);
  run = mine;
  if (asked.exchange && prompt === composer.text) composer.text = "";
  if (asked.exchange && !matchMedia("(pointer: coarse)").matches) composer.focus(); // on a phone the keyboard would cover the answer
  showRunning(true, "Waiting for the first token");
  announcer.began(() => mine.figures());
  showAnswer();
  let waits = true;
  let reasons = false;
  const outcome = await mine.follow(request, key.headers(), (receipt) => {
    if (receipt.pieces.length) waits = false;
    reasons = receipt.reasons ?? reasons;
    element("outcome").textContent = waits ? waitingFor(receipt) : reasons ? "Reasoning, which is not shown" : "";
  });
  if (run === mine) finished(asked, outcome);
}

/** @param {import("./stream.js").Receipt} receipt */
function waitingFor({ numBefore, promptRead }) {
  if (promptRead) return `Reading the prompt: ${promptRead[0]} of ${promptRead[1]} tokens`;
  return numBefore ? `Waiting: ${numBefore} before this one` : "Waiting for the first token";
}

/** @param {import("./answers.js").Asked} asked @param {import("./run.js").Outcome} outcome */
function finished(asked, { answer, figures, failure, reason }) {
  const words = failure ? failure.title : OUTCOMES[reason] ?? `Ended (${reason})`;
  answers.keep(asked, { prompt: asked.prompt, answer, figures, outcome: words, ...(asked.isJson && { isJson: true }) });
  failed = failure && asked.exchange ? answers.placeOf(asked, answer) : null;
  showRunning(false, answer || !failure ? words : "");
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
  if (failed?.id === answers.shown.id) start(failed.prompt, failed.from);
  else form.requestSubmit(); // the prompt may have been changed, as the remedy says
}

/** On a small screen the answer is below the prompt: bring it into sight, with the figures above it. */
function showAnswer() {
  const view = document.querySelector(".live > :is(.listing, .transcript):not([hidden])");
  if (view && view.getBoundingClientRect().bottom > innerHeight) element("speed").scrollIntoView({ block: "start" });
}

/** @param {boolean} running @param {string} words */
function showRunning(running, words) {
  const hadFocus = document.activeElement; // a disabled button would lose it
  document.body.toggleAttribute("data-running", running);
  for (const id of ["live", "transcript"]) element(id).setAttribute("aria-busy", String(running));
  button("run").disabled = running;
  button("stop").disabled = !running;
  button("stop-here").hidden = !running;
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
  if (told === null || told === "locked") return;
  answers.model = told.model?.id ?? answers.model;
  contextTokens = told.model?.max_model_len ?? contextTokens;
  if (told.model?.max_model_len) instruments.context.setLimit(told.model.max_model_len);
  instruments.ranks.describe(told);
  const untouched = chatStyle === null && answers.isEmpty && composer.isUntouched && !run;
  chatStyle = told.model?.chat ?? chatStyle;
  if (untouched && chatStyle === "template") composer.choose("conversation"); // a model that was made to be talked to
  composer.setChatStyle(chatStyle);
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
  start(composer.text);
});
form.addEventListener("invalid", () => {
  element("sampling").setAttribute("open", ""); // a browser says nothing about a field that it cannot show
}, { capture: true });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !document.querySelector("dialog[open]")) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && run?.streaming && !document.querySelector("dialog[open]")) {
    run.stop();
  }
});
addEventListener("pagehide", () => run?.abandon());
document.addEventListener("click", ({ target }) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) { // a click elsewhere, or on what it offers, closes it
    if (!menu.contains(/** @type {Node} */ (target)) || /** @type {HTMLElement} */ (target).closest("button")) menu.removeAttribute("open");
  }
});

for (const id of ["stop", "stop-here"]) button(id).addEventListener("click", () => run?.stop());
button("key-button").addEventListener("click", () => enterKey(false));
button("copy-request").addEventListener("click", () => {
  const next = makeRequest(composer.mode, composer.text, answers.messages(), settings());
  requestDialog.show(composer.text === "" && sent !== null ? sent : next, needsKey || key.isSet); // a message that was sent is no longer in its box
});
button("copy-answer").addEventListener("click", () => copy(answers.shown.turns[0].answer, button("copy-answer")));
button("continue").addEventListener("click", () => composer.edit(answers.shown.turns[0].prompt + answers.shown.turns[0].answer));
button("clear").addEventListener("click", () => {
  answers.clear();
  announcer.say("History cleared.");
});

answers.restore();
watchSettings(() => instruments.context.changed());
form.addEventListener("input", () => instruments.context.changed());
pulse.ask();
