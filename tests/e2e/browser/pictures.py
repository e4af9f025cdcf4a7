"""Makes the pictures of docs/playground.md: `python -m tests.e2e.browser.pictures`.

The answers come from the scripted server of the tests, at the rate written below: they show the page, not an engine.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.e2e.browser.conftest import ARGUMENTS, CHROMIUM
from tests.e2e.browser.replay_server import INFO, ReplayServer, Script

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
    page.click(".sampling summary")
    page.fill("#max-tokens", "6000")
    return page


def ask(page: Page, prompt: str, num_tokens: int) -> None:
    """Send the prompt and wait until so many tokens have come."""
    page.click(".sampling summary")
    page.fill("#prompt", prompt)
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Control+Enter")
    counted = "() => Number(document.getElementById('num-tokens').textContent.replace(/\\D/g, ''))"
    page.wait_for_function(f"(least) => ({counted})() >= least", arg=num_tokens)


def keep(page: Page, name: str) -> None:
    page.screenshot(path=FOLDER / f"{name}.png")
    page.close()


def completions(browser: Browser, server: ReplayServer, pieces: Sequence[str]) -> None:
    server.script = Script(pieces=[*pieces, *pieces], tokens_per_s=TOKENS_PER_S)  # long enough to be caught in flight
    page = opened(browser, server, 1280, 800, "light")
    ask(page, PROMPT, 2000)
    keep(page, "playground-light")
    server.script = Script(pieces=pieces[:600], tokens_per_s=TOKENS_PER_S)
    page = opened(browser, server, 1280, 800, "light")
    page.select_option("#num-logprobs", "5")
    ask(page, PROMPT, 600)
    page.wait_for_timeout(300)
    page.locator("#live-tokens .tok").nth(545).hover()
    keep(page, "playground-tokens")
    server.script = Script(pieces=pieces[:400], tokens_per_s=TOKENS_PER_S, end="error")
    page = opened(browser, server, 1280, 800, "dark")
    ask(page, PROMPT, 400)
    page.locator("#problem").wait_for()
    keep(page, "playground-failure")


def conversations(browser: Browser, server: ReplayServer) -> None:
    pieces = pieces_of(ANSWER)
    server.script = Script(pieces=pieces, tokens_per_s=TOKENS_PER_S)
    for name, width, height, scheme in (("playground-dark", 1280, 800, "dark"), ("playground-360", 360, 740, "light")):
        page = opened(browser, server, width, height, scheme)
        page.get_by_role("radio", name="Conversation").check()
        page.fill("#system", "Answer with code first.")
        ask(page, QUESTION, len(pieces))
        page.wait_for_timeout(1200)  # so that the slow one gets somewhere
        keep(page, name)
    page = opened(browser, server, 1280, 1100, "light")
    page.get_by_role("radio", name="Conversation").check()
    page.fill("#system", "Answer with code first.")
    page.select_option("#format", "json_schema")
    keep(page, "playground-settings")


def main() -> None:
    """Take all pictures anew."""
    FOLDER.mkdir(exist_ok=True)
    server = ReplayServer()
    server.info = {**INFO, "model": {**INFO["model"], "max_model_len": 8192}}
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            completions(browser, server, listing())
            conversations(browser, server)
            browser.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
