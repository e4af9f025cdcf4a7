"""Ollama's API: what a body asks for, and what comes of an answer, streamed in any pieces and whole."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kog_dist.gateway.ollama.plans import plan_chat, plan_generate
from kog_dist.gateway.openai.chat import plan_chat as plan_openai_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, unpacked
from kog_dist.rpc.messages import Done, Error, ErrorCode, FinishReason, Generate
from kog_dist.speculation import Speculation
from tests.unit.gateway.conftest import engine, folder, http, running, shared_engine
from tests.unit.gateway.scripted_engine import ScriptedEngine, says
from tests.unit.gateway_openai.conftest import base_model, channels_model, tagged_model
from tests.unit.gateway_openai.engine_script import events_of, play

__all__ = ["base_model", "channels_model", "engine", "folder", "http", "running", "shared_engine", "tagged_model"]
USER = {"role": "user", "content": "Weather in Oslo?"}
ASK = {"model": "demo:latest", "messages": [USER]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
CALLING = ("I look.", "<tool_call>", '{"name": "weather", "arguments": {"city": "O', 'slo"}}', "</tool_call>")


def planned(body: Mapping[str, Any], served: ServedModel) -> Planned:
    found = (plan_chat if "messages" in body else plan_generate)(body, served)
    assert isinstance(found, Planned)
    return found


def asked(body: Mapping[str, Any], served: ServedModel) -> Generate:
    (message,) = planned(body, served).generates
    return message


def same(message: Generate, other: Planned) -> bool:
    """Whether both ask the ranks for the same, but for names and seeds that are drawn."""
    (wanted,) = other.generates
    names = ("prompt_ids", "prompt", "max_tokens", "stop", "json_schema")
    fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return all(getattr(message, name) == getattr(wanted, name) for name in names) and all(
        getattr(message.sampling, name) == getattr(wanted.sampling, name) for name in fields
    )


OPTIONS = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7, "num_predict": 20, "stop": ["X"],
    "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25,
}  # fmt: skip
MEANT = {
    **{name: value for name, value in OPTIONS.items() if name not in ("num_predict", "repeat_penalty")},
    "max_tokens": 20, "repetition_penalty": 1.1,
}  # fmt: skip
CHATS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"options": OPTIONS}, MEANT),
    ({"options": {"num_predict": -1, "num_ctx": 4096, "mirostat": 0}, "keep_alive": "5m"}, {"max_tokens": -1}),
    ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    ({"format": SCHEMA}, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    ({"format": ""}, {}),
    ({"tools": TOOLS}, {"tools": TOOLS}),
    ({"think": False}, {"reasoning_effort": "none"}),
]


@pytest.mark.parametrize(("fields", "meant"), CHATS)
def test_a_chat_is_openais(tagged_model: ServedModel, fields: dict[str, Any], meant: dict[str, Any]) -> None:
    wanted = plan_openai_chat({"messages": [USER], **meant}, tagged_model)
    assert same(asked({**ASK, **fields}, tagged_model), wanted)


@pytest.mark.parametrize(("think", "effort"), [(None, None), (True, "medium"), (False, "none"), ("high", "high"), ("low", "low")])
def test_thinking_is_an_effort(channels_model: ServedModel, think: object, effort: str | None) -> None:
    """Of a model whose prompt says how long it thinks."""
    wanted = plan_openai_chat({"messages": [USER], **({} if effort is None else {"reasoning_effort": effort})}, channels_model)
    others = plan_openai_chat({"messages": [USER], "reasoning_effort": "high" if effort != "high" else "low"}, channels_model)
    found = asked({**ASK, "think": think}, channels_model)
    assert same(found, wanted)
    assert not same(found, others)


def test_results_follow_their_calls(tagged_model: ServedModel) -> None:
    calls = [{"function": CALL}, {"function": {"name": "time", "arguments": {}}}]
    results = [{"role": "tool", "tool_name": "time", "content": "noon"}, {"role": "tool", "content": "rain"}]
    mine = asked({**ASK, "messages": [USER, {"role": "assistant", "tool_calls": calls}, *results]}, tagged_model)
    theirs = [{"id": f"call_{idx}", "type": "function", **call} for idx, call in enumerate(calls)]
    answers = [{"role": "tool", "tool_call_id": f"call_{idx}", "content": said} for idx, said in ((1, "noon"), (0, "rain"))]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": theirs}, *answers]
    assert same(mine, plan_openai_chat({"messages": messages}, tagged_model))


def test_a_prompt_is_answered_or_continued(tagged_model: ServedModel, base_model: ServedModel) -> None:
    body = {"model": "demo", "prompt": "def f(", "system": "Write code."}
    messages = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "def f("}]
    assert same(asked(body, tagged_model), plan_openai_chat({"messages": messages}, tagged_model))
    raw = plan_completion({"prompt": "def f(", "max_tokens": -1}, tagged_model)
    assert same(asked({**body, "raw": True}, tagged_model), raw)
    assert same(asked({"model": "demo", "prompt": "def f("}, base_model), raw)


def test_nothing_but_the_model_is_asked_for(tagged_model: ServedModel) -> None:
    empty_chat = {"message": {"role": "assistant", "content": ""}}
    for body, plan, said in (
        ({"model": "demo", "messages": []}, plan_chat, empty_chat),
        ({"model": "demo"}, plan_generate, {"response": ""}),
    ):
        found = plan(body, tagged_model)
        assert isinstance(found, dict)
        assert found.pop("created_at")
        assert found == {"model": "demo", **said, "done": True, "done_reason": "load"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{**USER, "images": ["AA=="]}]}, "images"),
    ({"options": {"mirostat": 2}}, "mirostat"),
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "repeat_last_n"),
    ({"model": "other"}, "there is no model"),
    ({"options": {"temperature": "hot"}}, "temperature"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(tagged_model: ServedModel, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        plan_chat({**ASK, **fields}, tagged_model)


# ---- answers ----
def lines(stream: bytes) -> list[dict[str, Any]]:
    assert stream.endswith(b"\n")
    return [json.loads(line) for line in stream.decode().split("\n")[:-1]]


def rebuilt(chunks: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
    """Text and calls of all chunks. Only the last is `done`."""
    assert [chunk["done"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    messages = [chunk["message"] for chunk in chunks]
    return "".join(message["content"] for message in messages), [
        call["function"] for message in messages for call in message.get("tool_calls", ())
    ]


ANSWERS: list[tuple[dict[str, Any], Sequence[str], FinishReason, str, list[Any], str]] = [
    ({}, ("It ", "rains."), FinishReason.STOP, "It rains.", [], "stop"),
    ({}, ("It ", "rains."), FinishReason.LENGTH, "It rains.", [], "length"),
    ({}, (), FinishReason.STOP, "", [], "stop"),
    ({"tools": TOOLS}, CALLING, FinishReason.STOP, "I look.", [CALL], "stop"),
    ({"tools": TOOLS}, CALLING[1:] * 2, FinishReason.STOP, "", [CALL, CALL], "stop"),
]


@pytest.mark.parametrize(("fields", "pieces", "finish", "text", "calls", "reason"), ANSWERS)
def test_an_answer_is_the_same_streamed_and_whole(
    tagged_model: ServedModel, fields: dict[str, Any], pieces: Sequence[str], finish: FinishReason, text: str, calls: list[Any],
    reason: str,
) -> None:  # fmt: skip
    plan = planned({**ASK, **fields, "stream": False}, tagged_model)
    for event in events_of(plan.generates[0], pieces, finish):
        assert plan.reply.on_event(0, event) == b""
    whole = plan.reply.whole()
    assert rebuilt([whole]) == (text, calls)
    assert (whole["done_reason"], whole["model"]) == (reason, "demo:latest")
    assert (whole["eval_count"], whole["prompt_eval_duration"]) == (len(pieces), 250_000_000)
    said = "".join(pieces)
    for seed in range(20):
        cuts = sorted(random.Random(seed).randrange(len(said) + 1) for _ in range(seed % 9))
        cut = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        assert rebuilt(lines(play(planned({**ASK, **fields}, tagged_model), cut, finish))) == (text, calls)


def test_drafts_are_asked_for_and_counted(tagged_model: ServedModel, base_model: ServedModel) -> None:
    for body, served in (
        (ASK, tagged_model),
        ({"model": "demo", "prompt": "x"}, tagged_model),
        ({"model": "demo", "prompt": "x"}, base_model),
    ):
        assert asked(body, served).speculate is None
        for value in Speculation:
            plan = planned({**body, "speculate": value.value}, served)
            assert (plan.generates[0].speculate, plan.left_out) == (value, ())
        with pytest.raises(ApiError, match="speculate"):
            planned({**body, "speculate": "eagle"}, served)
    for drafted in (0, 8):
        plan = planned(ASK, tagged_model)
        *events, done = events_of(plan.generates[0], ["a", "b"], FinishReason.STOP, 0, None)
        assert isinstance(done, Done)
        for event in (*events, replace(done, num_drafted_tokens=drafted, num_accepted_tokens=drafted // 2)):
            plan.reply.on_event(0, event)
        told = {name: value for name, value in lines(plan.reply.end())[-1].items() if name.startswith("draft")}
        assert told == ({"draft_n": 8, "draft_n_accepted": 4} if drafted else {})


def test_an_error_ends_a_stream(tagged_model: ServedModel) -> None:
    plan = planned(ASK, tagged_model)
    said = b"".join(plan.reply.on_event(0, event) for event in events_of(plan.generates[0], ["a"])[:-1])
    assert lines(said + plan.reply.on_error(0, Error(ErrorCode.RANK_FAILED, "rank 1 died")))[-1] == {"error": "rank 1 died"}
    assert plan.reply.end() == b""


def test_a_plan_survives_the_way_from_another_process(tagged_model: ServedModel) -> None:
    plan = planned({**ASK, "tools": TOOLS}, tagged_model)
    again = unpacked(**packed(plan), tokenizer=tagged_model.tokenizer)
    assert again.generates == plan.generates
    assert rebuilt(lines(play(again, CALLING))) == rebuilt(lines(play(plan, CALLING)))


# ---- over HTTP ----
def test_a_stream_is_lines_without_comments(http: httpx.Client, engine: ScriptedEngine) -> None:
    def play_waiting(received: Any) -> None:
        received.accept(num_before=2)
        received.say("late")
        received.finish()

    engine.on_generate = play_waiting
    with http.stream("POST", "/api/generate", json={"model": "demo", "prompt": "x"}) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        found = [json.loads(line) for line in response.iter_lines()]
    assert [chunk["response"] for chunk in found] == ["late", ""]
    engine.on_generate = says("at once")
    whole = http.post("/api/generate", json={"model": "demo", "prompt": "x", "stream": False}).json()
    assert (whole["response"], whole["done"]) == ("at once", True)


@pytest.mark.parametrize("declared", ["application/x-www-form-urlencoded", "text/plain", "application/json", None])
@pytest.mark.parametrize("site", [None, "none", "same-origin"])
def test_json_is_read_however_it_is_declared(
    http: httpx.Client, engine: ScriptedEngine, declared: str | None, site: str | None
) -> None:
    """Ollama's documents show `curl -d` alone, which declares a form."""
    engine.on_generate = says("read")
    given = {"content-type": declared, "sec-fetch-site": site}
    headers = {name: value for name, value in given.items() if value is not None}
    for path, body in (("/api/generate", {"prompt": "x"}), ("/api/chat", {"messages": [USER]}), ("/api/show", {})):
        answer = http.post(path, content=json.dumps({"model": "demo", "stream": False, **body}), headers=headers)
        assert answer.status_code == 200, answer.text
    refused = http.post("/api/chat", content=b"{}", headers={**headers, "sec-fetch-site": "cross-site"})
    assert (refused.status_code, set(refused.json())) == (403, {"error"}), "a form of another site is sent without being asked"


def test_the_model_is_described(http: httpx.Client) -> None:
    (entry,) = http.get("/api/tags").json()["models"]
    assert entry["name"] == "demo"
    assert entry["details"]["parameter_size"] == "16M"
    assert http.get("/api/ps").json()["models"][0]["context_length"] == 2048
    shown = http.post("/api/show", json={"model": "demo:latest"}).json()
    assert "completion" in shown["capabilities"]
    assert shown["model_info"]["kog.context_length"] == 2048
    assert http.get("/api/version").json()["version"]
    missing = http.post("/api/show", json={"model": "other"})
    assert (missing.status_code, set(missing.json())) == (404, {"error"})
    assert http.get("/api/nothing").json()["error"].startswith("there is nothing at")
