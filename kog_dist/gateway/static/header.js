/** The line at the top: what is served, on what, and how it is. What was said too long ago is grey. */

import { count, size } from "./numbers.js";

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

/** @typedef {import("./engine.js").EngineInfo} EngineInfo */

export class Header {
  #info = /** @type {EngineInfo} */ ({});

  /** @param {import("./engine.js").Readiness} readiness @param {EngineInfo | "locked" | null} told */
  show({ state, reason }, told) {
    if (told !== null && told !== "locked") this.#info = told;
    const { model, ranks, replicas, devices } = this.#info;
    element("engine").dataset.state = state;
    const what = [model?.id, many(ranks, "rank"), many(replicas, "replica")].filter(Boolean).join(", ");
    const words = state === "ready" ? [what, "ready", told === "locked" && "the server wants an API key"] : [state, reason];
    setText("engine-sentence", words.filter(Boolean).join(state === "ready" ? " · " : ": "));
    setText("engine-facts", [
      model?.num_parameters && `${size(model.num_parameters)} parameters`,
      model?.format,
      ...(Array.isArray(devices) ? devices : []).map(({ name, count: number }) => (number > 1 ? `${number} × ${name}` : name)),
      model?.max_model_len && `context ${count(model.max_model_len)}`,
    ].filter(Boolean).join(" · "));
  }

  /** @param {number} ageMs of what is shown @param {boolean} isFresh */
  age(ageMs, isFresh) {
    const gone = !isFresh || ["unreachable", "failed"].includes(element("engine").dataset.state ?? "");
    document.body.toggleAttribute("data-gone", gone);
    setText("engine-age", isFresh || !Number.isFinite(ageMs) ? "" : `Last heard of ${Math.round(ageMs / 1000)} s ago.`);
  }
}

/** @param {string} id @param {string} text */
function setText(id, text) {
  if (element(id).textContent !== text) element(id).textContent = text;
}

/** "2 ranks", or nothing where there are none. @param {unknown[] | undefined} things @param {string} name */
function many(things, name) {
  return things?.length ? `${things.length} ${name}${things.length === 1 ? "" : "s"}` : "";
}
