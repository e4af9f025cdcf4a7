"""Passes of several tokens on several GPUs: the tokens and bits of plain decoding on one, whatever is drafted, and by whom.

With RANKS_PER_GPU=2 two ranks run on one GPU, and four on two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.made_models.published import write_published
from kog_dist.bench.shapes import DENSE
from kog_dist.collectives.ranks import run_ranks
from tests.gpu.pass_bodies import CONTEXT, KINDS, NUM_PROMPT, NUM_TOKENS, SAMPLINGS, VARIANTS, WRONG
from tests.gpu.sharing import RANKS_PER_GPU

pytestmark = pytest.mark.timeout(400)
ON_2_AND_4 = [pytest.param(n, marks=pytest.mark.gpu(n, may_share=True)) for n in (2, 4)]
OF_BITS = ("tokens", "finish", "digests", "scores")


def results(world_size: int, body: str, **arguments: Any) -> list[Any]:
    outcomes = run_ranks(
        world_size, f"tests.gpu.pass_bodies:{body}", arguments, deadline_s=300.0, search_path=[Path(__file__).parents[2]],
        device="cuda", ranks_per_gpu=RANKS_PER_GPU,
    )  # fmt: skip
    failed = [f"rank {number}: {outcome.error or outcome.status}" for number, outcome in enumerate(outcomes) if outcome.status]
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]


def of_all(ranks: list[dict[str, list[Any]]], kind: str, number: int) -> dict[str, Any]:
    """An answer that all ranks have alike; of the digests each has its lanes'."""
    first, *others = (rank[kind][number] for rank in ranks)
    assert all({**other, "digests": []} == {**first, "digests": []} for other in others), "ranks have other answers"
    return {**first, "digests": [digest for one in (first, *others) for digest in one["digests"]]}


@pytest.mark.parametrize("world_size", ON_2_AND_4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_passes_on_ranks_have_the_bits_of_plain_decoding_on_one(variant: str, world_size: int) -> None:
    (alone,) = results(1, "passes", variant=variant)
    ranks = results(world_size, "passes", variant=variant)
    differences = list[str]()
    for number in range(len(SAMPLINGS) * len(WRONG)):
        wanted = alone["1"][number]
        assert len(wanted["tokens"]) == NUM_TOKENS
        for tokens in (1, 2, 4):
            found = of_all(ranks, f"{tokens}", number)
            others = [name for name in OF_BITS if found[name] != wanted[name]]
            differences += [f"passes of {tokens}, answer {number}: {', '.join(others)}"] if others else []
            if tokens > 1 and number % len(WRONG) == 0:
                assert found["passes"] == [0, -(-(NUM_PROMPT - 1 + NUM_TOKENS) // tokens)], "all drafts are right"
            assert found["passes"] == alone[f"{tokens}"][number]["passes"]
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("world_size", ON_2_AND_4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_that_draft_give_the_answers_of_one_without(variant: str, world_size: int) -> None:
    """Tokens, scores and, of plain requests in between, logits; passes are those of one GPU that drafts, and so are drafts."""
    (alone,) = results(1, "drafts", variant=variant)
    ranks = results(world_size, "drafts", variant=variant)
    assert [len(alone[kind]) for kind in ("plain", "drafted", "after")] == [2, 8, 8]
    for number in range(8):
        plain = alone["plain"][number // 4]
        for kind in ("drafted", "after"):
            found, of_one = of_all(ranks, kind, number), alone[kind][number]
            assert found["tokens"] == plain["tokens"], f"{kind}, answer {number}"
            assert found == of_one, f"{kind}, answer {number}"
        assert of_all(ranks, "after", number)["digests"] == plain["digests"]
    assert alone["drafted"][0]["drafted"][1] >= 40, "a right prediction"
    assert sum(ranks[0]["drafted"][number]["passes"][1] for number in range(8)) > 100
    assert min(ranks[0]["drafted"][number]["passes"][1] for number in range(8)) > 0


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    write_published(folder, {**DENSE["llama-3.2-1b"], "num_hidden_layers": 4, "max_position_embeddings": CONTEXT})
    return folder


@pytest.mark.parametrize("world_size", ON_2_AND_4)
@pytest.mark.parametrize("prefill", ["on", "off"])
def test_an_engine_on_ranks_gives_the_same_answers_with_drafts(prefill: str, world_size: int, dense_folder: Path) -> None:
    (alone,) = results(1, "engine", model=str(dense_folder), prefill=prefill)
    first, *others = results(world_size, "engine", model=str(dense_folder), prefill=prefill)
    assert all(other["costs"] == first["costs"] for other in others), "ranks go by other costs"
    print(f"\non {world_size} ranks a pass of four costs {first['costs'][0]:.3f} of one more, its edges {first['costs'][1]:.3f}")
    for name in KINDS:
        for number, said in enumerate(first[name]):
            assert said == alone[name][0], f"{name}, {number}"
    assert first["greedy, right"] > 0
