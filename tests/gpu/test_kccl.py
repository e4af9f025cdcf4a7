"""KCCL on GPUs: the bodies of the CPU communicators' tests, and what only GPUs can show. Every rank is a process with a GPU."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.collectives.torch_nccl import ENVIRON
from kog_dist.collectives.ranks import RankOutcome, run_ranks

HERE = Path(__file__).parent
METHODS = ["publish", "collect", "delayed_reduce", "all_reduce", "all_gather", "barrier"]
pytestmark = pytest.mark.timeout(100)
pair, all_four = pytest.mark.gpu(2), pytest.mark.gpu(4)
both = pytest.mark.parametrize("world_size", [pytest.param(2, marks=pair), pytest.param(4, marks=all_four)])


def run_body(world_size: int, name: str, *, module: str = "communicator_bodies", **arguments: Any) -> list[RankOutcome]:
    """Run a body on every rank, rank r on GPU r. No process is left behind."""
    search_path = (HERE, HERE.parent / "multi", HERE.parents[1])
    body = f"{module}:{name}"
    outcomes = run_ranks(world_size, body, arguments, deadline_s=60.0, search_path=search_path, device="cuda", environ=ENVIRON)
    for outcome in outcomes:
        pid = outcome.result.get("pid") if isinstance(outcome.result, dict) else None
        assert pid is None or not os.path.exists(f"/proc/{pid}"), f"rank {outcome.rank} is still there"
    return outcomes


def results(outcomes: list[RankOutcome]) -> list[Any]:
    """The result of every rank; shows the tracebacks of those that failed."""
    assert [outcome.status for outcome in outcomes] == [0] * len(outcomes), "\n".join(o.error for o in outcomes if o.error)
    return [outcome.result for outcome in outcomes]


def run_own(world_size: int, name: str, **arguments: Any) -> list[Any]:
    return results(run_body(world_size, name, module="kccl_bodies", **arguments))


# ---- the right bits ----
@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 3, 4)]
)  # fmt: skip
def test_every_operation_matches_its_definition(world_size: int) -> None:
    assert results(run_body(world_size, "every_operation")) == [96] * world_size


@both
def test_delayed_sums_survive_wrapping_epochs(world_size: int) -> None:
    outcomes = run_body(world_size, "delayed_steps", delay=2, steps=700, length=24, epoch_bits=8)
    assert results(outcomes) == [698] * world_size


@pair
def test_every_bit_pattern_travels() -> None:
    assert results(run_body(2, "all_bits")) == [300] * 2


@both
def test_chains_inside_a_kernel_have_the_bits_of_their_definition(world_size: int) -> None:
    assert len(run_own(world_size, "chain_bits")[0]) == 7


@both
def test_every_thread_block_finds_the_same_best_candidate(world_size: int) -> None:
    assert run_own(world_size, "handoff", ctas=128, rows=24, steps=300) == [300 * 128 * 4] * world_size


# ---- start-up ----
@pair
def test_a_rank_that_sees_only_its_own_gpu_reaches_the_others() -> None:
    assert run_own(2, "own_gpu_only") == [19] * 2


@pair
def test_two_ranks_on_one_gpu_are_refused() -> None:
    texts = run_own(2, "one_gpu_for_two")
    assert any(text.startswith("ConfigError: ranks 0 and 1 were both given GPU") for text in texts), texts
    assert "nothing was raised" not in texts


@pair
def test_a_late_rank_is_named() -> None:
    assert run_own(2, "late_rank")[0] == "missing (1,)"


@pair
def test_different_plans_are_refused() -> None:
    texts = results(run_body(2, "different_plans"))
    assert any("all ranks must run the same plan" in text for text in texts)


@pair
def test_misuse_is_refused_before_anything_is_published() -> None:
    assert [len(raised) for raised in results(run_body(2, "misuse"))] == [18] * 2


@both
def test_memory_comes_back(world_size: int) -> None:
    assert max(run_own(world_size, "memory_comes_back")) <= 4 << 20


# ---- a good end to every wait ----
@pytest.mark.parametrize("operation", ["collect", "all_reduce", "barrier"])
@pair
def test_abort_ends_every_wait_for_good(operation: str) -> None:
    outcomes = results(run_body(2, "abort_in_wait", operation=operation))
    assert "the engine is being stopped (shutdown)" in outcomes[0]["message"]
    assert [result["refused"] for result in outcomes] == [METHODS] * 2


@pytest.mark.gpu(3)
def test_a_missing_epoch_is_named() -> None:
    first, second, _ = results(run_body(3, "missing_epoch"))
    record = first["record"]
    assert (record["rank"], record["peer"], record["label"], record["mailbox"], record["slot"]) == (0, 2, "sum", 1, 1)
    assert (record["epoch_wanted"], record["epoch_seen"], record["num_missing"]) == (5, 3, 8)
    assert record["elapsed_ns"] >= 50_000_000
    assert "requested_by_rank" in second["message"], "the other waiting rank leaves through the abort word"


@both
def test_waits_inside_a_kernel_end_and_are_named(world_size: int) -> None:
    found = run_own(world_size, "missing_rank_in_a_chain")[:-1]
    named = [result for result in found if result["how"] == "DeviceError"]
    assert named, found
    assert all(result["how"] in ("DeviceError", "AbortedError") for result in found)
    for result in named:
        assert result["elapsed_ns"] >= 2_000_000_000
        assert result["label"] == "chain 3072"


@both
def test_a_killed_rank_sets_the_others_free(world_size: int) -> None:
    outcomes = run_body(world_size, "killed_rank")
    assert outcomes[-1].status == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.status == 0, outcome.error
        assert "rank_died" in outcome.result


@both
def test_a_rank_killed_while_all_spin_holds_nobody_up(world_size: int) -> None:
    search_path = (HERE.parents[1],)
    body = "kog_dist.bench.collectives.kccl:killed_while_spinning"
    outcomes = run_ranks(world_size, body, deadline_s=60.0, search_path=search_path, device="cuda", environ=ENVIRON)
    assert outcomes[-1].status == -signal.SIGKILL
    for outcome in outcomes[:-1]:
        assert outcome.status == 0, outcome.error
        assert outcome.result["how"] == "AbortedError"
        assert outcome.result["usable"]
        assert 0 <= outcome.result["left_ms"] < 1000, "figures are the benchmark's; this only catches waiting for the limit"
        assert math.isfinite(outcome.result["left_ms"])


@pytest.mark.gpu(3)
def test_memory_of_a_dead_rank_can_still_be_used() -> None:
    assert results(run_body(3, "dead_peer_memory")) == ["whole", "whole", "gone"]


@pair
def test_ranks_beat_while_they_wait() -> None:
    assert results(run_body(2, "beats_while_waiting")) == [True, True]
