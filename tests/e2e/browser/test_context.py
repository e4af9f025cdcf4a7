"""The context meter: what a draft would take, and what an answer has taken."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.e2e.browser.replay_server import INFO, ReplayServer, Script
from tests.e2e.browser.test_conversation import ask
from tests.e2e.browser.test_playground import ended, run

MODEL = {"id": "demo", "max_model_len": 1000}


def words(page: Page, text: str) -> None:
    expect(page.locator("#context-words")).to_have_text(text)


def test_a_draft_is_counted_while_it_is_typed(page: Page, server: ReplayServer) -> None:
    page.fill("#prompt", "one two three")
    words(page, "3 tokens and up to 1,024 of 2,048")
    meter = page.get_by_role("meter", name="Context")
    expect(meter).to_have_attribute("aria-valuenow", "3")
    expect(meter).to_have_attribute("aria-valuemax", "2048")
    page.click("#settings-button")
    page.fill("#max-tokens", "")
    words(page, "3 tokens and an answer of 2,045 of 2,048")
    page.fill("#max-tokens", "2046")
    words(page, "3 tokens and up to 2,046 do not fit the context of 2,048")
    assert meter.get_attribute("data-over") == ""
    page.fill("#max-tokens", "2045")
    words(page, "3 tokens and up to 2,045 of 2,048")
    assert meter.get_attribute("data-over") is None


def test_an_answer_fills_the_context(page: Page, server: ReplayServer) -> None:
    server.script = Script(pieces=["word "] * 500, end="hold", tokens_per_s=2000.0)
    run(page, "x")
    words(page, "512 of 2,048 tokens of context used")
    page.click("#stop")
    page.fill("#prompt", "x")
    words(page, "1 token and up to 1,024 of 2,048")


def test_a_conversation_counts_with_its_template(page: Page, server: ReplayServer) -> None:
    server.info = {**INFO, "model": {**MODEL, "chat": "template"}}
    page.reload()
    page.wait_for_function("() => document.querySelector('[value=conversation]').checked")
    page.click("#settings-button")
    page.fill("#max-tokens", "512")
    server.script = Script(pieces=["yes ", "no"])
    ask(page, "one two")
    page.fill("#prompt", "three")
    words(page, "11 tokens and up to 512 of 1,000")
    assert [message["role"] for message in server.tokenized[-1]["messages"]] == ["user", "assistant", "user"]
    page.click("#system-button")
    page.fill("#system", "be brief")
    words(page, "15 tokens and up to 512 of 1,000")
    page.click("#new")
    words(page, "7 tokens and up to 512 of 1,000")


def test_without_a_tokenizer_nothing_is_claimed(page: Page, server: ReplayServer) -> None:
    server.has_tokenizer = False
    page.fill("#prompt", "one two three")
    expect(page.locator("#context")).to_be_hidden()
    run(page)
    ended(page)
    words(page, "15 of 2,048 tokens of context used")
