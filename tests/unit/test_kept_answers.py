"""Earlier answers as drafts: of the same scope alone, the most alike prompt's first, none that the prompt has anyway."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage, KvLayout
from kog_dist.runtime.ring import Finish
from kog_dist.workers.coordinator import kept_answers
from kog_dist.workers.coordinator.decode_slot import DecodeSlots
from kog_dist.workers.coordinator.kept_answers import MOST_RECALLED, KeptAnswers

ANSWER = tuple(range(100, 120))
OTHER = tuple(range(200, 230))


def ids(*tokens: int) -> array[int]:
    return array("I", tokens)


def kept(*answers: tuple[str, Sequence[int], Sequence[int]]) -> KeptAnswers:
    """Scope, prompt and answer of each, the newest last."""
    made = KeptAnswers()
    for scope, prompt, answer in answers:
        made.add(scope, ids(*prompt, *answer), len(prompt))
    return made


def test_the_answer_to_the_most_alike_prompt_comes_first_then_the_newest() -> None:
    made = kept(("", (1, 2, 3), ANSWER), ("", (9, 2, 4), OTHER), ("", (5, 6, 4), range(300, 310)))
    assert made.recall("", ids(0, 2, 3)) == ids(*ANSWER, *range(300, 310), *OTHER)
    assert made.recall("", ids(7, 7, 7)) == ids(*range(300, 310), *OTHER, *ANSWER)
    assert made.recall("", ids(9, 2, 4)) == ids(*OTHER, *range(300, 310), *ANSWER)


def test_likeness_is_of_ends_as_far_as_prompts_are_compared() -> None:
    long = tuple(range(1000, 1200))
    made = kept(("", (1, *long), ANSWER), ("", (*long[:-1], 5), OTHER))
    assert made.recall("", ids(2, *long))[:20] == ids(*ANSWER)


def test_no_other_scope_learns_of_it() -> None:
    made = kept(("mine", (1, 2, 3), ANSWER))
    assert made.recall("yours", ids(1, 2, 3)) == ids()
    assert made.recall("", ids(1, 2, 3)) == ids()
    assert made.recall("mine", ids(1, 2, 3)) == ids(*ANSWER)


def test_what_a_conversation_quotes_is_not_recalled() -> None:
    """Whatever its template makes of the token that ended it."""
    made = kept(("", (1, 2, 3), ANSWER))
    assert made.recall("", ids(1, 2, 3, *ANSWER, 4)) == ids()
    assert made.recall("", ids(1, 2, 3, *ANSWER[:-1], 4)) == ids()
    assert made.recall("", ids(1, 2, 3, *ANSWER[:-2], 4)) == ids(*ANSWER)
    assert made.recall("", ids(1, 2, *ANSWER)) == ids(*ANSWER)


def test_short_answers_are_not_kept_and_long_ones_are_cut() -> None:
    made = kept(("", (1,), range(7)), ("", (2,), range(MOST_RECALLED + 9)))
    assert made.recall("", ids(1)) == ids(*range(MOST_RECALLED))
    assert made.recall("", ids(1), 10) == ids(*range(10))


def test_the_same_answer_is_kept_once_and_counts_as_new() -> None:
    made = kept(("", (1,), ANSWER), ("", (2,), OTHER), ("", (3,), ANSWER))
    assert made.recall("", ids(9)) == ids(*ANSWER, *OTHER)


@pytest.mark.parametrize(("name", "most"), [("_MOST_KEPT", 50), ("_MOST_ANSWERS", 2)])
def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(kept_answers, name, most)
    made = kept(("a", (1,), ANSWER), ("b", (2,), OTHER), ("c", (3,), range(300, 320)))
    assert made.recall("a", ids(1)) == ids()
    assert made.recall("b", ids(2)) == ids(*OTHER)
    assert made.recall("c", ids(3)) == ids(*range(300, 320))


@pytest.fixture
def page() -> Iterator[ControlPage]:
    made = ControlPage.create(1, 64)
    made.set_kv_layout(0, KvLayout(1))
    yield made
    made.close()


def decoded(
    page: ControlPage, slots: DecodeSlots, request: DecodeRequest, answer: Sequence[int], *, recalls: bool = True
) -> DecodeRequest:
    """The request as ranks got it, once they have given that answer."""
    slot = slots.slots[0]
    given = slots.submit(slot, request, reuse_kv=True, recalls=recalls)
    assert slot.seq is not None
    page.set_read(0, slot.seq)
    for index, token in enumerate(answer):
        finish = Finish.STOP if index + 1 == len(answer) else Finish.NONE
        page.ring.put(slot.seq, index, token, 1, None, finish)
    slot.read()
    assert not slot.busy
    return given


def test_ranks_get_an_earlier_answer_in_place_of_a_prediction(page: ControlPage) -> None:
    slots, asked = DecodeSlots(page, None), DecodeRequest((1, 2, 3), 30, drafts=True)
    assert decoded(page, slots, asked, ANSWER).prediction == ids()
    assert decoded(page, slots, asked, ANSWER).prediction == ids(*ANSWER)
    assert decoded(page, slots, asked, ANSWER, recalls=False).prediction == ids()
    predicting = DecodeRequest((1, 2, 3), 30, drafts=True, prediction=(7, 8))
    assert decoded(page, slots, predicting, ANSWER).prediction == ids(7, 8)
