"""Each family's form of thoughts and calls, as models write it and as they get it wrong."""

from __future__ import annotations

import json

import pytest

from tests.unit.gateway_reading.readings import parser, said

PING = '{"name": "ping"}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ARGS = '{"a": 1, "b": 2}'
CALLED = [("add", ARGS)]

THOUGHTS = {
    "a thought and an answer": ("<think>\nHm.\n</think>\n\nYes.", "free", [("reasoning", "Hm."), ("content", "Yes.")]),
    "the prompt has begun it": ("Hm.\n</think>\n\nYes.", "open", [("reasoning", "Hm."), ("content", "Yes.")]),
    "the prompt has begun it and the model does again": (
        "<think>Hm.</think>Yes.", "open", [("reasoning", "Hm."), ("content", "Yes.")]
    ),
    "it was never begun": ("Hm.\n</think>\n\nYes.", "free", [("reasoning", "Hm.\n"), ("content", "Yes.")]),
    "the prompt has ended it": ("Yes </think> no", "closed", [("content", "Yes </think> no")]),
    "an empty one": ("<think>\n\n</think>\n\nYes.", "free", [("content", "Yes.")]),
    "cut": ("<think>Hm", "free", [("reasoning", "Hm")]),
    "it ends twice": ("<think>Hm.</think></think>Yes.", "free", [("reasoning", "Hm."), ("content", "Yes.")]),
    "no thought": ("  Yes.", "free", [("content", "  Yes.")]),
    "blanks": (" \n", "free", [("content", " \n")]),
    "nothing": ("", "open", []),
    "a tag that is quoted": ("Write <think> first.", "free", [("content", "Write <think> first.")]),
    "a tag within": ("<think>a <think> b</think>c", "free", [("reasoning", "a <think> b"), ("content", "c")]),
    "a call within is none": (
        f"<think>I might <tool_call>{ADD}</tool_call>.</think>No.", "free",
        [("reasoning", f"I might <tool_call>{ADD}</tool_call>."), ("content", "No.")],
    ),
    "a call in one that the prompt has begun is none": (
        f"<tool_call>{ADD}</tool_call>", "open", [("reasoning", f"<tool_call>{ADD}</tool_call>")]
    ),
    "a thought and two calls": (
        f"<think>Hm.</think>\n\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{PING}\n</tool_call>", "free",
        [("reasoning", "Hm."), ("add", ARGS), ("ping", "{}")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts(name: str) -> None:
    text, begins, expected = THOUGHTS[name]
    assert said(parser(begins=begins), [text]) == expected
    assert said(parser(begins=begins), list(text)) == expected, "character by character"


def test_of_a_model_that_does_not_think_only_the_beginning_is_a_thought() -> None:
    """One that writes code about tags, say."""
    for text in ('print("</think>")', 'print("<think>") </think> x'):
        assert said(parser(thinks=False), [text]) == [("content", text)]
    assert said(parser(thinks=False), ["<think>Hm.</think>Yes."]) == [("reasoning", "Hm."), ("content", "Yes.")]


def test_what_is_not_asked_for_stays_text() -> None:
    text = f"<think>Hm.</think><tool_call>{ADD}</tool_call>"
    assert said(parser("none", "hermes"), [text]) == [("content", "<think>Hm.</think>"), *CALLED]
    assert said(parser("think", "none"), [text]) == [("reasoning", "Hm."), ("content", f"<tool_call>{ADD}</tool_call>")]
    assert said(parser("none", "none"), [text]) == [("content", text)]
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=ping<|message|>{}"
    assert said(parser("none", "channels"), [text]) == [("content", "Hm."), ("ping", "{}")]
    assert said(parser("channels", "none"), [text]) == [("reasoning", "Hm.{}")]


def xml(*parameters: tuple[str, str], name: str = "write") -> str:
    """A call as Qwen3-Coder writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def made(**arguments: object) -> list[tuple[str, str]]:
    return [("write", json.dumps(arguments, ensure_ascii=False))]


FENCED = "function<｜tool▁sep｜>add\n```json\n" + ARGS + "\n```"  # noqa: RUF001
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001

CALLS = {
    "hermes": [
        (f"<tool_call>\n{ADD}\n</tool_call>", CALLED),
        (f"I add.\n<tool_call>{ADD}</tool_call>\nDone.", [("content", "I add.\n"), *CALLED, ("content", "Done.")]),
        (f"<tool_call>{ADD}</tool_call>\n<tool_call>{PING}</tool_call>", [*CALLED, ("ping", "{}")]),
        # D3: JSON ends a call, not a tag inside a string
        ('<tool_call>{"name": "write", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>',
         made(text="</tool_call> <tool_call>")),
        # D4 and D6
        (f"<tool_call>{PING}</tool_call>", [("ping", "{}")]),
        ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "ping", "arguments": ""}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', CALLED),
        ('<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', CALLED),
        ('<tool_call>{"name": "add", "id": [1, {"x": 2}], "parameters": {"a": 1, "b": 2}}</tool_call>', CALLED),
        (f"<tool_call>[{ADD}, {PING}]</tool_call>", [*CALLED, ("ping", "{}")]),
        (f"<tool_call>\n{ADD}\n{PING}\n</tool_call>", [*CALLED, ("ping", "{}")]),
        (f"<tool_call>{ADD}", CALLED),
        # slips that are mended
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2,}}</tool_call>', [("add", '{"a": 1, "b": 2}')]),
        ('<tool_call>{"name": "write", "arguments": {"text": "a\nb\\d\\\'"}}</tool_call>', made(text="a\nb\\d'")),
        ('<tool_call>{"name": "write", "arguments": {"text": "\\ud83d\\ude00 \\ud83d."}}</tool_call>',
         [("write", '{"text": "\\ud83d\\ude00 \\ufffd."}')]),
        # what is cut is JSON all the same
        ('<tool_call>{"name": "write", "arguments": {"path": "/a", "text": "on', made(path="/a", text="on")),
        ('<tool_call>{"name": "write", "arguments": {"lines": [1, {"a": [2, 3', [("write", '{"lines": [1, {"a": [2]}]}')]),
        ('<tool_call>{"name": "write", "arguments": {"path": "/a", "te', made(path="/a")),
        ('<tool_call>{"name": "write", "arguments": {"path": "\\u00', made(path="")),
        ('<tool_call>{"name": "write", "arguments": "{\\"path\\": \\"x', made(path="x")),
        ('<tool_call>{"name": "write", "arg', [("content", '<tool_call>{"name": "write", "arg')]),
        # what is broken behind its beginning ends there
        ('<tool_call>{"name": "add", "arguments": {"a": 1, b: 2}}</tool_call>',
         [("add", '{"a": 1}'), ("content", "b: 2}}</tool_call>")]),
        # no calls
        ('<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>.',
         [("content", '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>.')]),
        ('<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>{\\"name\\": \\"ping\\"}</tool_call>"}}</tool_call>',
         [("content",
           '<tool_call>{"name": "rm", "arguments": {"a": "<tool_call>{\\"name\\": \\"ping\\"}</tool_call>"}}</tool_call>')]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
         [("content", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>')]),
        ('<tool_call>{"arguments": {}}</tool_call>', [("content", '<tool_call>{"arguments": {}}</tool_call>')]),
        ("<tool_call>no</tool_call>", [("content", "<tool_call>no</tool_call>")]),
        (f"<tool_call>no <tool_call>{PING}</tool_call>", [("content", "<tool_call>no "), ("ping", "{}")]),
        (ADD, [("content", ADD)]),
        ("a </tool_call> b", [("content", "a </tool_call> b")]),
    ],
    "qwen3_coder": [
        (xml(("path", "/a"), ("text", 'x = "1"\n\n')), made(path="/a", text='x = "1"\n\n')),
        (xml(("mode", "5"), ("force", "True"), ("lines", "[1, 2]"), ("options", '{"a": "b"}'), ("scale", "0.5")),
         [("write", '{"mode": 5, "force": true, "lines": [1, 2], "options": {"a": "b"}, "scale": 0.5}')]),
        (xml(("mode", "null"), ("label", "null")), made(mode=None, label=None)),
        (xml(("label", "5"), ("level", "low"), ("path", "5")), made(label="5", level="low", path="5")),
        (xml(("mode", "many"), ("lines", "1, 2")), made(mode="many", lines="1, 2")),
        (xml(("any", "5"), ("unknown", "5")), made(any=5, unknown="5")),
        (xml(("scale", "1e999"), ("mode", "2.0")), [("write", '{"scale": 1e999, "mode": 2.0}')]),
        (xml(("mode", "1e999"), ("scale", "NaN")), made(mode="1e999", scale="NaN")),
        (xml(name="ping"), [("ping", "{}")]),
        (xml(("path", "a")) + "\n" + xml(("path", "b")), made(path="a") + made(path="b")),
        (xml(("path", "a")).removeprefix("<tool_call>\n"), made(path="a")),
        ("I write.\n" + xml(("path", "a")).removeprefix("<tool_call>\n"), [("content", "I write.\n"), *made(path="a")]),
        ("I write. " + xml(("path", "a")).removeprefix("<tool_call>\n"),
         [("content", "I write. " + xml(("path", "a")).removeprefix("<tool_call>\n"))]),
        (xml(("text", f"{ADD}</parameter> <tool_call>{PING}</tool_call>")),
         made(text=f"{ADD}</parameter> <tool_call>{PING}</tool_call>")),
        (xml(("path", "a"), ("path", "b")), made(path="a")),
        ("<tool_call>\n<function=write>\n<parameter=path>a</parameter></function></tool_call>", made(path="a")),
        ("<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>.", [*made(path="a"), ("content", ".")]),
        ("<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>.", [*made(path="a"), ("content", ".")]),
        ("<tool_call>\n<function=write>\n<parameter=path>\na", made(path="a")),
        ("<tool_call>\n<function=write>\n<parameter=path>\na\n</para", made(path="a")),
        ("<tool_call>\n<function=write>\n<parameter=mode>\n1", made(mode=1)),
        ("<tool_call>\n<function=write>\n<param", [("write", "{}"), ("content", "<param")]),
        (f"<tool_call>{ADD}</tool_call>", CALLED),
        (xml(("a", xml(name="ping")), name="rm"), [("content", xml(("a", xml(name="ping")), name="rm"))]),
        ("<function=write", [("content", "<function=write")]),
    ],
    "llama3_json": [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', CALLED),
        (' {"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', CALLED),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "ping", "parameters": {}}', [*CALLED, ("ping", "{}")]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', CALLED),
        ('<|python_tag|>add.call(a=1, b=2)', CALLED),
        ('<|python_tag|>write.call(text="a) \\"b", path="c")', made(text='a) "b', path="c")),
        ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
        ('{"name": "ping"}', [("ping", "{}")]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}} Done.', [*CALLED, ("content", "Done.")]),
        ('{"name": "ping", "age": 5}', [("content", '{"name": "ping", "age": 5}')]),
        ('{"name": "rm", "parameters": {"x": {"name": "ping", "parameters": {}}}}',
         [("content", '{"name": "rm", "parameters": {"x": {"name": "ping", "parameters": {}}}}')]),
        ('Sure: {"name": "ping", "parameters": {}}', [("content", 'Sure: {"name": "ping", "parameters": {}}')]),
        ('{"name": "ping", "parameters": {"a": "', [("ping", '{"a": ""}')]),
        ("{", [("content", "{")]),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{ADD}]", CALLED),
        (f"[TOOL_CALLS][{ADD}, {PING}]", [*CALLED, ("ping", "{}")]),
        (f"[TOOL_CALLS]{ADD}", CALLED),
        (f"[TOOL_CALLS]add[ARGS]{ARGS}", CALLED),
        (f"[TOOL_CALLS]add{ARGS}[TOOL_CALLS]ping[ARGS]{{}}", [*CALLED, ("ping", "{}")]),
        (f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ARGS}", CALLED),
        ('[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]ping[ARGS]{}"}', made(text="[TOOL_CALLS]ping[ARGS]{}")),
        ('[TOOL_CALLS]rm[ARGS]{"text": "[TOOL_CALLS]ping[ARGS]{}"}',
         [("content", '[TOOL_CALLS]rm[ARGS]{"text": "[TOOL_CALLS]ping[ARGS]{}"}')]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1', [("add", "{}")]),
        (f"I add.[TOOL_CALLS][{ADD}]", [("content", "I add."), *CALLED]),
        ("[TOOL_CALLS]add", [("content", "[TOOL_CALLS]add")]),
    ],
    "deepseek": [
        (DEEP.format(FENCED), CALLED),
        (DEEP.format("add<｜tool▁sep｜>" + ARGS), CALLED),  # noqa: RUF001
        (DEEP.format(FENCED).replace("▁", "_"), CALLED),
        (DEEP.format(FENCED + "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}"), [*CALLED, ("ping", "{}")]),  # noqa: RUF001
        ("I add.\n\n" + DEEP.format(FENCED), [("content", "I add.\n\n"), *CALLED]),
        (DEEP.format("write<｜tool▁sep｜>" + json.dumps({"text": DEEP.format(FENCED)}, ensure_ascii=False)),  # noqa: RUF001
         made(text=DEEP.format(FENCED))),
        (DEEP.format("rm<｜tool▁sep｜>" + ARGS), [("content", DEEP.format("rm<｜tool▁sep｜>" + ARGS))]),  # noqa: RUF001
        (DEEP.format(FENCED).partition(', "b": 2')[0], [("add", "{}")]),
    ],
    "none": [
        (f"<tool_call>{ADD}</tool_call>", [("content", f"<tool_call>{ADD}</tool_call>")]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("tools", "text", "expected"), [(tools, *case) for tools, cases in CALLS.items() for case in cases])
def test_calls(tools: str, text: str, expected: list[tuple[str, str]]) -> None:
    assert said(parser(tools=tools), [text]) == expected
    assert said(parser(tools=tools), list(text)) == expected, "character by character"
    if expected[0][0] != "reasoning":
        expected = [("reasoning", "Hm."), *expected]
        assert said(parser(tools=tools), [f"<think>Hm.</think>\n\n{text}"]) == expected, "behind a thought"
    [(kind, _)] = said(parser(tools=tools, begins="open"), [text]) or [("reasoning", "")]
    assert kind == "reasoning", "within a thought"


def test_of_several_calls_the_first_is_all_that_was_asked_for() -> None:
    text = f"I add. <tool_call>{ADD}</tool_call><tool_call>{PING}</tool_call> Done."
    reader = parser(has_one_call=True)
    assert said(reader, [text]) == [("content", "I add. "), *CALLED]
    assert reader.is_enough
    reader = parser(has_one_call=True)
    reader.push((), f"<tool_call>{ADD[:-1]}")
    assert not reader.is_enough
    reader.push((), "}</tool_call>")
    assert reader.is_enough


def test_numbers_and_nesting_have_an_end() -> None:
    """What is held back is bounded; beyond, the call ends."""
    for rest in ("1" * 5000, "[" * 200):
        head = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": '
        (name, arguments), (kind, text) = said(parser(), [head, rest])
        assert (name, kind) == ("add", "content")
        assert json.loads(arguments)["a"] == 1
        assert set(text) == {rest[0]}


def test_arguments_come_while_they_are_written() -> None:
    reader = parser()
    given = [reader.push((), piece) for piece in ('<tool_call>{"name": "write", "argum', 'ents": {"text": "a', "b", 'c"}', "}")]
    assert [[getattr(delta, "text", "call") for delta in deltas] for deltas in given] == [
        [], ["call", '{"text": "a'], ["b"], ['c"}'], [],
    ]  # fmt: skip
    reader = parser(tools="qwen3_coder")
    head = "<tool_call>\n<function=write>\n<parameter=text>\n"
    given = [reader.push((), piece) for piece in (head, "a", '"', "\n", "b", "\n</parameter>\n</function>")]
    assert [[getattr(delta, "text", "call") for delta in deltas] for deltas in given] == [
        ["call", '{"text": "'], ["a"], ['\\"'], [], ["\\nb"], ['"}'],
    ]  # fmt: skip
