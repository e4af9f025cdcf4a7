/**
 * Syntax colours, line by line: a line and the state at its beginning give coloured runs and the state at its end. Nothing looks
 * back, so a stream is coloured as it comes, and each finished line once.
 *
 * Colours are a help to the eye, not a parser: what is not recognised stays plain.
 */

import { LANGUAGES } from "./languages.js";

/**
 * @typedef {"keyword" | "constant" | "string" | "comment" | "number" | "name" | "call" | "decorator" | null} Colour
 * @typedef {[Colour, string]} Run
 * @typedef {object} State
 * @property {string} language
 * @property {string | null} until what ends the string or comment in which the line begins
 * @property {Colour} colour of that string or comment
 */

/** @param {string} language one of `languages.js`, or "plain" @returns {State} */
export function beginning(language) {
  return { language, until: null, colour: null };
}

/**
 * The language that a text is probably written in.
 * @param {string} text
 */
export function guessLanguage(text) {
  const python = text.match(/^\s*(def |class \w+.*:|import |from \w|@\w|#|async def |if .*:$|for .*:$|""")/gm)?.length ?? 0;
  const cLike = text.match(/^\s*(function\b|const |let |var |#include|\/\/|\/\*|struct |template|public |fn |func |package |using )|[;{]\s*$/gm)?.length ?? 0;
  return cLike > python ? "c-like" : "python";
}

/**
 * @param {State} state at the beginning of the line
 * @param {string} line without its end
 * @returns {{runs: Run[], state: State}}
 */
export function colourLine(state, line) {
  const language = LANGUAGES[state.language];
  return language ? codeLine(language, state, line) : { runs: [[null, line]], state };
}

/** @returns {{runs: Run[], state: State}} */
function codeLine(language, state, line) {
  const runs = /** @type {Run[]} */ ([]);
  let position = 0;
  if (state.until !== null) {
    position = endOf(state.until, line, 0);
    if (position === -1) return { runs: [[state.colour, line]], state };
    runs.push([state.colour, line.slice(0, position)]);
    state = { ...state, until: null, colour: null };
  }
  let naming = false;
  language.token.lastIndex = position;
  for (let match = language.token.exec(line); match !== null; match = language.token.exec(line)) {
    const groups = /** @type {Record<string, string | undefined>} */ (match.groups);
    let found = match[0];
    let colour = /** @type {Colour} */ (null);
    if (groups.open !== undefined) {
      colour = /^[/<]/.test(found) ? "comment" : "string";
      const until = language.end(found);
      const end = endOf(until, line, match.index + found.length);
      if (end === -1) state = { ...state, until, colour };
      found = line.slice(match.index, end === -1 ? line.length : end);
    } else if (groups.word !== undefined) {
      colour = wordColour(language, found, naming, line, match.index + found.length);
      naming = language.naming.has(found);
    } else {
      colour = /** @type {Colour} */ (["comment", "string", "decorator", "number", "name"].find((name) => groups[name] !== undefined) ?? null);
    }
    if (match.index > position) runs.push([null, line.slice(position, match.index)]);
    runs.push([colour, found]);
    position = match.index + found.length;
    language.token.lastIndex = position;
  }
  if (position < line.length) runs.push([null, line.slice(position)]);
  return { runs, state };
}

/** @returns {Colour} */
function wordColour(language, word, naming, line, end) {
  if (naming) return "name";
  if (language.keywords.has(language.anyCase ? word.toLowerCase() : word)) return "keyword";
  if (language.constants.has(word)) return "constant";
  return line[end] === "(" ? "call" : null;
}

/** Index after the next `until` that no backslash escapes, or -1. */
function endOf(until, line, from) {
  for (let at = line.indexOf(until, from); at !== -1; at = line.indexOf(until, at + 1)) {
    let backslashes = 0;
    while (line[at - 1 - backslashes] === "\\") backslashes++;
    if (until === "*/" || until === "-->" || backslashes % 2 === 0) return at + until.length;
  }
  return -1;
}
