"""The monokernel on several GPUs: the tokens and the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kog_dist.collectives.ranks import run_ranks
from tests.gpu.rank_bodies import VARIANTS

pytestmark = pytest.mark.timeout(180)


def results(world_size: int, variant: str) -> list[dict[str, Any]]:
    arguments = {"variant": variant}
    outcomes = run_ranks(
        world_size,
        "tests.gpu.rank_bodies:answer",
        arguments,
        deadline_s=100.0,
        search_path=[Path(__file__).parents[2]],
        device="cuda",
    )
    assert not any(outcome.status for outcome in outcomes), [outcome.error for outcome in outcomes if outcome.status]
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_ranks_have_the_bits_of_one(variant: str, world_size: int) -> None:
    (alone,) = results(1, variant)
    ranks = results(world_size, variant)
    for number in range(2):
        assert len(alone["answers"][number]) == 100
        assert [rank["answers"][number] for rank in ranks] == [alone["answers"][number]] * world_size
        assert [digest for rank in ranks for digest in rank["digests"][number]] == alone["digests"][number]
