"""Prompts of chats are those of transformers' `apply_chat_template`, and what a template leaves out is named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, unpacked
from kog_dist.gateway.tokens import tokenize
from kog_dist.model.chat_template import ChatTemplate
from kog_dist.model.tokenizer import Tokenizer

TEXT = "Say hello to the world."
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + BEGIN
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
STRIPPED = CHATML.replace("{{ m.content }}", "{{ m.content.strip() + (eos_token if m.role == 'assistant' else '') }}")
GUARD = (  # Llama-Guard-3
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] | trim }}{% endfor %}<|im_end|>\n{% endfor %}" + BEGIN
)
LOOP = CHATML.replace("{{ m.content }}", "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}")
USER_PARTS = CHATML.replace(  # a system message is a text, all others are parts
    "{{ m.content }}", "{% if m.role == 'system' %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
)
EITHER = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}",
)
THINKING = (  # Qwen3: thoughts of earlier answers go, the last answer has an empty one
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set content = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{% endif %}{{ content }}<|im_end|>\n{% endfor %}"
    + BEGIN
    + "{% if add_generation_prompt and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
TOOLS_SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
CALLS = TOOLS_SHOWN.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a town", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    """The demo's, with the tokens of ChatML."""
    from importlib import resources

    raw = Path(str(resources.files("kog_dist"))) / "models" / "demo" / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(raw))
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    made.add_tokens(["<think>", "</think>", "<tool_call>"])
    return made


Serve = Callable[..., ServedModel]


@pytest.fixture(scope="module")
def serve(base_model: ServedModel, library: tokenizers.Tokenizer) -> Iterator[Serve]:
    """A model with a template, or with another one for chats with tools."""
    made: dict[tuple[str, str | None], ServedModel] = {}

    def served(source: str, tool_source: str | None = None) -> ServedModel:
        key = (source, tool_source)
        if key not in made:
            tokenizer = Tokenizer(library.to_str(), special_tokens={"eos_token": "<|im_end|>"})
            template = ChatTemplate(
                source, tokenizer.special_tokens, tool_source=tool_source, specials=tokenizer.special_texts
            )  # fmt: skip
            made[key] = dataclasses.replace(base_model, tokenizer=tokenizer, chat_template=template, vocab_size=4200)
        return made[key]

    yield served
    for model in made.values():
        assert isinstance(model.chat_template, ChatTemplate)
        model.chat_template.close()


