"""Penalties, biases and filters: the bits of the definition, and that they need no order of additions and no sorting."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.decode.sampling import (
    NO_CANDIDATE,
    Sampler,
    adjust,
    gumbel,
    gumbel_of,
    in_order,
    log32,
    masses,
    sample,
    select,
    token_logprobs,
)
from kog_dist.decode.sampling.bits import log_of_mass
from kog_dist.sampling_params import GREEDY, MAX_LOGIT_BIAS, SamplingParams

F32 = np.float32
RECORDED_MASSES = [1099511627776, 666887520256, 404487733248, 148802715648, 7408451072, 49917752, 0, 0]
RECORDED_LOGPROBS = ["-0x1.6677cc0000000p-1", "-0x1.733be60000000p+0"]


def test_masses_have_the_bits_of_the_definition() -> None:
    """One value at a time in the written order, as a kernel does it."""

    def scalar(distance: np.float32) -> int:
        x = max(distance, F32(-28.0))
        n = F32(math.floor(x * F32(1.44269504088896341) + F32(0.5)))
        f = x - n * F32(0.693359375)
        f = f - n * F32(-2.12194440e-4)
        p = F32(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * f + F32(c)
        y = p * (f * f)
        y = y + f
        y = y + F32(1.0)
        return int(math.ldexp(float(y), int(n) + 40))

    distances = -np.abs(np.random.default_rng(2).standard_normal(400).astype(F32) * F32(9))
    assert masses(distances).tolist() == [scalar(d) for d in distances]
    known = np.array([0, -0.5, -1, -2, -5, -10, -28, -1e30], F32)
    assert masses(known).tolist() == RECORDED_MASSES, "a change here is a change of what every seed gives"


def test_masses_are_exponentials() -> None:
    distances = -np.linspace(0, 20, 200_001).astype(F32)
    exact = np.exp(distances.astype(np.float64)) * 2.0**40
    found = masses(distances).astype(np.float64)
    assert np.max(np.abs(found - exact) - 1 - 2e-7 * exact) < 0
    assert masses(np.array([-27.8, -28.0, -100.0, -np.inf], F32)).tolist() == [0, 0, 0, 0]


def test_noise_of_scattered_ids_is_that_of_the_range() -> None:
    ids = np.array([0, 3, 4, 17, 18, 19, 60])
    assert gumbel_of(9, 4, ids).tobytes() == gumbel(9, 4, 0, 61)[ids].tobytes()


# ---- penalties ----
def test_penalties_in_their_order() -> None:
    """Bias, repetition, frequency, presence: each rounded to float32, each id once whatever its count."""
    logits = np.array([2.5, -1.25, 0.3, 7.1, -0.0, 4.4], F32)
    seen = np.array([1, 1, 0, 1, 1, 0], np.bool_)
    counts = np.array([0, 3, 0, 1, 0, 0], np.int32)
    processors = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.2, logit_bias=((3, -9.0), (5, 1.1))
    )  # fmt: skip
    r, f, p = F32(1.3), F32(-0.2), F32(0.7)
    expected = [
        logits[0] / r, (logits[1] * r - f * F32(3)) - p, logits[2], ((logits[3] + F32(-9.0)) * r - f * F32(1)) - p,
        logits[4] / r, logits[5] + F32(1.1),
    ]  # fmt: skip
    assert adjust(logits, processors, seen, counts).tolist() == [float(value) for value in expected]
    assert adjust(logits, SamplingParams(), seen, counts).tobytes() == logits.tobytes()


def test_a_shaper_remembers_what_was_said() -> None:
    """Prompt ids count for the repetition penalty only; ids of the answer for all three."""
    logits = np.array([4.0, 3.9, 3.8, 3.7], F32)
    shaper = Sampler(4, [0], SamplingParams(presence_penalty=0.15, frequency_penalty=0.1))
    chosen = []
    for _ in range(5):
        chosen.append(shaper.choose(logits, 0).token_id)
        shaper.accept(chosen[-1])
    assert chosen == [0, 1, 2, 0, 3]  # then 3.75 / 3.65 / 3.55 / 3.7, then 3.65 / 3.65 / 3.55 / 3.7
    repeating = Sampler(4, [0, 0, 0], SamplingParams(repetition_penalty=1.05))
    assert repeating.choose(logits, 0).token_id == 1


def test_end_ids_wait_for_min_tokens() -> None:
    logits = np.array([1.0, 8.0, 9.0], F32)
    shaper = Sampler(3, [1], SamplingParams(min_tokens=2), stop_ids=[1, 2])
    only_ends = np.array([0b110], np.uint32)
    for wanted in (0, 0, 2, 2):
        found = shaper.choose(logits, 0).token_id
        assert found == wanted
        assert shaper.choose(logits, 0, only_ends) == (9.0, 2), "a grammar that ends is not held up"
        shaper.accept(found)


def test_a_mask_leaves_ids_out() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal(70).astype(F32)
    bits = rng.random(70) < 0.3
    mask = np.zeros(3, np.uint32)
    for token_id in np.flatnonzero(bits):
        mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
    mask[2] |= np.uint32(1 << 31)  # beyond the vocabulary: means nothing
    greedy = Sampler(70, [], SamplingParams()).choose(logits, 0, mask)
    assert greedy.token_id == int(np.where(bits, logits, -np.inf).argmax())
    drawn = {Sampler(70, [], SamplingParams(2.0, 5)).choose(logits, position, mask).token_id for position in range(300)}
    assert drawn <= set(np.flatnonzero(bits).tolist())
    assert len(drawn) > 10
    assert Sampler(70, [], SamplingParams()).choose(logits, 0, np.zeros(3, np.uint32)) == NO_CANDIDATE


# ---- filters ----
def test_ties_are_cut_by_id() -> None:
    x = np.array([1, 2, 2, 2, 0], F32)
    assert sorted(select(x, SamplingParams(top_k=2)).tolist()) == [1, 2]
    assert in_order(x).tolist() == [1, 2, 3, 0, 4]
    assert in_order(x, 4).tolist() == [1, 2, 3, 0]
    assert in_order(np.array([-0.0, 0.0], F32)).tolist() == [0, 1]
    equal = np.zeros(10, F32)
    assert sorted(select(equal, SamplingParams(top_p=0.3)).tolist()) == [0, 1, 2]  # 3/10 is reached exactly, with integers
    assert sorted(select(equal, SamplingParams(top_p=0.31)).tolist()) == [0, 1, 2, 3]
    assert sorted(select(equal[:3], SamplingParams(top_p=1 / 3)).tolist()) == [0]
    assert sorted(select(equal[:3], SamplingParams(top_p=math.nextafter(1 / 3, 1))).tolist()) == [0, 1]
    assert sorted(select(x, SamplingParams(min_p=1.0)).tolist()) == [1, 2, 3]
    assert sorted(select(x, SamplingParams(top_p=1e-6)).tolist()) == [1]


def any_processors() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        top_k=st.sampled_from([0, 0, 1, 2, 3, 7, 20, 100]),
        top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.1, 0.5, 0.9, 0.999]) | st.floats(0.01, 1.0),
        min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.02, 0.5, 1.0]) | st.floats(0.0, 1.0),
    )


@st.composite
def values(draw: st.DrawFn) -> NDArray[np.float32]:
    """Vocabularies with many ties, with few, flat and steep."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal(draw(st.integers(1, 60))) * draw(st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    return (np.round(x, draw(st.integers(0, 3))) if draw(st.booleans()) else x).astype(F32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(x=values(), processors=any_processors())
