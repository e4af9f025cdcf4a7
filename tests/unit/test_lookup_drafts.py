"""Drafts that are looked up: what is found and where, and that they end where they do not pay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kog_dist.decode import draft_lengths
from kog_dist.decode.draft_lengths import SIZES, DraftLengths, costs_between, shared_out
from kog_dist.decode.drafts import LookupDrafter
from kog_dist.decode.lookup import LEAST, Lookup, Match

COSTS = costs_between({1: 1.0, 2: 1.1, 4: 1.5, 8: 2.8, 16: 5.4})
PROMPT = list(range(100, 160))


def found(lookup: Lookup, num: int) -> list[int]:
    match = lookup.find()
    return [] if match is None else lookup.take(match, num)


def pushed(prompt: Sequence[int], answer: Sequence[int], prediction: Sequence[int] = ()) -> Lookup:
    """After each token somebody has looked, as while decoding."""
    lookup = Lookup(prompt, prediction)
    for token in answer:
        lookup.find()
        lookup.push(token)
    return lookup


# ---- where ----
def test_what_followed_the_last_tokens_comes() -> None:
    assert found(pushed(PROMPT, [1, 110, 111, 112]), 4) == [113, 114, 115, 116]
    assert found(pushed(PROMPT, [1, 2, 110, 111]), 4) == [], "two tokens are too few"
    assert found(pushed([*PROMPT, 110, 111], [112]), 2) == [113, 114], "the last tokens may begin in the prompt"


def test_the_longest_match_wins_then_the_newest() -> None:
    prompt = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 9, 1, 2, 3, 70, 5]
    assert found(pushed(prompt, [8, 1, 2, 3]), 1) == [60]
    assert found(pushed(prompt, [6, 1, 2, 3]), 1) == [70]
    assert pushed(prompt, [8, 1, 2, 3]).find() == Match(10, 4)


def test_an_answer_that_repeats_itself_goes_on_so() -> None:
    assert found(pushed([9], [1, 2, 1, 2, 1, 2]), 5) == [1, 2, 1, 2, 1]
    assert found(pushed([9], [4, 4, 4, 4]), 3) == [4, 4, 4]


def test_a_prediction_comes_before_anything_was_said() -> None:
    prediction = [20, 21, 22, 23, 24]
    assert found(Lookup([1, 2], prediction), 3) == [20, 21, 22]
    lookup = Lookup([1, 2], prediction)
    match = lookup.find()
    assert match is not None
    assert lookup.is_predicted(match)
    assert lookup.take(match, 9) == prediction, "the prompt does not follow it"
    assert found(pushed([8, 20, 21, 22, 99, 1, 2], prediction[:3], prediction), 2) == [23, 24], "it wins over the prompt"


def test_near_to_a_draft_less_is_enough() -> None:
    """Right behind a token that was other than expected, and after words that were put in, or left out."""
    lookup = pushed(PROMPT, [1, 110, 111, 112])
    assert found(lookup, 4) == [113, 114, 115, 116]
    for token in (113, 7):  # 7 in the place of 114
        lookup.push(token)
    assert found(lookup, 2) == [115, 116]
    for token in (8, 9, 120):  # some left out
        lookup.push(token)
    assert found(lookup, 2) == [121, 122]
    for token in range(1, 12):
        lookup.push(token)
    assert found(lookup, 2) == [], "the place is forgotten"


def test_all_ends_of_runs_are_known_however_tokens_came() -> None:
    """The index that is made at once is the one that grows token by token."""
    rng = random.Random(3)
    tokens = [rng.randrange(4) for _ in range(300)]
    for cut in (0, 1, 2, 3, 4, 100, 299):
        lookup = pushed(tokens[:cut] or [0], tokens[cut:] if cut else tokens[1:])
        whole = Lookup(tokens if cut else [0, *tokens[1:]])
        for one in (lookup, whole):
            one.push(2)
            one.find()
        assert lookup._newest == whole._newest
        assert lookup._older == whole._older


def test_short_prompts() -> None:
    for prompt in ([1], [1, 2], [1, 2, 3]):
        lookup = pushed(prompt, [])
        assert lookup.find() is None
        lookup = pushed(prompt, [5, 6, 5, 6, 5, 6])
        assert found(lookup, 2) == [5, 6]


# ---- how many ----
def test_costs_between_sizes() -> None:
    assert [*map(float, COSTS)] == pytest.approx([1.0, 1.1, 1.3, 1.5, 2.15, 2.8, 4.1, 5.4])
    assert costs_between({1: 0.02}) == pytest.approx(list(SIZES)), "what was not measured is not hoped for"
    assert costs_between({1: 0.01, 2: 0.02, 4: 0.015})[3] >= 2.0, "a pass costs no less than a smaller one"
    assert costs_between({1: 0.01, 2: 0.011})[-1] == pytest.approx(2.5)


def test_longer_matches_have_longer_drafts() -> None:
    lengths = DraftLengths(COSTS)
    drafted = [lengths.best(length, 15) for length in (0, LEAST, 8, 32)]
    assert drafted == sorted(drafted)
    assert drafted[-1] > drafted[1]
    assert [lengths.best(32, most) for most in (0, 1, 2, 5)] == [0, 1, 2, 3]


def test_drafts_that_are_never_right_end() -> None:
    lengths, lost = DraftLengths(COSTS), 0.0
    for _ in range(1000):
        num = lengths.best(LEAST, 15)
        if num:
            lengths.took(LEAST, num, 0)
            lost += COSTS[SIZES.index(num + 1)] - 1
        lengths.passed(1)
    assert 0 < lost < draft_lengths._CREDIT + 1000 * draft_lengths._SHARE
    for _ in range(200):
        lengths.took(32, 3, 3)
    assert lengths.best(32, 15) == 15, "what is right pays for more"


def cost_of(prompt: Sequence[int], answer: Sequence[int], prediction: Sequence[int] = ()) -> float:
    """Passes of one token that the answer takes with drafts."""
    drafter, at, cost = LookupDrafter(prompt, prediction, COSTS), 0, 0.0
    while at < len(answer):
        draft = drafter.draft(len(answer) - at - 1).token_ids
        right = next((k for k, token in enumerate(draft) if token != answer[at + k]), len(draft))
        drafter.took(answer[at : at + right + 1])
        at, cost = at + right + 1, cost + COSTS[SIZES.index(len(draft) + 1)]
    return cost


def test_quotes_and_edits_take_less_and_other_texts_no_more() -> None:
    rng = random.Random(4)
    text = [rng.randrange(3000) for _ in range(800)]
    edited = [5000 + at if at % 25 == 0 else token for at, token in enumerate(text[:500])]
    assert cost_of([*text, 1], text[100:600]) < 0.4 * 500
    assert cost_of([*text, 1], edited) < 0.5 * 500
    assert cost_of([1], edited, text[:500]) < 0.5 * 500
    for kinds in (2, 10, 300):  # nothing can be foreseen
        prompt, answer = ([rng.randrange(kinds) for _ in range(400)] for _ in range(2))
        assert cost_of(prompt, answer) < 1.005 * len(answer) + 1.01


def test_all_ranks_draft_alike() -> None:
    rng = random.Random(6)
    prompt, answer = ([min(int(rng.expovariate(0.2)), 40) for _ in range(300)] for _ in range(2))
    drafters = [LookupDrafter(prompt, answer[:50], COSTS) for _ in range(2)]
    at = 0
    while at < len(answer):
        first, second = (drafter.draft(15) for drafter in drafters)
        assert first == second
        right = next(
            (k for k, token in enumerate(first.token_ids) if answer[at + k : at + k + 1] != [token]), len(first.token_ids)
        )
        for drafter in drafters:
            drafter.took(answer[at : at + right + 1])
        at += right + 1


# ---- what a grammar forces ----
def test_what_is_forced_is_drafted_at_once_and_whole() -> None:
    drafter = LookupDrafter([1, 2, 3], (), COSTS)
    forced = [*range(50, 65)]
    assert drafter.draft(15, forced).token_ids == forced
    assert drafter.draft(9, forced).token_ids == forced[:7], "a pass of 8; 12 are too many"
    assert drafter.draft(0, forced).token_ids == ()
    assert drafter.draft(15).token_ids == ()


def test_a_match_goes_on_behind_what_is_forced() -> None:
    text = [*range(100, 140)]
    drafter = LookupDrafter(text, (), COSTS)
    drafter.took(text[:9])
    draft = drafter.draft(15, text[9:11])
    assert list(draft.token_ids) == text[9 : 9 + len(draft.token_ids)]
    assert len(draft.token_ids) > 2
    assert list(drafter.draft(15, [text[9], 7]).token_ids) == [text[9], 7], "the match is another one"


def test_what_was_said_before_is_looked_up_behind_what_is_forced() -> None:
    """Where the last tokens were never said, but what is forced was, and something stood behind it."""
    lookup = Lookup([30, 31, 32, 40, 41, 42, 43, 44], ())
    assert lookup.find_behind([40, 41, 42]) is None, "nothing was said yet"
    lookup.push(9)
    assert lookup.find() is None
    match = lookup.find_behind([40, 41, 42])
    assert match is not None
    assert (lookup.following(match, 5), match.length) == ([40, 41, 42, 43, 44], 3)
    assert lookup.find_behind([31, 32, 7]) is None
    assert lookup.find_behind([41, 42]) is None, "two are too few"
    lookup.push(41)  # all is as it was
    lookup.push(42)
    assert found(lookup, 2) == []
    drafter = LookupDrafter([30, 31, 32, 40, 41, 42, *range(50, 70)], (), [1.0] * len(SIZES))
    drafter.took([9])
    drafted = list(drafter.draft(15, [40, 41, 42]).token_ids)
    assert drafted == [40, 41, 42, *range(50, 62)]
    drafter.took([*drafted, 62])
    assert drafter.draft(3).token_ids == [63, 64, 65]


def test_what_is_forced_costs_nothing_however_wrong_other_drafts_were() -> None:
    text = [*range(100, 140)]
    drafter = LookupDrafter([*text, *text], (), COSTS)
    at = 0
    while drafter.draft(15).token_ids or at < 3:  # always wrong behind a match
        drafter.took([*text[at : at + 3], 7])
        at += 3
        assert at < len(text)
    assert list(drafter.draft(15, [1, 2, 3]).token_ids) == [1, 2, 3]


def test_who_was_wrong_of_what_is_forced_is_not_believed_again() -> None:
    drafter = LookupDrafter([1, 2, 3], (), COSTS)
    assert drafter.draft(15, [5, 6]).token_ids == [5, 6]
    drafter.took([5, 6, 9])
    assert drafter.draft(15, [5, 6]).token_ids == [5, 6]
    drafter.took([5, 9])
    assert drafter.draft(15, [5, 6]).token_ids == ()


def test_forced_tokens_say_nothing_of_others() -> None:
    lengths, other = DraftLengths(COSTS), DraftLengths(COSTS)
    for _ in range(20):
        lengths.took(5, 3, 3, num_forced=3)
    assert lengths.best(5, 15) == other.best(5, 15)
    for _ in range(20):
        lengths.took(5, 7, 3, num_forced=3)  # the others are wrong
        lengths.passed(1)
    assert lengths.best(5, 15) == 0
    assert lengths.best(5, 15, num_forced=3) == 3


def test_a_pass_is_shared_out_to_the_drafts_that_are_most_likely() -> None:
    sure, fair, poor = [0.9, 0.81, 0.73, 0.66], [0.6, 0.36], [0.5]
    assert shared_out([sure, fair, poor], 16) == [4, 2, 1], "there is room for all"
    assert shared_out([poor, sure, fair], 4) == [0, 4, 0]
    assert shared_out([poor, sure, fair], 5) == [0, 4, 1]
    assert shared_out([poor, sure, fair], 6) == [1, 4, 1]
    assert shared_out([[1.0] * 8, [1.0] * 8, []], 5) == [3, 2, 0], "as many of equally likely ones"
    assert shared_out([sure, fair], 0) == shared_out([[], []], 3) == [0, 0]
    assert shared_out([], 3) == []


def test_an_outlook_is_that_of_the_draft_which_may_be_shorter() -> None:
    text = [5, 9, 200, 17, 33, 41, 7, 8]
    costs = [1.0 + 0.02 * idx for idx in range(len(SIZES))]
    drafter = LookupDrafter([*text, 1, *text[:4]], (), costs)
    drafter.took([33])
    outlook = drafter.outlook(15)
    assert len(outlook) > 2
    assert [*outlook] == sorted(outlook, reverse=True)
    assert 0 < outlook[-1] < outlook[0] < 1
    assert [*drafter.draft(2).token_ids] == text[5:7], "no more than its share"
    drafter.took([41])
    asked = drafter.outlook(15)
    assert len(drafter.draft(15).token_ids) == len(asked), "as it has said"
    drafter.took([7])
    assert drafter.outlook(3, forced=(8, 2))[:2] == [1.0, 1.0], "what is forced is certain"
    assert [*drafter.draft(3, (8, 2)).token_ids][:2] == [8, 2]
