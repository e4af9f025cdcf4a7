"""Answers that a grammar makes a call: however they are cut, the call comes first, then its arguments, and all of it is JSON."""

from __future__ import annotations

import json

import pytest

from kog_dist.gateway.openai.parsers import ChosenCall, NamedCall
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, TextDelta

ARGUMENTS = '{"city": "Oslo}", "days": [1, 2]}'


def read(parser: NamedCall | ChosenCall, text: str, cut: int) -> list[Delta]:
    found = [delta for start in range(0, len(text), cut) for delta in parser.push((1,), text[start : start + cut])]
    return [*found, *parser.finish()]


def arguments_of(deltas: list[Delta]) -> str:
    assert all(isinstance(delta, CallArguments) and delta.idx == 0 and delta.text for delta in deltas)
    return "".join(delta.text for delta in deltas if isinstance(delta, CallArguments))


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("behind", ["", " ", "\n<|end|> more"])
def test_a_named_call(cut: int, behind: str) -> None:
    parser = NamedCall("weather")
    assert parser.push((5,), "") == ()
    assert parser.num_calls == 0
    begin, *rest = read(parser, ARGUMENTS + behind, cut)
    assert begin == CallStart(0, "weather")
    assert arguments_of(rest) == ARGUMENTS
    assert (parser.num_calls, parser.num_reasoning_tokens, parser.is_enough) == (1, 0, False)


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
@pytest.mark.parametrize("head", ['{"name": "get-it_2", "arguments": ', ' {\n"name" :"get-it_2" ,\t"arguments":'])
def test_a_chosen_call(cut: int, head: str) -> None:
    parser = ChosenCall()
    begin, *rest = read(parser, f"{head}{ARGUMENTS}}}", cut)
    assert begin == CallStart(0, "get-it_2")
    assert arguments_of(rest) == ARGUMENTS
    assert (parser.num_calls, parser.num_reasoning_tokens, parser.is_enough) == (1, 0, False)


@pytest.mark.parametrize("num_letters", range(1, len(ARGUMENTS)))
def test_arguments_that_are_cut_become_json(num_letters: int) -> None:
    for parser, head in ((NamedCall("a"), ""), (ChosenCall(), '{"name": "a", "arguments": ')):
        begin, *rest = read(parser, head + ARGUMENTS[:num_letters], 4)
        assert begin == CallStart(0, "a")
        assert isinstance(json.loads(arguments_of(rest)), dict)


@pytest.mark.parametrize(
    "text", ["{", '{"name": "a"', '{"name": "a", "arguments": ', '{"name": "a b", "arguments": {', "no call"]
)
def test_what_is_cut_before_its_arguments_is_content(text: str) -> None:
    parser = ChosenCall()
    assert read(parser, text, 3) == [TextDelta(text)]
    assert parser.num_calls == 0
    assert not parser.finish(), "once"


def test_nothing_is_nothing() -> None:
    for parser in (NamedCall("a"), ChosenCall()):
        assert list(parser.finish()) == []
        assert parser.num_calls == 0
