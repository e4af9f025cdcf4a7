"""Requests that take turns on the GPUs of two ranks, which are played, have the answers that they have alone."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.decode.request import DecodeRequest
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.coordinator import kept_caches, kept_states
from kog_dist.workers.coordinator.decode_slot import DecodeSlots
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.engines import cuda_caches, cuda_drafting
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.prefill.base.chunks import Work
from kog_dist.workers.prefill.prefill import Prefill
from kog_dist.workers.worker import serve
from tests.unit.asked_together import PATIENCE_S, Asked, AskedTogether
from tests.unit.played_gpu import PlayedRunner
from tests.unit.played_ranks import PlayedNode, PlayedPeers
from tests.unit.test_cuda_states import NETS
from tests.unit.test_cuda_turns import CONTEXT, DENSE, PARALLEL, SIZES, compare, drawn, weights

RANKS = 2


class RankedTurns(AskedTogether):
    """Engines of all ranks, each in a thread with a GPU that is played."""

    def __init__(
        self, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, *, prefill: bool, parallel: int, company: tuple[int, ...]
    ) -> None:  # fmt: skip
        monkeypatch.setattr(cuda_caches, "BLOCK", SIZES[0])
        shapes = [KernelShape(spec, spec.lanes_of_rank(rank, RANKS), num_ranks=RANKS) for rank in range(RANKS)]
        self.node = PlayedNode(shapes, monkeypatch)
        control = ControlPage.create(RANKS, CONTEXT, vocab_size=spec.vocab_size, parallel=parallel)
        super().__init__(control, DecodeSlots(control, None, is_recurrent=spec.is_recurrent), spec.vocab_size)
        self.engines = [self._engine(rank, shape, prefill, parallel, company) for rank, shape in enumerate(shapes)]
        self.threads = [threading.Thread(target=self._serve, args=(rank,)) for rank in range(RANKS)]
        for thread in self.threads:
            thread.start()

    def _engine(self, rank: int, shape: KernelShape, prefill: bool, parallel: int, company: tuple[int, ...]) -> CudaEngine:
        self.node.use(rank)
        control = ControlPage.from_fd(os.dup(self.control.fd))
        heap = SimpleNamespace(device_handle=lambda: np.zeros((), PEERS.dtype))
        kernel = Monokernel(
            shape, cast(Any, weights()), rank=rank, heap=cast(Any, heap), processors=True, masks=control.mask_slots,
            drafts=shape.delta is None, num_slots=parallel, num_caches=parallel + 1, company=company if parallel > 1 else (),
        )  # fmt: skip
        info = RankInfo(rank, RANKS, rank, "test", 1, control.fd, control.fd)
        args = WorkerArgs(info, "model", "cuda:0", "bfloat16", True, PATIENCE_S, PATIENCE_S)
        drafts = shape.delta is None
        args = replace(args, parallel=parallel, num_kv_caches=parallel + 1, drafts=drafts, kept_bytes=1 << 22)
        engine = CudaEngine(args, control)
        engine._gpu.loaded, engine._gpu.max_context, engine._gpu.peers = kernel, CONTEXT, cast(Any, PlayedPeers(self.node, rank))
        unrest = random.Random(rank)
        for name in ("launch", "launch_together", "is_idle"):
            setattr(kernel, name, restless(getattr(kernel, name), unrest, 0.004))
        if prefill:
            kernel.prepare_head_start()
            nets_ptr = 0 if kernel.nets is None else kernel.nets.data.ptr
            runner = cast(Any, PlayedRunner(self.node.gpus[rank], kernel.kv.data.ptr, nets_ptr, rounds_by=SIZES[0]))
            runner.queue_end = restless(runner.queue_end, unrest, 0.025)  # masks come meanwhile
            work = Work(row_flop=1e12, most_parts=3, max_context=CONTEXT)
            engine._gpu.prefill = Prefill(runner, max_context=CONTEXT, sizes=SIZES, work=work)
        engine._caches.make(shape, kernel, engine._drafting.most_drafted)
        return engine

    def _serve(self, rank: int) -> None:
        self.node.use(rank)
        engine = self.engines[rank]
        try:
            if engine._gpu.takes_turns:
                engine._gpu.kernel.try_together()
            serve(engine, engine._gpu.control, rank)
        except BaseException as error:
            if not self.control.aborted():
                self.error.append(error)
                self.is_broken.set()
        finally:
            engine.close()
            engine._gpu.control.close()

    def close(self) -> None:
        self.stop(self.threads)
        self.control.close()
        assert not self.error, self.error
        for gpu in self.node.gpus:
            gpu.stream.close()


def restless(call: Callable[..., Any], unrest: random.Random, most_s: float) -> Callable[..., Any]:
    """The same, but that hosts are late now and then."""

    def late(*args: Any, **options: Any) -> Any:
        if unrest.random() < 0.3:
            time.sleep(unrest.random() * most_s)
        return call(*args, **options)

    return late


@contextmanager
def turns(
    monkeypatch: pytest.MonkeyPatch, *, prefill: bool, parallel: int = PARALLEL, company: tuple[int, ...] = (2, 4),
    spec: ModelSpec = DENSE,
) -> Iterator[RankedTurns]:  # fmt: skip
    made = RankedTurns(spec, monkeypatch, prefill=prefill, parallel=parallel, company=company)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(("prefill", "seed", "flaps"), [(True, 5, False), (False, 6, False), (True, 7, True)])
def test_every_answer_is_that_of_the_request_alone(
    prefill: bool, seed: int, flaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Ranks launch the same programs in the same order, whoever comes and goes, though each looks at other times.

    `flaps`: requests share passes or take turns, as rank 0 finds it.
    """
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    chance = random.Random(seed)
    if flaps:
        monkeypatch.setattr(cuda_drafting, "gains_from_turns", lambda gains, extra: chance.random() < 0.3)
    asked = [*(Asked(DecodeRequest((first, 7), 250)) for first in (1, 2)), *drawn(chance, 20)]  # two that certainly meet
    with turns(monkeypatch, prefill=prefill) as engine:
        engine.run(asked, chance)
        assert all(gpu.num_shared > 0 for gpu in engine.node.gpus)
        first, other = engine.node.gpus
        deadline = Deadline.after(PATIENCE_S)
        while first.num_passes != other.num_passes:  # rank 0 alone is waited for
            assert not deadline.expired()
            time.sleep(0.001)
    with turns(monkeypatch, prefill=prefill, parallel=1) as engine:
        compare(cast(Any, engine), asked)
    assert {one.entries[-1].finish for one in asked} >= {Finish.LENGTH, Finish.CANCELLED}


