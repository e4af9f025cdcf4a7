"""Anthropic's messages: what chat a body stands for, and what comes of an answer, streamed in any pieces and whole."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kog_dist.gateway.anthropic.errors import error_body
from kog_dist.gateway.anthropic.messages import as_chat, count_tokens, plan_messages, without_hosted_tools
from kog_dist.gateway.anthropic.messages_request import MessagesRequest
from kog_dist.gateway.openai.body import parse
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import BUDGET
from kog_dist.gateway.packing import packed, unpacked
from kog_dist.rpc.messages import Error, ErrorCode, FinishReason
from kog_dist.speculation import Speculation
from tests.unit.gateway_openai.conftest import base_model, tagged_model
from tests.unit.gateway_openai.engine_script import events_of, play

__all__ = ["base_model", "tagged_model"]
ASK = {"model": "demo", "max_tokens": 64, "messages": [{"role": "user", "content": "Weather in Oslo?"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
CALLING = ("I look.", "<tool_call>", '{"name": "weather", "arguments": {"city": "O', 'slo"}}', "</tool_call>")


def chat_of(**fields: Any) -> dict[str, Any]:
    chat = as_chat(parse(MessagesRequest, {**ASK, **fields}))
    return {name: value for name, value in chat.items() if value is not None}


def blocks(*content: Mapping[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([blocks(text("a"), text("b"))], [{"role": "user", "content": "a\nb"}]),
    (
        [{"role": "user", "content": "q"}, blocks(text("Be brief."), text("Be kind."), role="system"),
         {"role": "assistant", "content": "a"}, {"role": "system", "content": "Be loud."}],
        [{"role": "user", "content": "q"}, {"role": "system", "content": "Be brief.\nBe kind."},
         {"role": "assistant", "content": "a"}, {"role": "system", "content": "Be loud."}],
    ),
    (
        [{"role": "user", "content": "q"}, blocks(THOUGHT, text("I look."), USE, role="assistant"),
         blocks({"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("rain")]}, text("And tomorrow?"))],
        [{"role": "user", "content": "q"},
         {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"}, {"role": "user", "content": "And tomorrow?"}],
    ),
    (
        [{"role": "user", "content": "q"}, blocks(USE, role="assistant"),
         blocks({"type": "tool_result", "tool_use_id": "toolu_1", "content": "no network", "is_error": True})],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no network"}],
    ),
    (
        [{"role": "user", "content": "q"}, blocks(HIDDEN, text("a"), role="assistant"), blocks(text("b"))],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "wanted"), CHATS)
def test_turns_become_messages_of_a_chat(sent: list[Any], wanted: list[Any]) -> None:
    assert chat_of(messages=sent)["messages"] == wanted


def test_speculate_is_the_engines(base_model: ServedModel) -> None:
    assert plan_messages({**ASK, "model": base_model.name}, base_model).generates[0].speculate is None
    for value in Speculation:
        body = {**ASK, "model": base_model.name, "speculate": value.value}
        planned = plan_messages(body, base_model)
        assert (planned.generates[0].speculate, planned.left_out) == (value, ())
    with pytest.raises(ApiError, match="speculate"):
        plan_messages({**ASK, "model": base_model.name, "speculate": "eagle"}, base_model)


def test_fields_have_one_meaning() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, text("Be kind.")]
    chat = chat_of(system=system, stop_sequences=["X"], temperature=0.5, top_k=4, top_p=0.9, tools=TOOLS)
    assert chat["messages"][0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert (chat["max_tokens"], chat["stop"], chat["temperature"], chat["top_k"], chat["top_p"]) == (64, ["X"], 0.5, 4, 0.9)
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    assert chat["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ],
)
def test_choices_of_tools(choice: Any, wanted: Mapping[str, Any]) -> None:
    chat = chat_of(tools=TOOLS, tool_choice=choice)
    assert {name: chat[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat} == wanted
    assert "tool_choice" not in chat_of(tool_choice=choice), "without tools there is nothing to choose"


@pytest.mark.parametrize(
    ("thinking", "wanted"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"reasoning_effort": "medium", "chat_template_kwargs": {BUDGET: 1024}}),
        ({"type": "adaptive"}, {}),
        ({"type": "disabled"}, {"reasoning_effort": "none"}),
    ],
)
def test_thoughts_are_asked_for_as_in_chats(thinking: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    chat = chat_of(thinking=thinking)
    assert {name: chat[name] for name in ("reasoning_effort", "chat_template_kwargs") if name in chat} == wanted


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "max"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "none"),
        ({"output_config": {}}, None), ({"output_config": {"effort": None, "task_budget": {"total": 9}}}, None),
    ],
)  # fmt: skip
def test_effort_is_that_of_chats(fields: Mapping[str, Any], effort: str | None) -> None:
    assert chat_of(**fields).get("reasoning_effort") == effort


def test_the_form_of_an_answer_is_followed(tagged_model: ServedModel) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert chat_of(**fields)["response_format"] == wanted
        assert json.loads(plan_messages({**ASK, **fields}, tagged_model).generates[0].json_schema or "") == SCHEMA
    assert "response_format" not in chat_of(output_config={"format": None}, output_format=None)


def test_an_answer_that_has_begun_is_gone_on_with() -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "It"}]  # type: ignore[misc]
    assert chat_of(messages=begun)["continue_final_message"] is True
    assert "continue_final_message" not in chat_of()


def test_tools_that_anthropic_runs_are_left_out_and_named(tagged_model: ServedModel) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    body, named = without_hosted_tools({**ASK, "tools": [TOOLS[0], hosted]})
    assert body == {**ASK, "tools": TOOLS}
    assert named == ("tools[1]",)
    assert "tools[1]" in plan_messages({**ASK, "tools": [TOOLS[0], hosted]}, tagged_model).left_out


def turn_with(thought: str, *more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A turn of an assistant that has thought, and the user's next."""
    answer = blocks({**THOUGHT, "thinking": thought}, *more, role="assistant")
    results = [{"type": "tool_result", "tool_use_id": USE["id"], "content": "rain"}] if more else []
    return [answer, blocks(*results) if results else {"role": "user", "content": "And then?"}]


