"""What every rendezvous must do: bodies that each of three ranks runs, whatever its ranks are and however they meet."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kog_dist.errors import AbortedError, RendezvousTimeout
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline

NUM_RANKS = 3
Join = Callable[[Callable[[], bool]], Rendezvous]  # gives this rank its rendezvous; the argument is `aborted`
Body = Callable[[Join], None]


def never() -> bool:
    return False


def many_rounds_of_payloads(join: Join) -> None:
    rendezvous = join(never)
    assert rendezvous.world_size == NUM_RANKS
    deadline = Deadline.after(60)
    for number in range(100):
        payload = bytes([rendezvous.rank, number]) * ((number + rendezvous.rank) % 33)
        expected = [bytes([peer, number]) * ((number + peer) % 33) for peer in range(NUM_RANKS)]
        assert rendezvous.all_gather_bytes(payload, deadline) == expected
        if number % 7 == rendezvous.rank:
            for _ in range(20):
                os.sched_yield()
    rendezvous.barrier(deadline)


def missing_ranks_are_named(join: Join) -> None:
    rendezvous = join(never)
    rendezvous.barrier(Deadline.after(60))
    if rendezvous.rank == 1:
        with pytest.raises(RendezvousTimeout, match=r"rank 1 waited .* and rank 0, 2 did not come") as caught:
            rendezvous.barrier(Deadline.after(0.01))
        assert caught.value.missing == (0, 2)


def abort_ends_the_wait(join: Join) -> None:
    polls = 0

    def aborted() -> bool:
        nonlocal polls
        polls += 1
        return polls > 3

    rendezvous = join(aborted)
    if rendezvous.rank == 0:
        with pytest.raises(AbortedError, match="rank 0 left rendezvous 1"):
            rendezvous.barrier(Deadline.after(60))


BODIES: tuple[Body, ...] = (many_rounds_of_payloads, missing_ranks_are_named, abort_ends_the_wait)
