"""Prefill on several GPUs: the keys, values and logits of one; a peer that does not come is named, and an abort obeyed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.ranks import run_ranks
from tests.gpu.rank_bodies import KV_OF_VARIANT
from tests.gpu.sharing import RANKS_PER_GPU

pytestmark = pytest.mark.timeout(300)
ON_2_AND_4 = [pytest.param(n, marks=pytest.mark.gpu(n, may_share=True)) for n in (2, 4)]


def results(world_size: int, body: str, **arguments: Any) -> list[dict[str, Any]]:
    outcomes = run_ranks(
        world_size, f"tests.gpu.prefill_bodies:{body}", arguments, deadline_s=120.0, search_path=[Path(__file__).parents[2]],
        device="cuda", ranks_per_gpu=RANKS_PER_GPU,
    )  # fmt: skip
    failed = [
        f"rank {rank} ended with {outcome.status}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.status
    ]
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("world_size", ON_2_AND_4)
@pytest.mark.parametrize("variant", ["delayed", "all blocking", *KV_OF_VARIANT, "late", "attention alone", "experts", "2b"])
def test_ranks_fill_the_cache_of_one(variant: str, world_size: int) -> None:
    check_that_ranks_fill_the_cache_of_one(world_size, variant=variant)


@pytest.mark.parametrize("world_size", ON_2_AND_4)
@pytest.mark.parametrize(("variant", "coding"), [
    ("all blocking", ("E4M3", 1, "F32")), ("delayed", ("INT4", 0, "BF16")), ("experts", ("E2M1", 4, "E8M0", False, True)),
    ("wide experts", ("E4M3", 1, "F32")),
])  # fmt: skip
def test_ranks_fill_the_cache_of_one_with_quantised_weights(variant: str, coding: tuple[Any, ...], world_size: int) -> None:
    check_that_ranks_fill_the_cache_of_one(world_size, variant=variant, coding=coding)


def check_that_ranks_fill_the_cache_of_one(world_size: int, **arguments: Any) -> None:
    """`arguments`: of the body `fill`."""
    (alone,) = results(1, "fill", **arguments)
    ranks = results(world_size, "fill", **arguments)
    num_other = 0
    for number, wanted in enumerate(alone["logits"]):
        found = np.concatenate([rank["logits"][number] for rank in ranks])
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < 1e-3, f"prompt {number // 2}: logits are wrong by {error:.1e}"
    for number in range(len(alone["heads"])):
        for layer, heads in enumerate(alone["heads"][number]):
            others = [head for rank in ranks for head in rank["heads"][number][layer]]
            num_other += sum(a != b for a, b in zip(heads, others, strict=True))
    assert num_other == 0, f"{num_other} heads of all prompts and layers have other bits than on one GPU"


@pytest.mark.gpu(2)
def test_a_peer_that_does_not_come_is_named() -> None:
    found = results(2, "lonely", aborts_after_s=100.0)[0]
    assert "of rank 1" in found["error"]
    assert 0.3 <= found["took_s"] < 1.0


@pytest.mark.gpu(2)
def test_an_abort_ends_the_wait_for_a_peer() -> None:
    found = results(2, "lonely", aborts_after_s=0.1)[0]
    assert (found["reached"], found["error"]) == (0, "")
    assert found["took_s"] < 0.3
