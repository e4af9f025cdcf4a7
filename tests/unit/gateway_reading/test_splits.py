"""However an answer is cut the same is read; nothing within a thought or a string is a call."""

from __future__ import annotations

import json
import random

import pytest

from tests.unit.gateway_reading.readings import parser, said

FORMS = ("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "channels", "none")
PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=write>", "<parameter=text>", "<parameter=mode>",
    "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|channel|>", "<|message|>",
    "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "analysis", "final", "commentary to=functions.add ",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",  # noqa: RUF001
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "ping"}', '{"name": "rm", "arguments": {"a": "',
    '{"name": "write", "parameters": {"text": "', '{"arguments": {"a": [1, ', '"name": "add"', '"arguments": "{\\"a\\": ',
    "function", "add", "write", "ping", "rm", "```json\n", "\n```", ".call(", ")", "{", "}", "[", "]", ",", ":", ";", '"', "'",
    "\\", "\\u", "d83d", "\\ud83d\\ude00", "null", "true", "-1.5e3", "0", " ", "\n", "\t", "x", "é", "<", "</", "\x00",
)  # fmt: skip


def written(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(1, 14)))


def cut(text: str, draw: random.Random) -> list[str]:
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(1, 9))))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("tools", FORMS)
def test_however_it_is_cut_the_same_is_read(tools: str) -> None:
    draw = random.Random(f"cut {tools}")
    reasoning = "channels" if tools == "channels" else "think"
    for _ in range(400):
        text, begins = written(draw), draw.choice(("free", "open", "closed"))
        whole = said(parser(reasoning, tools, begins), [text])
        for pieces in (cut(text, draw), list(text)):
            assert said(parser(reasoning, tools, begins), pieces) == whole, (text, pieces)


@pytest.mark.parametrize("tools", FORMS[:-2])
def test_nothing_in_a_thought_is_a_call(tools: str) -> None:
    draw = random.Random(f"thought {tools}")
    for _ in range(200):
        text = written(draw).replace("</think>", "")
        for begins, head in (("open", ""), ("free", "<think>"), ("closed", " <think>")):
            found = said(parser("think", tools, begins), [head, text])
            assert {kind for kind, _ in found} <= {"reasoning"}, text
            assert all("<think>" in text or thought in text for _, thought in found)


def in_form(tools: str, name: str, text: str) -> str:
    """A call of `name` with this text as an argument."""
    arguments = json.dumps({"text": text}, ensure_ascii=False)
    called = f'{{"name": "{name}", "arguments": {arguments}}}'
    return {
        "hermes": f"<tool_call>{called}</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function={name}>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "llama3_json": called,
        "mistral": f"[TOOL_CALLS][{called}]",
        "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",  # noqa: RUF001
        "channels": f"<|channel|>commentary to={name}<|message|>{arguments}<|call|>",
    }[tools]


@pytest.mark.parametrize("tools", FORMS[:-1])
def test_nothing_in_a_string_is_a_call(tools: str) -> None:
    """Of a known function and of another one, whose call is text."""
    draw = random.Random(f"string {tools}")
    reasoning = "channels" if tools == "channels" else "think"
    for _ in range(200):
        text = written(draw)
        if tools == "qwen3_coder":  # its strings have no end but these
            text = text.replace("</parameter>", "").replace("</function>", "")
        [(name, arguments)] = said(parser(reasoning, tools), cut(in_form(tools, "write", text), draw))
        assert (name, json.loads(arguments)) == ("write", {"text": text})
        assert {kind for kind, _ in said(parser(reasoning, tools), [in_form(tools, "rm", text)])} <= {"content", "reasoning"}
