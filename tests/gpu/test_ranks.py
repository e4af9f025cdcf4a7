"""The monokernel on several GPUs: the tokens and the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kog_dist.collectives.ranks import run_ranks
from tests.gpu.rank_bodies import VARIANTS
from tests.gpu.sharing import RANKS_PER_GPU

pytestmark = pytest.mark.timeout(180)
ANSWER, PROCESSED_ANSWERS = "tests.gpu.rank_bodies:answer", "tests.gpu.rank_bodies:processed_answers"
DECODE = "kog_dist.bench.kernel.scaling_run:decode_on_ranks"
PLACES_2B = (64, 1530, 3066, 3900)  # two of them just before attention comes to another part


def results(world_size: int, body: str, **arguments: Any) -> list[Any]:
    outcomes = run_ranks(
        world_size,
        body,
        arguments,
        deadline_s=100.0,
        search_path=[Path(__file__).parents[2]],
        device="cuda",
        ranks_per_gpu=RANKS_PER_GPU,
    )
    assert not any(outcome.status for outcome in outcomes), [outcome.error for outcome in outcomes if outcome.status]
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n, may_share=True)) for n in (2, 4, 8)])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_ranks_have_the_bits_of_one(variant: str, world_size: int) -> None:
    (alone,) = results(1, ANSWER, variant=variant)
    ranks = results(world_size, ANSWER, variant=variant)
    for number in range(2):
        assert len(alone["answers"][number]) == 100
        assert [rank["answers"][number] for rank in ranks] == [alone["answers"][number]] * world_size
        assert [digest for rank in ranks for digest in rank["digests"][number]] == alone["digests"][number]


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n, may_share=True)) for n in (2, 4, 8)])
def test_2b_ranks_have_the_bits_of_one(world_size: int) -> None:
    arguments = {"spec": "2b", "contexts": PLACES_2B, "tokens": 12, "repeats": 0}
    (alone,) = results(1, DECODE, **arguments)
    ranks = results(world_size, DECODE, **arguments)
    for place in map(str, PLACES_2B):
        assert [digest for rank in ranks for digest in rank["bits"][place]] == alone["bits"][place]


@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n, may_share=True)) for n in (1, 2, 4, 8)])
@pytest.mark.parametrize("variant", ["delay 1", "all blocking", "head of all lanes", "head by lane"])
def test_processed_answers_do_not_depend_on_ranks(variant: str, world_size: int) -> None:
    """One rank's are compared with the definition, others with these. The vocabulary of `delay 1` is cut unevenly."""
    (alone,) = results(1, PROCESSED_ANSWERS, variant=variant)
    assert [len(tokens) for tokens, _ in alone] == [60] * 3
    if world_size > 1:
        first, *others = results(world_size, PROCESSED_ANSWERS, variant=variant)
        assert first == alone
        assert [[tokens for tokens, _ in other] for other in others] == [[tokens for tokens, _ in alone]] * (world_size - 1)
