"""CPU communicators in real processes: the right bits, and a good end to every wait."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kog_dist.collectives.ranks import RankOutcome, run_ranks
from kog_dist.errors import LaunchError

HERE = Path(__file__).parent
METHODS = ["publish", "collect", "delayed_reduce", "all_reduce", "all_gather", "barrier"]


def run_body(world_size: int, name: str, *, deadline_s: float = 60.0, **arguments: Any) -> list[RankOutcome]:
    """Run `communicator_bodies.name` on every rank; returns how each rank ended. No process is left behind."""
    search_path = (HERE, HERE.parents[1])
    outcomes = run_ranks(world_size, f"communicator_bodies:{name}", arguments, deadline_s=deadline_s, search_path=search_path)
    for outcome in outcomes:
        pid = outcome.result.get("pid") if isinstance(outcome.result, dict) else None
        assert pid is None or not os.path.exists(f"/proc/{pid}"), f"rank {outcome.rank} is still there"
    return outcomes


def results(outcomes: list[RankOutcome]) -> list[Any]:
    """The result of every rank; shows the tracebacks of those that failed."""
    assert [outcome.status for outcome in outcomes] == [0] * len(outcomes), "\n".join(o.error for o in outcomes if o.error)
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_operation_matches_its_definition(world_size: int) -> None:
    assert results(run_body(world_size, "every_operation")) == [96] * world_size


@pytest.mark.parametrize(("world_size", "delay", "steps"), [(2, 0, 700), (2, 1, 700), (2, 3, 3000), (4, 2, 700), (8, 2, 300)])
def test_delayed_sums_survive_wrapping_epochs(world_size: int, delay: int, steps: int) -> None:
    outcomes = run_body(world_size, "delayed_steps", delay=delay, steps=steps, length=24, epoch_bits=8)
    assert results(outcomes) == [steps - delay] * world_size


def test_full_epochs_give_the_same() -> None:
    assert results(run_body(2, "delayed_steps", delay=2, steps=300, length=257, epoch_bits=32)) == [298] * 2


def test_every_bit_pattern_travels() -> None:
    assert results(run_body(3, "all_bits")) == [300] * 3


@pytest.mark.parametrize("operation", ["collect", "delayed_reduce", "all_reduce", "all_gather", "barrier"])
def test_abort_ends_every_wait_for_good(operation: str) -> None:
    outcomes = results(run_body(3, "abort_in_wait", operation=operation))
    for result in outcomes[:2]:
        assert "the engine is being stopped (shutdown)" in result["message"]
    assert [result["refused"] for result in outcomes] == [METHODS] * 3


def test_a_missing_epoch_is_named() -> None:
    first, second, last = results(run_body(3, "missing_epoch"))
    record = first["record"]
    assert (record["rank"], record["peer"], record["label"], record["mailbox"], record["slot"]) == (0, 2, "sum", 1, 1)
    assert (record["epoch_wanted"], record["epoch_seen"], record["num_missing"]) == (5, 3, 8)
    assert record["elapsed_ns"] >= 50_000_000
    assert "rank 0: mailbox 'sum' slot 1 waited" in first["message"]
    assert "words of rank 2 (epoch 5 wanted, 3 seen)" in first["message"]
    assert "requested_by_rank" in second["message"], "the other waiting rank leaves through the abort word"
    assert [result["refused"] for result in (first, second, last)] == [METHODS] * 3


def test_a_killed_rank_frees_the_others() -> None:
    *others, last = run_body(4, "killed_rank")
    assert last.status == -signal.SIGKILL
    assert [outcome.status for outcome in others] == [0] * 3
    for outcome in others:
        assert "the engine is being stopped (rank_died)" in outcome.result


def test_the_memory_of_a_dead_rank_stays_whole() -> None:
    assert results(run_body(3, "dead_peer_memory")) == ["whole", "whole", "gone"]


def test_a_rank_that_never_comes_is_named() -> None:
    assert results(run_body(3, "late_rank")) == ["missing (2,)", "aborted", "stayed away"]


def test_ranks_with_different_plans_do_not_start() -> None:
    found = results(run_body(2, "different_plans"))
    assert "rank 1 laid its heap out differently" in found[0]
    assert "rank 0 laid its heap out differently" in found[1]


def test_misuse_is_refused_and_harmless() -> None:
    expected = ["ValueError"] * 12 + ["IndexError"] * 4 + ["KeyError"] * 2
    assert results(run_body(2, "misuse")) == [expected] * 2


def test_communicators_give_their_descriptors_back() -> None:
    for counts in results(run_body(3, "resources")):
        assert len(set(counts)) == 1, counts


def test_a_waiting_rank_beats() -> None:
    assert results(run_body(2, "beats_while_waiting", deadline_s=20.0)) == [True, True]


def test_the_runner_reports_a_rank_that_raises() -> None:
    outcomes = run_body(3, "raises")
    assert [outcome.status for outcome in outcomes] == [1, 1, 1]
    assert "RuntimeError: planted" in outcomes[1].error
    assert "AbortedError" in outcomes[0].error


def test_the_runner_kills_what_does_not_stop() -> None:
    outcomes = run_body(2, "ignores_everything", deadline_s=1.5)
    assert [outcome.status for outcome in outcomes] == [0, -signal.SIGKILL]


def test_the_runner_says_why_it_could_not_start() -> None:
    with pytest.raises(LaunchError, match="cannot run communicator_bodies:nothing on 2 ranks"):
        run_body(2, "nothing")
