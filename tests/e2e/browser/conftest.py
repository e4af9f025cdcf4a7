"""One browser for all tests of the folder, one server, and a fresh page for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.e2e.browser.replay_server import ReplayServer

expect.set_options(timeout=20_000)  # a machine that runs other tests, too
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"needs {CHROMIUM} (Debian package chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ReplayServer]:
    server = ReplayServer()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: ReplayServer) -> ReplayServer:
    shared_server.reset()
    return shared_server


@pytest.fixture(scope="session")
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Shared, so that the page's files are loaded once; each test leaves its storage empty."""
    made = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    made.set_default_timeout(20_000)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, server: ReplayServer) -> Iterator[Page]:
    """The playground, loaded. Fails the test if the page breaks its security policy or throws."""
    faults: list[str] = []
    made = context.new_page()
    made.on("pageerror", lambda error: faults.append(f"exception: {error}"))
    made.on("console", lambda message: faults.append(message.text) if "Content Security Policy" in message.text else None)
    made.goto(server.url)
    yield made
    made.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    made.close()
    assert faults == []
