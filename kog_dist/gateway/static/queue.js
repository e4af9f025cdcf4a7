/** Text that waits for the next frames. */

export class TextQueue {
  #texts = /** @type {string[]} */ ([]);

  /** @param {string} text */
  push(text) {
    if (text) this.#texts.push(text);
  }

  get isEmpty() {
    return this.#texts.length === 0;
  }

  clear() {
    this.#texts = [];
  }

  /** The first of it. @param {number} most characters @returns {string} */
  take(most) {
    const taken = [];
    let room = most;
    let idx = 0;
    for (; idx < this.#texts.length && this.#texts[idx].length <= room; idx++) {
      taken.push(this.#texts[idx]);
      room -= this.#texts[idx].length;
    }
    this.#texts.splice(0, idx);
    if (taken.length === 0 && this.#texts.length) {
      taken.push(this.#texts[0].slice(0, room));
      this.#texts[0] = this.#texts[0].slice(room);
    }
    return taken.join("");
  }
}