def test_filters_keep_what_exact_arithmetic_keeps(x: NDArray[np.float32], processors: SamplingParams) -> None:
    """The slow obvious twin: sort, then rational numbers."""
    order = sorted(range(len(x)), key=lambda k: (-float(x[k]), k))
    largest = x.max()
    if processors.min_p > 0:
        lowest = log32(np.array([max(F32(processors.min_p), F32(2.0**-126))], F32))[0]
        order = [k for k in order if F32(x[k] - largest) >= lowest]
    if processors.top_k:
        order = order[: processors.top_k]
    weights = [Fraction(int(m)) for m in masses(x[order] - largest)]
    total, before, kept = sum(weights), Fraction(0), []
    for k, weight in zip(order, weights, strict=True):
        if processors.top_p == 1 or before < Fraction(processors.top_p) * total:
            kept.append(k)
        before += weight
    assert sorted(select(x, processors).tolist()) == sorted(kept)


def chosen_without_sorting(
    x: NDArray[np.float32], processors: SamplingParams, scores: NDArray[np.float32], cuts: list[int]
) -> int:
    """What a kernel may do instead: draw from all, and reject by a token's own place, with sums over slices in any order.

    With top-k and top-p together, the mass that top-p counts is that of the first k: found by bisection over the order's keys.
    """
    slices = np.split(np.arange(len(x)), cuts)
    largest = x.max()
    lowest = log32(np.array([max(F32(processors.min_p), F32(2.0**-126))], F32))[0] if processors.min_p > 0 else F32(-np.inf)
    alive = [part[(x[part] - largest) >= lowest] for part in slices]

    def before(k: int) -> tuple[int, int]:
        """How many, and how much mass, stand before token k."""
        count = mass = 0
        for part in reversed(alive):
            first = part[(x[part] > x[k]) | ((x[part] == x[k]) & (part < k))]
            count, mass = count + len(first), mass + int(masses(x[first] - largest).sum())
        return count, mass

    num = sum(map(len, alive))
    top_k = min(processors.top_k or num, num)
    total = sum(int(masses(x[part] - largest).sum()) for part in alive)
    if top_k < num:
        edge = next(int(k) for part in alive for k in part if before(int(k))[0] == top_k)
        total = before(edge)[1]
    limit = Fraction(processors.top_p) * total if processors.top_p < 1 else Fraction(total + 1)
    pool = [int(k) for part in alive for k in part]
    while True:
        best = max(pool, key=lambda k: (scores[k], -k))
        count, mass = before(best)
        if count < top_k and mass < limit:
            return best
        pool = [k for k in pool if x[k] > x[best] or (x[k] == x[best] and k < best)]  # what comes after cannot stay either


