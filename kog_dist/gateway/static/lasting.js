/** Small texts that outlive a reload, where the browser keeps anything at all. */

const PREFIX = "kog-";

/** @param {string} name @returns {string} "" for what was never kept */
export function kept(name) {
  try {
    return localStorage.getItem(PREFIX + name) ?? "";
  } catch {
    return ""; // no storage
  }
}

/** @param {string} name @param {string} text "" forgets it */
export function keep(name, text) {
  try {
    if (text) localStorage.setItem(PREFIX + name, text);
    else localStorage.removeItem(PREFIX + name);
  } catch {
    // no storage, or none left: it lasts until the page is left
  }
}
