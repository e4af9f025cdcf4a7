"""One request's prompt on its way through prefill, with the kernel's first launches queued behind it."""

from __future__ import annotations

from collections.abc import Callable, Generator

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.engines.cuda_peers import CudaPeers
from kog_dist.workers.engines.cuda_start import Prefiller
from kog_dist.workers.engines.heartbeat import Heartbeat
from kog_dist.workers.engines.launches import Launches


class PromptRun:
    """All of it at once, or chunk by chunk. `begin` sets the request up in the kernel, to begin with the LM head, and queues its
    first launches.

    `peers`: None for one rank. `is_stopped`: somebody wanted the request to end meanwhile. `launches`: what `begin` gave, None if
    it was not called.
    """

    def __init__(
        self,
        control: ControlPage,
        rank: int,
        peers: CudaPeers | None,
        seq: int,
        request: DecodeRequest,
        heartbeat: Heartbeat,
        begin: Callable[[], Launches],
        *,
        takes_turns: bool = False,
    ) -> None:
        self._takes_turns = takes_turns
        self._control, self._rank, self._peers, self._heartbeat = control, rank, peers, heartbeat
        self._seq, self._request, self._begin = seq, request, begin
        self._num_asked, self._is_first = 0, True
        self.is_stopped = False
        self.launches: Launches | None = None

    def steps(self, prefill: Prefiller, start: int, end: int | None, pauses: Callable[[], bool]) -> Generator[None, None, int]:
        """The generator's value: positions that the KV cache holds then. It holds `start` ones, and is to hold `end`, where a
        chunk ends, or all. `pauses`: see `Prefill.steps`.
        """
        prompt, cache, self._is_first = self._request.prompt, self._request.kv.cache, start == self._request.kv.num_cached
        is_last = end is None or end == len(prompt)
        held = yield from prefill.steps(
            prompt if is_last else prompt[:end],
            start,
            should_stop=self._should_stop,
            aborted=self._control.aborted,
            # Others may copy what is told, and rows are stored behind all chunks: run one by one, each tells behind its own.
            on_progress=self._progress if end is None else self._beat,
            on_queued=self._queued if is_last else lambda: None,
            pauses=pauses,
            cache=cache,
        )
        if not self._control.aborted():
            prefill.forget(held, cache)
            self._progress(held)
        return held

    def _progress(self, position: int) -> None:
        self._heartbeat.progress()
        done = min(position, len(self._request.prompt) - 1)  # the last one is done with a token
        self._control.set_progress(self._rank, self._seq, done, self._request.decode_slot)

    def _beat(self, position: int) -> None:
        self._heartbeat.progress()

    def _should_stop(self) -> bool:
        """Asked once before each part of a chunk: all ranks take rank 0's answer, but for the first, which saves its time."""
        self._num_asked += 1
        if self._num_asked == 1 and self._is_first:
            self._control.stamp(self._rank, RankStage.UPLOADED, self._request.decode_slot)
        self.is_stopped = self._control.cancelled(self._seq, self._request.decode_slot)
        if self._peers is not None:
            is_later = self._num_asked > 1
            self.is_stopped = is_later and bool(self._peers.share_choice(int(self.is_stopped), Finish.NONE)[0])
        return self.is_stopped

    def _queued(self) -> None:
        """Behind prefill; if that overflows, the launches do nothing. A mask that is not there yet is waited for by the host.

        Where ranks take turns all of them must do the same, and look at the mask at other times.
        """
        epoch, has_peers = self._request.mask_epoch, self._peers is not None and self._takes_turns
        if not epoch or (not has_peers and self._control.mask_slots[self._request.decode_slot].get(epoch) is not None):
            self.launches = self._begin()
