"""What hosts of GPU ranks exchange between launches: slices of the logits, and rank 0's choice; over a played cupy."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.cuda_peers import CudaPeers
from tests.unit import fake_cupy

MAX_CONTEXT, STEP_TIMEOUT_S, JOIN_S = 64, 5.0, 30.0
SCALES = np.array([1.0, 2.0, 4.0, 8.0], np.float32)


def test_slices_of_other_lengths_and_every_choice_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that is no multiple of the lanes leaves less for the last rank."""
    fake_cupy.install(monkeypatch)
    rows = [(0, 5), (5, 10), (10, 13)]
    whole = np.array([0.0, -0.0, np.inf, -np.inf, *np.linspace(-1.0, 1.0, 9)], np.float32)
    whole[7] = np.uint32(0x7FC12345).view(np.float32)  # bits are kept, also of what is no number
    choices = [(0, Finish.NONE), (2**31 - 1, Finish.LENGTH), (70_000, Finish.STOP), (NO_TOKEN, Finish.NO_MASK)]
    heads, words = (SimpleNamespace(vocab_rows=each) for each in rows), SimpleNamespace(boxes=SimpleNamespace(specs=list))
    shapes: list[Any] = [SimpleNamespace(head=head, words=words) for head in heads]
    page, meeting = ControlPage.create(len(rows), MAX_CONTEXT), LocalRendezvous.create(len(rows))
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        info = RankInfo(rank, len(rows), rank, "test", control_fd=page.fd, rendezvous_fd=os.dup(meeting.fd))
        args = WorkerArgs(info, "model", f"cuda:{rank}", "bfloat16", False, JOIN_S, STEP_TIMEOUT_S)
        peers = CudaPeers(args, page, shapes, Deadline.after(JOIN_S))
        peers.link(rank)
        gathered, shared = [], []
        for scale, choice in zip(SCALES, choices, strict=True):
            gathered.append(peers.gather_logits(scale * whole[slice(*rows[rank])]))
            shared.append(peers.share_choice(*(choice if rank == 0 else (rank, Finish.CANCELLED))))
        found[rank] = (peers.vocab_size, gathered, shared)
        peers.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    meeting.close()
    page.close()
    assert sorted(found) == [0, 1, 2]
    assert [result[0] for result in found.values()] == [13] * 3
    assert [result[2] for result in found.values()] == [choices] * 3
    assert [logits.tobytes() for logits in found[0][1]] == [(scale * whole).tobytes() for scale in SCALES]
    assert [found[rank][1] for rank in (1, 2)] == [[None] * 4] * 2
