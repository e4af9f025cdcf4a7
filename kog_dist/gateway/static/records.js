/**
 * What the browser keeps: conversations and completions, each under a key of its own in `localStorage`, so that several tabs do not
 * overwrite one another. Where there is no storage, or it is full, they last until the page is left.
 */

const PREFIX = "kog-history/";
/** Characters of all records together; browsers give a site about five million. The oldest go first. */
const BUDGET = 2_000_000;

/** @typedef {import("./conversation.js").Record} Record */

export class Records {
  #records = /** @type {Map<string, Record>} */ (new Map());

  /** @param {() => void} onChange called when another tab has changed something */
  constructor(onChange) {
    this.#read();
    addEventListener("storage", ({ key }) => {
      if (key !== null && !key.startsWith(PREFIX)) return;
      this.#read();
      onChange();
    });
  }

  /** Newest first. @returns {Record[]} */
  all() {
    return [...this.#records.values()].sort((one, other) => other.at - one.at);
  }

  /** @param {string} id */
  get(id) {
    return this.#records.get(id) ?? null;
  }

  /** @param {Record} record new, or changed */
  save(record) {
    this.#records.set(record.id, record);
    this.#makeRoom();
    while (this.#records.has(record.id) && !this.#write(record)) {
      const oldest = this.all().at(-1);
      if (!oldest || oldest.id === record.id) return; // it stays in memory
      this.remove(oldest.id);
    }
  }

  /** @param {string} id */
  remove(id) {
    this.#records.delete(id);
    this.#storage((storage) => storage.removeItem(PREFIX + id));
  }

  clear() {
    for (const id of [...this.#records.keys()]) this.remove(id);
  }

  #makeRoom() {
    let left = BUDGET;
    for (const record of this.all()) {
      left -= JSON.stringify(record).length;
      if (left < 0) this.remove(record.id);
    }
  }

  /** @param {Record} record @returns {boolean} false where storage is full */
  #write(record) {
    try {
      localStorage.setItem(PREFIX + record.id, JSON.stringify(record));
      return true;
    } catch (error) {
      return !(error instanceof DOMException && error.name === "QuotaExceededError"); // no storage at all is no reason to forget
    }
  }

  #read() {
    const found = /** @type {[string, Record][]} */ ([]);
    const works = this.#storage((storage) => {
      for (let idx = 0; idx < storage.length; idx++) {
        const key = storage.key(idx);
        const record = key?.startsWith(PREFIX) ? parsed(storage.getItem(key)) : null;
        if (record && key === PREFIX + record.id) found.push([record.id, record]);
      }
    });
    if (works) this.#records = new Map(found);
  }

  /** @param {(storage: Storage) => void} act @returns {boolean} whether there is a storage */
  #storage(act) {
    try {
      act(localStorage);
      return true;
    } catch {
      return false;
    }
  }
}

/** What somebody stored, if it is a record of this version of the page. @param {string | null} text @returns {Record | null} */
function parsed(text) {
  try {
    const record = JSON.parse(text ?? "null");
    const isTurn = (turn) => typeof turn?.prompt === "string" && typeof turn.answer === "string" && typeof turn.outcome === "string" &&
      typeof turn.figures === "object" && turn.figures !== null;
    const whole = typeof record?.id === "string" && Number.isFinite(record.at) && ["completion", "conversation"].includes(record.mode) &&
      Array.isArray(record.turns) && record.turns.length > 0 && record.turns.every(isTurn);
    return whole ? record : null;
  } catch {
    return null;
  }
}
