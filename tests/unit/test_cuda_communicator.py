"""The GPU communicator's host side with played cupy: the bodies of the CPU ranks' tests in threads, and bad ends of waits."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.ranks import RankContext
from kog_dist.errors import LaunchError
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.runtime.wait import Deadline
from tests.multi import communicator_bodies as bodies
from tests.unit import fake_cupy
from tests.unit.fake_cupy import FakeRuntime

METHODS = ["publish", "collect", "delayed_reduce", "all_reduce", "all_gather", "barrier"]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    return fake_cupy.install(monkeypatch)


def run(world_size: int, body: Callable[[RankContext], Any], **arguments: Any) -> list[Any]:
    """A body on every rank, each a thread; results, or the text of what was raised. Heeds abort requests as a supervisor does."""
    page, meeting = ControlPage.create(world_size, max_context=256), LocalRendezvous.create(world_size)
    results: list[Any] = [None] * world_size

    def rank_main(rank: int) -> None:
        control = ControlPage.from_fd(os.dup(page.fd))
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=control.aborted)
        info = RankInfo(rank, world_size, rank, "played")
        try:
            results[rank] = body(RankContext(info, control, rendezvous, arguments, Deadline.after(30.0), "cuda", rank))
        except Exception:
            results[rank] = traceback.format_exc()
            page.set_abort(AbortCause.RANK_DIED, rank)
        rendezvous.close()
        control.close()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for rank, _ in page.abort_requests():
            page.set_abort(AbortCause.REQUESTED_BY_RANK, rank)
        threads[0].join(0.005)
        if not threads[0].is_alive():
            for thread in threads:
                thread.join(0.005)
    meeting.close()
    page.close()
    return results


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_operation_matches_its_definition(world_size: int) -> None:
    assert run(world_size, bodies.every_operation) == [96] * world_size


@pytest.mark.usefixtures("runtime")
def test_delayed_sums_and_misuse() -> None:
    assert run(2, bodies.delayed_steps, delay=1, steps=40, length=5, epoch_bits=4) == [39] * 2
    assert [len(raised) for raised in run(2, bodies.misuse)] == [18] * 2


def test_everything_is_given_back(runtime: FakeRuntime) -> None:
    def body(context: RankContext) -> None:
        comm = context.communicator([MailboxSpec("sum", 2, 8)])
        comm.all_reduce("sum", 0, 1, np.zeros(8, np.float32))
        comm.close()
        comm.close()
        assert bodies.refused(comm, np.zeros(8, np.float32)) == METHODS

    assert run(2, body) == [None, None]
    assert runtime.memory == {}


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("operation", ["collect", "delayed_reduce", "all_gather", "barrier"])
def test_abort_ends_every_wait_for_good(operation: str) -> None:
    first, second = run(2, bodies.abort_in_wait, operation=operation)
    assert first["message"].startswith("rank 0 left")
    assert "the engine is being stopped (shutdown)" in first["message"]
    assert (first["refused"], second["refused"]) == (METHODS, METHODS)


@pytest.mark.usefixtures("runtime")
def test_a_missing_epoch_is_named() -> None:
    first, second, last = run(3, bodies.missing_epoch)
    record = first["record"]
    assert (record["rank"], record["peer"], record["label"], record["mailbox"], record["slot"]) == (0, 2, "sum", 1, 1)
    assert (record["epoch_wanted"], record["epoch_seen"], record["num_missing"]) == (5, 3, 8)
    assert "words of rank 2 (epoch 5 wanted, 3 seen)" in first["message"]
    assert "requested_by_rank" in second["message"]
    assert [result["refused"] for result in (first, second, last)] == [METHODS] * 3


@pytest.mark.usefixtures("runtime")
def test_ranks_beat_while_they_wait() -> None:
    assert run(2, bodies.beats_while_waiting) == [True, True]


@pytest.mark.usefixtures("runtime")
def test_different_plans_are_refused() -> None:
    assert all("all ranks must run the same plan" in text or text == "AbortedError" for text in run(2, bodies.different_plans))


@pytest.mark.usefixtures("runtime")
def test_a_failed_kernel_is_an_error_at_once() -> None:
    def body(context: RankContext) -> str:
        comm = context.cuda_communicator([MailboxSpec("sum", 2, 8)])
        comm.stream.failed = True
        try:
            comm.all_reduce("sum", 0, 1, np.zeros(8, np.float32))
        except LaunchError as error:
            return str(error)
        return "nothing was raised"

    (text,) = run(1, body)
    assert text.startswith("rank 0: waiting for epoch 1 of mailbox 'sum' failed: cudaErrorIllegalAddress")
