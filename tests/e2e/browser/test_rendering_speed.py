"""4,000 tokens a second for more than five seconds: everything arrives on the page, and the page stays alive."""

from __future__ import annotations

import inspect
import re
import textwrap

from playwright.sync_api import CDPSession, Page

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_playground import ANSWER_JS, answer, run

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


def test_4000_tokens_per_second_stay_smooth_and_exact(page: Page, server: ReplayServer) -> None:
    pieces = code_pieces(NUM_TOKENS)
    server.script = Script(pieces=pieces, tokens_per_s=TOKENS_PER_S)
    page.fill("#prompt", "# go\n")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before = _metrics(session)
    page.evaluate(WATCH)
    run(page)
    page.wait_for_function("() => !document.body.hasAttribute('data-running')", timeout=60_000)
    page.wait_for_function(f"(length) => {ANSWER_JS.format('live')}.length === length", arg=len("".join(pieces)), timeout=20_000)
    watched = page.evaluate("window.watched")
    after = _metrics(session)

    assert answer(page) == "".join(pieces)
    assert page.inner_text("#num-tokens") == f"{NUM_TOKENS:,}"
    rate = float(page.inner_text("#rate").replace(",", ""))
    gaps = sorted(watched["gaps"])
    middle, late, longest = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], gaps[-1]
    longest_task = max(watched["tasks"], default=0)
    share = (_busy_s(after) - _busy_s(before)) / (after["Timestamp"] - before["Timestamp"])
    print(f"{rate:.0f} tokens/s; {len(gaps)} frames, gaps p50 {middle:.1f} p99 {late:.1f} max {longest:.1f} ms")
    print(f"{len(watched['tasks'])} long tasks, longest {longest_task:.0f} ms; main thread busy for {share:.0%} of the time")
    assert rate > 0.5 * TOKENS_PER_S, "the machine is too busy for this test to say anything, or the page holds up the stream"
    # The bounds leave room for other work on two cores; docs/playground.md has the figures of a run.
    assert longest_task < 300
    assert middle < 60
    assert late < 250
    assert longest < 600
    assert share < 0.7


def _busy_s(metrics: dict[str, float]) -> float:
    return metrics["ScriptDuration"] + metrics["LayoutDuration"] + metrics["RecalcStyleDuration"]


def _metrics(session: CDPSession) -> dict[str, float]:
    answered = session.send("Performance.getMetrics")
    return {metric["name"]: metric["value"] for metric in answered["metrics"]}


def test_an_answer_of_100000_tokens_is_painted_in_bounded_steps(page: Page, server: ReplayServer) -> None:
    """Not through the network: what the page does when a long answer comes at once, as after it was in the background."""
    text = "".join(code_pieces(100_000))
    painted = page.evaluate(
        """async (text) => {
            const { Listing } = await import("/static/listing.js");
            const listing = new Listing(document.getElementById("live"));
            listing.begin("python");
            listing.append(text);
            const steps = [];
            while (!listing.settled) {
                await new Promise(requestAnimationFrame);
                const began = performance.now();
                listing.paint();
                steps.push(performance.now() - began);
            }
            return { steps, exact: document.getElementById("live").textContent === text };
        }""",
        text,
    )
    assert painted["exact"]
    steps = sorted(painted["steps"])
    print(f"{len(text)} characters in {len(steps)} frames, step p50 {steps[len(steps) // 2]:.1f} ms, longest {steps[-1]:.1f} ms")
    assert steps[-1] < 300
