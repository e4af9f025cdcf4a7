"""4,000 tokens a second for more than five seconds: everything arrives on the page, and the page stays alive."""

from __future__ import annotations

import inspect
import re
import textwrap
import time
from dataclasses import asdict, dataclass

import pytest
from playwright.sync_api import CDPSession, Page

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_playground import ANSWER_JS, answer
from tests.patience import slowness

pytestmark = pytest.mark.alone
TOKENS_PER_S = 4000.0
NUM_TOKENS = 22_000

WATCH = """() => {
    window.watched = { gaps: [], tasks: [] };
    const observer = new PerformanceObserver((list) => watched.tasks.push(...list.getEntries().map((entry) => entry.duration)));
    observer.observe({ type: "longtask" });
    let last = performance.now();
    const frame = (now) => { watched.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
}"""


def code_pieces(count: int) -> list[str]:
    """Real Python in pieces of about 3.5 characters."""
    pieces = re.findall(r"\s+|\w{1,4}|[^\w\s]{1,3}", inspect.getsource(textwrap) + inspect.getsource(inspect))
    return (pieces * (1 + count // len(pieces)))[:count]


@dataclass(frozen=True)
class Smoothness:
    """What the page's main thread did while an answer arrived; milliseconds of wall clock, but for `busy`."""

    tokens_per_s: float
    num_frames: int
    gap_p50: float
    gap_p99: float
    gap_max: float
    longest_task: float
    busy: float  # CPU time of the main thread over the time that passed

    def is_smooth(self, slowness: float) -> bool:
        """The bounds leave room for other work on two cores, and are as much wider as the machine is slower just now.

        docs/playground.md has the figures of a run.
        """
        limits = ((self.gap_p50, 40), (self.gap_p99, 150), (self.gap_max, 400), (self.longest_task, 200))
        return self.tokens_per_s * slowness > 0.9 * TOKENS_PER_S and all(ms < limit * slowness for ms, limit in limits)


def markdown_pieces(count: int) -> list[str]:
    """An answer with long code, lists, a table and paragraphs, over and over."""
    code = inspect.getsource(textwrap.TextWrapper)
    steps = "".join(f"{idx}. Step *{idx}* of the `wrap` method, which has **several** of them.\n" for idx in range(1, 30))
    table = "| name | value |\n|---|---:|\n" + "".join(f"| `width{idx}` | {idx} |\n" for idx in range(20))
    words = "It wraps text, as [1] says in ~~fewer~~ **more** *words*. " * 6
    pieces = re.findall(
        r"\s+|\w{1,4}|[^\w\s]{1,3}", f"## Wrapping\n\n{words}\n\n{steps}\n```python\n{code}```\n\n{words}\n\n{table}\n"
    )
    return (pieces * (1 + count // len(pieces)))[:count]


def letters(text: str) -> str:
    """What Markdown does not take for marks; the name behind a fence is no part of the code."""
    return re.sub(r"(?<=```)python|[^A-Za-z]", "", text)


SHOWN = """() => [...document.querySelectorAll(".exchange .prose :is(h3, h4, p, li, th, td, pre)")]
    .filter((each) => !each.parentElement.closest("li, pre")).map((each) => each.textContent).join("")"""


def one_run(page: Page, server: ReplayServer, pieces: list[str], mode: str = "Complete text") -> Smoothness:
    """Stream the pieces; whatever the machine does besides, all of the text must be on the page."""
    server.script = Script(pieces=pieces, tokens_per_s=TOKENS_PER_S)
    page.evaluate("localStorage.clear()")  # or a conversation of an earlier run would go on
    page.goto(server.url)
    page.get_by_role("radio", name=mode).check()
    page.fill("#prompt", "# go\n")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before_s, began_s = cpu_s(session), time.monotonic()
    page.evaluate(WATCH)
    page.click("#run")
    page.wait_for_function("() => !document.body.hasAttribute('data-running')", timeout=60_000)
    text = "".join(pieces)
    if mode == "Chat":
        page.wait_for_function(f"(length) => ({SHOWN})().replace(/[^A-Za-z]/g, '').length === length", arg=len(letters(text)))
    else:
        page.wait_for_function(f"(length) => {ANSWER_JS.format('live')}.length === length", arg=len(text), timeout=20_000)
    watched = page.evaluate("window.watched")
    busy = (cpu_s(session) - before_s) / (time.monotonic() - began_s)
    session.detach()
    if mode == "Chat":
        assert letters(page.evaluate(SHOWN)) == letters(text)
    else:
        assert answer(page) == text
    assert page.inner_text("#num-tokens") == f"{len(pieces):,}"
    gaps = sorted(watched["gaps"])
    rate = float(page.inner_text("#rate").replace(",", ""))
    return Smoothness(
        tokens_per_s=rate, num_frames=len(gaps), gap_p50=gaps[len(gaps) // 2], gap_p99=gaps[int(len(gaps) * 0.99)],
        gap_max=gaps[-1], longest_task=max(watched["tasks"], default=0.0), busy=busy,
    )  # fmt: skip


def cpu_s(session: CDPSession) -> float:
    """CPU seconds that the main thread has spent in tasks."""
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


@pytest.mark.parametrize("mode", ["Complete text", "Chat"])
def test_4000_tokens_per_second_stay_smooth_and_exact(page: Page, server: ReplayServer, mode: str) -> None:
    """A page that is too slow is so each time; a machine that is busy with other things gets two more chances."""
    pieces = code_pieces(NUM_TOKENS) if mode == "Complete text" else markdown_pieces(NUM_TOKENS)
    runs = []
    for _ in range(3):
        slow = slowness()
        runs.append(one_run(page, server, pieces, mode))
        print({name: round(value, 2) for name, value in asdict(runs[-1]).items()})
        assert runs[-1].busy < 0.6
        if runs[-1].is_smooth(max(slow, slowness())):
            return
    pytest.fail(f"not smooth, three times: {runs}")


def test_an_answer_of_100000_tokens_is_painted_in_bounded_steps(page: Page, server: ReplayServer) -> None:
    """What the page does when a long answer comes at once, as after it was in the background.

    It is painted three times; of each step the fastest counts, since what else the machine does is not the page's.
    """
    text = "".join(code_pieces(100_000))
    paintings = []
    for _ in range(3):
        painted = page.evaluate(PAINT_ALL, text)
        assert painted["exact"]
        paintings.append(painted["steps"])
    steps = sorted(min(same) for same in zip(*paintings, strict=True))
    print(f"{len(text)} characters in {len(steps)} frames, step p50 {steps[len(steps) // 2]:.1f} ms, longest {steps[-1]:.1f} ms")
    assert steps[-1] < 100


PAINT_ALL = """async (text) => {
    const { Listing } = await import("/static/listing.js");
    const { Follower } = await import("/static/follow.js");
    const scroller = document.getElementById("live");
    document.getElementById("completion").hidden = false;
    const listing = new Listing(scroller, new Follower(document.getElementById("scroll")));
    listing.begin("python");
    listing.append(text);
    const steps = [];
    while (!listing.settled) {
        await new Promise(requestAnimationFrame);
        const began = performance.now();
        listing.paint();
        steps.push(performance.now() - began);
    }
    return { steps, exact: scroller.textContent === text };
}"""
