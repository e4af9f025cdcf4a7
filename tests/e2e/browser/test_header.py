"""The line at the top: what is served, and a state that is at most a second old, or grey."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.browser.replay_server import INFO, ReplayServer, Script
from tests.e2e.browser.test_modules import evaluate
from tests.e2e.browser.test_playground import run
from tests.patience import in_time

INK, SOFT = "rgb(22, 25, 29)", "rgb(86, 93, 102)"
GREY = "() => [getComputedStyle(document.getElementById('engine-sentence')).color, document.body.hasAttribute('data-gone')]"
LATE_S = 1.0  # for a browser that shares two cores with other work


def shown_within(page: Page, words: str, limit_s: float) -> None:
    """Wait for the words; they must be there in time."""
    began_s = time.monotonic()
    expect(page.locator("#engine-sentence")).to_contain_text(words)
    took_s = time.monotonic() - began_s
    assert in_time(took_s, limit_s), f"{words} after {took_s:.1f} s"


def test_the_header_names_size_format_devices_and_context(page: Page, server: ReplayServer) -> None:
    expect(page.locator("#engine-sentence")).to_have_text("demo, 4 ranks · ready")
    expect(page.locator("#engine-facts")).to_have_text("16.4 M parameters · bfloat16 · 4 \u00d7 CPU · context 2,048")
    server.info = {
        **INFO,
        "devices": [{"name": "NVIDIA H200", "count": 1}],
        "model": {"id": "m", "num_parameters": 8_030_261_248},
    }
    expect(page.locator("#engine-facts")).to_have_text("8.03 B parameters · NVIDIA H200")


@pytest.mark.parametrize("streams", [False, True])
def test_a_state_is_at_most_a_second_old(page: Page, server: ReplayServer, streams: bool) -> None:
    expect(page.locator("#engine-sentence")).to_contain_text("ready")
    if streams:
        server.script = Script(pieces=["word "] * 100_000, tokens_per_s=500.0)
        run(page)
    server.readiness = (503, {"state": "draining", "reason": "a stop was asked for"})
    shown_within(page, "draining: a stop was asked for", 1.0 + LATE_S)
    server.readiness = (200, {"state": "ready", "reason": ""})
    shown_within(page, "ready", 1.0 + LATE_S)
    assert page.evaluate(GREY) == [INK, False]
    if streams:
        page.click("#stop")


def test_what_is_old_is_grey_and_says_its_age(page: Page, server: ReplayServer) -> None:
    expect(page.locator("#engine-sentence")).to_contain_text("ready")
    server.is_silent = True
    page.wait_for_function("() => document.body.hasAttribute('data-gone')", timeout=1000 * (1.5 + LATE_S))
    assert page.evaluate(GREY) == [SOFT, True]
    expect(page.locator("#engine-age")).to_contain_text("Last heard of")
    expect(page.locator("#engine-sentence")).to_contain_text("unreachable")
    server.is_silent = False
    expect(page.locator("#engine-sentence")).to_have_text("demo, 4 ranks · ready")
    expect(page.locator("#engine-age")).to_be_empty()
    assert page.evaluate(GREY) == [INK, False]


def test_a_failed_engine_is_grey(page: Page, server: ReplayServer) -> None:
    server.readiness = (503, {"state": "failed", "reason": "rank 1 is lost"})
    expect(page.locator("#engine-sentence")).to_have_text("failed: rank 1 is lost")
    assert page.evaluate(GREY) == [SOFT, True]
    expect(page.locator(".rank > p:first-child")).to_have_text([f"rank {rank}lost" for rank in range(4)])
    assert page.evaluate("getComputedStyle(document.querySelector('.rank b')).color") == SOFT
    server.readiness = (200, {"state": "ready", "reason": ""})
    expect(page.locator(".rank > p:first-child").first).to_have_text("rank 0ready")


def test_a_server_that_ended_is_grey(browser: Browser) -> None:
    own = ReplayServer()
    page = browser.new_page()
    try:
        page.goto(own.url)
        expect(page.locator("#engine-sentence")).to_have_text("demo, 4 ranks · ready")
        own.close()
        page.wait_for_function("() => document.body.hasAttribute('data-gone')", timeout=1000 * (1.5 + LATE_S))
        expect(page.locator("#engine-facts")).to_contain_text("16.4 M parameters")
    finally:
        page.close()


def test_sizes_as_people_write_them(page: Page) -> None:
    write = 'const { size } = await load("numbers"); return given.map(size);'
    assert evaluate(page, write, [134_515_008, 999_600_000, 1_235_814_400, 16_421_760, 70_553_706_496]) == [
        "135 M", "1.00 B", "1.24 B", "16.4 M", "70.6 B",
    ]  # fmt: skip
