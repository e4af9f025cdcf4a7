"""axe, the checker of accessibility, finds nothing: on a laptop in the light and on a phone in the dark, in every state.

`vendor/axe.min.js` is axe-core 4.14.1 as npm publishes it, under the Mozilla Public License 2.0 (vendor/axe.LICENSE); its source
is at https://github.com/dequelabs/axe-core/tree/v4.14.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_conversation import CALLS
from tests.e2e.browser.test_markdown import DOCUMENT
from tests.e2e.browser.test_playground import ANSWER, ended, run, run_until_compared

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
LAPTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 740}
FINDINGS = """async () => (await axe.run({ resultTypes: ["violations"] })).violations.flatMap(({ id, nodes }) =>
    nodes.map((node) => `${id}: ${node.target.join(" ")}: ${node.failureSummary.split("\\n").slice(1).join(" ").trim()}`))"""


@pytest.fixture(params=[(LAPTOP, "light"), (PHONE, "dark")], ids=["laptop-light", "phone-dark"])
def seen(browser: Browser, server: ReplayServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    viewport, scheme = request.param
    page = browser.new_page(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
    page.goto(server.url)
    expect(page.locator("#engine")).to_have_attribute("data-state", "ready")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    yield page
    page.close()


def untouched(page: Page, server: ReplayServer) -> None:
    pass


def completed(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER)
    run(page)
    ended(page)


def measured(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 300, tokens_per_s=400.0)
    run_until_compared(page)
    page.click("#tab-speed")
    page.locator(".method summary").click()
    expect(page.locator("#race")).to_be_visible()


def listed(page: Page, server: ReplayServer) -> None:
    completed(page, server)
    if page.locator("#side").is_hidden():
        page.click("#side-button")
    page.locator(".turn .menu summary").click()


def called(page: Page, server: ReplayServer) -> None:
    page.get_by_role("radio", name="Chat").check()
    server.script = Script(pieces=("Hm", "I look."), num_reasoning=1, calls=CALLS, finish_reason="tool_calls")
    run(page, "Weather?")
    ended(page)
    page.locator(".thought summary").click()


def running(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 300, end="hold", tokens_per_s=5000.0)
    run(page)
    expect(page.locator("#num-tokens")).to_have_text("300")


def conversing(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=[DOCUMENT])
    page.get_by_role("radio", name="Chat").check()
    for question in ("How?", "And then?"):
        run(page, question)
        ended(page)
    page.locator(".exchange").first.get_by_role("button", name="Edit").click()


def setting(page: Page, server: ReplayServer) -> None:
    page.get_by_role("radio", name="Chat").check()
    page.click("#settings-button")
    page.select_option("#format", "json_schema")
    page.fill("#max-tokens", "5000")
    expect(page.locator("#context[data-over]")).to_have_count(1)


def by_token(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=ANSWER * 3)
    page.click("#settings-button")
    page.select_option("#num-logprobs", "3")
    page.click("#settings-close")
    run(page, "def f():\n")
    ended(page)
    page.locator(".tok").nth(2).hover()
    expect(page.locator("#chance")).to_be_visible()


def conversing_by_token(page: Page, server: ReplayServer) -> None:
    page.get_by_role("radio", name="Chat").check()
    by_token(page, server)


def failing(page: Page, server: ReplayServer) -> None:
    server.script = Script(status=401)
    run(page)
    expect(page.locator("#problem")).to_be_visible()


def gone(page: Page, server: ReplayServer) -> None:
    completed(page, server)
    server.readiness = (503, {"state": "failed", "reason": "rank 1 is lost"})
    expect(page.locator("#engine-sentence")).to_have_text("failed: rank 1 is lost")


def asking_for_a_key(page: Page, server: ReplayServer) -> None:
    page.click("#key-button")


def as_code(page: Page, server: ReplayServer) -> None:
    page.evaluate("document.getElementById('copy-request').click()")  # a phone shows no button for it


STATES = (
    untouched, completed, measured, listed, called, running, conversing, setting, by_token, conversing_by_token, failing, gone,
    asking_for_a_key, as_code,
)  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_axe_finds_nothing(seen: Page, server: ReplayServer, state: Callable[[Page, ReplayServer], None]) -> None:
    state(seen, server)
    assert seen.evaluate(FINDINGS) == []


def test_axe_would_find_something(seen: Page) -> None:
    seen.evaluate("() => { const image = document.createElement('input'); document.querySelector('main').append(image); }")
    assert any(finding.startswith("label: ") for finding in seen.evaluate(FINDINGS))


def test_axe_is_the_published_one() -> None:
    assert hashlib.sha256(AXE.read_bytes()).hexdigest() == AXE_SHA256
    assert "Mozilla Public License, version 2.0" in AXE.with_name("axe.LICENSE").read_text(encoding="utf-8")