ALL = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        ({"keep": "all"}, ALL), ({}, ["b", "c"]), ({"keep": None}, ["b", "c"]),
        ({"keep": {"type": "thinking_turns", "value": 1}}, ["b", "c"]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, ALL), ({"keep": {"type": "all"}}, ALL),
    ],
)  # fmt: skip
def test_thoughts_of_earlier_turns_are_cleared_where_asked_for(edit: Mapping[str, Any], kept: list[str]) -> None:
    """A turn goes on over its calls: what it thought before and after them is of one turn."""
    turns = [*ASK["messages"], *turn_with("a"), *turn_with("b", USE), *turn_with("c")]  # type: ignore[misc]
    management = {"edits": [{"type": "clear_thinking_20251015", **edit}]}
    messages = chat_of(messages=turns, context_management=management)["messages"]
    assert [message["reasoning_content"] for message in messages if "reasoning_content" in message] == kept
    assert len(messages) == len(chat_of(messages=turns)["messages"]), "nothing else is left out"


def test_deferred_tools_are_shown_from_when_they_are_found() -> None:
    tools = [TOOLS[0], {**TOOLS[0], "name": "tide", "defer_loading": True}, {**TOOLS[0], "name": "moon", "defer_loading": True}]
    assert [tool["function"]["name"] for tool in chat_of(tools=tools)["tools"]] == ["weather"]
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "moon"}]}
    chat = chat_of(tools=tools, messages=[*ASK["messages"], blocks(USE, role="assistant"), blocks(found)])  # type: ignore[misc]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["weather", "moon"]
    assert chat["messages"][-1]["content"] == "The tool moon can be called now."
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    kept, _ = without_hosted_tools({**ASK, "tools": [search, *tools]})
    assert len(as_chat(parse(MessagesRequest, kept))["tools"]) == 3, "nobody would find them"
    assert "tools" not in chat_of(tools=tools[1:], tool_choice={"type": "auto"})


def change(kind: str, **tool: Any) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_definition" if "definition" in tool else "tool_reference", **tool}}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ([change("tool_addition", name="tide")], ["weather", "tide"]),
        ([change("tool_removal", name="weather")], []),
        ([change("tool_removal", name="weather"), change("tool_addition", name="weather")], ["weather"]),
        ([change("tool_addition", definition={**TOOLS[0], "name": "moon"})], ["weather", "moon"]),
        ([change("tool_addition", definition={**TOOLS[0], "name": "moon"}), change("tool_removal", name="moon")], ["weather"]),
    ],
)  # fmt: skip
def test_the_system_changes_tools_between_turns(changes: list[Any], shown: list[str]) -> None:
    tools = [TOOLS[0], {**TOOLS[0], "name": "tide", "defer_loading": True}]
    chat = chat_of(tools=tools, messages=[*ASK["messages"], blocks(*changes, role="system")])  # type: ignore[misc]
    assert [tool["function"]["name"] for tool in chat.get("tools", ())] == shown
    assert chat["messages"] == ASK["messages"], "there is no text in it"


