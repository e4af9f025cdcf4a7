"""Conversations of ten families through the HTTP service: a thought and two calls, then what came of them and an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import FinishReason, Generate, Tokens
from tests.unit.gateway.scripted_engine import Received, ScriptedEngine, client, frames_of, gateway
from tests.unit.gateway_reading.published import CLOCK, FAMILIES, TOWN, WEATHER, Published, write_folder

QUESTION = {"role": "user", "content": "How is it in Köln, and how late? Not <think> this."}
TOOLS = [{"type": "function", "function": tool} for tool in (WEATHER, CLOCK)]
FLAT = [{"type": "function", **tool} for tool in (WEATHER, CLOCK)]
CALLED = [("weather", TOWN), ("clock", {})]


@dataclass
class Talk:
    """A family behind HTTP; the engine says what `says` is."""

    family: Published
    http: httpx.Client
    engine: ScriptedEngine
    tokenizer: Tokenizer
    says: str = ""
    finish: FinishReason = FinishReason.STOP

    def play(self, received: Received) -> None:
        decoder = self.tokenizer.stream(after=received.message.prompt_ids or ())
        received.accept()
        for idx, token_id in enumerate(self.tokenizer.encode(self.says, add_special_tokens=False)):
            text = decoder.push(token_id)
            self.engine.send(received.peer, Tokens.one(received.message.request_id, idx, token_id, text))
        received.finish(self.finish)

    def chat(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """The message of a chat; streamed it is the same."""
        body = {"messages": [QUESTION, *messages], "tools": TOOLS, **fields}
        whole: dict[str, Any] = self.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        streamed = self.http.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text
        state = ChatCompletionStreamState()
        for chunk in frames_of(streamed)[:-1]:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        again = state.current_completion_snapshot.choices[0].message.model_dump()
        message: dict[str, Any] = whole["message"]
        for key in ("content", "reasoning_content", "reasoning"):
            assert (again.get(key) or None) == (message.get(key) or None), key
        assert calls_of(again) == calls_of(message)
        return message

    def sent(self) -> Generate:
        """The last request that the engine got."""
        return self.engine.received[-1].message

    def prompt(self) -> str:
        return self.tokenizer.decode(self.sent().prompt_ids or ())


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.fixture(scope="module", params=FAMILIES)
def talk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("f")
    folder.chmod(0o700)
    num_ids = write_folder(folder, family)
    tokenizer = Tokenizer.from_folder(Path(folder))
    assert tokenizer is not None
    engine = ScriptedEngine(folder)
    engine.welcome = replace(engine.welcome, vocab_size=num_ids, max_context=8192)
    with gateway(engine, folder, model=folder) as running, client(running) as http:
        made = Talk(family, http, engine, tokenizer)
        engine.on_generate = made.play
        yield made
    engine.stop()


def test_a_thought_and_two_calls_and_what_comes_of_them(talk: Talk) -> None:
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    message = talk.chat()
    assert message["reasoning_content"] == message["reasoning"] == "Two things."
    assert calls_of(message) == CALLED
    assert message["content"] is None
    ids = [call["id"] for call in message["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ids]
    last = "<|channel|>final<|message|>Mild." if family.begin.startswith("<|channel|>") else "Mild."
    talk.says = last if family.begin else f"Done.{family.end}{last}"
    answer = talk.chat(message, *results)
    assert answer["content"] == "Mild."
    assert "tool_calls" not in answer
    if family.shown:
        assert family.shown in talk.tokenizer.decode(talk.sent().prompt_ids or ()) or family.shown in shown_specials(talk)


def shown_specials(talk: Talk) -> str:
    """The prompt with the names of its special tokens."""
    by_id = {talk.tokenizer.id_of(name): name for name in talk.family.specials}
    return "".join(by_id.get(token_id) or talk.tokenizer.decode([token_id]) for token_id in talk.sent().prompt_ids or ())


def test_the_same_as_a_response(talk: Talk) -> None:
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    body = {"input": QUESTION["content"], "tools": FLAT}
    response = talk.http.post("/v1/responses", json=body).raise_for_status().json()
    thought, *calls = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Two things."}]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLED
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 2
    events = frames_of(talk.http.post("/v1/responses", json=body | {"stream": True}).raise_for_status().text)
    streamed = events[-1]["response"]["output"]
    assert [item["type"] for item in streamed] == ["reasoning", "function_call", "function_call"]
    assert [item.get("arguments") for item in streamed] == [item.get("arguments") for item in response["output"]]


def anthropic_blocks(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of a message; streamed it is the same."""
    whole: list[dict[str, Any]] = http.post("/v1/messages", json=body).raise_for_status().json()["content"]
    found: list[dict[str, Any]] = []
    for line in http.post("/v1/messages", json=body | {"stream": True}).raise_for_status().text.splitlines():
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if event.get("type") == "content_block_start":
            found.append(event["content_block"] | ({"input": ""} if event["content_block"]["type"] == "tool_use" else {}))
        elif event.get("type") == "content_block_delta":
            for kind, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "input")):
                if kind in event["delta"]:
                    found[event["index"]][key] += event["delta"][kind]
    for block in found:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    told = [{key: value for key, value in block.items() if key not in ("id", "signature")} for block in (*found, *whole)]
    assert told[: len(found)] == told[len(found) :]
    return whole


