"""Bodies of all APIs, and what clients get of an answer, pinned as text: what each value of a body changes, and each line."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kog_dist.gateway.anthropic.messages import plan_messages
from kog_dist.gateway.ollama import plans as ollama
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.peer_fields import HARMLESS, REFUSED_EVERYWHERE
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import RequestModel
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.rpc.messages import Error, ErrorCode, FinishReason
from tests.unit.gateway_openai.conftest import base_model, tagged_model
from tests.unit.gateway_openai.engine_script import events_of, play
from tests.unit.gateway_openai.test_body_mutants import BODIES, Body, shown
from tests.unit.pinning import compare
from tests.unit.varied import OTHERS, around

__all__ = ["base_model", "tagged_model"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK: list[Body] = [{"role": "user", "content": "Weather in Oslo?"}]
TOOLS: list[Body] = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}]
FLAT_TOOLS: list[Body] = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
OTHER_BODIES: dict[str, tuple[Callable[..., Any], Body]] = {
    "messages": (plan_messages, {
        "model": "demo", "max_tokens": 64, "system": [{"type": "text", "text": "Be brief."}], "temperature": 0.5, "top_k": 4,
        "stop_sequences": ["END"], "thinking": {"type": "disabled"},
        "tools": [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]}]}),
    "a chat of Ollama": (ollama.plan_chat, {
        "model": "demo", "messages": ASK, "stream": False, "format": SCHEMA, "think": False, "keep_alive": "5m",
        "options": {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "num_predict": 20, "stop": ["X"]}}),
    "a text of Ollama": (ollama.plan_generate, {
        "model": "demo", "prompt": "def f(", "suffix": "", "raw": False, "system": "Be brief.", "stream": True,
        "options": {"repeat_penalty": 1.1, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.25}}),
}  # fmt: skip
ALL_BODIES = {**BODIES, **OTHER_BODIES}


def models(of: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for one in of.__subclasses__():
        yield one
        yield from models(one)


FIELDS = {
    name
    for model in models()
    if model.__module__.startswith("kog_dist.")
    for name in (*model.model_fields, *model.refused, *model.inert)
}
FEW = {label: OTHERS[label] for label in ("null", "true", "1", "text", "object of 1")}
HI = [{"role": "user", "content": "hi"}]
SHORT_BODIES: dict[str, tuple[Callable[..., Any], Body]] = {
    "chat": (plan_chat, {"messages": HI}), "completion": (plan_completion, {"prompt": "hi"}),
    "response": (plan_response, {"input": HI}),
    "messages": (plan_messages, {"messages": HI, "max_tokens": 5, "model": "demo"}),
    "Ollama": (ollama.plan_chat, {"messages": HI, "model": "demo", "options": {}}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count(1)
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes=16: f"id{next(numbers)}")
    monkeypatch.setattr(secrets, "randbits", lambda _: 5)
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)


@pytest.mark.parametrize("name", ALL_BODIES)
def test_a_body_means_what_it_meant(name: str, tagged_model: ServedModel) -> None:
    plan, body = ALL_BODIES[name]

    def read(changed: Body) -> object:
        planned = plan(changed, tagged_model)
        return shown(planned) if isinstance(planned, Planned) else type(planned)  # Ollama's to load a model

    compare(f"bodies/{name}", list(around(body, read, refusals=(ApiError,))))


@pytest.mark.parametrize("name", SHORT_BODIES)
def test_a_name_means_what_it_meant(name: str, base_model: ServedModel) -> None:
    plan, body = SHORT_BODIES[name]
    prefix = "options/" * ("options" in body)
    names = [
        prefix + field for field in sorted({*HARMLESS, *REFUSED_EVERYWHERE, *FIELDS, "unheard_of", "temprature"} - set(body))
    ]

    def read(changed: Body) -> object:
        return shown(plan(changed, base_model))

    lines = around(body, read, names=names, refusals=(ApiError,), deepest=0, others=FEW)
    compare(f"names/{name}", list(lines))


# ---- answers ----
CALLING = (
    "<think>",
    "hm",
    "</think>",
    "I look.",
    "<tool_call>",
    '{"name": "weather", "arguments": {"city": "O',
    'slo"}}',
    "</tool_call>",
)
PIECES: dict[str, Sequence[str]] = {
    "words": ("\n", "", "    ré", "turn"), "a call": CALLING[3:], "a thought": CALLING[:4], "all": CALLING,
    "broken call": CALLING[4:6], "nothing": (), "open thought": CALLING[:2],
}  # fmt: skip
ASKED: dict[str, tuple[Callable[..., Any], Body, str]] = {
    "chat": (plan_chat, {"messages": ASK}, "tools"),
    "chat, everything": (
        plan_chat, {"messages": ASK, "logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}},
        "tools",
    ),
    "completion": (plan_completion, {"prompt": "def f("}, ""),
    "completion, everything": (plan_completion, {"prompt": "def f(", "n": 2, "logprobs": 2, "echo": True}, ""),
    "response": (plan_response, {"input": ASK}, "flat"),
    "response, everything": (
        plan_response, {"input": ASK, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "instructions": "a"},
        "flat",
    ),
    "messages": (plan_messages, {"max_tokens": 64, "messages": ASK}, "messages"),
    "Ollama's chat": (ollama.plan_chat, {"messages": ASK}, "tools"),
    "Ollama's text": (ollama.plan_generate, {"prompt": "def f("}, ""),
}  # fmt: skip
MOMENT = re.compile(r"2\d{3}-\d\d-\d\dT[0-9:.]+Z")
OF_KIND: dict[str, list[Body]] = {
    "": [], "tools": TOOLS, "flat": FLAT_TOOLS, "messages": [{"name": "weather", "input_schema": SCHEMA}],
}  # fmt: skip


def lines_of(said: bytes | object) -> Iterator[str]:
    text = said.decode() if isinstance(said, bytes) else json.dumps(said)
    yield from (MOMENT.sub("NOW", line) for line in text.splitlines() if line)


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_reads_as_it_did(name: str, tagged_model: ServedModel) -> None:
    plan, body, kind = ASKED[name]
    lines: list[str] = []
    for stream, (label, pieces), with_tools in itertools.product((True, False), PIECES.items(), (False, True)):
        if with_tools and not OF_KIND[kind]:
            continue
        asked = {"model": "demo", **body, "stream": stream, **({"tools": OF_KIND[kind]} if with_tools else {})}
        for finish in FinishReason:
            if finish is not FinishReason.STOP and label != "all":
                continue
            lines.append(f"== {label}, {finish}{', streamed' * stream}{', tools' * with_tools}")
            planned = plan(asked, tagged_model)
            try:
                lines += lines_of(play(planned, pieces, finish, num_cached=1))
                lines += [] if stream else lines_of(planned.reply.whole())
            except ApiError as error:
                lines.append(f"{error.status} {error}")
    compare(f"answers/{name}", lines)


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_that_fails_reads_as_it_did(name: str, tagged_model: ServedModel) -> None:
    plan, body, _ = ASKED[name]
    lines: list[str] = []
    for stream, num_before, code in itertools.product(
        (True, False), (0, 2, 4), (ErrorCode.ENGINE_LOST, ErrorCode.INVALID_REQUEST)
    ):
        planned = plan({"model": "demo", **body, "stream": stream}, tagged_model)
        events = events_of(planned.generates[0], ("a", "b"))[:num_before]
        lines.append(f"== {code} after {num_before}{', streamed' * stream}")
        try:
            for event in events:
                lines += lines_of(planned.reply.on_event(0, event))
            for choice in range(len(planned.generates)):
                lines += lines_of(planned.reply.on_error(choice, Error(code, "it failed")))
            lines += lines_of(planned.reply.end() if stream else planned.reply.whole())
        except ApiError as error:
            lines.append(f"{error.status} {error}")
    compare(f"answers/{name}, failed", lines)
