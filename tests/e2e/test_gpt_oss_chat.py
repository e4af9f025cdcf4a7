"""A tiny gpt-oss in MXFP4 behind HTTP: random weights write no sense; what a grammar enforces is read as calls and answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kog_dist.bench.engine.session import engine_session
from tests.e2e.http_engine import HttpEngine, http_engine
from tests.unit import moe_models
from tests.unit.gateway_openai.conftest import with_channels
from tests.unit.gateway_openai.engine_script import CHANNELS_TEMPLATE

PARAMETERS = {
    "type": "object", "properties": {"a": {"enum": [1, 22, 333]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
VOCAB_SIZE = 4200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpEngine]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    config, stored, _ = moe_models.in_mxfp4()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = torch.randn(VOCAB_SIZE, config.hidden_size, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    config.vocab_size = VOCAB_SIZE
    moe_models.write_mxfp4(folder, config, stored)
    (folder / "tokenizer.json").write_text(json.dumps(with_channels()))
    (folder / "chat_template.jinja").write_text(CHANNELS_TEMPLATE)
    with engine_session() as session, http_engine(session, str(folder), "--ranks=2", "--device=cpu", "--check-experts") as made:
        yield made


def asked(served: HttpEngine, path: str, **fields: Any) -> Any:
    return served.http.post(f"/v1/{path}", json={"temperature": 0, **fields}, timeout=60.0).raise_for_status().json()


@pytest.mark.timeout(180)
def test_calls_and_answers_that_are_enforced(served: HttpEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tool = {"name": "add", "parameters": PARAMETERS}
    enforced: dict[str, Any] = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    at_once = {"reasoning_effort": "none", "parallel_tool_calls": False, "max_tokens": 90}
    [choice] = asked(served, "chat/completions", messages=messages, **at_once, **enforced)["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "add")
    assert json.loads(call["function"]["arguments"])["a"] in (1, 22, 333)
    enforced = {"tools": [{"type": "function", **tool}], "tool_choice": "required", "parallel_tool_calls": False}
    response = asked(served, "responses", input="hi", max_output_tokens=90, reasoning={"effort": "none"}, **enforced)
    [item] = [item for item in response["output"] if item["type"] == "function_call"]
    assert (item["name"], item["arguments"]) == ("add", call["function"]["arguments"]), "the same prompt, the same answer"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}
    bounded = {"max_tokens": 90, "chat_template_kwargs": {"thinking_budget": 6}}
    answer = asked(served, "chat/completions", messages=messages, response_format=schema, **bounded)
    [choice] = answer["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 22, 333)
    assert choice["message"]["reasoning_content"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}, "six, and the end"


@pytest.mark.timeout(180)
def test_a_free_answer_ends(served: HttpEngine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = asked(served, "chat/completions", messages=messages, max_tokens=24, reasoning_effort="low")
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] <= 24