@pytest.fixture(scope="module")
def theirs(library: tokenizers.Tokenizer) -> Callable[..., tuple[int, ...]]:
    """Ids of transformers."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<|im_end|>")

    def ids(template: str, messages: list[dict[str, Any]], **options: Any) -> tuple[int, ...]:
        options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        return tuple(tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False, **options))

    return ids


def planned(served: ServedModel, messages: list[dict[str, Any]], **fields: Any) -> Planned:
    return plan_chat({"messages": messages, **fields}, served)


def ids_of(found: Planned) -> tuple[int, ...]:
    return tuple(found.generates[0].prompt_ids or ())


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# ---- content as a text and in parts ----
@pytest.mark.parametrize("template", [GUARD, LOOP, USER_PARTS])
@pytest.mark.parametrize("content", ["a", TEXT * 3, in_parts(TEXT)])
def test_templates_that_loop_over_parts_get_parts(serve: Serve, theirs: Any, template: str, content: Any) -> None:
    conversation = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": content}]
    expected = [{**m, "content": in_parts(m["content"]) if isinstance(m["content"], str) else m["content"]} for m in conversation]
    found = planned(serve(template), conversation)
    assert ids_of(found) == theirs(template, expected)
    assert found.unseen == ()


def test_roles_whose_content_is_a_text_keep_it(serve: Serve, theirs: Any) -> None:
    system = {"role": "system", "content": "be brief"}
    assert ids_of(planned(serve(USER_PARTS), [system, USER])) == theirs(
        USER_PARTS, [system, {"role": "user", "content": in_parts(TEXT)}]
    )


@pytest.mark.parametrize(("template", "sent"), [(EITHER, in_parts("a", "b")), (LOOP, in_parts("a", "b")), (CHATML, "a\nb")])
def test_several_parts(serve: Serve, theirs: Any, template: str, sent: Any) -> None:
    """A template that reads parts gets them as they came; else they are lines of one text."""
    found = planned(serve(template), [{"role": "user", "content": in_parts("a", "b")}])
    assert ids_of(found) == theirs(template, [{"role": "user", "content": sent}])


@pytest.mark.parametrize("template", [CHATML, TRIMMED, EITHER, THINKING])
def test_a_text_stays_a_text_where_it_is_shown(serve: Serve, theirs: Any, template: str) -> None:
    assert ids_of(planned(serve(template), [USER])) == theirs(template, [USER])


# ---- the template for tools ----
def test_chats_with_tools_have_the_template_for_tools(serve: Serve, theirs: Any) -> None:
    model = serve(CHATML, CALLS)
    assert ids_of(planned(model, [USER])) == theirs(CHATML, [USER])
    with_tools = planned(model, [USER], tools=[TOOL])
    assert ids_of(with_tools) == theirs(CALLS, [USER], tools=[TOOL])
    assert with_tools.unseen == ()
    assert ids_of(planned(model, [USER], tools=[TOOL], tool_choice="none")) == theirs(CHATML, [USER])


# ---- what is left out ----
@pytest.mark.parametrize(
    ("template", "messages", "fields", "unseen"),
    [
        (CHATML, [USER], {"tools": [TOOL]}, ("tools",)),
        (CHATML, [{"role": "user", "content": "call weather"}], {"tools": [TOOL]}, ("tools",)),
        (CHATML, [USER], {"tools": [TOOL], "tool_choice": "required"}, ("tools",)),
        (CHATML, [USER], {"tools": [TOOL], "tool_choice": "none"}, ()),
        (TOOLS_SHOWN, [USER], {"tools": [TOOL]}, ()),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHATML, [USER], {"tools": [TOOL]}, ("tools[0]",)),
        (NO_SYSTEM, [{"role": "system", "content": "be brief"}, USER], {}, ("messages[0].content",)),
        (CHATML, [{**USER, "name": "Ada"}], {}, ("messages[0].name",)),
        (CHATML, [USER], {"chat_template_kwargs": {"enable_thinking": False}}, ("chat_template_kwargs.enable_thinking",)),
        (THINKING, [USER], {"chat_template_kwargs": {"enable_thinking": False}}, ()),
        (THINKING, [USER, {"role": "assistant", "content": "<think>\nso</think>\n\nyes"}, USER], {}, ()),
        (TRIMMED, [{"role": "user", "content": "  a\r\n b \n"}], {}, ()),
        (CHATML.replace("m.content", "m.content | tojson"), [{"role": "user", "content": 'say "é"\n'}], {}, ()),
        (CHATML.replace("m.content", "m.content | indent"), [{"role": "user", "content": "a\nb\nc"}], {}, ()),
        (CHATML.replace("m.content", "m.content[:5]"), [USER], {}, ("messages[0].content",)),
        (CHATML, [{"role": "user", "content": ""}], {}, ()),
    ],
)
def test_what_the_prompt_does_not_show_is_named(
    serve: Serve, template: str, messages: list[Any], fields: dict[str, Any], unseen: tuple[str, ...]
) -> None:
    found = planned(serve(template), messages, **fields)
    assert found.unseen == unseen
    parts = packed(found)
    assert unpacked(parts["generates"], parts["reply"], parts["told"], None).unseen == unseen


def test_calls_that_a_template_leaves_out_are_named(serve: Serve) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"town": ["Zürich"]})}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    conversation: list[dict[str, Any]] = [USER, answer, result]
    assert planned(serve(CHATML), conversation).unseen == ("messages[1].tool_calls[0]",)
    assert planned(serve(CALLS), conversation).unseen == ()


@pytest.mark.parametrize("shown", ["'json ' + c.function.arguments", "c.function.arguments", "c.function.arguments | string"])
def test_arguments_are_a_text_where_the_template_wants_one(serve: Serve, theirs: Any, shown: str) -> None:
    """DeepSeek-R1's template breaks on an object; others would write it down as Python does."""
    template = CALLS.replace("c.function | tojson", f"c.function.name ~ ' ' ~ ({shown})")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Zürich"}'}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation = [USER, answer, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    found = planned(serve(template), conversation)
    assert ids_of(found) == theirs(template, conversation)
    assert found.unseen == ()


def test_a_base_model_is_shown_no_tools(base_model: ServedModel) -> None:
    assert planned(base_model, [USER], tools=[TOOL]).unseen == ("tools",)
    assert plan_response({"input": TEXT, "tools": [{"type": "function", **TOOL["function"]}]}, base_model).unseen == ("tools",)  # type: ignore[dict-item]


