"""Settings: every sampling parameter, the system prompt, JSON schemas; what is wrong in them is said before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from kog_dist.sampling_params import DEFAULTS, LIMITS
from tests.e2e.browser.replay_server import INFO, ReplayServer, Script
from tests.e2e.browser.test_conversation import RECORDS, ask, choose, saved
from tests.e2e.browser.test_playground import ANSWER, answer, ended, run

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ALL = {
    "temperature": 0.8, "max_tokens": 64, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "repetition_penalty": 1.1,
    "presence_penalty": -0.5, "frequency_penalty": 0.25, "min_tokens": 3,
}  # fmt: skip


@pytest.fixture
def opened(page: Page) -> Page:
    page.click("#settings-button")
    return page


def fill(page: Page, values: dict[str, Any]) -> None:
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))


def test_sampling_controls_reach_the_request_and_its_code(page: Page, server: ReplayServer) -> None:
    page.click("#settings-button")
    for field, value in (
        ("temperature", "0.8"),
        ("top-p", "0.9"),
        ("max-tokens", "64"),
        ("seed", "7"),
        ("stop-texts", "\\ndef|it's"),
    ):
        page.fill(f"#{field}", value)
    run(page, "x = 'é'")
    ended(page)
    wanted = {"prompt": "x = 'é'", "temperature": 0.8, "top_p": 0.9, "max_tokens": 64, "seed": 7, "stop": ["\ndef", "it's"]}
    sent = server.served[0].body
    assert {name: sent[name] for name in wanted} == wanted
    expect(page.locator("#sampling-summary")).to_contain_text("temperature 0.8, at most 64 tokens")
    page.fill("#temperature", "-1")
    page.click("#settings-close")
    expect(page.locator("#temperature")).to_be_hidden()
    run(page, "x")
    expect(page.locator("#temperature")).to_be_focused()
    assert len(server.served) == 1, "the browser refuses values out of range"


@pytest.mark.parametrize("mode", ["Complete text", "Chat"])
def test_all_parameters_reach_the_request(opened: Page, server: ReplayServer, mode: str) -> None:
    opened.get_by_role("radio", name=mode).check()
    fill(opened, ALL)
    opened.fill("#logit-bias", "199: -2, 42=1.5")
    opened.check("#ignore-eos")
    opened.select_option("#speculate", "off")
    opened.select_option("#num-logprobs", "3")
    run(opened, "x")
    ended(opened)
    wanted = {**ALL, "logit_bias": {"199": -2, "42": 1.5}, "ignore_eos": True, "speculate": "off"}
    wanted |= {"logprobs": 3} if mode == "Complete text" else {"logprobs": True, "top_logprobs": 3}
    sent = server.served[0].body
    assert {name: value for name, value in sent.items() if name in wanted} == wanted
    for words in ("top-k 40", "min-p 0.05", "seed 7", "ignore-eos", "speculate off", "logit-bias", "log-probabilities"):
        expect(opened.locator("#sampling-summary")).to_contain_text(words)
    opened.click("#copy-request")
    opened.click("#as-python")
    calls: list[dict[str, Any]] = []
    exec(opened.inner_text("#snippet").replace("from openai import OpenAI", ""), {"OpenAI": lambda **_: _Client(calls)})
    extra = calls[0].pop("extra_body")
    assert set(extra) == {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "speculate"}
    for wire in (calls[0] | extra,):
        assert {name: value for name, value in wire.items() if name in wanted} == wanted


class _Client:
    """Stands for the client of `openai`."""

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        self.completions = self
        self.chat = self
        self._calls = calls

    def create(self, **fields: Any) -> list[object]:
        self._calls.append(fields)
        return []


def test_every_parameter_has_a_field_with_its_limits(opened: Page) -> None:
    fields = opened.evaluate("""() => Object.fromEntries([...document.querySelectorAll("#sampling [data-field][type=number]")]
        .map((each) => [each.dataset.field, [Number(each.min), Number(each.max)]]))""")
    assert set(DEFAULTS) - set(fields) == {"logit_bias", "logprobs"}, "these have fields of another kind"
    for name, limits in LIMITS.items():
        if name in fields and name not in ("temperature", "seed"):
            assert tuple(fields[name]) == limits, name
    assert fields["temperature"] == [0, LIMITS["temperature"][1]]
    assert fields["seed"][1] == 2**53 - 1, "a browser's numbers are exact up to there"


def test_empty_fields_are_not_sent(opened: Page, server: ReplayServer) -> None:
    fill(opened, {"temperature": "", "max_tokens": ""})
    run(opened, "x")
    ended(opened)
    assert set(server.served[0].body) == {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert server.served[0].body["max_tokens"] == -1, "what fits the context"
    expect(opened.locator("#sampling-summary")).to_have_text("temperature 1, as many tokens as fit")
    opened.click("#defaults")
    expect(opened.locator("#sampling-summary")).to_have_text("temperature 1, at most 1024 tokens")


def test_the_models_own_sampling_is_said(opened: Page, server: ReplayServer) -> None:
    server.info = {**INFO, "engine": {"own_sampling": "temperature 0.2, top_p 0.9"}}
    expect(opened.locator("#temperature")).to_have_attribute("placeholder", "model's: 0.2")
    expect(opened.locator("#top-p")).to_have_attribute("placeholder", "model's: 0.9")
    expect(opened.locator("#sampling-summary")).to_contain_text("temperature 0.2, top_p 0.9")


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "101"), ("logit-bias", "-2"), ("logit-bias", "5: 101"), ("top-k", "1.5"), ("repetition-penalty", "0")],
)
def test_what_is_wrong_is_not_sent(opened: Page, server: ReplayServer, field: str, value: str) -> None:
    opened.fill(f"#{field}", value)
    opened.click("#settings-close")
    run(opened, "x")
    expect(opened.locator(f"#{field}")).to_be_focused()
    assert server.served == []


@pytest.mark.parametrize("mode", ["Complete text", "Chat"])
def test_a_schema_is_sent_and_its_answer_is_code(opened: Page, server: ReplayServer, mode: str) -> None:
    opened.get_by_role("radio", name=mode).check()
    expect(opened.locator("#schema")).to_be_hidden()
    opened.select_option("#format", "json_schema")
    for wrong in ("{", "[]", "3", ""):
        opened.fill("#schema", wrong)
        run(opened, "x")
        expect(opened.locator("#schema")).to_be_focused()
    assert server.served == []
    opened.fill("#schema", json.dumps(SCHEMA))
    server.script = Script(pieces=['{"x"', ": 1", "}"])
    run(opened, "x")
    ended(opened)
    sent = server.served[0].body["response_format"]
    assert sent == {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    expect(opened.locator("#sampling-summary")).to_contain_text("JSON schema")
    if mode == "Complete text":
        assert answer(opened) == '{"x": 1}'
        return
    for listing in ("#transcript", "#replay"):
        expect(opened.locator(f"{listing} figcaption")).to_contain_text("json")
        expect(opened.locator(f"{listing} pre")).to_have_text('{"x": 1}')
    opened.reload()
    expect(opened.locator("#transcript pre .number")).to_have_text("1")
    opened.click("#settings-button")
    opened.select_option("#format", "json_object")
    ask(opened, "again")
    assert server.served[1].body["response_format"] == {"type": "json_object"}


def test_the_system_prompt_goes_first_and_stays_with_its_conversation(opened: Page, server: ReplayServer) -> None:
    expect(opened.locator("#system-button")).to_be_hidden()
    opened.get_by_role("radio", name="Chat").check()
    opened.click("#system-button")
    opened.fill("#system", "Answer in one word.")
    expect(opened.locator("#system-button[data-set]")).to_be_visible()
    server.script = Script(pieces=ANSWER)
    ask(opened, "How?", "And then?")
    roles = [message["role"] for message in server.served[1].body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert server.served[1].body["messages"][0]["content"] == "Answer in one word."
    assert opened.evaluate(RECORDS)[0]["system"] == "Answer in one word."
    assert "## System prompt\n\nAnswer in one word.\n" in saved(opened, lambda: choose(opened, 0, "Export as Markdown"))[1]
    opened.reload()
    expect(opened.locator("#system-button[data-set]")).to_be_visible()
    assert opened.input_value("#system") == "Answer in one word."
    opened.get_by_role("radio", name="Complete text").check()
    expect(opened.locator("#system-button")).to_be_hidden()