@settings(max_examples=80, deadline=None, derandomize=True)
@given(x=values(), processors=any_processors(), seed=st.integers(0, 2**63 - 1), rnd=st.randoms(use_true_random=False))
def test_slices_and_rejection_choose_the_same(x: NDArray[np.float32], processors: SamplingParams, seed: int, rnd: Any) -> None:
    cuts = sorted(rnd.choices(range(len(x) + 1), k=rnd.choice([0, 1, 3, 7])))
    scores = x + gumbel(seed, 5, 0, len(x))
    found = Sampler(len(x), [], replace(processors, temperature=1.0, seed=seed)).choose(x, 5)
    assert found.token_id == chosen_without_sorting(x, processors, scores, cuts)
    assert found.value == scores[found.token_id]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.7])
def test_a_shaper_with_nothing_to_do_has_the_bits_of_plain_sampling(temperature: float) -> None:
    rng = np.random.default_rng(4)
    for position in range(20):
        logits = rng.standard_normal(101).astype(F32) * F32(3)
        sampling = SamplingParams(temperature, seed=77)
        plain = sample(logits, position, sampling)
        assert Sampler(101, [1, 2], sampling).choose(logits, position).token_id == plain
        full = replace(sampling, top_k=101, min_p=1e-30, logit_bias=((5, 0.0),), min_tokens=3)
        assert Sampler(101, [1, 2], full).choose(logits, position).token_id == plain


def test_top_p_draws_from_the_cut_softmax() -> None:
    """Chi-square over 4,000 positions of the five ids that top-p leaves; 4 degrees of freedom, 18.5 is the 0.1 % point."""
    logits = np.linspace(-3, 3, 24).astype(F32)
    processors, sampling = SamplingParams(top_p=0.7), SamplingParams(1.0, 99)
    kept = np.sort(select(logits, processors))
    shaper = Sampler(24, [], replace(processors, temperature=sampling.temperature, seed=sampling.seed))
    counts = np.bincount([shaper.choose(logits, position).token_id for position in range(4000)], minlength=24)
    assert counts[kept].sum() == 4000
    assert len(kept) == 5
    weights = np.exp(logits[kept].astype(np.float64))
    expected = 4000 * weights / weights.sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_never_a_token(bad: float) -> None:
    logits = np.zeros(8, F32)
    logits[5] = bad
    assert math.isnan(Sampler(8, [], SamplingParams(presence_penalty=1)).choose(logits, 0).value)
    steep = Sampler(8, [], SamplingParams(0.001, top_k=2))
    assert math.isnan(steep.choose(np.full(8, 3e38, F32), 0).value)


