/** A model's text as nodes. Characters that cannot be seen, or would turn the direction of text, stay where they are and are named. */

/** Control characters but tab and newline, invisible ones, and those that change the direction of text; joiners shape scripts and stay. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]/;
const UNSEEN_RUNS = new RegExp(`(${UNSEEN.source})`);

/** @param {string} text @returns {Node[]} */
export function textNodes(text) {
  return UNSEEN.test(text) ? text.split(UNSEEN_RUNS).map(visible) : [document.createTextNode(text)];
}

/** @param {string} tag @param {string} className @param {string} text @returns {HTMLElement} */
export function made(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.append(...textNodes(text));
  return element;
}

/** @param {string} label @param {() => void} act @returns {HTMLButtonElement} */
export function madeButton(label, act) {
  const element = /** @type {HTMLButtonElement} */ (made("button", "quiet", label));
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

/** @param {string} part @param {number} idx odd: a character that cannot be seen @returns {Node} */
function visible(part, idx) {
  if (idx % 2 === 0) return document.createTextNode(part);
  const element = document.createElement("span");
  element.className = "unseen";
  element.dataset.code = `U+${part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  element.textContent = part;
  return element;
}