def test_the_same_as_a_message_of_anthropics(talk: Talk) -> None:
    """Then with the thought left out."""
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    tools = [{"name": tool["name"], "description": "x", "input_schema": tool["parameters"]} for tool in (WEATHER, CLOCK)]
    body = {"model": "default", "max_tokens": 500, "messages": [QUESTION], "tools": tools}
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    thought, *calls = anthropic_blocks(talk.http, body | thinks)
    assert (thought["type"], thought["thinking"]) == ("thinking", "Two things.")
    assert [(call["name"], call["input"]) for call in calls] == CALLED
    if "nine characters" in family.template:
        return  # it refuses ids that are as long as Anthropic's
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Mild."} for call in calls]
    talk.says = "Yes." if "enable_thinking" in family.template else f"{family.begin}x{family.end}Yes."
    if family.begin.startswith("<|channel|>"):
        talk.says = "<|channel|>final<|message|>Yes."
    messages = [QUESTION, {"role": "assistant", "content": [thought, *calls]}, {"role": "user", "content": results}]
    answer = anthropic_blocks(talk.http, body | {"messages": messages, "thinking": {"type": "disabled"}})
    assert [block["text"] for block in answer if block["type"] == "text"] == ["Yes."]


def test_the_same_as_a_chat_of_ollamas(talk: Talk) -> None:
    """Streamed and whole; then with the thought left out."""
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    body = {"model": "default", "messages": [QUESTION], "tools": TOOLS, "think": True}
    for stream in (False, True):
        text = talk.http.post("/api/chat", json=body | {"stream": stream}).raise_for_status().text
        parts = [json.loads(line)["message"] for line in text.splitlines()]
        assert "".join(part.get("thinking") or "" for part in parts) == "Two things."
        calls = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        assert [(call["name"], call["arguments"]) for call in calls] == CALLED
        assert not "".join(part["content"] for part in parts)
    if "enable_thinking" in family.template:
        talk.says = "Yes."
        answer = talk.http.post("/api/chat", json=body | {"think": False, "stream": False}).raise_for_status().json()["message"]
        assert (answer["content"], answer.get("thinking")) == ("Yes.", None)


