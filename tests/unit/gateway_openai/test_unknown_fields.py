"""Fields that a request has and we have not: which are left out and named, which are refused, and what is said then."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from kog_dist.gateway.openai.chat import ChatRequest, plan_chat
from kog_dist.gateway.openai.completions import CompletionRequest
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.peer_fields import HARMLESS, REFUSED_EVERYWHERE
from kog_dist.gateway.openai.responses import ResponsesRequest, plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, unpacked
from tests.unit.gateway_openai.engine_script import TemplateTwin
from tests.unit.gateway_openai.test_refusals import LEAST, PLANS, USER, refused

CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def test_unknown_fields_are_refused_with_a_guess(base_model: ServedModel) -> None:
    error = refused("chat", base_model, temprature=1)
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert "temperature?" in error.message
    assert refused("chat", base_model, **{"\x00\ud800": 1}).status == 400
    strict = dataclasses.replace(base_model, leaves_out_unknown=False)
    assert refused("chat", strict, wings=2).param == "wings"
    assert refused("chat", strict, messages=[{**USER[0], "id": "x"}]).param == "messages[0].id"


@pytest.mark.parametrize(
    "name", ["Temperature", "top-p", "topP", "max_token", "maxTokens", "sotp", "seeds", "response_fromat", "stram"]
)
def test_what_looks_like_a_field_that_counts_is_no_other(base_model: ServedModel, name: str) -> None:
    assert refused("chat", base_model, **{name: 1}).code == "unknown_parameter"
    assert plan_chat({**LEAST["chat"], name: None}, base_model).left_out == (name,), "null means absent"


@pytest.mark.parametrize("name", ["users", "user_id", "prompt_cache_keys", "meta_data", "stores", "service_tiers"])
def test_what_looks_like_a_field_that_counts_for_nothing_is_left_out(base_model: ServedModel, name: str) -> None:
    assert plan_chat({**LEAST["chat"], name: "x"}, base_model).left_out == (name,)


@pytest.mark.parametrize("kind", PLANS)
def test_unknown_fields_that_look_like_no_other_are_left_out(base_model: ServedModel, kind: str) -> None:
    plan, body = PLANS[kind], LEAST[kind]
    planned = plan({**body, "wings": 2, "x-y.z": None}, base_model)
    assert planned.left_out == ("wings", "x-y.z")
    assert planned.generates[0].prompt_ids == plan(body, base_model).generates[0].prompt_ids
    parts = packed(planned)
    again = unpacked(parts["generates"], parts["reply"], parts["told"], base_model.tokenizer)
    assert again.left_out == planned.left_out
    assert len(plan({**body, **{f"wings{i}": 0 for i in range(16)}}, base_model).left_out) == 16
    assert plan({**body, **{f"wings{i}": 0 for i in range(20)}}, base_model).left_out[15:] == ("wings15", "and 4 more")
    assert plan({**body, "line\nbreak": 1, "é": 2, "": 3}, base_model).left_out == (r"'line\nbreak'", r"'\xe9'", "''")
    assert "more than 256" in refused(kind, base_model, **{f"wings{i}": 0 for i in range(256)}).message


@pytest.mark.parametrize(
    ("kind", "fields", "left_out"),
    [
        ("chat", {"messages": [{**USER[0], "id": "9", "provider_specific_fields": None}]},
         ("messages[].id", "messages[].provider_specific_fields")),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "mood": 1}]}]},
         ("messages[].content[].mood",)),
        ("chat", {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [
            {**CALL, "thought_signature": "x", "function": {**CALL["function"], "wings": {}}}]}]},
         ("messages[].tool_calls[].thought_signature", "messages[].tool_calls[].function.wings")),
        ("chat", {"tools": [{**TOOL, "eager_input_streaming": True, "function": {**TOOL["function"], "returns": {"type": "x"}}}]},
         ("tools[].eager_input_streaming", "tools[].function.returns")),
        ("chat", {"response_format": {**SCHEMA, "wings": 1, "json_schema": {**SCHEMA["json_schema"], "id": 2}}},
         ("response_format.wings", "response_format.json_schema.id")),
        ("chat", {"stream": True, "stream_options": {"wings": True}}, ("stream_options.wings",)),
        ("completion", {"stream": True, "stream_options": {"wings": True}}, ("stream_options.wings",)),
        ("chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}, "mode": 5}},
         ("tool_choice.mode", "tool_choice.function.x")),
        ("response", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "mood": 1}], "x": 2}]},
         ("input[].x", "input[].content[].mood")),
        ("response", {"tools": [{"type": "function", "name": "f", "wings": 2}], "text": {"wings": 1}},
         ("text.wings", "tools[].wings")),
    ],
)  # fmt: skip
def test_unknown_fields_inside_of_others_are_left_out_and_named(
    base_model: ServedModel, kind: str, fields: dict[str, Any], left_out: tuple[str, ...]
) -> None:
    planned = PLANS[kind]({**LEAST[kind], **fields}, base_model)
    assert sorted(planned.left_out) == sorted(left_out)
    assert all(name.isascii() and name.isprintable() for name in planned.left_out)


def test_a_field_of_every_message_is_named_once(base_model: ServedModel) -> None:
    messages = [{"role": "user", "content": "x", "id": str(idx)} for idx in range(100)]
    assert plan_chat({"messages": messages}, base_model).left_out == ("messages[].id",)
    found = plan_chat({"messages": messages}, base_model).generates[0].prompt_ids
    assert found == plan_chat({"messages": [{"role": "user", "content": "x"}] * 100}, base_model).generates[0].prompt_ids


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": [{**USER[0], "images": ["x"]}]}, "messages[0].images", "text only"),
        ({"messages": [{**USER[0], "audio": {"id": "x"}}]}, "messages[0].audio", "text only"),
        ({"messages": [{**USER[0], "function_call": {"name": "f", "arguments": "{}"}}]},
         "messages[0].function_call", "tool_calls"),
        ({"messages": [{**USER[0], "tool_call": [CALL]}]}, "messages[0].tool_call", "did you mean tool_calls?"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "args": {"a": 1}}}]}]},
         "messages[1].tool_calls[0].function.args", "use arguments"),
        ({"tools": [{**TOOL, "function": {"name": "f", "input_schema": {"type": "object"}}}]},
         "tools[0].function.input_schema", "use parameters"),
        ({"tools": [{**TOOL, "function": {"name": "f", "paramters": {"type": "object"}}}]},
         "tools[0].function.paramters", "did you mean parameters?"),
        ({"response_format": {"type": "json_object", "schemas": {}}}, "response_format.schemas", "did you mean schema?"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "did you mean include_usage?"),
    ],
)  # fmt: skip
def test_what_changes_the_answer_is_refused_inside_of_others(
    base_model: ServedModel, fields: dict[str, Any], param: str, says: str
) -> None:
    error = refused("chat", base_model, **fields)
    assert error.param == param
    assert says in error.message


# Of each name values that would change the answer, and those that ask for nothing.
PEERS: dict[str, tuple[tuple[object, ...], tuple[object, ...], str]] = {
    "typical_p": ((0.5, True), (1, 1.0, None), "sampler"),
    "mirostat": ((1, 2), (0, None, False), "sampler"),
    "dry_multiplier": ((0.8,), (0, 0.0), "repetition_penalty"),
    "xtc_probability": ((0.5,), (0.0,), "sampler"),
    "top_n_sigma": ((1.0,), (-1, -1.0, 0), "sampler"),
    "dynatemp_range": ((0.5,), (0.0,), "sampler"),
    "repeat_penalty": ((1.1,), (1.0, 1), "repetition_penalty"),
    "enable_thinking": ((True, False), (None,), "chat_template_kwargs"),
    "thinking": (({"type": "enabled"}, {"type": "disabled"}), (None,), "chat_template_kwargs"),
    "think": ((True, False), (None,), "chat_template_kwargs"),
    "n_predict": ((5, -1), (None,), "max_tokens"),
    "max_new_tokens": ((5,), (None,), "max_tokens"),
    "stop_sequences": ((["x"],), ([], None), "stop"),
    "guided_json": (({"type": "object"},), (None,), "response_format"),
    "grammar": (("root ::= x",), ("", None), "response_format"),
    "json_schema": (({"type": "object"},), ({}, None), "response_format"),
    "format": (("json", {"type": "object"}), ("",), "response_format"),
    "safe_prompt": ((True,), (False,), "system message"),
    "random_seed": ((5,), (None,), "seed"),
    "images": ((["x"],), ([],), "text"),
    "options": (
        ({"temperature": 0.5}, {"num_predict": 5}, {"num_ctx": 5, "seed": 1}, "x"),
        ({}, {"num_ctx": 8192, "num_gpu": 1}, {"mirostat": 0}),
        "body itself",
    ),
    "extra_body": (({"top_k": 5},), ({},), "body itself"),
    "transforms": ((["middle-out"],), ([],), "never cut"),
    "truncate": ((100,), (True, False), "never cut"),
    "include_reasoning": ((False,), (True,), "reasoning"),
    "do_sample": ((False,), (True,), "temperature"),
    "num_beams": ((4,), (1,), "beam"),
    "mock_response": (("x",), (None,), "model's own"),
}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("name", PEERS)
def test_fields_of_peers_that_change_the_answer(base_model: ServedModel, kind: str, name: str) -> None:
    changing, neutral, says = PEERS[name]
    for value in changing:
        error = refused(kind, base_model, **{name: value})
        assert (error.code, error.param) == ("unsupported_parameter", name)
        assert says in error.message
    for value in neutral:
        planned = PLANS[kind]({**LEAST[kind], name: value}, base_model)
        assert planned.left_out == (), "it is done as it is asked for"


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("value", [True, 7, "x", [1], {"a": 1}])
def test_fields_of_peers_that_change_nothing(base_model: ServedModel, kind: str, value: object) -> None:
    known = {*PLANS_MODELS[kind].model_fields, *PLANS_MODELS[kind].refused}
    for name in sorted(HARMLESS - known)[:: 1 if value is True else 10]:
        assert PLANS[kind]({**LEAST[kind], name: value}, base_model).left_out == (name,)
    assert not HARMLESS & REFUSED_EVERYWHERE.keys()


PLANS_MODELS: dict[str, Any] = {"chat": ChatRequest, "completion": CompletionRequest, "response": ResponsesRequest}


def test_penalties_over_the_last_tokens_count_with_a_penalty_alone(base_model: ServedModel) -> None:
    body = {"repeat_last_n": 64, "penalize_nl": False}
    assert plan_chat({**LEAST["chat"], **body, "presence_penalty": 0}, base_model).left_out == ()
    assert refused("chat", base_model, **body, presence_penalty=0.5).param == "repeat_last_n"
    assert plan_chat({**LEAST["chat"], "repeat_last_n": -1, "frequency_penalty": 1.0}, base_model)


def test_what_llama_cpp_sends_with_its_defaults_is_taken(base_model: ServedModel) -> None:
    defaults = {
        "temperature": 0.8, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
        "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "samplers": [], "timings_per_token": True, "cache_prompt": True, "reasoning_format": "auto", "stream": True,
    }  # fmt: skip
    planned = plan_chat({**LEAST["chat"], **defaults}, base_model)
    assert {"cache_prompt", "timings_per_token", "dry_base"} <= set(planned.left_out)
    assert "typ_p" not in planned.left_out


def test_marks_for_a_prompt_cache_are_left_out_of_messages(base_model: ServedModel) -> None:
    part = {"type": "text", "text": "hi"}
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = {"messages": [{"role": "user", "content": [{**part, **mark}], **mark}]}
    plain = {"messages": [{"role": "user", "content": [part]}]}
    for served in (base_model, dataclasses.replace(base_model, leaves_out_unknown=False)):
        found = plan_chat(marked, served)
        assert (found.generates[0].prompt_ids, found.left_out) == (plan_chat(plain, served).generates[0].prompt_ids, ())
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi", **mark}], **mark}]
    assert plan_response({"input": items}, base_model).generates[0].prompt_ids == found.generates[0].prompt_ids


# ---- what agents send back ----
def prompt_of(served: ServedModel, messages: Sequence[Any], **fields: Any) -> str:
    assert served.tokenizer is not None
    return served.tokenizer.decode(plan_chat({"messages": messages, **fields}, served).generates[0].prompt_ids or ())


@pytest.mark.parametrize("broken", ['{"a": 1', "", "[]", "5", '{"a": 1}}', "not JSON", '{"a": NaN}', '"{}"', '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("kind", ["chat", "response"])
def test_a_call_with_broken_arguments_is_shown_as_it_is(tagged_model: ServedModel, kind: str, broken: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": broken}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "bad"}]
    items = [
        *USER, {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": broken},
        {"type": "function_call_output", "call_id": "call_1", "output": "bad"},
    ]  # fmt: skip
    planned = plan_chat({"messages": messages}, tagged_model) if kind == "chat" else plan_response({"input": items}, tagged_model)
    assert tagged_model.tokenizer is not None
    text = tagged_model.tokenizer.decode(planned.generates[0].prompt_ids or ())
    assert f'"arguments": {json.dumps(broken) if broken else "{}"}' in text


def test_a_template_that_breaks_on_them_gets_the_call_as_text(base_model: ServedModel) -> None:
    source = """
        {%- for message in messages %}{{ '<|' ~ message.role ~ '|>' ~ message.content }}
        {%- for call in message.tool_calls %}
        {%- if call.function.arguments is string %}{{ raise_exception('no object') }}{% endif %}
        {{- '<' ~ call.function.name ~ '>' }}{% endfor %}{% endfor %}"""
    served = dataclasses.replace(base_model, chat_template=TemplateTwin(source))
    broken = {**CALL, "function": {"name": "g", "arguments": '{"a": 1'}}
    messages = [*USER, {"role": "assistant", "content": "so", "tool_calls": [CALL, broken]}]
    assert prompt_of(served, messages) == '<|user|>hi<|assistant|>so\ng({"a": 1)<f>'
    refusing = dataclasses.replace(base_model, chat_template=TemplateTwin("{{ raise_exception('no object') }}"))
    with pytest.raises(ApiError, match="no object"):
        prompt_of(refusing, messages)


def test_other_shapes_of_an_earlier_answer(tagged_model: ServedModel) -> None:
    plain = [*USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    wanted = prompt_of(tagged_model, plain)
    for function in ({"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": '{ "a":1 }'}):
        for call in ({"function": function}, {"id": None, "type": None, "index": 0, "function": function}):
            assert prompt_of(tagged_model, [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]) == wanted
    empty = prompt_of(tagged_model, [*USER, {"role": "assistant", "content": ""}])
    assert prompt_of(tagged_model, [*USER, {"role": "assistant", "content": None}]) == empty
    said = prompt_of(tagged_model, [*USER, {"role": "assistant", "content": "no"}])
    assert prompt_of(tagged_model, [*USER, {"role": "assistant", "content": None, "refusal": "no"}]) == said
    part = {"type": "refusal", "refusal": "no"}
    assert prompt_of(tagged_model, [*USER, {"role": "assistant", "content": [part]}]) == said
    assert prompt_of(tagged_model, [*USER, {"role": "assistant", "content": [{"type": "output_text", "text": "no"}]}]) == said
    nothing = [*USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": None}]
    assert prompt_of(tagged_model, nothing).endswith("<|tool|>\n<|assistant|>")


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_one_meaning_by_all_its_names(channels_model: ServedModel, name: str) -> None:
    wanted = prompt_of(channels_model, [*USER, {"role": "assistant", "content": "a", "reasoning_content": "so"}])
    assert "so" in wanted
    assert prompt_of(channels_model, [*USER, {"role": "assistant", "content": "a", name: "so"}]) == wanted
    both = {"role": "assistant", "content": "a", "reasoning_content": "so", "reasoning": "else"}
    assert prompt_of(channels_model, [*USER, both]) == wanted
    null = {"role": "assistant", "content": "a", "reasoning_content": None, name: "so"}
    assert prompt_of(channels_model, [*USER, null]) == wanted


# ---- values ----
def test_small_temperatures_are_greedy(base_model: ServedModel) -> None:
    for value in (1e-8, 1e-320, 0.0009):
        assert plan_chat({**LEAST["chat"], "temperature": value}, base_model).generates[0].sampling.temperature == 0
    assert plan_chat({**LEAST["chat"], "temperature": 0.001}, base_model).generates[0].sampling.temperature == 0.001


@pytest.mark.parametrize(
    ("seed", "used"), [(-5, 2**64 - 5), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1), (2**63, 2**63), (0, 0), (-2, 2**64 - 2)]
)
def test_seeds_count_modulo_64_bits(base_model: ServedModel, seed: int, used: int) -> None:
    assert plan_chat({**LEAST["chat"], "seed": seed}, base_model).generates[0].sampling.seed == used


def test_a_json_object_may_have_a_schema(base_model: ServedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = plan_chat(
        {**LEAST["chat"], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, base_model
    )
    for kind, fields in (
        ("chat", {"response_format": {"type": "json_object", "schema": schema}}),
        ("completion", {"response_format": {"type": "json_object", "schema": schema}}),
        ("response", {"text": {"format": {"type": "json_object", "schema": schema}}}),
    ):
        planned = PLANS[kind]({**LEAST[kind], **fields}, base_model)
        assert planned.generates[0].json_schema == wanted.generates[0].json_schema
    plain = plan_chat({**LEAST["chat"], "response_format": {"type": "json_object", "schema": {}}}, base_model)
    assert plain.generates[0].json_schema == '{"type":"object"}'


@pytest.mark.parametrize("name", ["max_tokens", "seed", "n", "top_k", "min_tokens", "top_logprobs"])
def test_a_whole_number_may_be_written_with_a_point(base_model: ServedModel, name: str) -> None:
    body = {**LEAST["chat"], "logprobs": True, "seed": 1, "max_tokens": 9}
    with_point, without = (plan_chat({**body, name: value}, base_model).generates for value in (3.0, 3))
    assert [(one.max_tokens, one.sampling) for one in with_point] == [(one.max_tokens, one.sampling) for one in without]
    assert refused("chat", base_model, **{name: 3.5}).param == name
    minus = plan_chat({**body, "max_tokens": -1.0}, base_model).generates[0]
    assert minus.max_tokens == plan_chat({**body, "max_tokens": -1}, base_model).generates[0].max_tokens


def test_names_that_clients_make_may_be_long(tagged_model: ServedModel) -> None:
    long = "x" * 5000  # LiteLLM keeps signatures of thoughts in ids of calls
    messages: list[dict[str, Any]] = [
        *USER, {"role": "assistant", "tool_calls": [{**CALL, "id": long}]},
        {"role": "tool", "tool_call_id": long, "content": "a", "name": "f"},
    ]  # fmt: skip
    fields = {"user": long, "prompt_cache_key": long}
    plain = [{**message, **({"tool_call_id": "c"} if "tool_call_id" in message else {})} for message in messages]
    assert prompt_of(tagged_model, messages, **fields) == prompt_of(tagged_model, plain)
    items = [*USER, {"type": "function_call", "call_id": long, "name": "f", "arguments": "{}"},
             {"type": "function_call_output", "call_id": long, "output": "a"}]  # fmt: skip
    assert plan_response({"input": items}, tagged_model).generates
