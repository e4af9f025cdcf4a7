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
from tests.e2e.browser.replay_server import ReplayServer, Script

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
TOKENS_PER_S = 3000.0
PROMPT = 'import re\n\n\nclass TextWrapper:\n    """Wrap and fill text."""\n'


def answer() -> list[str]:
    """The standard library's TextWrapper after its documentation, in pieces as a tokenizer might make them."""
    source = inspect.getsource(textwrap.TextWrapper)
    begin = source.index("    unicode_whitespace_trans")
    return re.findall(r"\n +|\s?\w{1,6}|\s?[^\w\s]{1,3}|\s", source[begin:])


def opened(browser: Browser, server: ReplayServer, width: int, height: int, scheme: str) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(server.url)
    expect(page.locator("#engine")).to_have_attribute("data-state", "ready")
    page.fill("#prompt", PROMPT)
    page.click(".sampling summary")
    page.fill("#max-tokens", "8192")
    page.click(".sampling summary")
    return page


def take(browser: Browser, server: ReplayServer) -> None:
    pieces = answer() * 2  # long enough to be caught in flight
    server.script = Script(pieces=pieces, tokens_per_s=TOKENS_PER_S)
    for name, width, height, scheme, numbers in (
        ("playground-light", 1280, 860, "light", 2000),
        ("playground-dark", 1280, 860, "dark", len(pieces)),
        ("playground-360", 360, 780, "light", len(pieces)),
    ):
        page = opened(browser, server, width, height, scheme)
        page.evaluate("() => document.activeElement.blur()")
        page.keyboard.press("Control+Enter")
        counted = "() => Number(document.getElementById('num-tokens').textContent.replace(/\\D/g, ''))"
        page.wait_for_function(f"(least) => ({counted})() >= least", arg=numbers)
        if numbers == len(pieces):
            page.wait_for_timeout(2500)  # so that the slow one gets somewhere
        page.screenshot(path=FOLDER / f"{name}.png")
        page.close()
    server.script = Script(pieces=pieces[:400], tokens_per_s=TOKENS_PER_S, end="error")
    page = opened(browser, server, 1280, 860, "dark")
    page.click("#run")
    page.locator("#problem").wait_for()
    page.screenshot(path=FOLDER / "playground-failure.png")
    page.close()


def main() -> None:
    """Take all pictures anew."""
    FOLDER.mkdir(exist_ok=True)
    server = ReplayServer()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
            take(browser, server)
            browser.close()
    finally:
        server.close()


if __name__ == "__main__":
    main()
