/** A failure on the page: what happened, why, and what to do; with a countdown where the server said when to come back. */

const element = (id) => /** @type {HTMLElement} */ (document.getElementById(id));

export class ProblemView {
  #timer = 0;

  /** @param {{retry: () => void, enterKey: () => void}} actions */
  constructor({ retry, enterKey }) {
    element("problem-retry").addEventListener("click", () => {
      this.hide();
      retry();
    });
    element("problem-key").addEventListener("click", enterKey);
    element("problem-close").addEventListener("click", () => this.hide());
  }

  /** @param {import("./failures.js").Failure} failure */
  show(failure) {
    element("problem-title").textContent = failure.title;
    element("problem-cause").textContent = failure.cause;
    element("problem-remedy").textContent = failure.remedy;
    element("problem-key").hidden = !failure.needsKey;
    element("problem").hidden = false;
    this.#countDown(failure.retryAfterS ?? 0);
  }

  hide() {
    clearInterval(this.#timer);
    element("problem").hidden = true;
  }

  /** @param {number} leftS */
  #countDown(leftS) {
    clearInterval(this.#timer);
    const label = () => (element("problem-retry").textContent = leftS > 0 ? `Try again (in ${Math.ceil(leftS)} s)` : "Try again");
    label();
    if (leftS <= 0) return;
    this.#timer = setInterval(() => {
      leftS -= 1;
      label();
      if (leftS <= 0) clearInterval(this.#timer);
    }, 1000);
  }
}
