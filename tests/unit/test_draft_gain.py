"""What a GPU engine thinks drafts would give requests that share passes."""

from __future__ import annotations

import random

import pytest

from kog_dist.workers.engines.draft_gain import DraftGain, gains_from_turns

EXTRA = 0.12


def followed(prompt: list[int], answer: list[int], prediction: tuple[int, ...] = (), known: int = 0) -> DraftGain:
    made = DraftGain(prompt, prediction, answer[:known], 4, EXTRA)
    for token_id in answer[known:]:
        made.took(token_id)
    return made


def words(num: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 10_000 + i).randrange(1000) for i in range(num)]


@pytest.mark.parametrize(("known", "prediction"), [(0, ()), (50, ()), (0, tuple(words(200)))])
def test_a_quote_gives_all_tokens_of_a_pass(known: int, prediction: tuple[int, ...]) -> None:
    text = words(200)
    found = followed(words(5, 2) if prediction else text, text, prediction, known)
    assert found.rate == pytest.approx(4 / (1 + EXTRA), rel=0.05)


def test_prose_gives_one() -> None:
    assert followed(words(300), words(300, 3)).rate == 1
    assert followed(words(300), words(11)).rate == 1, "not yet known"


def test_what_was_long_ago_does_not_count() -> None:
    text = words(300)
    assert followed(text, [*text, *words(100, 4)]).rate < 1.1
    assert followed(text, [*words(100, 4), *text]).rate > 3


def test_turns_are_for_few_that_all_have_many_right_drafts() -> None:
    text = words(100)
    many, none = followed(text, text), followed(text, words(100, 5))
    assert gains_from_turns([many, many], EXTRA)
    assert gains_from_turns([many] * 3, EXTRA)
    assert not gains_from_turns([many] * 4, EXTRA), "a pass of four takes as long as one with drafts"
    assert not gains_from_turns([many, none], EXTRA)
