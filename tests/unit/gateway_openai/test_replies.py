"""Answers of the three APIs, streamed and whole: shapes that the openai package accepts, and the same content in both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.rpc.messages import Error, ErrorCode, FinishReason
from tests.unit.gateway_openai.engine_script import cut, data_of, events_of, play

CHAT = {"messages": [{"role": "user", "content": "def add(a, b):"}]}
ADDER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADDER}},
    {"type": "function", "function": {"name": "stop"}},
]
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
TIMING_KEYS = {
    "queue_ms", "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
    "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def chat_message(stream: bytes) -> dict[str, Any]:
    """What the openai package makes of a stream."""
    state = ChatCompletionStreamState()
    *chunks, last = data_of(stream)
    assert last == "[DONE]"
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    return dict(state.get_final_completion().choices[0].message.model_dump(exclude_none=True))


def whole(planned: Planned, pieces: list[str], **options: Any) -> dict[str, Any]:
    assert play(planned, pieces, **options) == b""
    return planned.reply.whole()


# ---- chat ----
def test_a_chat_stream_has_the_order_that_clients_expect(base_model: ServedModel) -> None:
    planned = plan_chat({**CHAT, "stream": True, "stream_options": {"include_usage": True}}, base_model)
    first, *middle, last, end = data_of(play(planned, ["\n", "", "    ré", "turn"], num_cached=1))
    *middle, final = middle
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in middle] == [{"content": "\n"}, {"content": "    ré"}, {"content": "turn"}]
    assert (final["choices"][0]["delta"], final["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (last["choices"], end) == ([], "[DONE]")
    assert all(chunk["usage"] is None for chunk in (first, *middle, final))
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert set(last["timings"]) == set(final["timings"]) == TIMING_KEYS
    assert {chunk["id"] for chunk in (first, *middle, final, last)} == {planned.generates[0].request_id}


def test_no_chunk_comes_before_the_first_token(base_model: ServedModel) -> None:
    planned = plan_chat({**CHAT, "stream": True}, base_model)
    accepted, prefill, token, *_ = events_of(planned.generates[0], ["x"])
    assert planned.reply.on_event(0, accepted) + planned.reply.on_event(0, prefill) == b""
    assert len(data_of(planned.reply.on_event(0, token))) == 2


def test_timings_of_an_answer(base_model: ServedModel) -> None:
    timings = whole(plan_chat(CHAT, base_model), ["a", "b", "c"], num_cached=2)["timings"]
    num_prompt = len(plan_chat(CHAT, base_model).generates[0].prompt_ids or ())
    assert timings.pop("queue_ms") >= 0
    assert timings == {
        "cache_n": 2, "prompt_n": num_prompt - 2, "prompt_ms": 250.0, "prompt_per_token_ms": round(250 / (num_prompt - 2), 3),
        "prompt_per_second": round((num_prompt - 2) / 0.25, 3), "predicted_n": 3, "predicted_ms": 20.0,
        "predicted_per_token_ms": 10.0, "predicted_per_second": 100.0,
    }  # fmt: skip


def test_choices_are_interleaved_and_the_prompt_counts_once(base_model: ServedModel) -> None:
    planned = plan_chat(
        {**CHAT, "n": 3, "seed": 2**64 - 1, "stream": True, "stream_options": {"include_usage": True}}, base_model
    )
    assert [message.sampling.seed for message in planned.generates] == [2**64 - 1, 0, 1]
    assert len({message.request_id for message in planned.generates}) == 3
    assert len({message.conversation for message in planned.generates}) == 3
    chunks = data_of(play(planned, ["a", "b"]))
    for choice in range(3):
        mine = [chunk["choices"][0] for chunk in chunks[:-2] if chunk["choices"][0]["index"] == choice]
        assert "".join(one["delta"].get("content", "") for one in mine) == "ab"
        assert mine[-1]["finish_reason"] == "stop"
    assert chunks[-2]["usage"]["completion_tokens"] == 6
    assert chunks[-2]["usage"]["prompt_tokens"] == len(planned.generates[0].prompt_ids or ())
    assert len(ChatCompletion.model_validate(whole(plan_chat({**CHAT, "n": 3}, base_model), ["a"])).choices) == 3


def test_usage_so_far_in_every_chunk(base_model: ServedModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for plan, body in ((plan_chat, CHAT), (plan_completion, {"prompt": "x"})):
        chunks = data_of(play(plan({**body, "stream": True, "stream_options": options}, base_model), ["a", "b"]))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1]]
        assert counts == sorted(counts)
        assert counts[-1] == 2
        assert all(CompletionUsage.model_validate(chunk["usage"]) for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("finish", "reason"), [(FinishReason.STOP, "stop"), (FinishReason.LENGTH, "length"), (FinishReason.DEADLINE, "length")]
)
def test_finish_reasons(base_model: ServedModel, finish: FinishReason, reason: str) -> None:
    answer = ChatCompletion.model_validate(whole(plan_chat(CHAT, base_model), ["x"], finish=finish))
    assert answer.choices[0].finish_reason == reason
    completion = Completion.model_validate(whole(plan_completion({"prompt": "x"}, base_model), ["x"], finish=finish))
    assert completion.choices[0].finish_reason == reason


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [Error(ErrorCode.RANK_FAILED, "rank 1 died"), None])
def test_an_answer_that_fails_ends_once(base_model: ServedModel, stream: bool, failure: Error | None) -> None:
    """None: it is cancelled."""
    plans = ((plan_chat, CHAT), (plan_completion, {"prompt": "x"}), (plan_response, {"input": "x"}))
    for plan, body in plans:
        planned = plan({**body, "stream": stream}, base_model)
        reply = planned.reply
        *begun, done = events_of(planned.generates[0], ["a", "b"], FinishReason.CANCELLED)
        said = b"".join(reply.on_event(0, event) for event in begun)
        said += reply.on_error(0, failure) if failure is not None else reply.on_event(0, done)
        assert reply.is_over
        assert reply.on_event(0, begun[-1]) + reply.on_error(0, failure or Error(ErrorCode.SHUTDOWN, "x")) + reply.end() == b""
        if not stream:
            assert said == b""
            with pytest.raises(ApiError) as caught:
                reply.whole()
            assert caught.value.status == (503 if failure is not None else 499)
            continue
        last = data_of(said)[-1]
        code = "rank_failed" if failure is not None else "request_cancelled"
        if plan is plan_response:
            assert EVENT.validate_python(last).type == "response.failed"
            assert code in last["response"]["error"]["message"]
        else:
            assert last["error"]["code"] == code


# ---- log-probabilities ----
def test_log_probabilities_of_a_chat(base_model: ServedModel) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 2}
    pieces = ["a", "", "b"]  # the second token's text comes with the third
    answer = ChatCompletion.model_validate(whole(plan_chat(body, base_model), pieces))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -1.5, -2.5]
    assert base_model.tokenizer is not None
    for idx, entry in enumerate(logprobs.content):
        assert bytes(entry.bytes or ()) == base_model.tokenizer.token_bytes(300 + idx)
        assert len(entry.top_logprobs) == 2
    special = logprobs.content[0].top_logprobs[0]  # id 0 is the end token
    assert (special.token, special.bytes) == ("token_id:0", None)
    streamed = [
        entry
        for chunk in data_of(play(plan_chat({**body, "stream": True}, base_model), pieces))[:-1]
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == [entry.model_dump() for entry in logprobs.content]


def test_log_probabilities_of_a_completion(base_model: ServedModel) -> None:
    body = {"prompt": "x", "logprobs": 3}
    answer = Completion.model_validate(whole(plan_completion(body, base_model), ["a", "b"]))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.5, -1.5]
    assert logprobs.tokens is not None
    assert logprobs.text_offset == [0, len(logprobs.tokens[0])]
    assert [len(top) for top in logprobs.top_logprobs or ()] == [3, 3]
    chunks = data_of(play(plan_completion({**body, "stream": True}, base_model), ["a", "b"]))[:-1]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [token for one in told for token in one["tokens"]] == logprobs.tokens
    assert [offset for one in told for offset in one["text_offset"]] == logprobs.text_offset


def test_log_probabilities_of_a_response(base_model: ServedModel) -> None:
    body = {"input": "x", "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    response = Response.model_validate(whole(plan_response(body, base_model), ["a", "b"]))
    part = response.output[0].content[0]
    assert [entry.logprob for entry in part.logprobs] == [-0.5, -1.5]
    events = data_of(play(plan_response({**body, "stream": True}, base_model), ["a", "b"]))
    told = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert [entry["logprob"] for entry in told] == [-0.5, -1.5]
    assert all(EVENT.validate_python(event) for event in events)


def test_log_probabilities_are_of_the_text_behind_a_thought(tagged_model: ServedModel) -> None:
    body = {"input": "x", "top_logprobs": 0, "include": ["message.output_text.logprobs"]}
    pieces = ["<think>", "Hm.", "</think>", "\n", "Yes", "."]
    for stream in (False, True):
        planned = plan_response({**body, "stream": stream}, tagged_model)
        said = play(planned, pieces)
        output = data_of(said)[-1]["response"]["output"] if stream else planned.reply.whole()["output"]
        thought, message = output
        assert thought["content"][0]["text"] == "Hm."
        assert message["content"][0]["text"] == "Yes."
        assert [entry["logprob"] for entry in message["content"][0]["logprobs"]] == [-2.5, -3.5, -4.5, -5.5]


# ---- responses ----
def test_a_response_comes_into_being_in_openais_order(base_model: ServedModel) -> None:
    events = data_of(play(plan_response({"input": "x", "stream": True}, base_model), ["a", "", "b"]))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(EVENT.validate_python(event) for event in events)
    response = Response.model_validate(events[-1]["response"])
    assert (response.output_text, response.status) == ("ab", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    assert set(events[-1]["response"]["timings"]) == TIMING_KEYS


def test_a_response_that_was_cut_is_incomplete(base_model: ServedModel) -> None:
    cut_off = whole(plan_response({"input": "x"}, base_model), ["a"], finish=FinishReason.LENGTH)
    response = Response.model_validate(cut_off)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    events = data_of(play(plan_response({"input": "x", "stream": True}, base_model), [""], FinishReason.LENGTH))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


# ---- streamed and whole are the same ----
ANSWERS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.sampled_from([
            "<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": 1}}', '{"name":"stop","arguments":{}}', " ", "\n",
            "<tool", "x", '{"name": "other", "arguments": {}}', "<", "{", "}", '"', "\\", "é", "\x00",
        ]),
        max_size=12,
    ).map("".join),
    st.dictionaries(st.text(max_size=3), st.text(max_size=6), max_size=3).map(
        lambda arguments: TypeAdapter(Any).dump_json({"name": "add", "arguments": arguments}).decode()
    ),
)  # fmt: skip
CHOICES = ("none", "auto", "required", {"type": "function", "function": {"name": "add"}})


@settings(max_examples=80, deadline=None, derandomize=True)
@given(text=ANSWERS, cuts=st.lists(st.integers(0, 200), max_size=6), choice=st.sampled_from(CHOICES), logprobs=st.booleans())
def test_a_streamed_chat_is_the_whole_one(
    tagged_model: ServedModel, text: str, cuts: list[int], choice: Any, logprobs: bool
) -> None:
    body = {**CHAT, "tools": TOOLS, "tool_choice": choice, "logprobs": logprobs}
    at_once = whole(plan_chat(body, tagged_model), [text])
    in_pieces = whole(plan_chat(body, tagged_model), cut(text, cuts))
    streamed = play(plan_chat({**body, "stream": True}, tagged_model), cut(text, cuts))
    messages = []
    for answer in (at_once, in_pieces):
        message = ChatCompletion.model_validate(answer).choices[0].message.model_dump(exclude_none=True)
        messages.append(without_ids(message))
    messages.append(without_ids(chat_message(streamed)))
    assert messages[0] == messages[1] == messages[2]
    assert data_of(streamed)[-2]["choices"][0]["finish_reason"] == at_once["choices"][0]["finish_reason"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message; ids of calls are random, and a stream has no null content."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"content": message.get("content") or "", "calls": calls}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=ANSWERS, cuts=st.lists(st.integers(0, 200), max_size=6), choice=st.sampled_from(["none", "auto", "required"]))
def test_a_streamed_response_is_the_whole_one(tagged_model: ServedModel, text: str, cuts: list[int], choice: str) -> None:
    body = {"input": "x", "tools": FLAT_TOOLS, "tool_choice": choice}
    expected = whole(plan_response(body, tagged_model), [text])
    events = data_of(play(plan_response({**body, "stream": True}, tagged_model), cut(text, cuts)))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert outputs(events[-1]["response"]) == outputs(expected)
    grown: dict[int, str] = {}
    for event in events:
        EVENT.validate_python(event)
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    assert [grown.get(idx, "") for idx in range(len(expected["output"]))] == [said for _, said in outputs(expected)]


def outputs(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Kind or function, and text or arguments, of each item."""
    return [
        (item["name"], item["arguments"]) if item["type"] == "function_call" else ("message", item["content"][0]["text"])
        for item in response["output"]
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_streamed_completion_is_the_whole_one(base_model: ServedModel, text: str, cuts: list[int]) -> None:
    chunks = data_of(play(plan_completion({"prompt": ["x", "y"], "stream": True}, base_model), cut(text, cuts)))[:-1]
    expected = whole(plan_completion({"prompt": ["x", "y"]}, base_model), [text])
    for choice in expected["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"] == text
    assert all(Completion.model_validate({**chunk, "choices": []}) for chunk in chunks)


def test_the_model_of_the_answer_is_the_served_one(base_model: ServedModel) -> None:
    renamed = dataclasses.replace(base_model, name='org/a "quoted" name')
    assert whole(plan_chat({**CHAT, "model": "default"}, renamed), ["x"])["model"] == renamed.name
    assert data_of(play(plan_chat({**CHAT, "stream": True}, renamed), ["x"]))[0]["model"] == renamed.name
