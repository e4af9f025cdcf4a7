/** Calls of tools, put together from the pieces in which a stream brings them. */

const MOST = 64; // of one answer

export class Calls {
  /** As they have become so far. @type {import("./conversation.js").Call[]} */
  all = [];

  /** @param {any[]} changes of chunks: `{index, id?, function: {name?, arguments?}}` */
  take(changes) {
    for (const { index, id, function: given } of changes) {
      const call = (this.all[this.#idx(index)] ??= { id: "", name: "", arguments: "" });
      if (typeof id === "string") call.id = id;
      if (typeof given?.name === "string") call.name += given.name;
      if (typeof given?.arguments === "string") call.arguments += given.arguments;
    }
  }

  /** A server that numbers nothing goes on with the last. @param {unknown} index @returns {number} */
  #idx(index) {
    return typeof index === "number" && index >= 0 && index < MOST ? Math.min(Math.trunc(index), this.all.length) : Math.max(0, this.all.length - 1);
  }
}
