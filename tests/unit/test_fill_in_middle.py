"""Which tokens stand around two texts for a model that fills in what belongs between them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kog_dist.model.fill_in_middle import FillInMiddle
from kog_dist.model.tokenizer import Tokenizer

KINDS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


class Known:
    def __init__(self, *tokens: str) -> None:
        self._tokens = tokens

    def id_of(self, token: str) -> int | None:
        return 100 + self._tokens.index(token) if token in self._tokens else None


@pytest.mark.parametrize("marks", KINDS)
def test_all_three_must_be_there(marks: tuple[str, ...]) -> None:
    found = FillInMiddle.of(cast(Tokenizer, Known("other", *marks)))
    assert found == FillInMiddle(101, 102, 103, marks[0].startswith("▁"))
    for without in range(3):
        some = [mark for idx, mark in enumerate(marks) if idx != without]
        assert FillInMiddle.of(cast(Tokenizer, Known(*some))) is None
    assert FillInMiddle.of(cast(Tokenizer, Known(*reversed(marks)))) == FillInMiddle(102, 101, 100, marks[0].startswith("▁"))


def encode(text: str) -> tuple[int, ...]:
    """As SentencePiece: a blank in front."""
    return tuple(map(ord, f"▁{text}"))


def test_sentencepiece_gets_no_blank_in_front() -> None:
    bare: Any = FillInMiddle(1, 2, 3, is_sentencepiece=True)
    assert bare.bare("ab", encode) == (97, 98)
    assert bare.bare(" ab", encode) == (32, 97, 98)
    assert bare.bare("", encode) == ()
    others = FillInMiddle(1, 2, 3, is_sentencepiece=False)
    assert others.bare("ab", encode) == encode("ab")
    assert others.bare("", encode) == ()


def test_the_prompt() -> None:
    assert FillInMiddle(1, 2, 3, is_sentencepiece=False).around((10, 11), (12,)) == [1, 10, 11, 2, 12, 3]
    assert FillInMiddle(1, 2, 3, is_sentencepiece=False).around((), ()) == [1, 2, 3]
