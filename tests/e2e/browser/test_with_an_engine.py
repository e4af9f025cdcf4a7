"""The playground as `kog-launch` serves it: the bundled model, a stop that reaches the ranks, the loss of one; a real model."""

from __future__ import annotations

import json
import os
import signal

import pytest
from playwright.sync_api import Browser, Page, expect

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.runtime.http_file import HTTP_FILE
from tests.e2e.browser.test_playground import answer, ended, foot, run
from tests.e2e.test_smollm2 import FOLDER

PROMPT = "def fibonacci(n):\n"


def test_the_page_of_a_real_engine(browser: Browser, session: EngineSession) -> None:
    session.launch("--http", "--port=0", "--ranks=2", "--api-key=sk-real-key")
    with session.connect() as client:
        announced = session.instance_folder / HTTP_FILE
        until(announced.exists, 30, session.output)
        page = browser.new_page()
        page.goto(json.loads(announced.read_text(encoding="utf-8"))["url"])
        page.click("#key-button")
        page.fill("#key", "sk-real-key")
        page.keyboard.press("Enter")
        expect(page.locator("#engine-sentence")).to_have_text("demo, 2 ranks · ready")

        page.click("#settings-button")
        page.fill("#temperature", "0")
        page.fill("#max-tokens", "40")
        run(page, PROMPT)
        ended(page)
        events = client.generate(prompt=PROMPT, max_tokens=40)
        assert answer(page) == "".join(event.text for event in events if isinstance(event, Tokens))
        expect(page.locator("#num-tokens")).to_have_text("40")
        expect(page.locator("#engine-num-tokens")).to_have_text("40")
        expect(page.locator("#engine-rate")).not_to_be_empty()

        page.select_option("#num-logprobs", "3")
        run(page, PROMPT)
        ended(page)
        tokens = page.locator("#live-tokens .tok")
        expect(tokens).to_have_count(40)
        assert "".join(tokens.all_text_contents()) == answer(page)
        tokens.first.hover()
        expect(page.locator("#chance .taken")).to_contain_text("%")
        expect(page.locator("#chance div")).to_have_count(3)
        page.select_option("#num-logprobs", "")
        expect(page.locator("#engine-facts")).to_contain_text("16.4 M parameters · bfloat16 · 2 \u00d7 CPU")
        page.fill("#prompt", "x")
        expect(page.locator("#context-words")).to_contain_text("and up to 40 of 2,048")

        page.fill("#max-tokens", "2000")
        run(page, PROMPT)
        page.wait_for_function("() => document.querySelectorAll('#live .block')[0].textContent.length > 20")
        page.keyboard.press("Escape")
        expect(foot(page)).to_contain_text("Stopped")
        until(lambda: client.status().num_cancelled == 1, 5, lambda: str(client.status()))

        run(page, PROMPT)
        page.wait_for_function("() => document.querySelectorAll('#live .block')[0].textContent.length > 20")
        os.kill(session.processes()["rank 1"], signal.SIGKILL)
        expect(page.locator("#problem")).to_contain_text("cut off")
        page.close()


@pytest.mark.sweep  # 1,800 tokens of the bundled model, which seldom changes
def test_examples_are_long_enough_for_a_speed(page: Page, session: EngineSession) -> None:
    """With the page's own settings: any number of CPU ranks gives the same tokens each time."""
    examples = page.evaluate("async () => (await import('/static/examples.js')).COMPLETIONS")
    session.launch("--no-http", "--ranks=1")
    with session.connect() as client:
        for example in examples:
            *_, done = client.generate(prompt=example["prompt"], max_tokens=300, temperature=0.5, seed=1)
            assert isinstance(done, Done)
            assert done.num_generated_tokens == 300, example["title"]


@pytest.mark.service
@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs `make model`")
def test_a_conversation_with_a_real_model(browser: Browser, session: EngineSession) -> None:
    session.launch(str(FOLDER), "--http", "--port=0", "--device=cpu", "--context=2048")
    announced = session.instance_folder / HTTP_FILE
    until(announced.exists, 60, session.output)
    page = browser.new_page()
    page.goto(json.loads(announced.read_text(encoding="utf-8"))["url"])
    expect(page.locator("#engine-sentence")).to_have_text("SmolLM2-135M-Instruct, 1 rank · ready", timeout=60_000)
    page.get_by_role("radio", name="Chat").check()
    page.click("#settings-button")
    page.fill("#temperature", "0")
    for question, word in (("What is the capital of France?", "Paris"), ("Tell me more.", "")):
        run(page, question)
        ended(page)
        expect(foot(page)).to_contain_text("Finished")  # by the model's own stop id
        assert word in (said := page.locator(".exchange .prose").last.inner_text())
        assert len(said) > 5
    expect(page.locator(".exchange")).to_have_count(2)
    expect(page.locator(".turn")).to_have_count(1)
    page.close()