# ---- log-probabilities ----
@settings(max_examples=60, deadline=None, derandomize=True)
@given(logits=values(), rnd=st.randoms(use_true_random=False))
def test_logprobs_are_those_of_the_softmax(logits: NDArray[np.float32], rnd: Any) -> None:
    token_id = rnd.randrange(len(logits))
    num_top = rnd.choice([0, 1, 5, 20])
    found = token_logprobs(logits, token_id, num_top)
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    best = sorted(range(len(logits)), key=lambda k: (-wide[k], k))[:num_top]
    assert list(found.top_ids) == best
    for value, wanted in zip((found.chosen, *found.top_logprobs), exact[[token_id, *best]], strict=True):
        assert abs(value - wanted) < 2e-6 + 1e-7 * abs(wanted)
        assert value <= 0


def test_logprobs_do_not_depend_on_the_order_of_additions() -> None:
    """Float32 sums of 2**18 terms differ with their order; sums of masses do not, and are near the truth."""
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(1 << 18) * 2).astype(F32)
    found = [
        token_logprobs(logits[order], int(np.flatnonzero(order == 7)[0]), 3) for order in map(rng.permutation, [1 << 18] * 3)
    ]
    assert len({(one.chosen, one.top_logprobs) for one in found}) == 1
    wide = logits.astype(np.float64)
    assert abs(found[0].chosen - (wide[7] - math.log(np.exp(wide).sum()))) < 2e-6
    assert abs(float(log_of_mass(3 << 40)) - math.log(3)) < 1e-7
    chance = random.Random(3)
    totals = [1 << 40, (1 << 40) + 1, *(chance.randrange(1 << 40, 1 << chance.randint(41, 62)) for _ in range(2000))]
    scaled = np.array(totals, np.uint64).astype(np.float32) * np.float32(2.0**-40)
    assert [log_of_mass(total) for total in totals] == log32(scaled).tolist()


def test_bits_of_logprobs_do_not_change() -> None:
    found = token_logprobs(np.array([0.5, 1.5, -0.25, 0.75], F32), 3, 2)
    assert [value.hex() for value in (found.top_logprobs[0], found.chosen)] == RECORDED_LOGPROBS
    lowest = token_logprobs(np.array([-3e38, 3e38], F32), 0, 1)
    assert lowest == (float(np.finfo(F32).min), (1,), (0.0,))


# ---- limits ----
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("top_k", -1), ("top_k", 2**31),
        ("min_tokens", -1), ("logit_bias", ((1, 101.0),)), ("logit_bias", ((1, math.nan),)), ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", tuple((k, 0.0) for k in range(MAX_LOGIT_BIAS + 1))),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: bad})


def test_only_what_differs_from_its_default_is_given() -> None:
    assert GREEDY.given() == {}
    assert SamplingParams(top_k=5, min_p=-0.0).given() == {"top_k": 5}
    with pytest.raises(ValueError, match=r"^top_p must be between"):
        SamplingParams(top_p=math.nan)
    with pytest.raises(ValueError, match=r"^top_k must be an integer, got bool True"):
        SamplingParams(top_k=True)


def test_greedy_needs_no_filters() -> None:
    assert not SamplingParams(top_k=3, top_p=0.5, min_p=0.1).has_processors
    assert SamplingParams(0.5, top_k=3).has_processors
    assert SamplingParams(presence_penalty=0.1).has_processors
    assert not SamplingParams(1.0).has_processors
    rng = np.random.default_rng(6)
    logits = np.round(rng.standard_normal(40), 1).astype(F32)
    filtered = Sampler(40, [], SamplingParams(top_k=3, top_p=0.5, min_p=0.1)).choose(logits, 0)
    assert filtered.token_id == sample(logits, 0, SamplingParams())