SAID = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        (SAID, True), ({**SAID, "clear_at": "never"}, True), ({**SAID, "clear_at": "next_user_message"}, False),
        ({**SAID, "content": []}, False), ({**SAID, "content": [], "output_config": {"effort": "low"}}, False),
    ],
)  # fmt: skip
def test_what_the_system_says_for_a_turn(message: dict[str, Any], is_shown: bool) -> None:
    before, behind = [*ASK["messages"], message], [{"role": "assistant", "content": "a"}, *ASK["messages"]]  # type: ignore[misc]
    assert (SAID in chat_of(messages=[*before, *behind])["messages"]) is is_shown
    assert (SAID in chat_of(messages=before)["messages"]) is bool(message["content"]), "it is the turn's own"
    effort = message.get("output_config", {}).get("effort", "high")
    assert chat_of(messages=[*before, *behind], output_config={"effort": "high"})["reasoning_effort"] == effort


def test_claude_codes_header_of_bills_is_no_text(tagged_model: ServedModel) -> None:
    """It changes with every request, and stands before all that could be kept."""
    headers = [text(f"x-anthropic-billing-header: cc_version=2.1.332; cch={count};") for count in range(2)]
    plans = [plan_messages({**ASK, "system": [header, text("Be brief.")]}, tagged_model) for header in headers]
    assert [plan.generates[0].prompt_ids for plan in plans] == [
        plan_messages({**ASK, "system": "Be brief."}, tagged_model).generates[0].prompt_ids
    ] * 2
    assert plans[0].left_out == ("system[0]",)
    assert count_tokens({**ASK, "system": [headers[0]]}, tagged_model) == count_tokens(ASK, tagged_model)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [blocks(text("x"), IMAGE)]}, "messages[0].content[1]", "a block of type image is not supported"),
    (
        {"messages": [blocks({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]})]},
        "messages[0].content[0].content[0]",
        "type image",
    ),
    ({"messages": [blocks(USE)]}, "messages[0].content[0]", "only an assistant's message"),
    ({"max_tokens": None}, "max_tokens", "max_tokens"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "is not supported"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0]",
        "is not supported",
    ),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0]", "is not supported"),
    ({"model": "other"}, "model", "there is no model"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "must be"),
    ({"messages": [blocks(change("tool_addition", name="x"))]}, "messages[0].content[0]", "only a system's"),
    ({"messages": [SAID, blocks(change("tool_addition", name="x"), role="system")]}, "messages[1].content[0]", "no tool 'x'"),
    ({"messages": [blocks(role="system")]}, "messages", "nothing to answer"),
    ({"output_config": {"effort": 3}}, "output_config.effort", "must be"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be"),
    (
        {"messages": [blocks({"type": "tool_result", "tool_use_id": "1"}, role="system")]},
        "messages[0].content[0]",
        "only a user's",
    ),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    tagged_model: ServedModel, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        plan_messages({**ASK, **fields}, tagged_model)
    assert caught.value.param == param
    assert words in caught.value.message


def test_errors_have_anthropics_form() -> None:
    kinds = [
        error_body(ApiError(status, "x", None, None, "why"))["error"]["type"] for status in (400, 401, 404, 413, 429, 500, 503)
    ]
    assert kinds == [
        "invalid_request_error", "authentication_error", "not_found_error", "request_too_large", "rate_limit_error", "api_error",
        "overloaded_error",
    ]  # fmt: skip


@pytest.mark.parametrize("num_words", [3000, 8000, 150_000])
def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(tagged_model: ServedModel, num_words: int) -> None:
    """Claude Code shortens a conversation when it reads them."""
    with pytest.raises(ApiError) as caught:
        plan_messages({**ASK, "messages": [{"role": "user", "content": "word " * num_words}]}, tagged_model)
    message = error_body(caught.value)["error"]["message"]
    numbers = r"[0-9]+ tokens > 2047 maximum" if num_words < 150_000 else r"the prompt has [0-9]+ bytes, .*"
    assert re.fullmatch(rf"prompt is too long: {numbers}", message), message


# ---- answers ----
def events_in(stream: bytes) -> list[dict[str, Any]]:
    """The data of each event; each says its own type twice."""
    found = []
    for frame in stream.decode().split("\n\n")[:-1]:
        kind, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def rebuilt(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that the events make, as a client puts it together. Checks their order."""
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message, is_open, arguments = dict(events[0]["message"]), False, ""
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            is_open, arguments = True, ""
            continue
        assert is_open
        block = message["content"][event["index"]]
        assert event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments or "{}")
            continue
        delta = event["delta"]
        arguments += delta.get("partial_json", "")
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] += delta[name]
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def whole(planned: Planned, pieces: Sequence[str], finish: FinishReason = FinishReason.STOP) -> dict[str, Any]:
    for event in events_of(planned.generates[0], pieces, finish):
        assert planned.reply.on_event(0, event) == b""
    return planned.reply.whole()


def without_ids(content: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The blocks without what is another one in each answer."""
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


ANSWERS: list[tuple[dict[str, Any], Sequence[str], FinishReason, list[str], str]] = [
    ({}, ("It ", "rains."), FinishReason.STOP, ["text"], "end_turn"),
    ({}, ("It ", "rains."), FinishReason.LENGTH, ["text"], "max_tokens"),
    ({}, (), FinishReason.STOP, [], "end_turn"),
    ({"tools": TOOLS}, CALLING, FinishReason.STOP, ["text", "tool_use"], "tool_use"),
    ({"tools": TOOLS}, CALLING[1:] * 2, FinishReason.STOP, ["tool_use", "tool_use"], "tool_use"),
    ({"tools": TOOLS}, CALLING[:3], FinishReason.LENGTH, ["text", "tool_use"], "max_tokens"),
    ({"tools": TOOLS, "tool_choice": {"type": "any"}}, CALLING[1:], FinishReason.STOP, ["tool_use"], "tool_use"),
]


@pytest.mark.parametrize(("fields", "pieces", "finish", "kinds", "reason"), ANSWERS)
def test_an_answer_is_the_same_streamed_and_whole(
    tagged_model: ServedModel, fields: dict[str, Any], pieces: Sequence[str], finish: FinishReason, kinds: list[str], reason: str
) -> None:
    found = whole(plan_messages({**ASK, **fields}, tagged_model), pieces, finish)
    assert [block["type"] for block in found["content"]] == kinds
    assert (found["stop_reason"], found["role"], found["type"], found["model"]) == (reason, "assistant", "message", "demo")
    calls = [block for block in found["content"] if block["type"] == "tool_use"]
    assert all((call["name"], call["input"]) == ("weather", {"city": "Oslo"}) for call in calls if finish is FinishReason.STOP)
    assert len({call["id"] for call in calls}) == len(calls)
    said = "".join(pieces)
    for seed in range(20):
        random_cuts = random.Random(seed)
        cuts = sorted(random_cuts.randrange(len(said) + 1) for _ in range(random_cuts.randrange(12)))
        cut = [said[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
        stream = rebuilt(events_in(play(plan_messages({**ASK, **fields, "stream": True}, tagged_model), cut, finish)))
        assert without_ids(stream["content"]) == without_ids(found["content"])
        assert (stream["stop_reason"], stream["stop_sequence"]) == (reason, None)


def test_the_stop_sequence_is_named(tagged_model: ServedModel) -> None:
    for stream in (False, True):
        planned = plan_messages({**ASK, "stop_sequences": ["Oslo"], "stream": stream}, tagged_model)
        *events, done = events_of(planned.generates[0], ["In "])
        said = b"".join(planned.reply.on_event(0, event) for event in [*events, dataclasses.replace(done, stop_string="Oslo")])
        found = rebuilt(events_in(said + planned.reply.end())) if stream else planned.reply.whole()
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "Oslo")


def test_cached_tokens_are_counted_beside_the_others(tagged_model: ServedModel) -> None:
    planned = plan_messages({**ASK, "stream": True}, tagged_model)
    events = events_in(play(planned, ["a", "b"], num_cached=5))
    num_prompt = len(planned.generates[0].prompt_ids or ())
    assert events[0]["message"]["usage"] == {"input_tokens": num_prompt, "output_tokens": 0}
    assert events[-2]["usage"] == {
        "input_tokens": num_prompt - 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5, "output_tokens": 2,
    }  # fmt: skip


def test_an_error_ends_a_stream(tagged_model: ServedModel) -> None:
    planned = plan_messages({**ASK, "stream": True}, tagged_model)
    said = b"".join(planned.reply.on_event(0, event) for event in events_of(planned.generates[0], ["a"])[:-1])
    said += planned.reply.on_error(0, Error(ErrorCode.RANK_FAILED, "rank 1 died"))
    last = events_in(said)[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "rank 1 died"}}
    assert planned.reply.end() == b""


def test_a_limit_that_does_not_fit_is_cut_to_what_does(tagged_model: ServedModel) -> None:
    (message,) = plan_messages({**ASK, "max_tokens": 32_000}, tagged_model).generates
    assert message.max_tokens == tagged_model.max_context - len(message.prompt_ids or ())


def test_tokens_are_counted_as_they_are_sent(tagged_model: ServedModel) -> None:
    body = {**ASK, "tools": TOOLS, "system": "Be brief."}
    (message,) = plan_messages(body, tagged_model).generates
    assert count_tokens({name: value for name, value in body.items() if name != "max_tokens"}, tagged_model) == {
        "input_tokens": len(message.prompt_ids or ())
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_plan_survives_the_way_from_another_process(tagged_model: ServedModel, stream: bool) -> None:
    planned = plan_messages({**ASK, "tools": TOOLS, "stream": stream}, tagged_model)
    again = unpacked(**packed(planned), tokenizer=tagged_model.tokenizer)
    assert again.generates == planned.generates
    if stream:
        assert play(again, CALLING) == play(planned, CALLING)
    else:
        assert whole(again, CALLING) == whole(planned, CALLING)
