"""SamplingParams: bits of the definition, the right distribution, and the same choice however the vocabulary is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kog_dist.decode.sampling import (
    NO_CANDIDATE,
    Candidate,
    candidate,
    gumbel,
    log32,
    philox4x32,
    philox4x32_counters,
    pick,
    sample,
)
from kog_dist.sampling_params import SamplingParams

RECORDED = ["0x400f867a", "0xbf657e38", "0xbff5c727", "0xbd3e9114"]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_philox_gives_the_published_vectors(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """The known answers of Random123's kat_vectors for philox4x32, 10 rounds."""
    c0, c1, c2, c3 = (np.array([word], np.uint32) for word in counter)
    assert tuple(philox4x32_counters((c0, c1, c2, c3), *key)[0]) == words


def scalar_noise(seed: int, position: int, token_id: int) -> np.float32:
    """The definition of `gumbel`, one value at a time in the written order, as a kernel does it."""
    f32 = np.float32
    block = philox4x32(np.array([token_id >> 2], np.uint32), position, seed)[0]
    uniform = (f32(int(block[token_id & 3]) >> 9) + f32(0.5)) * f32(2.0**-23)

    def log(x: np.float32) -> np.float32:
        bits = int(x.view(np.uint32))
        e, m = (bits >> 23) - 126, np.uint32((bits & 0x7FFFFF) | 0x3F000000).view(f32)
        if m < f32(0.70710678):
            m, e = m + m, e - 1
        f = m - f32(1.0)
        z = f * f
        p = f32(7.0376836292e-2)
        for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
                  -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
            p = p * f + f32(c)
        y = (p * f) * z
        y = y + f32(e) * f32(-2.12194440e-4)
        y = y - f32(0.5) * z
        return (f + y) + f32(e) * f32(0.693359375)

    return -log(-log(uniform))


def test_noise_has_the_bits_of_the_definition() -> None:
    noise = gumbel(seed=(7 << 32) + 9, position=41, first_id=5, count=60)
    expected = np.array([scalar_noise((7 << 32) + 9, 41, token_id) for token_id in range(5, 65)], np.float32)
    assert noise.tobytes() == expected.tobytes()


def test_bits_of_the_noise_do_not_change() -> None:
    """Recorded once; a change here is a change of what every seed gives."""
    words = gumbel(seed=1, position=2, first_id=0, count=4).view(np.uint32)
    assert [hex(word) for word in words] == RECORDED


def test_the_logarithm_is_right_everywhere_it_is_used() -> None:
    uniform = (np.arange(1 << 23, dtype=np.uint32).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    exact = np.log(uniform.astype(np.float64))
    ours = log32(uniform.copy())
    assert np.max(np.abs(ours - exact) / np.abs(exact)) < 1e-7
    noise = -log32(-ours)
    assert np.max(np.abs(noise + np.log(-exact))) < 1e-6
    assert np.isfinite(noise).all()


def test_noise_does_not_depend_on_how_the_vocabulary_is_cut() -> None:
    whole = gumbel(3, 17, 0, 101)
    for cut in (1, 2, 3, 4, 5, 50, 99):
        parts = np.concatenate([gumbel(3, 17, first, min(cut, 101 - first)) for first in range(0, 101, cut)])
        assert parts.tobytes() == whole.tobytes(), cut


def test_noise_depends_on_seed_position_and_id() -> None:
    base = gumbel(1, 1, 0, 64)
    assert not np.isin(gumbel(2, 1, 0, 64), base).any()
    assert not np.isin(gumbel(1 + (1 << 32), 1, 0, 64), base).any()
    assert not np.isin(gumbel(1, 2, 0, 64), base).any()
    assert len(np.unique(base)) == 64


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_the_choice_does_not_depend_on_how_the_vocabulary_is_cut(temperature: float) -> None:
    rng = np.random.default_rng(5)
    for position in range(12):
        logits = rng.standard_normal(97).astype(np.float32)
        sampling = SamplingParams(temperature, seed=11)
        whole = sample(logits, position, sampling)
        for cut in (1, 7, 48, 96):
            found = [candidate(logits[first : first + cut], first, position, sampling) for first in range(0, 97, cut)]
            rng.shuffle(found)
            assert pick(Candidate(*one) for one in found).token_id == whole


def test_greedy_takes_the_largest_and_the_lower_of_equal_ones() -> None:
    assert sample(np.array([1, 5, 5, 2], np.float32), 0, SamplingParams()) == 1
    assert sample(np.array([-0.0, 0.0], np.float32), 0, SamplingParams()) == 0
    assert pick([Candidate(2.0, 9), Candidate(2.0, 4), Candidate(1.0, 0)]) == (2.0, 4)
    assert pick([NO_CANDIDATE, Candidate(-1e30, 7)]) == (-1e30, 7)


def test_temperature_draws_from_the_softmax() -> None:
    """Chi-square over 20,000 draws from 400 positions with a fixed seed; 15 degrees of freedom, 37.7 is the 0.1 % point."""
    logits = np.linspace(-1.5, 1.5, 16).astype(np.float32)
    temperature, draws = 0.8, 20_000
    weights = np.exp(logits.astype(np.float64) / temperature)
    noise = np.stack([gumbel(2024, position, 0, 16 * 50).reshape(50, 16) for position in range(draws // 50)])
    scores = logits * (np.float32(1) / np.float32(temperature)) + noise
    chosen = scores.argmax(axis=2)
    for position in range(0, draws // 50, 57):
        assert sample(logits, position, SamplingParams(temperature, seed=2024)) == chosen[position, 0]
    counts = np.bincount(chosen.ravel(), minlength=16)
    expected = draws * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 37.7


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of consecutive positions, and of neighbouring ids, fall evenly into 4 x 4 cells; 15 degrees of freedom."""
    noise = np.stack([gumbel(77, position, 0, 64) for position in range(500)])
    quartiles = -np.log(-np.log([0.25, 0.5, 0.75]))
    cells = np.searchsorted(quartiles, noise)
    for first, second in ((cells[:-1], cells[1:]), (cells[:, :-1], cells[:, 1:])):
        counts = np.bincount((4 * first + second).ravel(), minlength=16)
        expected = counts.sum() / 16
        assert ((counts - expected) ** 2 / expected).sum() < 37.7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_never_a_token(bad: float, temperature: float) -> None:
    logits = np.zeros(8, np.float32)
    logits[5] = bad
    found = candidate(logits, 0, 3, SamplingParams(temperature))
    assert math.isnan(found.value)
    assert math.isnan(pick([Candidate(9.0, 1), found, Candidate(1.0, 2)]).value)
    with pytest.raises(ValueError, match="not all finite"):
        sample(logits, 3, SamplingParams(temperature))


def test_an_empty_slice_has_no_candidate() -> None:
    assert candidate(np.empty(0, np.float32), 12, 0, SamplingParams()) == NO_CANDIDATE
    with pytest.raises(ValueError, match="no candidate"):
        pick([])


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf, 1e9])
def test_temperatures_out_of_range_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be between"):
        SamplingParams(temperature)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed must be between"):
        SamplingParams(1.0, seed)
