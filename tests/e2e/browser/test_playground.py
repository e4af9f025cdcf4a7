"""The playground in a real browser, against a server that follows a script."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.e2e.browser.replay_server import NOTHING, ReplayServer, Script, wait_for

TRIES = 4
ANSWER = ("    if", " n", " < 2", ":\n", "        return n\n", "    # sum\n", '    return "a"', " + fib(n - 1)\n")
ANSWER_JS = "[...document.querySelectorAll('#{0} .block')].map((block) => block.textContent).join('')"


def answer(page: Page, listing: str = "live") -> str:
    """The text of the answer as it stands on the page, without the prompt."""
    text = page.evaluate(ANSWER_JS.format(listing))
    assert isinstance(text, str)
    return text


def run(page: Page, prompt: str = "def f(n):\n") -> None:
    page.fill("#prompt", prompt)
    page.click("#run")


def foot(page: Page) -> Locator:
    """The line below the last answer."""
    return page.locator("#completion-foot:visible, .exchange:last-child footer:visible")


def ended(page: Page) -> None:
    """Wait until the stream has ended and all of it has been painted."""
    page.wait_for_function("() => !document.body.hasAttribute('data-running')")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def run_until_compared(page: Page, prompt: str = "def f(n):\n") -> None:
    """Run until the page has a speed to compare: a browser that gets no core takes all at once, and has none."""
    for _ in range(TRIES):
        run(page, prompt)
        ended(page)
        if not page.evaluate("document.getElementById('race').hidden"):
            return


def test_an_answer_is_streamed_coloured_and_measured(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER, tokens_per_s=400.0)
    run(page, "def fib(n):\n")
    ended(page)
    assert answer(page) == "".join(ANSWER)
    assert page.locator("#live .given").text_content() == "def fib(n):\n"
    for colour, word in (("keyword", "if"), ("number", "2"), ("comment", "# sum"), ("string", '"a"'), ("call", "fib")):
        expect(page.locator(f"#live .block .{colour}", has_text=word).first).to_be_visible()
    body = server.served[0].body
    assert body["prompt"] == "def fib(n):\n"
    assert body["stream"] is True
    assert (body["max_tokens"], "temperature" in body) == (1024, False), "the model's own sampling counts"
    expect(page.locator("#num-tokens")).to_have_text("8")
    expect(foot(page)).to_contain_text("Finished · ")
    expect(foot(page)).to_contain_text(" · 8 tokens")
    expect(page.locator("#outcome")).to_be_empty()
    expect(page.locator("#rate")).to_have_text(re.compile(rf"^[\d,.]+$|^{NOTHING}$"))  # nothing if all came at once
    expect(page.locator("#ttft")).to_have_text(re.compile(r"^[\d.]+ (ms|s)$"))
    expect(page.locator("#engine-ttft")).to_have_text("5.00 ms")
    expect(page.locator("#engine-num-tokens")).to_have_text("8")
    expect(page.locator("#announcement")).to_contain_text("Finished: 8 tokens")


def test_the_same_answer_follows_at_100_tokens_per_second(page: Page, server: ReplayServer) -> None:
    """The comparison goes on for more than two seconds after the answer: a busy browser has time to be asked meanwhile."""
    pieces = [f"x{idx} = {idx}\n" for idx in range(321)]
    server.script = Script(pieces=pieces, tokens_per_s=600.0)  # so slow that a busy browser does not get all at once
    began = page.evaluate("performance.now()")
    run_until_compared(page)
    expect(page.locator("#time-live")).to_contain_text(" s")
    page.click("#tab-speed")
    expect(page.locator("#race")).to_be_visible()
    assert len(answer(page, "replay")) < len(answer(page))
    expect(page.locator("#verdict")).to_contain_text("3.20 s at 100 tokens/s")
    expect(page.locator("#time-replay")).to_have_text("3.20 s")
    assert page.evaluate("performance.now()") - began >= 3200
    assert answer(page, "replay") == "".join(pieces)


def test_an_engine_that_is_slower_is_not_compared(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER, tokens_per_s=25.0)
    run(page)
    ended(page)
    page.click("#tab-speed")
    expect(page.locator("#rate")).to_be_visible()
    expect(page.locator("#race")).to_be_hidden()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_cancels_the_request_and_keeps_what_came(page: Page, server: ReplayServer, how: str) -> None:
    server.script = Script(pieces=["word "] * 100_000, tokens_per_s=500.0)
    run(page)
    page.wait_for_function("() => document.querySelector('#live .block').textContent.includes('word word')")
    page.keyboard.press("Escape") if how == "Escape" else page.click("#stop")
    ended(page)
    assert server.served[0].disconnected.wait(5), "the server was not told"
    assert server.served[0].num_sent < 100_000
    expect(foot(page)).to_contain_text("Stopped")
    kept = answer(page)
    assert kept
    assert kept == "word " * (len(kept) // 5)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#run")).to_be_visible()


def test_a_reload_cancels_the_request(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 100_000, tokens_per_s=500.0)
    run(page)
    page.wait_for_function("() => document.querySelector('#live .block').textContent.includes('word word')")
    page.reload()
    assert server.served[0].disconnected.wait(5), "the server was not told"
    expect(page.locator("#run")).to_be_visible()
    assert answer(page) == ""


FAILURES = [
    (Script(status=429, message="64 requests wait.", headers={"Retry-After": "7"}), "busy", "64 requests wait.", "in 7 s"),
    (Script(status=503, message="rank 1 is loading"), "not ready", "Rank 1 is loading.", "says ready"),
    (Script(status=400, message="prompt of 9000 tokens exceeds 2048"), "refused", "9000 tokens", "Change"),
    (Script(status=500, message="oops"), "failed", "Oops.", "log of kog-launch"),
    (Script(pieces=ANSWER, end="error"), "cut off", "Rank 2 was lost (rank_failed).", "exact beginning"),
    (Script(pieces=ANSWER, end="close"), "cut off", "closed the connection", "exact beginning"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "title", "cause", "remedy"), FAILURES, ids=["429", "503", "400", "500", "error", "hang-up"])
def test_failures_have_a_cause_a_remedy_and_a_retry(
    page: Page, server: ReplayServer, script: Script, title: str, cause: str, remedy: str
) -> None:
    server.script = script
    run(page)
    problem = page.locator("#problem")
    expect(problem).to_be_visible()
    for words in (title, cause, remedy):
        expect(problem).to_contain_text(words)
    assert answer(page) == ("".join(ANSWER) if script.status == 200 else "")
    server.script = Script(pieces=ANSWER)
    page.click("#problem-retry")
    expect(problem).to_be_hidden()
    ended(page)
    assert answer(page) == "".join(ANSWER)


def test_a_server_that_is_gone_is_named(browser: Browser) -> None:
    own = ReplayServer()
    page = browser.new_page()
    try:
        page.goto(own.url)
        expect(page.locator("#engine")).to_have_attribute("data-state", "ready")
        own.close()
        run(page)
        expect(page.locator("#problem")).to_contain_text("Check that kog-launch is running")
        expect(page.locator("#engine")).to_have_attribute("data-state", "unreachable")
    finally:
        page.close()


def test_who_waits_sees_how_many_are_before_and_later_how_long_it_was(page: Page, server: ReplayServer) -> None:
    server.script = Script(place=2, pieces=(), end="hold")
    run(page)
    expect(page.locator("#outcome")).to_have_text("Waiting: 2 before this one")
    page.locator("#stop").click()
    server.script = Script(num_read=4096, pieces=(), end="hold")
    run(page)
    expect(page.locator("#outcome")).to_have_text("Reading the prompt: 4096 of 30000 tokens")
    page.locator("#stop").click()
    server.script = Script(place=2, queue_ms=1500.0, pieces=ANSWER)
    run(page)
    expect(page.locator("#outcome")).not_to_contain_text("Waiting")
    expect(page.locator("#engine-ttft")).to_contain_text("after 1.50 s in the queue")


def test_a_silent_server_is_given_up(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER, end="hold")
    failure = page.evaluate("""async () => {
        const { receipts } = await import("/static/stream.js");
        const signal = new AbortController().signal;
        try {
            for await (const _ of receipts("/v1/completions", {}, { headers: {}, signal, silenceLimitMs: 200 }));
            return "no failure";
        } catch (error) { return `${error.title}: ${error.cause}`; }
    }""")
    assert failure == "The server went silent: Nothing arrived for 0.2 s, so the request was cancelled."
    assert server.served[0].disconnected.wait(5)


def test_the_key_is_asked_for_and_sent_and_never_written_out(page: Page, server: ReplayServer) -> None:
    server.api_key = "sk-secret"
    server.script = Script(pieces=ANSWER)
    page.reload()
    expect(page.locator("#engine-sentence")).to_contain_text("wants an API key")
    run(page)
    expect(page.locator("#problem")).to_contain_text("Incorrect API key")
    page.click("#problem-key")
    page.fill("#key", "sk-secret")
    page.keyboard.press("Enter")
    expect(foot(page)).to_contain_text("Finished")
    ended(page)
    assert answer(page) == "".join(ANSWER)
    page.click("#copy-request")
    for form in ("#as-curl", "#as-python"):
        page.click(form)
        assert "KOG_API_KEY" in page.inner_text("#snippet")
        assert "sk-secret" not in page.inner_text("#snippet")
    assert page.evaluate("Object.values(localStorage).join() + document.cookie").find("sk-secret") == -1


def test_the_request_as_code_is_the_request(page: Page, server: ReplayServer) -> None:
    page.fill("#prompt", 'def f():\n    return "it\'s" # $HOME `x` \\n')
    page.click("#copy-request")
    curl = page.inner_text("#snippet")
    printed = subprocess.run(
        ["bash", "-c", f"curl() {{ printf '%s\\0' \"$@\"; }}; {curl}"], capture_output=True, check=True, timeout=10
    )
    arguments = printed.stdout.decode().split("\0")
    assert arguments[1] == f"{server.url}/v1/completions"
    assert json.loads(arguments[arguments.index("-d") + 1])["prompt"] == 'def f():\n    return "it\'s" # $HOME `x` \\n'
    page.click("#as-python")
    page.click("#copy-snippet")
    expect(page.locator("#copied")).to_have_text(re.compile("^Copied|The text is selected"))
    calls: list[dict[str, object]] = []
    source = page.inner_text("#snippet").replace("from openai import OpenAI", "")
    exec(source, {"OpenAI": lambda **options: _Recorder(calls, options)})
    assert calls[0]["base_url"] == f"{server.url}/v1"
    assert calls[1]["prompt"] == 'def f():\n    return "it\'s" # $HOME `x` \\n'
    assert calls[1]["stream"] is True


class _Recorder:
    """Stands for the client of `openai`: keeps what it is given."""

    def __init__(self, calls: list[dict[str, object]], options: dict[str, object]) -> None:
        calls.append(options)
        self.completions = self
        self._calls = calls

    def create(self, **fields: object) -> Sequence[object]:
        self._calls.append(fields)
        return ()


HOSTILE = (
    "<script>window.pwned = 1</script>", "<img src=x onerror='window.pwned = 1'>", "\x1b[31mred\x1b[0m\x07\x00",
    "a\u202eb\u2066c\u200f", "</span></div>&lt;b&amp;", "\u2028\u0085", "\r\n", "{{constructor}}", "# <b>comment</b>\n",
    '"<i>string</i>"', "\U0001f600",
)  # fmt: skip


def test_what_a_model_writes_stays_text(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=HOSTILE)
    run(page, "<script>window.pwned = 1</script>\u202e")
    ended(page)
    assert answer(page) == "".join(HOSTILE)
    assert page.evaluate("window.pwned") is None
    assert page.locator("main script, main img, main b:not(.rank b), main i:not(.rank i)").count() == 0
    codes = page.evaluate("[...document.querySelectorAll('#live .block .unseen')].map((each) => each.dataset.code)")
    assert codes == [f"U+{code}" for code in ("001B", "001B", "0007", "0000", "202E", "2066", "200F", "2028", "0085", "000D")]
    page.locator(".turn-open").click()
    assert page.evaluate("window.pwned") is None


def test_the_engine_state_and_its_ranks_are_shown(page: Page, server: ReplayServer) -> None:
    expect(page.locator("#engine-sentence")).to_have_text("demo, 4 ranks · ready")
    page.click("#tab-speed")
    expect(page.locator(".rank")).to_have_count(4)
    page.click("#tab-chat")
    expect(page.locator(".rank .lanes i")).to_have_count(8)
    server.script = Script(pieces=["x "] * 100_000, tokens_per_s=1000.0)
    run(page)
    expect(page.locator(".rank[data-active=true]")).to_have_count(4)
    expect(page.locator(".rank-flow").first).to_contain_text("% of peak")
    page.click("#stop")
    expect(page.locator(".rank[data-active=false]")).to_have_count(4)


def test_a_server_that_says_little_is_no_fault(page: Page, server: ReplayServer) -> None:
    server.info = {}
    server.readiness = (503, {"state": "loading", "reason": "rank 1 is loading"})
    page.reload()
    expect(page.locator("#engine-sentence")).to_have_text("loading: rank 1 is loading")
    expect(page.locator("#ranks")).to_be_hidden()


def test_scrolling_up_stops_following(page: Page, server: ReplayServer) -> None:
    page.evaluate("() => { window.seen = () => document.getElementById('scroll'); }")
    server.script = Script(pieces=[f"line {idx}\n" for idx in range(100_000)], tokens_per_s=1000.0)
    run(page)
    page.wait_for_function("() => seen().scrollTop > 600")
    page.locator("#live").hover(position={"x": 20, "y": 20}, force=True)
    page.mouse.wheel(0, -300)
    page.wait_for_function("() => seen().scrollHeight - seen().clientHeight - seen().scrollTop > 200")
    top = page.evaluate("seen().scrollTop")
    height = page.evaluate("seen().scrollHeight")
    page.wait_for_function(f"() => seen().scrollHeight > {height} + 600")
    assert abs(page.evaluate("seen().scrollTop") - top) < 310  # the wheel may still have been turning
    page.click("#stop")


def test_examples_and_going_on(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER)
    page.get_by_role("button", name="LRU cache").click()
    prompt = page.input_value("#prompt")
    assert "class LRUCache" in prompt
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.click("#run")
    ended(page)
    assert server.served[0].body["prompt"] == prompt
    foot(page).get_by_role("button", name="Continue").click()
    ended(page)
    assert server.served[1].body["prompt"] == prompt + "".join(ANSWER)
    assert answer(page) == "".join(ANSWER)
    page.click("#new")
    expect(page.locator("#completion")).to_be_hidden()
    page.locator(".turn-open").click()
    assert answer(page) == "".join(ANSWER) * 2, "it is one answer"
    foot(page).get_by_role("button", name="Edit").click()
    assert page.input_value("#prompt") == prompt


def test_a_visible_wait(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER, first_after_s=60.0)
    run(page)
    expect(page.locator("#outcome")).to_have_text("Waiting for the first token")
    wait_for(lambda: len(server.served) == 1, "the request")
    page.click("#stop")
    expect(page.locator("#outcome")).to_have_text("Stopped")
    assert page.input_value("#prompt") == "def f(n):\n", "nothing came, so it is back"
