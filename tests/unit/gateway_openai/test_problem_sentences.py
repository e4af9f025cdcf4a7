"""What is said of a body that is wrong: the field, what it must be, and what it is, in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kog_dist.gateway.openai.body import MAX_FIELDS, MAX_NESTING, parse, read_body
from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.completion_request import CompletionRequest
from kog_dist.gateway.openai.errors import ApiError

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = "x" * 200


def problem(body: Any, model: Any = ChatRequest, **options: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as raised:
        parse(model, body, **options)
    assert raised.value.status == 400
    return raised.value.param, raised.value.message


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **changes}


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"temperature": -0.1}, "temperature", "temperature: must be greater than or equal to 0, got -0.1"),
        ({"temperature": "1"}, "temperature", 'temperature: must be a valid number, got "1"'),
        ({"temperature": [1]}, "temperature", "temperature: must be a valid number, got an array"),
        ({"temperature": {}}, "temperature", "temperature: must be a valid number, got an object"),
        ({"temperature": True}, "temperature", "temperature: must be a valid number, got true"),
        ({"top_p": 1.5}, "top_p", "top_p: must be less than or equal to 1, got 1.5"),
        ({"stream": 1}, "stream", "stream: must be a valid boolean, got 1"),
        ({"stream": LONG}, "stream", f'stream: must be a valid boolean, got "{LONG[:60]}"'),
        ({"seed": 1.5}, "seed", "seed: must be a valid integer, got 1.5"),
        ({"stop": ["a"] * 100}, "stop", "stop: must have at most "),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": ""}]}, "messages[1].role", "messages[1].role: must be "),
        ({"messages": None}, "messages", "messages: must be a valid list, got null"),
        ({"messages": []}, "messages", "messages: must have at least 1 item, got 0"),
        ({"logit_bias": {"5": "a"}}, "logit_bias.5", 'logit_bias.5: must be a valid number, got "a"'),
    ],
)  # fmt: skip
def test_sentences(changes: dict[str, Any], param: str, said: str) -> None:
    found_param, message = problem(chat(**changes))
    assert (found_param, message[: len(said)]) == (param, said)


def test_a_missing_field_has_a_code_of_its_own() -> None:
    with pytest.raises(ApiError) as raised:
        parse(ChatRequest, {})
    assert (raised.value.code, raised.value.param) == ("missing_required_parameter", "messages")


@pytest.mark.parametrize(
    ("value", "kind"), [([], "an array"), ("a", "a string"), (True, "a boolean"), (5, "a number"), (None, "null")]
)
def test_a_body_is_an_object(value: object, kind: str) -> None:
    assert problem(value) == (None, f"the body must be a JSON object, got {kind}")


def test_a_body_has_a_bounded_number_of_fields() -> None:
    extra = {f"field{number}": 1 for number in range(MAX_FIELDS - 1)}
    parse(ChatRequest, chat(**extra), leaves_out=True)
    assert problem(chat(**extra, more=1), leaves_out=True)[1] == "the body has 257 fields; no request has more than 256"


@pytest.mark.parametrize("shown", [120, 121])
def test_long_values_are_shown_in_part(shown: int) -> None:
    text = "\u00e9" * (shown // 6) + "x" * (shown - 2 - 6 * (shown // 6))
    message = problem(chat(stream=text[:60] if shown == 120 else "\u00e9" * 60))[1]
    value = json.dumps(text[:60] if shown == 120 else "\u00e9" * 60)
    assert message.endswith(value if len(value) <= 120 else f"{value[:120]}...")


@pytest.mark.parametrize(("length", "is_whole"), [(118, True), (119, False)])
def test_what_is_shown_has_at_most_120_letters(length: int, is_whole: bool) -> None:
    number = int("9" * (length + 2))
    message = problem(chat(stream=number))[1]
    assert message.endswith(f"got {number}" if is_whole else f"got {str(number)[:120]}...")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "the body is not valid JSON: "),
        (b'{"a": NaN}', "the body is not valid JSON: NaN is no JSON number"),
        (b'{"a": -Infinity}', "the body is not valid JSON: -Infinity is no JSON number"),
        (b'{"a": 1, "a": 2}', "the body is not valid JSON: the key 'a' is given twice in one object"),
        (b'{"a": {"b": 1, "b": 2}}', "the body is not valid JSON: the key 'b' is given twice in one object"),
        (b'"\xff"', "the body is not valid JSON: "),
        (b'{"a": "\\ud800"}', "the body holds text that is not valid Unicode: a lone surrogate"),
        (b'{"a": "\\uDC00"}', "the body holds text that is not valid Unicode: a lone surrogate"),
        (b"9" * 5000, "the body is not valid JSON: an integer is too long, with more than 4300 digits"),
        (b"[" * 66 + b"]" * 66, f"the body nests deeper than {MAX_NESTING} levels"),
    ],
)
def test_bytes_that_are_no_body(raw: bytes, said: str) -> None:
    with pytest.raises(ApiError) as raised:
        read_body(raw)
    assert raised.value.message.startswith(said)


def test_pairs_of_surrogates_are_text() -> None:
    assert read_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(("num_members", "is_read"), [(4096, True), (4097, False)])
def test_an_object_has_a_bounded_number_of_members(num_members: int, is_read: bool) -> None:
    raw = json.dumps({f"k{number}": 0 for number in range(num_members)}).encode()
    if is_read:
        read_body(raw)
        return
    with pytest.raises(ApiError, match="an object has 4097 members, at most 4096 are read"):
        read_body(raw)


@pytest.mark.parametrize(
    ("value", "found"),
    [(100.0, 100), (100, 100), (-1, 2**31 - 1), (-1.0, 2**31 - 1), (2**31 - 1, 2**31 - 1), (1, 1), (None, None)],
)
def test_numbers_of_tokens(value: object, found: int | None) -> None:
    assert parse(CompletionRequest, {"prompt": "a", "max_tokens": value}).max_tokens == found


@pytest.mark.parametrize("value", [1.5, 2**31, -2, True, "1"])
def test_what_are_no_numbers_of_tokens(value: object) -> None:
    assert problem({"prompt": "a", "max_tokens": value}, CompletionRequest)[0] == "max_tokens"


@pytest.mark.parametrize(("seed", "found"), [(-1, None), (0, 0), (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)), (3.0, 3)])
def test_seeds(seed: object, found: int | None) -> None:
    assert parse(CompletionRequest, {"prompt": "a", "seed": seed}).seed == found


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 0.5])
def test_what_are_no_seeds(seed: object) -> None:
    assert problem({"prompt": "a", "seed": seed}, CompletionRequest)[0] == "seed"


def test_of_a_union_the_deepest_complaint_is_told() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]
    param, message = problem({"messages": [{"role": "user", "content": content}]})
    assert param == "messages[0].content[1].text"
    assert message == "messages[0].content[1].text: must be a valid string, got 5"
