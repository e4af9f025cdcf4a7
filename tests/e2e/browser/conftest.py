"""One browser for all tests of the folder, one server, and a fresh page for each test.

Nothing of it may outlive the folder: while Playwright is there, its event loop runs in this thread, and asyncio.run() is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, expect, sync_playwright

from tests.e2e.browser.replay_server import ReplayServer

expect.set_options(timeout=20_000)  # a machine that runs other tests, too
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM} (Debian package chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="package")
def shared_server() -> Iterator[ReplayServer]:
    server = ReplayServer()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: ReplayServer) -> ReplayServer:
    shared_server.reset()
    return shared_server


@pytest.fixture(scope="package")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Shared, so that the page's files are loaded once; each test leaves its storage empty."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    made.set_default_timeout(20_000)
    yield made
    made.close()


@pytest.fixture(scope="package")
def shared_page(context: BrowserContext) -> Page:
    return context.new_page()


@pytest.fixture
def page(shared_page: Page, server: ReplayServer) -> Iterator[Page]:
    """The playground, loaded anew. Fails the test if the page breaks its security policy or throws."""
    faults: list[str] = []

    def on_error(error: Error) -> None:
        faults.append(f"exception: {error}")

    def on_message(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    shared_page.on("pageerror", on_error)
    shared_page.on("console", on_message)
    shared_page.goto(server.url)
    yield shared_page
    shared_page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    shared_page.remove_listener("pageerror", on_error)
    shared_page.remove_listener("console", on_message)
    assert faults == []
