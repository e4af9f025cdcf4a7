"""GPUs of several ranks that are played: their launches meet, and go by what rank 0 tells; and the peers of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.runtime.ring import Finish
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.played_gpu import PlayedGpu

_LATE_S = 20.0


class Told:
    """What rank 0 says, one after the other, and the others hear in the same order."""

    def __init__(self) -> None:
        self._said, self._changed = list[Any](), threading.Condition()
        self._num_heard = dict[int, int]()

    def say(self, value: Any) -> Any:
        with self._changed:
            self._said.append(value)
            self._changed.notify_all()
        return value

    def hear(self, rank: int) -> Any:
        index = self._num_heard.get(rank, 0)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._said) > index, _LATE_S), "rank 0 has not come"
        self._num_heard[rank] = index + 1
        return self._said[index]

    def share(self, rank: int, own: Callable[[], Any]) -> Any:
        return self.say(own()) if rank == 0 else self.hear(rank)


class PlayedNode:
    """A GPU for each shape."""

    def __init__(self, shapes: list[KernelShape], monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus, self._local = [PlayedGpu(shape) for shape in shapes], threading.local()
        self.numbers, self._launches, self._decisions = Told(), Told(), Told()
        self.gathered = list[list[NDArray[Any]]]()
        self.gpus[0].install(monkeypatch, lambda: self.gpus[self._local.rank])
        for rank, gpu in enumerate(self.gpus):
            self._play(rank, gpu)

    def _play(self, rank: int, gpu: PlayedGpu) -> None:
        def meet(what: tuple[Any, ...]) -> None:
            theirs = self._launches.share(rank, lambda: what)
            assert theirs == what, f"rank {rank} launches {what}, and rank 0 {theirs}"

        gpu.meet, gpu.told = meet, lambda decide: self._decisions.share(rank, decide)

    def use(self, rank: int) -> None:
        """Let the calling thread be of this rank."""
        self._local.rank = rank


class PlayedPeers:
    """What an engine asks of `CudaPeers` when it runs requests."""

    def __init__(self, node: PlayedNode, rank: int) -> None:
        self._node, self._rank = node, rank

    def share_choice(self, token_id: int, finish: Finish) -> tuple[int, Finish]:
        assert not self._node.gpus[self._rank].num_under_way, "a launch is under way"
        found: tuple[int, Finish] = self._node.numbers.share(self._rank, lambda: (token_id, finish))
        return found

    def share_number(self, number: int) -> int:
        return self.share_choice(number, Finish.NONE)[0]

    def gather_logits(self, own: NDArray[np.float32]) -> NDArray[np.float32] | None:
        assert not self._node.gpus[self._rank].num_under_way, "a launch is under way"
        return own if self._rank == 0 else None

    def close(self) -> None:
        pass
