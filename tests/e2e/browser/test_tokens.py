"""Log-probabilities: answers token by token, with what else could have stood there."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.browser.replay_server import ReplayServer, Script
from tests.e2e.browser.test_modules import evaluate
from tests.e2e.browser.test_playground import answer, ended, run
from tests.e2e.browser.test_rendering_speed import WATCH
from tests.patience import in_time

PIECES = ("    return", " n", " * 2", "\n", "x" * 5)
MODES = ["Complete text", "Chat"]


def asked(page: Page, server: ReplayServer, mode: str, alternatives: str = "3") -> Any:
    """Run with log-probabilities; what shows the tokens."""
    server.script = Script(pieces=PIECES)
    page.get_by_role("radio", name=mode).check()
    page.click("#settings-button")
    page.select_option("#num-logprobs", alternatives)
    run(page, "def f(n):\n")
    ended(page)
    return page.locator("#live-tokens" if mode == "Complete text" else ".exchange .tokens")


@pytest.mark.parametrize("mode", MODES)
def test_a_token_under_the_pointer_says_how_likely_it_was(page: Page, server: ReplayServer, mode: str) -> None:
    tokens = asked(page, server, mode)
    assert tokens.locator(".tok").all_text_contents() == list(PIECES)
    shades = tokens.locator(".tok").evaluate_all("(all) => all.map((each) => each.className.split(' ')[1])")
    assert shades == ["sure", "likely", "open", "rare", "sure"]
    tokens.locator(".tok").nth(1).hover()
    card = page.locator("#chance")
    expect(card.locator(".taken")).to_contain_text("␣n60.7%-0.50")
    expect(card.locator("div").first).to_contain_text("␣other67.0%")
    box, token = card.bounding_box(), tokens.locator(".tok").nth(1).bounding_box()
    assert box is not None
    assert token is not None
    assert 0 < box["y"] - token["y"] - token["height"] < 12, "right below it"
    tokens.locator(".tok").nth(3).hover()
    expect(card.locator(".taken")).to_contain_text("↵5.0%-3.00")
    page.evaluate("() => { replay.dispatchEvent(new Event('scroll')); }")
    expect(card).to_be_visible()
    page.locator("#prompt").hover()
    expect(card).to_be_hidden()


@pytest.mark.parametrize("mode", MODES)
def test_a_button_switches_between_tokens_and_text(page: Page, server: ReplayServer, mode: str) -> None:
    tokens = asked(page, server, mode)
    text = page.locator("#live" if mode == "Complete text" else ".exchange .prose")
    button = page.get_by_role("button", name="Tokens", exact=True)
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(text).to_be_hidden()
    button.click()
    expect(tokens).to_be_hidden()
    expect(text).to_be_visible()
    if mode == "Complete text":
        assert answer(page) == "".join(PIECES)
    button.click()
    expect(tokens).to_be_visible()
    page.select_option("#num-logprobs", "")
    run(page, "again")
    ended(page)
    expect(page.locator("#live-tokens")).to_be_hidden()
    expect(page.locator("#live" if mode == "Complete text" else ".exchange .prose >> nth=1")).to_be_visible()
    expect(page.locator("#replay")).to_contain_text("return n")


def test_the_keyboard_goes_from_token_to_token(page: Page, server: ReplayServer) -> None:
    tokens = asked(page, server, "Complete text")
    tokens.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(tokens.locator(".current")).to_have_text(" n")
    expect(page.locator("#chance .taken")).to_contain_text("␣n")
    expect(page.locator("#announcement")).to_have_text("␣n, 60.7%. Instead: ␣other 67.0%.")
    page.keyboard.press("ArrowLeft")
    expect(tokens.locator(".current")).to_have_text("    return")
    page.keyboard.press("Escape")
    expect(page.locator("#chance")).to_be_hidden()
    page.keyboard.press("Tab")
    expect(tokens.locator(".current")).to_have_count(0)


def test_without_alternatives_a_token_tells_its_own(page: Page, server: ReplayServer) -> None:
    tokens = asked(page, server, "Complete text", "0")
    tokens.locator(".tok").nth(2).hover()
    expect(page.locator("#chance div")).to_have_count(1)
    expect(page.locator("#chance .taken")).to_contain_text("22.3%")


def test_chances_are_read_in_both_forms(page: Page) -> None:
    read = """
        const { chancesOf } = await load("chances");
        return given.map((choice) => chancesOf(choice).map(({ bytes, ...rest }) => ({ ...rest, bytes: bytes && [...bytes] })));
    """
    chat = {"logprobs": {"content": [
        {"token": "\ufffd", "logprob": -1, "bytes": [226, 130], "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]},
        {"token": "token_id:2", "logprob": -2, "bytes": None, "top_logprobs": []},
    ]}}  # fmt: skip
    legacy = {"logprobs": {
        "tokens": ["bytes:\\xe2\\x82", "token_id:2", "é"], "token_logprobs": [-1, -2, -3],
        "top_logprobs": [{"a": -0.5}, {}, {"bytes:\\xc3": -4}], "text_offset": [0, 0, 0],
    }}  # fmt: skip
    partial = {"name": "\ufffd", "bytes": [226, 130], "logprob": -1, "others": [["a", -0.5]]}
    end: dict[str, Any] = {"name": "token_id:2", "bytes": None, "logprob": -2, "others": []}
    accent = {"name": "é", "bytes": [195, 169], "logprob": -3, "others": [["\ufffd", -4]]}
    assert evaluate(page, read, [chat, legacy, {"text": "x"}, {"logprobs": None}]) == [
        [partial, end],
        [partial, end, accent],
        [],
        [],
    ]


def test_tokens_within_a_character_and_without_text_have_marks(page: Page) -> None:
    show = """
        const { TokenText } = await load("tokens");
        const { Follower } = await load("follow");
        const element = document.createElement("div");
        const view = new TokenText(element, new Follower(element), null);
        view.begin("given");
        const chance = { logprob: -1, others: [] };
        view.append(given.map((bytes, idx) => ({ ...chance, name: `token_id:${idx}`, bytes: bytes && Uint8Array.from(bytes) })));
        while (!view.settled) view.paint();
        return [...element.querySelectorAll(".tok")].map((each) => [each.textContent, each.dataset.code ?? null]);
    """
    assert evaluate(page, show, [[226, 130], [172], [60, 98, 62], None]) == [
        ["", "…"], ["€", None], ["<b>", None], ["", "token_id:3"],
    ]  # fmt: skip


@pytest.mark.alone
def test_tokens_stay_smooth(page: Page, server: ReplayServer) -> None:
    """2,000 tokens/s with their log-probabilities; frames stay short where the machine has time."""
    server.script = Script(pieces=["word "] * 8000, tokens_per_s=2000.0)
    page.click("#settings-button")
    page.select_option("#num-logprobs", "5")
    page.fill("#max-tokens", "8000")
    page.evaluate(WATCH)
    run(page)
    page.wait_for_function("() => document.querySelectorAll('#live-tokens .tok').length === 8000")
    gaps = sorted(page.evaluate("window.watched.gaps"))
    print(f"gaps p50 {gaps[len(gaps) // 2]:.1f} ms, p99 {gaps[int(len(gaps) * 0.99)]:.1f} ms")
    assert in_time(gaps[len(gaps) // 2], 60)
