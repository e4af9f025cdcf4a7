"""Answers in channels, as gpt-oss writes them: content, reasoning and calls, however they are cut; and prompts of such models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.reading.styles import Reading, Style
from kog_dist.model.tokenizer import CHANNEL_TAGS, Tokenizer
from kog_dist.rpc.messages import Generate, Tokens
from tests.unit.gateway_openai.conftest import with_channels
from tests.unit.gateway_openai.engine_script import cut, data_of, events_of, play
from tests.unit.gateway_openai.test_prompts import prompt_of
from tests.unit.gateway_openai.test_replies import whole
from tests.unit.gateway_reading.readings import said

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
NEXT = "<|end|><|start|>assistant"
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
USER = {"role": "user", "content": "hi"}


def read(pieces: list[str], names: tuple[str, ...] = ("add", "sub")) -> list[tuple[str, str]]:
    """What is read of text alone, where letters are tags."""
    return said(Reading(Style("channels", "channels"), {name: {} for name in names}).parser(None, ()), pieces)


READINGS = {
    "reasoning and answer": (ANALYSIS + "Hm." + NEXT + FINAL + "Yes.<|return|>", [("reasoning", "Hm."), ("content", "Yes.")]),
    "answer alone": (FINAL + "Yes.", [("content", "Yes.")]),
    "a call": (ANALYSIS + "1?" + NEXT + CALL + '{"a": 1}', [("reasoning", "1?"), ("add", '{"a": 1}')]),
    "a call that ends with its tag": (CALL + '{"a": 1}<|call|>', [("add", '{"a": 1}')]),
    "the recipient before the channel": (
        " to=functions.sub<|channel|>commentary json<|message|>{}<|call|>", [("sub", "{}")]
    ),
    "two calls": (CALL + '{"a": 1}<|call|><|start|>assistant' + CALL + '{"a": 2}', [("add", '{"a": 1}'), ("add", '{"a": 2}')]),
    "a call without arguments": (CALL + "<|call|>", [("add", "{}")]),
    "a preamble": (
        "<|channel|>commentary<|message|>I will add." + NEXT + CALL + "{}", [("content", "I will add."), ("add", "{}")]
    ),
    "a tool that nobody offered": ("<|channel|>commentary to=functions.rm<|message|>{}", [("reasoning", "{}")]),
    "a tool of its own": (ANALYSIS.replace("<|message|>", " to=python code<|message|>") + "1+1", [("reasoning", "1+1")]),
    "a call without the name of the tools": (
        CALL.replace("functions.", "") + '{"a": 1}<|call|>', [("add", '{"a": 1}')]
    ),
    "a channel and a recipient in one word": (
        CALL.replace("commentary to", "commentaryto") + '{"a": 1}<|call|>', [("add", '{"a": 1}')]
    ),
    "JSON ends a call": (CALL + '{"a": 1} and more<|call|>', [("add", '{"a": 1}')]),
    "a call that is cut": (CALL + '{"a": "x', [("add", '{"a": "x"}')]),
    "a call in another language": (CALL + "add(1)<|call|>", [("reasoning", "add(1)")]),
    "tags in a call's text": (CALL + '{"a": "<|end|>"}<|call|>', [("add", '{"a": "<|end|>"}')]),
    "no header": ("Yes.", [("content", "Yes.")]),
    "no header, and text that begins like one": ("to be", [("content", "to be")]),
    "the beginning of one": ("to", [("content", "to")]),
    "a message alone": ("<|message|>Yes.", [("content", "Yes.")]),
    "a role first": ("<|start|>assistant" + FINAL + "Yes.", [("content", "Yes.")]),
    "cut in a header": (ANALYSIS + "Hm." + NEXT + "<|channel|>fin", [("reasoning", "Hm.")]),
    "cut in a tag": (FINAL + "Yes.<|retu", [("content", "Yes.<|retu")]),
    "no end before the next channel": (ANALYSIS + "Hm." + FINAL + "Yes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    "text that looks like a tag": (FINAL + "a <| b |> c <|x|>", [("content", "a <| b |> c <|x|>")]),
    "between messages": (ANALYSIS + "Hm.<|end|>\n<|start|>a" + FINAL + "No.", [("reasoning", "Hm."), ("content", "No.")]),
    "a header without end": ("<|channel|>" + "x" * 1100, [("content", "x" * 1100)]),
    "nothing": ("", []),
}  # fmt: skip


@pytest.mark.parametrize("name", READINGS)
def test_answers_are_read(name: str) -> None:
    text, expected = READINGS[name]
    assert read([text]) == expected
    assert read(list(text)) == expected, "character by character"


PIECES = (
    ANALYSIS,
    FINAL,
    CALL,
    NEXT,
    *CHANNEL_TAGS,
    "<|",
    "|>",
    "to=functions.sub",
    " ",
    "x",
    '{"a": 1}',
    "assistant",
    "final",
    "é",
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_however_it_is_cut_the_same_is_read(text: str, cuts: list[int]) -> None:
    assert read(cut(text, cuts)) == read([text])


# ---- replies ----
ANSWER = [ANALYSIS, "Let", " me.", "<|end|>", "<|start|>", "assistant", CALL, '{"a"', ": 1}"]


def test_a_chat_has_reasoning_content_and_calls(channels_model: ServedModel) -> None:
    body = {"messages": [USER], "tools": TOOLS}
    answer = whole(plan_chat(body, channels_model), ANSWER, tokenizer=channels_model.tokenizer)
    choice = ChatCompletion.model_validate(answer).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert answer["choices"][0]["message"]["reasoning_content"] == "Let me."
    assert choice.message.tool_calls is not None
    assert choice.message.content is None
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    chunks = data_of(play(plan_chat({**body, "stream": True}, channels_model), ANSWER, tokenizer=channels_model.tokenizer))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Let me."
    assert [delta["tool_calls"][0]["function"]["arguments"] for delta in deltas if "tool_calls" in delta] == ["", "{", '"a": 1}']
    assert not any("<|" in str(delta) for delta in deltas)


def test_a_chat_without_tools_has_content(channels_model: ServedModel) -> None:
    spoken = [ANALYSIS, "Hm.", NEXT, FINAL, "Yes."]
    answer = whole(plan_chat({"messages": [USER]}, channels_model), spoken, tokenizer=channels_model.tokenizer)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (
        "reasoning_content"
        not in whole(plan_chat({"messages": [USER]}, channels_model), [FINAL, "Yes."])["choices"][0]["message"]
    )


def test_a_response_has_reasoning_items(channels_model: ServedModel) -> None:
    body = {"input": "hi", "tools": [{"type": "function", **TOOL}]}
    response = whole(plan_response(body, channels_model), ANSWER, tokenizer=channels_model.tokenizer)
    Response.model_validate(response)
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert response["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me."}]
    assert response["output"][0]["summary"] == []
    events = data_of(play(plan_response({**body, "stream": True}, channels_model), ANSWER, tokenizer=channels_model.tokenizer))
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"].removeprefix("response.") for event in events[:8]] == [
        "created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done",
    ]  # fmt: skip
    ended = events[-1]["response"]["output"]
    assert [item["content"] for item in ended[:1]] == [response["output"][0]["content"]]
    assert ended[1]["arguments"] == '{"a": 1}'


def test_other_models_keep_their_text(base_model: ServedModel, tagged_model: ServedModel, channels_model: ServedModel) -> None:
    """Whatever it looks like; and so does a text completion of such a model."""
    for served in (base_model, tagged_model):
        message = whole(plan_chat({"messages": [USER]}, served), [FINAL, "Yes."])["choices"][0]["message"]
        assert message["content"] == FINAL + "Yes."
    assert channels_model.has_channels
    assert not tagged_model.has_channels


def test_tags_that_are_only_letters_are_text(channels_model: ServedModel) -> None:
    """A model that quotes them does not write their tokens."""
    tokenizer = channels_model.tokenizer
    assert tokenizer is not None
    planned = plan_chat({"messages": [USER], "tools": TOOLS}, channels_model)
    quoted = "<|end|><|start|>assistant" + CALL + '{"a": 1}<|call|>'
    letters = [token_id for character in quoted for token_id in tokenizer.encode(character, add_special_tokens=False)]
    header = tokenizer.encode(FINAL, add_special_tokens=False)
    accepted, prefill, *_, done = events_of(planned.generates[0], [])
    for event in (
        accepted,
        prefill,
        Tokens(planned.generates[0].request_id, 0, tuple(header), FINAL, ()),
        Tokens(planned.generates[0].request_id, 3, tuple(letters), quoted, ()),
        done,
    ):
        planned.reply.on_event(0, event)
    message = planned.reply.whole()["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == (quoted, None)


# ---- prompts ----
def test_enforced_answers_begin_with_a_thought(channels_model: ServedModel) -> None:
    """Its end is a token; then the grammar begins, with the header of a call or of the answer."""

    def asked(**fields: Any) -> Generate:
        return plan_chat({"messages": [USER], **fields}, channels_model).generates[0]

    def lark(message: Generate) -> str:
        return str(json.loads(message.grammar or "{}")["lark"])

    tokenizer = channels_model.tokenizer
    assert tokenizer is not None
    free = asked(tools=TOOLS)
    assert prompt_of(free, channels_model).endswith("<|start|>assistant")
    assert (free.grammar, free.json_schema, free.thought_end) == (None, None, None)
    header = f'<[{tokenizer.id_of("<|start|>")}]> "assistant" <[{tokenizer.id_of("<|channel|>")}]>'
    call, form = {"tools": TOOLS, "tool_choice": "required"}, {"response_format": {"type": "json_object"}}
    for fields, word in ((call, "commentary to=functions.add "), (form, "final")):
        message, at_once = asked(**fields), asked(**fields, reasoning_effort="none")
        assert prompt_of(message, channels_model).endswith(f"<|start|>assistant{ANALYSIS}")
        assert message.thought_end == tokenizer.id_of("<|end|>")
        assert f'{header} "{word}"' in lark(message)
        assert prompt_of(at_once, channels_model).endswith("<|start|>assistant")
        assert at_once.thought_end is None
        assert "assistant" not in lark(at_once)
    spoken = ["Hm.", "<|end|>", "<|start|>assistant", CALL, '{"a": 1}']
    planned = plan_chat({"messages": [USER], **call}, channels_model)
    answer = whole(planned, spoken, tokenizer=tokenizer)["choices"][0]["message"]
    assert answer["reasoning_content"] == "Hm."
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    response = plan_response({"input": "hi", "text": {"format": {"type": "json_object"}}}, channels_model)
    assert response.generates[0].thought_end == tokenizer.id_of("<|end|>")


def test_a_thought_is_bounded_by_its_budget(channels_model: ServedModel) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"thinking_budget": 50}}
    message = plan_chat(body, channels_model).generates[0]
    assert prompt_of(message, channels_model).endswith(ANALYSIS)
    assert (message.thought_tokens, message.grammar) == (50, None)


@pytest.mark.parametrize(
    ("effort", "word"), [("high", "high"), ("minimal", "low"), ("of the utmost", "medium"), (None, "medium")]
)
def test_the_effort_reaches_the_template(
    effort: str | None, word: str, channels_model: ServedModel, tagged_model: ServedModel
) -> None:
    asked = plan_chat({"messages": [USER], "reasoning_effort": effort}, channels_model).generates[0]
    assert f"Reasoning: {word}<|end|>" in prompt_of(asked, channels_model)
    planned = plan_response({"input": "hi", "reasoning": {"effort": effort}}, channels_model)
    assert f"Reasoning: {word}<|end|>" in prompt_of(planned.generates[0], channels_model)
    assert whole(planned, [FINAL, "Yes."])["reasoning"]["effort"] == effort
    others = plan_chat({"messages": [USER], "reasoning_effort": effort}, tagged_model).generates[0]
    assert prompt_of(others, tagged_model) == "<|user|>hi\n<|assistant|>"


def test_earlier_reasoning_goes_back_before_its_call(channels_model: ServedModel) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "I add.", "reasoning_content": "Let me.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    text = prompt_of(plan_chat({"messages": messages, "tools": TOOLS}, channels_model).generates[0], channels_model)
    expected = (
        "<|channel|>analysis<|message|>Let me.\nI add.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    assert expected in text
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ]
    body = {"input": items, "tools": [{"type": "function", **TOOL}]}
    text = prompt_of(plan_response(body, channels_model).generates[0], channels_model)
    assert expected.replace("\nI add.", "") in text


def test_tags_have_text_in_answers_and_none_in_grammars(channels_model: ServedModel) -> None:
    tokenizer = channels_model.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(ANALYSIS + "Hm.<|end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == ANALYSIS + "Hm.<|end|>"
    decoder = tokenizer.stream()
    assert "".join(map(decoder.push, ids)) + decoder.flush() == ANALYSIS + "Hm.<|end|>"
    assert [tokenizer.token_bytes(tokenizer.id_of(tag) or 0) for tag in CHANNEL_TAGS] == [b""] * len(CHANNEL_TAGS)


def test_the_ends_of_answers_and_calls_end_an_answer(tmp_path: Path) -> None:
    """Also where no file of the folder says so."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_channels()))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_ids[:2] == (tokenizer.id_of("<|return|>"), tokenizer.id_of("<|call|>"))