PICTURE = "iVBORw0KGgo="
WITH_PICTURES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
                {"type": "text", "text": "?"},
            ]
        },
    ),
    (
        "/v1/messages",
        {"content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}]},
    ),
    ("/v1/responses", {"content": [{"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}]}),
    ("/api/chat", {"content": "?", "images": [PICTURE]}),
]


@pytest.mark.parametrize(("path", "message"), WITH_PICTURES, ids=[path for path, _ in WITH_PICTURES])
def test_pictures_are_refused_with_the_reason(talk: Talk, path: str, message: dict[str, Any]) -> None:
    before, messages = len(talk.engine.received), [{"role": "user", **message}]
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 8}
    answer = talk.http.post(path, json={"model": "default", **body})
    assert answer.status_code == 400
    assert "the model reads text only" in json.dumps(answer.json()["error"])
    assert len(talk.engine.received) == before


def test_calls_in_a_thought_are_thoughts(talk: Talk) -> None:
    family = talk.family
    inner = family.calls if not family.begin.startswith("<|channel|>") else '{"name": "clock"}'
    talk.says = f"{family.begin}Perhaps {inner}"
    message = talk.chat()
    assert "tool_calls" not in message
    assert message["content"] == ""
    assert message["reasoning_content"].startswith("Perhaps")


def test_letters_of_tags_that_are_tokens_are_text(talk: Talk) -> None:
    family = talk.family
    quoted = f"Look:\n{family.calls}"
    if "<think>" in family.tags:
        quoted = quoted.replace(":", f":<think>{family.begin}", 1)
    if not any(name in family.calls for name in (*family.tags, *family.specials)):
        pytest.skip("its tags are letters")
    ids = [token_id for character in quoted for token_id in talk.tokenizer.encode(character, add_special_tokens=False)]
    head = [] if family.begin else talk.tokenizer.encode(f"x{family.end}", add_special_tokens=False)

    def play(received: Received) -> None:
        decoder = talk.tokenizer.stream(after=received.message.prompt_ids or ())
        received.accept()
        for idx, token_id in enumerate([*head, *ids]):
            talk.engine.send(received.peer, Tokens.one(received.message.request_id, idx, token_id, decoder.push(token_id)))
        received.finish()

    talk.engine.on_generate = play
    try:
        message = talk.http.post("/v1/chat/completions", json={"messages": [QUESTION], "tools": TOOLS}).json()["choices"][0]
    finally:
        talk.engine.on_generate = talk.play
    assert "tool_calls" not in message["message"]
    assert message["message"]["content"] == quoted


def test_one_call_is_the_first(talk: Talk) -> None:
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    assert calls_of(talk.chat(parallel_tool_calls=False)) == CALLED[:1]
    talk.engine.wait_cancelled(talk.sent().request_id)


def test_a_cut_call_has_arguments_that_are_json(talk: Talk) -> None:
    family = talk.family
    talk.says = f"{family.begin}x{family.end}{family.calls.partition('öln')[0]}"
    talk.finish = FinishReason.LENGTH
    try:
        message = talk.chat()
    finally:
        talk.finish = FinishReason.STOP
    assert calls_of(message) == [("weather", {"town": "K"})]


def test_a_required_call_is_in_the_models_own_form(talk: Talk) -> None:
    """Behind a thought, where the model thinks and one token ends thoughts."""
    family = talk.family
    talk.says = f"{family.begin}Two things.{family.end}{family.calls}"
    talk.chat(tool_choice="required")
    sent = talk.sent()
    thinks = "<think>" in family.template or "<|channel|>" in family.template
    end = talk.tokenizer.id_of("<|end|>" if "<|channel|>" in family.template else "</think>")
    assert sent.thought_end == (end if thinks else None)
    lark = json.loads(sent.grammar or "{}")["lark"]
    assert "weather" in lark
    for name in ("<tool_call>", "[TOOL_CALLS]", "<|channel|>"):
        if name in family.calls and (token_id := talk.tokenizer.id_of(name)) is not None:
            assert f"<[{token_id}]>" in lark
    talk.chat(response_format={"type": "json_object"}, tool_choice="none")
    assert talk.sent().thought_end == (end if thinks else None)


def test_thinking_can_be_bounded_and_left_out(talk: Talk) -> None:
    family = talk.family
    knows = "enable_thinking" in family.template
    talk.says = f"{family.begin}x{family.end}Yes." if family.begin else f"x{family.end}Yes."
    talk.chat(chat_template_kwargs={"thinking_budget": 7})
    thinks = "<think>" in family.template or "<|channel|>" in family.template
    assert talk.sent().thought_tokens == (7 if thinks else None)
    if knows:
        talk.says = "Yes."
        for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert talk.chat(**fields)["content"] == "Yes."
            assert talk.prompt().endswith("</think>\n\n")
        talk.says = f"{family.begin}x{family.end}Yes."
        talk.chat(reasoning_effort="low")
        assert talk.sent().thought_tokens == 1024
