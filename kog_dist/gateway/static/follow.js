/** A view that scrolls along with what is written, until its reader scrolls up. */

export class Follower {
  #scroller;
  #follows = true;
  #lastTop = 0;

  /** @param {HTMLElement} scroller */
  constructor(scroller) {
    this.#scroller = scroller;
    scroller.addEventListener("scroll", () => this.#noticeScrolling(), { passive: true });
  }

  begin() {
    this.#follows = true;
  }

  /** Scroll to the end. Needs the layout: call it when nothing else changes in this frame. */
  follow() {
    if (!this.#follows) return;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#lastTop = this.#scroller.scrollTop;
  }

  #noticeScrolling() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const atEnd = scrollHeight - clientHeight - scrollTop < 32;
    if (atEnd) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false;
    this.#lastTop = scrollTop;
  }
}
