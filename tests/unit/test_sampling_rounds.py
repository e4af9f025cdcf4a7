"""How a kernel draws from what filters leave (workers/phases/choose.cuh), in NumPy: the definition's token, in few exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.sampling import Sampler, gumbel, masses
from kog_dist.decode.sampling.processors import fixed_top_p, lowest_distance
from kog_dist.sampling_params import SamplingParams

F32 = np.float32
_RANGES = 16  # of keys, counted in one exchange


class Rounds:
    """One token: `x` (n,) of the allowed ids; `token_id`, and how many exchanges it took besides that of the first offers."""

    def __init__(self, x: NDArray[np.float32], processors: SamplingParams, seed: int) -> None:
        ids = np.arange(len(x))
        scores = x + gumbel(seed, 3, 0, len(x))
        with np.errstate(over="ignore"):
            distance = x - x.max()
        self.num_exchanges = self.num_searches = 0
        stays = distance >= lowest_distance(processors.min_p)
        self._keys, self._masses = np.abs(distance[stays]).view(np.uint32).astype(np.int64), masses(distance[stays])
        limit = None if processors.top_p == 1 else -(-self._total(processors.top_k) * fixed_top_p(processors.top_p) >> 64)
        best = int(scores.argmax())
        while True:
            self.num_exchanges += 1
            before = stays & ((x > x[best]) | ((x == x[best]) & (ids < best)))
            mass = int(masses(distance[before]).sum())
            in_top_k = processors.top_k == 0 or before.sum() < processors.top_k
            if stays[best] and in_top_k and (limit is None or mass < limit):
                break
            best = int(np.where(before, scores, -np.inf).argmax())
        self.token_id = best

    def _total(self, top_k: int) -> int:
        """The mass of the first `top_k` by a search for the last one's key."""
        low, shift, num_below = 0, 27, 0
        while top_k:
            self.num_searches += 1
            counts = [int(((self._keys - low) >> shift == i).sum()) for i in range(_RANGES)]
            inside = next((i for i in range(_RANGES) if num_below + sum(counts[: i + 1]) >= top_k), None)
            if inside is None:
                break
            num_below += sum(counts[:inside])
            low += inside << shift
            if num_below + counts[inside] == top_k:
                return self._mass_below(low + (1 << shift))
            if shift == 0:
                one = int(masses(-np.array([low], np.uint32).view(np.float32))[0])
                return self._mass_below(low) + (top_k - num_below) * one
            shift = max(shift - 4, 0)
        return int(self._masses.sum())

    def _mass_below(self, key: int) -> int:
        return int(self._masses[self._keys < key].sum())


def logits_of(kind: str, rng: np.random.Generator) -> Any:
    size = int(rng.integers(1, 400))
    if kind == "equal":
        return np.full(size, rng.choice([-0.0, 3.25]), F32)
    values = rng.standard_normal(size) * rng.choice([0.1, 2.0, 12.0])
    if kind == "ties":
        values = np.round(values)
    if kind == "far":
        values[rng.integers(size)] += 3e38
    return values.astype(F32)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "far"])
def test_rounds_choose_what_the_definition_chooses(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    for number in range(250):
        x = logits_of(kind, rng)
        processors = SamplingParams(
            top_k=int(rng.choice([0, 0, 1, 3, 50, 1000])),
            top_p=float(rng.choice([1.0, 0.95, 0.6, 0.1, 1e-6])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 1.0])),
        )
        rounds = Rounds(x, processors, number)
        assert rounds.token_id == Sampler(len(x), [], replace(processors, temperature=1.0, seed=number)).choose(x, 3).token_id, (
            number,
            processors,
        )
        assert rounds.num_searches <= 8


def test_rounds_are_few() -> None:
    rng = np.random.default_rng(5)
    taken, searched = [], []
    for seed in range(60):
        x = (rng.standard_normal(8000) * 3).astype(F32)
        taken.append(Rounds(x, SamplingParams(top_p=0.9), seed).num_exchanges)
        searched.append(Rounds(x, SamplingParams(top_p=0.9, top_k=50), seed).num_searches)
    assert np.mean(taken) < 1.25, "nine of ten times the first one stays"
    assert np.mean(searched) < 5


def test_equal_logits_and_a_small_filter_take_rounds_that_grow_with_the_logarithm() -> None:
    taken = [Rounds(np.zeros(32000, F32), SamplingParams(top_p=1e-6), seed).num_exchanges for seed in range(20)]
    assert np.mean(taken) < 1 + np.log(32000) + 2
    assert max(taken) < 30
