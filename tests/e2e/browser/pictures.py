"""Makes the pictures of docs/playground.md: `python -m tests.e2e.browser.pictures`.

The answers come from the scripted server of the tests, at the rate written below: they show the page, not an engine.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.browser.conftest import ARGUMENTS, CHROMIUM
from tests.e2e.browser.replay_server import INFO, ReplayServer, Script
from tests.e2e.browser.test_conversation import CALLS

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
TOKENS_PER_S = 3000.0
PROMPT = 'import re\n\n\nclass TextWrapper:\n    """Wrap and fill text."""\n'
QUESTION = "Write a Python function that finds a value in a sorted list by binary search."
ANSWER = '''A binary search halves the range **at each step**, so it needs about `log2(n)` comparisons.

```python
def binary_search(values, wanted):
    """Return the index of `wanted` in sorted `values`, or -1."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(values) and values[low] == wanted else -1
```

1. The range is *half open*: `high` is never looked at.
2. Of equal values the first one is found.
'''


def pieces_of(text: str) -> list[str]:
    """As a tokenizer might cut it."""
    return re.findall(r"\n +|\s?\w{1,6}|\s?[^\w\s]{1,3}|\s", text)


def listing() -> list[str]:
    """The standard library's TextWrapper after its documentation."""
    source = inspect.getsource(textwrap.TextWrapper)
    return pieces_of(source[source.index("    unicode_whitespace_trans") :])


def opened(browser: Browser, server: ReplayServer, width: int, height: int, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(server.url)
    expect(page.locator("#engine")).to_have_attribute("data-state", "ready")
    return page


def ask(page: Page, prompt: str, num_tokens: int = 0) -> None:
    """Send the prompt and wait until so many tokens have come."""
    page.fill("#prompt", prompt)
    page.keyboard.press("Control+Enter")
    counted = "() => Number(document.getElementById('num-tokens').textContent.replace(/\\D/g, ''))"
    page.wait_for_function(f"(least) => ({counted})() >= least", arg=num_tokens)


def ended(page: Page) -> None:
    page.wait_for_function("() => !document.body.hasAttribute('data-running')")
    page.wait_for_timeout(300)


def keep(page: Page, name: str) -> None:
    page.screenshot(path=FOLDER / f"{name}.png")
    page.close()


def chats(browser: Browser, server: ReplayServer, width: int = 1280, height: int = 800, scheme: str = "light") -> Page:
    """A page with an earlier chat in its list, and a thought and an answer."""
    page = opened(browser, server, width, height, scheme)
    server.script = Script(pieces=pieces_of("Ostrava, Olomouc and Opava are three of them."), tokens_per_s=TOKENS_PER_S)
    ask(page, "Which Czech towns begin with O?")
    ended(page)
    page.evaluate("document.getElementById('new').click()")
    pieces = pieces_of(ANSWER)
    server.script = Script(pieces=["They want code, and a reason. ", *pieces], num_reasoning=1, tokens_per_s=TOKENS_PER_S)
    ask(page, QUESTION, len(pieces))
    ended(page)
    return page


def conversations(browser: Browser, server: ReplayServer) -> None:
    keep(opened(browser, server, 1280, 800, "light"), "playground-empty")
    keep(chats(browser, server), "playground-light")
    keep(chats(browser, server, 360, 740), "playground-360")
    page = opened(browser, server, 1280, 800, "dark")
    server.script = Script(pieces=pieces_of(ANSWER), tokens_per_s=60.0)
    ask(page, QUESTION, 100)
    keep(page, "playground-dark")
    page = opened(browser, server, 1280, 800, "light")
    server.script = Script(pieces=pieces_of(ANSWER)[:60], tokens_per_s=TOKENS_PER_S, end="hold")
    ask(page, QUESTION, 60)
    page.click("#stop")
    ended(page)
    keep(page, "playground-stopped")
    page = opened(browser, server, 1280, 800, "light")
    server.script = Script(place=2, pieces=(), end="hold")
    ask(page, QUESTION)
    page.get_by_text("Waiting: 2 before this one").wait_for()
    keep(page, "playground-waiting")
    page = opened(browser, server, 1280, 800, "light")
    server.script = Script(
        pieces=("I need two things for that.", "I look both up."), num_reasoning=1, calls=CALLS, finish_reason="tool_calls"
    )
    ask(page, "Can I go for a walk at noon?")
    ended(page)
    page.locator(".thought summary").click()
    page.get_by_label("Result of weather").fill("rain until 11")
    keep(page, "playground-calls")
    page = opened(browser, server, 1280, 1100, "light")
    page.click("#settings-button")
    page.select_option("#format", "json_schema")
    keep(page, "playground-settings")


def speed(browser: Browser, server: ReplayServer) -> None:
    page = opened(browser, server, 1280, 800, "light")
    server.script = Script(pieces=listing() * 2, tokens_per_s=TOKENS_PER_S)  # long enough to be caught in flight
    page.get_by_role("radio", name="Complete text").check()
    page.click("#tab-speed")
    page.evaluate("(prompt) => { document.getElementById('prompt').value = prompt; }", PROMPT)
    page.keyboard.press("Control+Enter")
    page.wait_for_function("() => Number(document.getElementById('num-tokens').textContent.replace(/\\D/g, '')) >= 2000")
    keep(page, "playground-speed")
    server.script = Script(pieces=listing()[:600], tokens_per_s=TOKENS_PER_S)
    page = opened(browser, server, 1280, 800, "light")
    page.get_by_role("radio", name="Complete text").check()
    page.click("#settings-button")
    page.select_option("#num-logprobs", "5")
    page.click("#settings-close")
    ask(page, PROMPT, 600)
    ended(page)
    page.locator("#live-tokens .tok").nth(545).hover()
    keep(page, "playground-tokens")
    page = opened(browser, server, 1280, 800, "dark")
    server.script = Script(pieces=pieces_of(ANSWER)[:80], tokens_per_s=TOKENS_PER_S, end="error")
    ask(page, QUESTION, 80)
    page.locator("#problem").wait_for()
    server.readiness = (503, {"state": "failed", "reason": "rank 2 was lost"})
    page.get_by_text("failed: rank 2 was lost").wait_for()
    keep(page, "playground-failure")


def main() -> None:
    """Take all pictures anew."""
    FOLDER.mkdir(exist_ok=True)
    server = ReplayServer()
    server.info = {**INFO, "model": {**INFO["model"], "id": "a-model", "chat": "template", "max_model_len": 8192}}
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            conversations(browser, server)
            speed(browser, server)
            browser.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