def test_groups_that_take_turns_all_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pass has two seats, and six requests run: hosts that are late let no group out."""
    asked = [Asked(DecodeRequest((first, 7), 60)) for first in range(6)]
    with turns(monkeypatch, prefill=False, parallel=6, company=(2,)) as engine:
        engine.run(asked, random.Random(1))
        assert engine.node.gpus[0].num_shared > 60
    with turns(monkeypatch, prefill=False, parallel=1) as engine:
        compare(cast(Any, engine), asked)


@pytest.mark.parametrize("prefill", [False, True])
def test_states_of_all_ranks_stand_and_are_copied_alike(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    monkeypatch.setattr(kept_states, "STEP", 32)
    chance = random.Random(8)
    asked = drawn(chance, 20)
    with turns(monkeypatch, prefill=prefill, company=(), spec=NETS) as engine:
        engine.run(asked, chance)
        books = [cast(Any, one._caches.states) for one in engine.engines]
        deadline = Deadline.after(PATIENCE_S)
        while books[0]._kept != books[1]._kept or books[0]._behind != books[1]._behind:  # rank 0 alone is waited for
            assert not deadline.expired()
            time.sleep(0.001)
        assert len(books[0]._kept) > 10
        assert books[0].num_missed == books[1].num_missed == 0
    with turns(monkeypatch, prefill=prefill, parallel=1, company=(), spec=NETS) as engine:
        compare(cast(Any, engine), asked, reuse_kv=False)
