"""What a request's effort and budget come to, and where the answer to a prompt begins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.errors import CheckpointError
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import Begun, Thinking, begin_answer, thinking_of
from kog_dist.model.template_trials import TemplateFacts
from kog_dist.model.tokenizer import Tokenizer

OPEN, CLOSE, OTHER, WORD = 100, 101, 102, 7
OPENER = (90, 91)
BOTH = ("enable_thinking", "thinking")


class Letters:
    """A tokenizer that knows some tags as tokens."""

    has_channels = False

    def __init__(self, **tags: int) -> None:
        self._tags, self.encoded = tags, list[str]()

    def id_of(self, tag: str) -> int | None:
        return self._tags.get(tag.strip("</>"), None) if not tag.startswith("</") else self._tags.get("end")

    def is_added(self, token_id: int) -> bool:
        return token_id >= OPEN

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({OPEN: "<think>", CLOSE: "</think>", WORD: " a", 8: "\n"}.get(one, "?") for one in ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.encoded.append(text)
        return list(OPENER)


def served(source: str | None, *variables: str, tokenizer: object = None, **changes: Any) -> ServedModel:
    """A model with this template, which looks at these variables."""
    facts = TemplateFacts(shows_tools=False, variables=frozenset(variables))
    template = None if source is None else SimpleNamespace(source=source, tool_source="", facts=facts)
    model = ServedModel("m", (), 2048, 4096, cast(Tokenizer | None, tokenizer), cast(Any, template), 0)
    return dataclasses.replace(model, **changes)


@pytest.mark.parametrize(
    ("effort", "given", "known", "wanted"),
    [
        (None, None, (), Thinking()),
        (None, {"a": 1}, (), Thinking({"a": 1})),
        ("high", None, ("reasoning_effort",), Thinking({"reasoning_effort": "high"})),
        ("none", None, ("reasoning_effort",), Thinking({"reasoning_effort": "none"}, is_off=True)),
        ("minimal", None, ("reasoning_effort",), Thinking({"reasoning_effort": "minimal"})),
        ("high", {"reasoning_effort": "low"}, ("reasoning_effort",), Thinking({"reasoning_effort": "low"})),
        ("huge", None, ("reasoning_effort",), Thinking()),
        ("huge", None, BOTH, Thinking()),
        (7, None, ("reasoning_effort",), Thinking()),
        (["high"], None, ("reasoning_effort",), Thinking()),
        ("none", None, BOTH, Thinking({"enable_thinking": False, "thinking": False}, is_off=True)),
        ("none", None, ("thinking",), Thinking({"thinking": False}, is_off=True)),
        ("none", None, (), Thinking(is_off=True)),
        ("none", {"thinking": True}, BOTH, Thinking({"enable_thinking": False, "thinking": True})),
        ("none", {"enable_thinking": True}, (), Thinking({"enable_thinking": True})),
        ("high", None, BOTH, Thinking({"enable_thinking": True, "thinking": True})),
        ("high", {"thinking": False}, BOTH, Thinking({"enable_thinking": True, "thinking": False})),
        ("low", None, ("thinking",), Thinking({"thinking": True}, 1024)),
        ("minimal", None, (), Thinking({}, 1024)),
        ("medium", None, (), Thinking()),
        ("low", {"thinking_budget": 5}, (), Thinking({}, 5, is_firm=True)),
        ("low", {"thinking_budget": -1}, (), Thinking({}, 1024)),
        (None, {"thinking_budget": 0}, (), Thinking({}, 0, is_firm=True)),
        (None, {"thinking_budget": 1 << 20}, (), Thinking({}, 1 << 20, is_firm=True)),
        (None, {"thinking_budget": 5}, ("thinking_budget",), Thinking({"thinking_budget": 5}, 5, is_firm=True)),
        (None, {"thinking_budget": None}, ("thinking_budget",), Thinking({"thinking_budget": None})),
    ],
)  # fmt: skip
def test_efforts_and_budgets(effort: object, given: dict[str, Any] | None, known: tuple[str, ...], wanted: Thinking) -> None:
    assert thinking_of(effort, given, served("<think>", *known)) == wanted


@pytest.mark.parametrize(
    ("effort", "word"),
    [("none", "low"), ("minimal", "low"), ("low", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_channels_have_three_efforts(effort: str, word: str) -> None:
    model = served("<|channel|>", "reasoning_effort", tokenizer=SimpleNamespace(has_channels=True))
    assert thinking_of(effort, None, model).variables == {"reasoning_effort": word}


def test_without_a_template_only_a_budget_is_read() -> None:
    assert thinking_of("none", {"a": 1}, served(None)) == Thinking({"a": 1})
    assert thinking_of("low", {"thinking_budget": 3}, served(None)) == Thinking({"thinking_budget": 3}, 3, is_firm=True)


@pytest.mark.parametrize("budget", [-2, (1 << 20) + 1, True, 1.0, "5"])
def test_a_budget_is_a_number_of_tokens(budget: object) -> None:
    with pytest.raises(ApiError, match=r"thinking_budget is a number of tokens from 0 to 1048576") as raised:
        thinking_of(None, {"thinking_budget": budget}, served("<think>"))
    assert (raised.value.status, raised.value.param) == (400, "chat_template_kwargs.thinking_budget")


def test_a_template_that_cannot_be_tried_is_an_error_of_the_server() -> None:
    class Broken:
        source = tool_source = ""

        @property
        def facts(self) -> TemplateFacts:
            raise CheckpointError("the template does not compile")

    with pytest.raises(ApiError, match="does not compile") as raised:
        thinking_of("high", None, served("", chat_template=Broken()))
    assert (raised.value.status, raised.value.code) == (500, "chat_template_unusable")


ASKED, FIRM, OFF, FREE = Thinking(budget=9), Thinking(budget=9, is_firm=True), Thinking(budget=9, is_off=True), Thinking()
TAGS = {"think": OPEN, "end": CLOSE}


@pytest.mark.parametrize(
    ("ids", "thinking", "is_enforced", "is_new", "wanted"),
    [
        ((WORD,), FREE, False, True, Begun((WORD,), "free")),  # nothing must be known
        ((OPEN, WORD), FREE, False, True, Begun((OPEN, WORD), "open")),
        ((WORD,), ASKED, False, True, Begun((WORD, *OPENER), "open", CLOSE, 9)),
        ((WORD,), Thinking(budget=0), False, True, Begun((WORD, *OPENER), "open", CLOSE, 0)),
        ((WORD,), FREE, True, True, Begun((WORD, *OPENER), "open", CLOSE, None)),
        ((WORD,), OFF, True, True, Begun((WORD,), "free")),
        ((WORD,), ASKED, False, False, Begun((WORD,), "free")),  # within a message no thought begins
        ((OPEN,), ASKED, False, True, Begun((OPEN,), "open", CLOSE, 9)),
        ((OPEN,), OFF, False, True, Begun((OPEN,), "open", CLOSE, 9)),
        ((OPEN,), ASKED, False, False, Begun((OPEN,), "open", CLOSE, 9)),
        ((OPEN, CLOSE), ASKED, True, True, Begun((OPEN, CLOSE), "closed")),
        ((OPEN, OTHER), ASKED, False, True, Begun((OPEN, OTHER, *OPENER), "open", CLOSE, 9)),
    ],
)  # fmt: skip
def test_where_an_answer_begins(ids: tuple[int, ...], thinking: Thinking, is_enforced: bool, is_new: bool, wanted: Begun) -> None:
    tokenizer = Letters(**TAGS)
    model = served("<think></think>", tokenizer=tokenizer)
    assert begin_answer(ids, thinking, model, is_enforced=is_enforced, is_new=is_new) == wanted
    assert tokenizer.encoded == (["<think>\n"] if wanted.prompt_ids[-2:] == OPENER else [])


@pytest.mark.parametrize(
    ("ids", "thinking", "is_enforced", "wanted"),
    [
        ((WORD,), ASKED, True, Begun((WORD,), "free")),
        ((WORD, OPEN), ASKED, False, Begun((WORD, OPEN), "open")),
        ((WORD, OPEN), ASKED, True, Begun((WORD, OPEN), "open", thought_letters="</think>")),
        ((WORD, OPEN, 8), FREE, True, Begun((WORD, OPEN, 8), "open", thought_letters="</think>")),
        ((OPEN, CLOSE), FREE, True, Begun((OPEN, CLOSE), "closed")),
        ((OPEN, *(WORD,) * 16), FREE, True, Begun((OPEN, *(WORD,) * 16), "free")),
    ],
)  # fmt: skip
def test_where_tags_are_letters(ids: tuple[int, ...], thinking: Thinking, is_enforced: bool, wanted: Begun) -> None:
    assert begin_answer(ids, thinking, served("<think></think>", tokenizer=Letters()), is_enforced=is_enforced) == wanted


def test_a_firm_budget_needs_a_token_that_ends_the_thought() -> None:
    with pytest.raises(ApiError, match=r"no single token </think>, so no thought can be bounded"):
        begin_answer((WORD, OPEN), FIRM, served("<think></think>", tokenizer=Letters()), is_enforced=True)
    assert begin_answer((WORD,), FIRM, served("no tags", tokenizer=Letters()), is_enforced=True) == Begun((WORD,), "free")


def test_models_without_thoughts_or_templates() -> None:
    plain = served("<think></think>", tokenizer=Letters(**TAGS), reasoning_parser="none")
    assert begin_answer((WORD,), ASKED, plain, is_enforced=True) == Begun((WORD,), "free")
    for model in (served(None, tokenizer=Letters(**TAGS)), served("<think></think>")):
        assert begin_answer((WORD,), ASKED, model, is_enforced=True) == Begun((WORD,), "free")


def test_what_goes_to_the_engine() -> None:
    assert Begun((1, 2), "open", 3, 4, "x").fields() == {"prompt_ids": (1, 2), "thought_end": 3, "thought_tokens": 4}
