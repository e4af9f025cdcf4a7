"""Bodies that are refused: which field is named, by which code, and that nothing but ApiError comes out."""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_dist.gateway.openai.body import _path, read_body
from kog_dist.gateway.openai.chat import ChatRequest, plan_chat
from kog_dist.gateway.openai.completions import CompletionRequest, plan_completion
from kog_dist.gateway.openai.errors import ApiError, from_rpc
from kog_dist.gateway.openai.peer_fields import REFUSED_EVERYWHERE
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.request_model import RequestModel
from kog_dist.gateway.openai.responses import ResponsesRequest, plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.model.generation_config import sampling_defaults, shown_sampling
from kog_dist.rpc.messages import Error, ErrorCode
from tests.unit.pinning import compare

USER = [{"role": "user", "content": "hi"}]
PLANS = {"chat": plan_chat, "completion": plan_completion, "response": plan_response}
LEAST: dict[str, dict[str, Any]] = {"chat": {"messages": USER}, "completion": {"prompt": "x"}, "response": {"input": "x"}}


def refused(kind: str, served: ServedModel, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        PLANS[kind]({**LEAST[kind], **fields}, served)
    error = caught.value
    assert error.body()["error"] == {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    assert error.message.isprintable()
    assert len(error.message) < 600
    return error


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 100.5), ("temperature", -1e-9), ("temperature", float("nan")),
        ("temperature", float("inf")), ("temperature", "0.5"), ("temperature", True), ("top_p", 1.5), ("top_p", -1e-9),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 2.5),
        ("frequency_penalty", float("-inf")), ("seed", -(2**63) - 1), ("seed", 2**64), ("stop", ""), ("stop", ["a"] * 17),
        ("stop", "x" * 257), ("stop", "\N{GRINNING FACE}" * 65), ("stop", [1]), ("stream", 1), ("min_tokens", -1),
        ("ignore_eos", "yes"), ("user", 7), ("stop_token_ids", [1]), ("guided_json", {}), ("best_of", 2),
    ],
)  # fmt: skip
def test_values_out_of_range_name_their_field(base_model: ServedModel, kind: str, field: str, value: Any) -> None:
    error = refused(kind, base_model, **{field: value})
    assert (error.status, error.type) == (400, "invalid_request_error")
    assert error.param is not None
    assert error.param.startswith(field)
    assert field in error.message


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"4096": 1}, "4096"),
        ({"-1": 1}, "-1"),
        ({"01": 1}, "01"),
        ({"²": 1}, "xb2"),
        ({"9" * 5000: 1}, "9999"),
        ({"1": 101}, "100"),
    ],
)
def test_biases_are_of_token_ids(base_model: ServedModel, bias: dict[str, float], says: str) -> None:
    error = refused("chat", base_model, logit_bias=bias)
    assert error.param is not None
    assert error.param.startswith("logit_bias")
    assert says in error.message


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": None}, "messages"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [*USER, {"role": "user"}]}, "messages[1].content"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
         "messages[0].content[0].type"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ("chat", {"messages": [{"role": "user", "content": "x", "tool_cals": 1}]}, "messages[0].tool_cals"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": []}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ("chat", {"n": 9}, "n"), ("chat", {"n": 0}, "n"), ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": -2}, "max_tokens"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"functions": [{}]}, "functions"), ("chat", {"modalities": ["audio"]}, "modalities"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
                  "tool_choice": "required"}, "tools"),
        ("chat", {"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ("completion", {"min_tokens": 5, "max_completion_tokens": 2}, "min_tokens"),
        ("completion", {"min_tokens": 17}, "min_tokens"), ("response", {"min_tokens": 5, "max_output_tokens": 2}, "min_tokens"),
        ("completion", {"prompt": []}, "prompt"), ("completion", {"prompt": ""}, "prompt"),
        ("completion", {"prompt": [4096]}, "prompt"), ("completion", {"prompt": [-1]}, "prompt[0]"),
        ("completion", {"prompt": ["a"] * 9}, "prompt"), ("completion", {"prompt": ["a"] * 4, "n": 3}, "n"),
        ("completion", {"prompt": None}, "prompt"), ("completion", {"echo": "yes"}, "echo"),
        ("completion", {"echo": True, "logprobs": 1, "response_format": {"type": "json_object"}}, "echo"),
        ("completion", {"max_tokens": 0}, "max_tokens"), ("completion", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"suffix": "x"}, "suffix"), ("response", {"suffix": "x"}, "suffix"),
        ("completion", {"suffix": "x"}, "suffix"), ("completion", {"logprobs": 21}, "logprobs"),
        ("response", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("response", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("response", {"input": [{"role": "user"}]}, "input[0].content"),
        ("response", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}]}, "input[0].arguments"),
        ("response", {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ("response", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ("response", {"background": True}, "background"), ("response", {"truncation": "auto"}, "truncation"),
        ("response", {"max_tokens": 5}, "max_tokens"), ("response", {"tools": [{"type": "teleport"}]}, "tools[0].type"),
        ("response", {"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(base_model: ServedModel, kind: str, fields: dict[str, Any], param: str) -> None:
    error = refused(kind, base_model, **fields)
    assert (error.status, error.param) == (400, param), error.message


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        ("chat", {"stop": ["a"] * 17}, "stop: must have at most 16 items, got 17"),
        ("chat", {"stop": [""]}, 'stop[0]: string must have at least 1 character, got ""'),
        ("chat", {"stop": 5}, "stop: must be a valid string, got 5"),
        ("chat", {"messages": []}, "messages: must have at least 1 item, got 0"),
        ("chat", {"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias: must have at most 1024 items, got 2000"),
        ("response", {"input": []}, "input: must have at least 1 item, got 0"),
    ],
)
def test_how_many_there_may_be_is_said(base_model: ServedModel, kind: str, fields: dict[str, Any], sentence: str) -> None:
    assert refused(kind, base_model, **fields).message == sentence


def test_an_integer_of_too_many_digits_is_too_long() -> None:
    with pytest.raises(ApiError) as caught:
        read_body(b'{"seed": ' + b"9" * 5000 + b"}")
    assert caught.value.message == "the body is not valid JSON: an integer is too long, with more than 4300 digits"


def test_harmless_values_of_unsupported_fields_pass(base_model: ServedModel) -> None:
    body = {
        "functions": None, "modalities": ["text"], "best_of": 1, "use_beam_search": False, "skip_special_tokens": True,
        "add_generation_prompt": True, "stop_token_ids": [], "store": True, "metadata": {"a": "b"}, "reasoning_effort": "low",
        "service_tier": "auto", "parallel_tool_calls": False, "verbosity": "low", "prediction": None, "logit_bias": {},
        "safety_identifier": "x", "prompt_cache_retention": "24h", "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    assert len(plan_chat({**LEAST["chat"], **body}, base_model).generates) == 1
    left_out = {"tools": [{"type": "web_search"}], "include": ["reasoning.encrypted_content"], "client_metadata": {"a": 1}}
    assert plan_response({**LEAST["response"], **left_out}, base_model).generates[0].json_schema is None


def test_an_unknown_model_is_a_404_that_lists_names(base_model: ServedModel) -> None:
    error = refused("chat", base_model, model="gpt-5")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert all(name in error.message for name in ("demo", "default", "demo-alias"))
    for name in ("demo", "default", "demo-alias", None):
        assert plan_chat({**LEAST["chat"], "model": name}, base_model)


def test_prompts_that_do_not_fit(base_model: ServedModel) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    assert refused("chat", base_model, messages=long).code == "context_length_exceeded"
    huge = [{"role": "user", "content": "x" * 2_000_000}]
    assert "bytes" in refused("chat", base_model, messages=huge).message
    assert refused("completion", base_model, prompt=[5] * 2048).code == "context_length_exceeded"
    error = refused("completion", base_model, prompt=[5] * 2000, max_tokens=49)
    assert (error.code, "at most 48" in error.message) == ("context_length_exceeded", True)
    assert plan_completion({"prompt": [5] * 2000, "max_tokens": 48}, base_model).generates[0].max_tokens == 48


def test_a_model_without_tokenizer_takes_ids_only(base_model: ServedModel) -> None:
    bare = ServedModel("bare", (), 64, 320, None, None, 0)
    assert refused("chat", bare).code == "no_tokenizer"
    assert refused("completion", bare).code == "no_tokenizer"
    assert plan_completion({"prompt": [[1, 2], [3]]}, bare).generates[1].prompt_ids == array("I", [3])
    assert bare.card()["chat"] == "none"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff{}",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a":1,"a":2}',
        b"[" * 100_000,
        b'{"a":' * 70 + b"1" + b"}" * 70,
    ],
)
def test_bodies_that_are_no_json(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_body(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [None, 5, "x", [], True])
def test_bodies_must_be_objects(base_model: ServedModel, body: object) -> None:
    for plan in PLANS.values():
        with pytest.raises(ApiError, match="object"):
            plan(body, base_model)


def test_lone_surrogates_are_refused(base_model: ServedModel) -> None:
    raw = b'{"messages": [{"role": "user", "content": "\\uD83D\\uDE00"}]}'
    assert plan_chat(read_body(raw), base_model).generates
    with pytest.raises(ApiError, match="surrogate"):
        read_body(raw.replace(b"\\uDE00", b""))
    lone = "\ud800"  # should it come another way
    for kind, fields in LEAST.items():
        value = [{"role": "user", "content": lone}] if kind == "chat" else lone
        assert refused(kind, base_model, **dict.fromkeys(fields, value)).status == 400


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_of_the_engine_has_a_status(code: ErrorCode) -> None:
    error = from_rpc(Error(code, "what happened", "id", 1.5 if code is ErrorCode.QUEUE_FULL else None))
    assert 400 <= error.status < 600
    assert (error.code, error.message) == (code.value, "what happened")
    assert (error.status == 429) == (code is ErrorCode.QUEUE_FULL) == (error.retry_after_s == 1.5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("kind", "model"), [("chat", ChatRequest), ("completion", CompletionRequest), ("response", ResponsesRequest)]
)
def test_any_json_is_planned_or_refused(kind: str, model: Any, base_model: ServedModel) -> None:
    names = sorted({*model.model_fields, *model.refused})

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.dictionaries(st.sampled_from(names), JSON, max_size=3))
    def check(fields: dict[str, Any]) -> None:
        outcome: Planned | ApiError
        try:
            outcome = PLANS[kind]({**LEAST[kind], **fields}, base_model)
        except ApiError as error:
            outcome = error
        if isinstance(outcome, ApiError):
            assert outcome.status in (400, 404)
            json.dumps(outcome.body()).encode()
        else:
            assert 1 <= len(outcome.generates) <= 8

    check()


def test_defaults_of_a_model_are_checked() -> None:
    found = sampling_defaults({"temperature": 0.6, "top_p": 0.9, "eos_token_id": 0})
    assert (found.temperature, found.top_p, found.top_k) == (0.6, 0.9, 0)
    assert shown_sampling(found) == "temperature 0.6, top_p 0.9"
    assert shown_sampling(sampling_defaults({})) == "temperature 1"
    assert shown_sampling(sampling_defaults({"temperature": 0, "repetition_penalty": 1.05})) == "greedy, repetition_penalty 1.05"
    assert sampling_defaults({"top_k": -1}) == sampling_defaults({"top_k": None}), "all, as over HTTP"
    for wrong in ({"temperature": -1}, {"top_p": 2}, {"top_k": 1.5}, {"min_p": "0"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sampling_defaults(wrong)


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_every_field_is_documented(model: Any) -> None:
    """Those of other servers by the page of sources that has them, whose refusals say what to use instead."""
    text = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
    assert "`kog_dist/gateway/openai/peer_fields.py`" in text
    for name in {*model.model_fields, *(model.refused.keys() - REFUSED_EVERYWHERE.keys())} - {"messages", "text"}:
        assert f"`{name}`" in text, f"docs/openai.md says nothing of {name}"


def test_only_what_may_go_well_the_second_time_is_repeated() -> None:
    """Clients of OpenAI repeat what ended with 408, 409, 429 or 5xx."""
    found = dict[int, set[str]]()
    for code in ErrorCode:
        found.setdefault(from_rpc(Error(code, "x", "id")).status, set()).add(code.name)
    assert found == {
        400: {"INVALID_REQUEST", "NO_TOKENIZER", "TOKEN_ID_OUT_OF_RANGE", "CONTEXT_LENGTH_EXCEEDED", "INVALID_CONSTRAINT"},
        404: {"UNKNOWN_REQUEST"},
        422: {"CONSTRAINT_FAILED"},
        429: {"QUEUE_FULL"},
        500: {"PROTOCOL_ERROR", "PROTOCOL_VERSION", "DUPLICATE_REQUEST_ID", "NUMERICAL_FAULT", "INTERNAL_ERROR"},
        503: {"DRAINING", "RANK_FAILED", "STARTUP_FAILED", "ENGINE_LOST", "DRAIN_TIMEOUT", "SHUTDOWN", "SLOW_READER"},
        504: {"DEADLINE_EXCEEDED"},
    }


def test_the_name_of_a_wrong_item_is_its_place() -> None:
    """Items from the first on; what is behind the last one is none."""
    body = {"stop": ["a", "b"]}
    assert _path(("stop", 1), body) == ("stop", 1)
    assert _path(("stop", 2), body) == ("stop",)
    assert _path(("stop", 0, "str"), body) == ("stop", 0)
    assert _path(("stop", "list[str]", 0), body) == ("stop", 0)
    assert _path(("missing",), body) == ("missing",)


def test_values_that_mean_nothing_are_those_of_the_text() -> None:
    """Of every field that is refused otherwise, in all APIs; `TESTS_PIN=1` writes them anew."""
    for name in ("openai.chat_request", "openai.completion_request", "openai.responses_request", "ollama.requests"):
        importlib.import_module(f"kog_dist.gateway.{name}")
    importlib.import_module("kog_dist.gateway.anthropic.messages_request")
    found = {
        f"{kind.__name__}.{name}: {refusal.harmless!r} {' '.join(refusal.counts_with)}".rstrip()
        for kind in _all_below(RequestModel)
        if kind.__module__.startswith("kog_dist.")
        for name, refusal in kind.refused.items()
    }
    compare("values-that-mean-nothing", sorted(found))


def _all_below(kind: type[RequestModel]) -> Iterator[type[RequestModel]]:
    for below in kind.__subclasses__():
        yield below
        yield from _all_below(below)
