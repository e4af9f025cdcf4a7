"""What a rank checks before it serves: its arguments, and that all ranks are about to run the same program."""

from __future__ import annotations

import threading

import pytest

from kog_dist.errors import ConfigError
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.agreement import agree


def agree_on_ranks(terms_by_rank: list[dict[str, str]]) -> list[str]:
    """What each rank's `agree` said; empty for those that agreed."""
    segment = LocalRendezvous.create(len(terms_by_rank))
    said = [""] * len(terms_by_rank)

    def run(rank: int) -> None:
        rendezvous = LocalRendezvous(segment, rank, aborted=lambda: False)
        try:
            agree(rendezvous, terms_by_rank[rank], Deadline.after(20))
        except ConfigError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(terms_by_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


def test_ranks_with_equal_terms_agree() -> None:
    assert agree_on_ranks([{"plan": "a", "numpy": "2"}] * 3) == ["", "", ""]


def test_the_ranks_that_differ_are_named_on_every_rank() -> None:
    said = agree_on_ranks([{"plan": "a", "numpy": "2"}, {"plan": "a", "numpy": "3"}, {"plan": "a", "numpy": "2"}])
    assert all("the ranks do not agree on the numpy: 1 differs from rank 0" in text for text in said), said
    assert "rank 1 has 3, rank 0 has 2" in said[1]


def test_worker_arguments_survive_the_command_line() -> None:
    args = WorkerArgs(RankInfo(1, 2, 1, "x"), "/model", "cpu", "float32", True, 300.0, 30.0)
    assert WorkerArgs.from_json(args.to_json()) == args


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"verify": true', '"verify": 1', "argument verify must be bool, got 1"),
        ('"device"', '"devise"', "unknown fields: devise; it takes info, model, device"),
        ('"rank": 1', '"rank": 2', "rank 2 is not one of 2 ranks"),
        ("{", "", "is not JSON"),
    ],
)
def test_wrong_worker_arguments_are_refused(old: str, new: str, expected: str) -> None:
    text = WorkerArgs(RankInfo(1, 2, 1, "x"), "/model", "cpu", "float32", True, 300.0, 30.0).to_json()
    with pytest.raises(ConfigError, match=expected):
        WorkerArgs.from_json(text.replace(old, new, 1))