def test_many_are_named_up_to_a_number(serve: Serve) -> None:
    found = planned(serve(NO_SYSTEM), [{"role": "system", "content": f"rule {idx}"} for idx in range(40)] + [USER])
    assert found.unseen == tuple(f"messages[{idx}].content" for idx in range(16))


# ---- an answer that goes on ----
ENDS = ["The town is", "The town is ", " The town is\n\n", "", "a\n```python\n", "x<|im_end|>", "<think>\nso"]


@pytest.mark.parametrize("template", [CHATML, TRIMMED, STRIPPED, EITHER, THINKING])
@pytest.mark.parametrize("end", ENDS)
def test_an_answer_goes_on_with_the_last_message(serve: Serve, theirs: Any, template: str, end: str) -> None:
    messages = [USER, {"role": "assistant", "content": end}]
    model = dataclasses.replace(serve(template), obeys_special_tokens=True)
    expected = theirs(template, messages, continue_final_message=True)
    for more in ({}, {"add_generation_prompt": False}):
        found = planned(model, messages, continue_final_message=True, **more)
        assert ids_of(found) == expected
    for name in ("prefix", "partial"):
        assert ids_of(planned(model, [USER, {"role": "assistant", "content": end, name: True}])) == expected
    assert tokenize({"messages": messages, "continue_final_message": True}, model)["tokens"] == list(expected)
    assert found.unseen == ()


def test_special_tokens_of_a_continued_message_are_text(serve: Serve) -> None:
    model = serve(CHATML)
    assert model.tokenizer is not None
    ids = ids_of(planned(model, [USER, {"role": "assistant", "content": "x<|im_end|>"}], continue_final_message=True))
    end_id = model.tokenizer.id_of("<|im_end|>")
    assert (ids.count(end_id or -1), ids[-1] == end_id) == (1, False)
    assert model.tokenizer.decode(ids).endswith("assistant\nx<|im_end|>")


@pytest.mark.parametrize("template", [LOOP, GUARD])
def test_a_message_in_parts_is_continued(serve: Serve, theirs: Any, template: str) -> None:
    messages = [USER, {"role": "assistant", "content": "The town "}]
    expected = theirs(template, [{**m, "content": in_parts(m["content"])} for m in messages], continue_final_message=True)
    assert ids_of(planned(serve(template), messages, continue_final_message=True)) == expected


def test_a_base_model_goes_on_anyway(base_model: ServedModel) -> None:
    messages = [USER, {"role": "assistant", "content": " def"}]
    assert ids_of(planned(base_model, messages, continue_final_message=True)) == ids_of(planned(base_model, messages))


def test_a_prompt_may_end_with_its_last_message(serve: Serve, theirs: Any) -> None:
    found = planned(serve(CHATML), [USER], add_generation_prompt=False)
    assert ids_of(found) == theirs(CHATML, [USER], add_generation_prompt=False)


@pytest.mark.parametrize(
    ("last", "fields", "reason"),
    [
        (USER, {}, "must be an assistant's message"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function",
          "function": {"name": "f", "arguments": "{}"}}]}, {}, "with content and without calls"),
        ({"role": "assistant", "content": "a"}, {"add_generation_prompt": True}, "exclude each other"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_continued(serve: Serve, last: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        planned(serve(CHATML), [USER, last], continue_final_message=True, **fields)


def test_a_template_that_drops_the_last_message_continues_none(serve: Serve) -> None:
    without_answers = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}")
    with pytest.raises(ApiError, match="cannot be continued") as caught:
        planned(serve(without_answers), [USER, {"role": "assistant", "content": "a"}], continue_final_message=True)
    assert (caught.value.status, caught.value.code) == (400, "chat_rejected")


# ---- counts ----
def test_counts_are_those_of_chats(serve: Serve) -> None:
    model = serve(CALLS)
    conversation = [{"role": "developer", "content": in_parts("a", "b")}, USER]
    body = {"messages": conversation, "tools": [TOOL]}
    assert tokenize(body, model)["tokens"] == list(ids_of(plan_chat(body, model)))
    long = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert tokenize(long, model)["count"] > model.max_context
    with pytest.raises(ApiError, match="writes special tokens itself"):
        tokenize({**long, "add_special_tokens": True}, model)
