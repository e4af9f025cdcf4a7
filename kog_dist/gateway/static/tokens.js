/** An answer token by token: each shaded by how likely it was, with what else could have stood there under pointer and arrow keys. */

import { made, textNodes } from "./text.js";

const TOKENS_PER_FRAME = 1_000;
const TOKENS_PER_BLOCK = 400;

/** @typedef {import("./chances.js").Chance} Chance */

export class TokenText {
  #element;
  #follower;
  #card;
  #queue = /** @type {Chance[]} */ ([]);
  #decoder = new TextDecoder();
  #block = /** @type {HTMLElement | null} */ (null);
  #chances = /** @type {WeakMap<Element, Chance>} */ (new WeakMap());
  #current = /** @type {Element | null} */ (null);
  #grown = false;
  #numShown = 0;

  /** @param {HTMLElement} element @param {import("./follow.js").Follower} follower of what scrolls around it @param {ChanceCard} card */
  constructor(element, follower, card) {
    this.#element = element;
    this.#follower = follower;
    this.#card = card;
    element.tabIndex = 0;
    element.addEventListener("pointerover", ({ target }) => this.#point(target));
    element.addEventListener("click", ({ target }) => this.#point(target)); // a finger does not hover
    element.addEventListener("pointerleave", () => card.hide());
    element.addEventListener("blur", () => this.#leave());
    element.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Empty the view. @param {string} given shown before the tokens, dimmed */
  begin(given = "") {
    this.#queue = [];
    this.#decoder = new TextDecoder();
    this.#numShown = 0;
    this.#block = null;
    this.#current = null;
    this.#element.replaceChildren(made("span", "given", given));
  }

  /** @param {Chance[]} chances painted with the next frames */
  append(chances) {
    this.#queue.push(...chances);
  }

  get isEmpty() {
    return this.#numShown + this.#queue.length === 0;
  }

  get settled() {
    return this.#queue.length === 0;
  }

  paint() {
    for (const chance of this.#queue.splice(0, TOKENS_PER_FRAME)) this.#add(chance);
  }

  follow() {
    if (this.#grown) this.#follower.follow();
    this.#grown = false;
  }

  /** @param {Chance} chance */
  #add(chance) {
    if (this.#numShown++ % TOKENS_PER_BLOCK === 0) {
      this.#block?.classList.add("whole");
      this.#block = made("span", "block");
      this.#element.append(this.#block);
    }
    const text = chance.bytes === null ? "" : this.#decoder.decode(chance.bytes, { stream: true });
    const token = made("span", `tok ${shade(chance.logprob)}${text.includes("\n") ? " line-end" : ""}`);
    if (text === "") token.dataset.code = chance.bytes === null ? chance.name : "…"; // the rest of its character is still to come
    else token.append(...textNodes(text));
    this.#chances.set(token, chance);
    this.#block?.append(token);
    this.#grown = true;
  }

  /** @param {EventTarget | null} target */
  #point(target) {
    const token = /** @type {Element} */ (target).closest(".tok");
    const chance = token && this.#chances.get(token);
    if (chance) this.#card.show(token, chance);
    else this.#card.hide();
  }

  /** @param {KeyboardEvent} event */
  #move(event) {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    const tokens = [...this.#element.querySelectorAll(".tok")];
    const step = event.key === "ArrowRight" ? 1 : -1;
    const at = this.#current ? tokens.indexOf(this.#current) + step : 0;
    const next = tokens[Math.min(Math.max(0, at), tokens.length - 1)];
    if (!next) return;
    this.#current?.classList.remove("current");
    this.#current = next;
    next.classList.add("current");
    next.scrollIntoView({ block: "nearest" });
    const chance = this.#chances.get(next);
    if (chance) this.#card.show(next, chance, true);
  }

  #leave() {
    this.#current?.classList.remove("current");
    this.#current = null;
    this.#card.hide();
  }
}

/** The same answer as text and as tokens, one of them in sight. */
export class TwoViews {
  /** @param {import("./listing.js").Listing | import("./prose.js").Prose} text @param {TokenText} tokens */
  constructor(text, tokens) {
    this.text = text;
    this.tokens = tokens;
  }

  append(text, chances = []) {
    this.text.append(text);
    this.tokens.append(chances);
  }

  complete() {
    this.text.complete();
  }

  get settled() {
    return this.text.settled && this.tokens.settled;
  }

  paint() {
    this.text.paint();
    this.tokens.paint();
  }

  follow() {
    this.text.follow();
    this.tokens.follow();
  }
}

/** What stood to choose at one place; a small table beside the token. */
export class ChanceCard {
  #card = /** @type {HTMLElement} */ (document.getElementById("chance"));
  #say;
  #token = /** @type {Element | null} */ (null);

  /** @param {(sentence: string) => void} say for those who do not see it */
  constructor(say) {
    this.#say = say;
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.hide());
    addEventListener("scroll", ({ target }) => {
      if (!this.#card.hidden && /** @type {Node} */ (target).contains(this.#token)) this.#place();
    }, { capture: true, passive: true });
  }

  /** @param {Element} token @param {Chance} chance @param {boolean} [aloud] */
  show(token, chance, aloud = false) {
    const { name, logprob, others } = chance;
    const isAmong = others.some(([other, same]) => other === name && same === logprob);
    const rows = isAmong ? others : [.../** @type {[string, number][]} */ ([[name, logprob]]), ...others];
    this.#card.replaceChildren(...rows.map(([other, value]) => row(other, value, other === name && value === logprob)));
    this.#card.hidden = false;
    this.#token = token;
    this.#place();
    if (!aloud) return;
    const instead = others.filter(([other]) => other !== name).slice(0, 3).map(([other, value]) => `${shown(other)} ${percent(value)}`);
    this.#say(`${shown(name)}, ${percent(logprob)}.${instead.length ? ` Instead: ${instead.join(", ")}.` : ""}`);
  }

  hide() {
    this.#card.hidden = true;
  }

  /** Below the token, or above it where there is more room; not at all if it has scrolled out of sight. */
  #place() {
    const beside = this.#token?.getClientRects()[0];
    if (!beside || beside.bottom < 0 || beside.top > innerHeight) return this.hide();
    const { width, height } = this.#card.getBoundingClientRect();
    const fitsBelow = beside.bottom + height + 12 < innerHeight;
    this.#card.style.left = `${Math.max(8, Math.min(beside.left, innerWidth - width - 8))}px`;
    this.#card.style.top = `${fitsBelow ? beside.bottom + 6 : Math.max(8, beside.top - height - 6)}px`;
  }
}

/** @param {string} name @param {number} logprob @param {boolean} taken */
function row(name, logprob, taken) {
  const line = made("div", taken ? "taken" : "");
  const bar = made("i");
  bar.style.setProperty("--share", Math.exp(logprob).toFixed(4));
  line.append(made("code", "", shown(name)), made("span", "", percent(logprob)), made("span", "", logprob.toFixed(2)), bar);
  return line;
}

/** White space as one can see it. @param {string} name */
function shown(name) {
  return name.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

/** @param {number} logprob */
function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)}%` : "below 0.1%";
}

/** @param {number} logprob */
function shade(logprob) {
  if (logprob > Math.log(0.9)) return "sure";
  if (logprob > Math.log(0.5)) return "likely";
  return logprob > Math.log(0.1) ? "open" : "rare";
}
