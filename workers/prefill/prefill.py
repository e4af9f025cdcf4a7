"""A prompt into the KV cache, chunk by chunk: `Prefill.run`."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from kog_dist.errors import ConfigError
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES, MOST_FLOP, NO_LIMIT, Chunk, Work, chunks

PARTS_QUEUED = 2  # of chunks; the next one starts without the host
ROWS_QUEUED = 4096  # of several chunks together, whose work is at most MOST_FLOP: what a stop waits for
POLL_S = 20e-6

Part = tuple[Chunk, int]  # of a chunk; 0: the first one


Value = TypeVar("Value")


def ended(steps: Generator[None, None, Value]) -> Value:
    """Let it go on to its end; its value."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            value: Value = stop.value
            return value


class Runner(Protocol):
    """Runs the chunks of one prompt, one after the other."""

    def begin(self, token_ids: Sequence[int], start: int, held: int, cache: int = 0) -> None:
        """A new prompt, whose first `start` tokens are in this KV cache of the monokernel's, and whose first `held` <= `start`
        ones stand in the plain keys and values, too. What was queued before must have ended.
        """

    def queue(self, chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        """Queue the next chunk, or the next part of one; what comes back says whether it has ended."""

    @property
    def streams(self) -> LastStreams:
        """What `queue_end` makes; invalid if `store` stores nothing."""

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether the monokernel's cache is as it was where `finish` says False; else it holds nothing then."""

    def queue_end(self, chunk: Chunk) -> None:
        """Queue behind the chunk of the prompt's last token: that one's streams behind the last layer."""

    def store(self, first: int, last: int) -> None:
        """Queue behind all chunks: these positions go to the monokernel's cache if all values are finite."""

    def has_ended(self) -> bool:
        """Whether all that was queued has ended, after `store`."""

    def finish(self) -> bool:
        """After that. False: nothing was stored: a value was not finite, or waits were stopped. DeviceError: one was late."""

    def stop(self) -> None:
        """End waits for peers, now and ever after."""


class Prefill:
    """Fills the KV caches of one rank. One request at a time, never while the monokernel runs.

    With several ranks `run` is collective, and `should_stop` must say the same on all ranks each time that it is asked, which is
    once before each part of a chunk.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_context: int,
        sizes: Sequence[int] = CHUNK_SIZES,
        exact_size: int = 0,
        work: Work = NO_LIMIT,
    ) -> None:
        self._runner, self._max_context, self._sizes = runner, max_context, tuple(sizes)
        self._exact_size, self._work = exact_size, work
        self._held, self._cache = 0, 0  # positions whose plain keys and values are those of this KV cache

    @property
    def streams(self) -> LastStreams:
        """Those of the last token that `run` was given; they are valid if it returned that it holds all of them."""
        return self._runner.streams

    def next_end(self, start: int, num_tokens: int) -> int:
        """Where the chunk ends that `run` begins with behind `start` of so many tokens."""
        return chunks(start, num_tokens, self._sizes, self._exact_size, self._work)[0].end

    def forget(self, position: int, cache: int = 0) -> None:
        """This KV cache was written from `position` on while no prefill of what it held until then came between."""
        if cache == self._cache:
            self._held = min(self._held, position)

    def run(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int], None] = lambda position: None,
        on_queued: Callable[[], None] = lambda: None,
        cache: int = 0,
    ) -> int:
        """Go on behind the first `start` tokens, which are in KV cache `cache`; returns how many it holds then.

        That is all of `token_ids`, or fewer when `should_stop` became true: it is asked before every part of a chunk, and chunks
        that are queued by then (some milliseconds of work) still count; of one whose last part is not, nothing does, and where
        layers keep a ring of positions (`Work.has_rings`) 0 comes back. If a value left the range of the products' type, nothing
        is stored and `start` comes back, or 0 if the cache was changed; the monokernel can go on from there. `on_progress` is
        called with the number of positions after every chunk, and `on_queued` once, when all is queued, unless it was stopped
        before: a launch that begins with `streams` may be queued behind it. Once `aborted` is true, nobody waits for a peer any
        more, and `start` may come back.

        Raises ConfigError if the tokens do not fit into the context, DeviceError if a peer did not send its sums in time; what
        `should_stop` raises ends all waits, too.
        """
        steps = self.steps(
            token_ids, start, should_stop=should_stop, aborted=aborted, on_progress=on_progress, on_queued=on_queued, cache=cache
        )
        return ended(steps)

    def steps(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool] = lambda: False,
        on_progress: Callable[[int], None] = lambda position: None,
        on_queued: Callable[[], None] = lambda: None,
        pauses: Callable[[], bool] = lambda: False,
        cache: int = 0,
    ) -> Generator[None, None, int]:
        """As `run`, whose value is the generator's. It stands still behind each part of a chunk but the last, as long as `pauses`
        says so: nothing is queued then, and the monokernel may decode other requests until it goes on.
        """
        if not 0 <= start <= len(token_ids) <= self._max_context:
            raise ConfigError(
                f"prefill from position {start} to {len(token_ids)} is not within the model's context of {self._max_context}"
            )
        found = chunks(start, len(token_ids), self._sizes, self._exact_size, self._work)
        waiting: deque[Part] = deque((chunk, part) for chunk in found for part in range(chunk.num_parts))
        if not waiting:
            return start
        held = self._held if cache == self._cache else 0
        self._runner.begin(token_ids, start, min(held, start), cache)
        self._held, self._cache = 0, cache
        try:
            reached = yield from self._queue(waiting, start, len(token_ids), should_stop, aborted, on_progress, on_queued, pauses)
        except BaseException:
            self._runner.stop()
            raise
        if not self._runner.finish():
            return start if self._runner.is_all_or_nothing else 0
        self._held = reached
        return reached

    def _queue(
        self,
        waiting: deque[Part],
        start: int,
        num_tokens: int,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool],
        on_progress: Callable[[int], None],
        on_queued: Callable[[], None],
        pauses: Callable[[], bool],
    ) -> Generator[None, None, int]:
        """Queue what is waiting, and return when it has ended: how many positions the cache holds."""
        queued: deque[tuple[Part, Callable[[], bool]]] = deque()  # and whether it has ended
        end = start
        is_stored = is_stopped = is_torn = False
        while queued or not is_stored or not self._runner.has_ended():
            if aborted() and not is_stopped:
                self._runner.stop()
                waiting.clear()
                is_stopped = True
            elif waiting and not (queued and pauses()) and self._has_room([*(part for part, _ in queued), waiting[0]]):
                if should_stop():
                    waiting.clear()
                    continue
                chunk, part = waiting.popleft()
                queued.append(((chunk, part), self._runner.queue(chunk, part)))
                is_torn = part < chunk.num_parts - 1
                if is_torn:
                    continue
                end = chunk.end
                if end == num_tokens:
                    self._runner.queue_end(chunk)
            elif not waiting and not is_stored:
                self._runner.store(start, end)
                is_stored = True
                if end == num_tokens:
                    on_queued()
            elif queued and queued[0][1]():
                (chunk, part), _ = queued.popleft()
                if part == chunk.num_parts - 1:
                    on_progress(chunk.end)
                if waiting and not queued and pauses():
                    yield
            elif waiting:  # the GPU has more to do
                time.sleep(POLL_S)
            else:  # the first token waits for this thread; even `sleep(0)` takes what timers may be late by, 50 us
                os.sched_yield()
        return 0 if is_torn and self._work.has_rings else end

    def _has_room(self, together: Sequence[Part]) -> bool:
        """Whether the last of these may be queued behind the others."""
        if len(together) == 1:
            return True
        num_rows = sum(chunk.size / chunk.num_parts for chunk, _ in together)
        flop = sum(self._work.of(chunk.start, chunk.size) / chunk.num_parts for chunk, _ in together)
        return len(together) <= PARTS_QUEUED and num_rows <= ROWS_QUEUED and flop <= MOST_FLOP


class HostRunner:
    """Runs chunks at once: for tests on a CPU, and as the definition of what a GPU does.

    `layers` are a `Layers` with `Buffers`, or a `DenseLayers` with `DenseBuffers`.
    """

    def __init__(self, layers: Any, buffers: Any, sizes: Sequence[int] = CHUNK_SIZES, *, exact_size: int = 0) -> None:
        self._layers, self._buffers = layers, buffers
        self._rows: dict[int, Any] = {size: buffers.rows(size) for size in sizes}
        if exact_size:
            self._rows[exact_size] = buffers.rows(exact_size, is_exact=True)
        self._last = buffers.last_rows()

    def begin(self, token_ids: Sequence[int], start: int, held: int, cache: int = 0) -> None:
        """See `Runner`."""
        self._buffers.staging.load(token_ids, start, self._buffers.max_size, 0, cache)
        if held < start:
            self._layers.load_cache(held, start)

    def queue(self, chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        """See `Runner`."""
        with _silently():
            if chunk.num_parts == 1:
                self._layers.run(self._rows[chunk.size])
            else:
                self._layers.run(self._rows[chunk.size], part, chunk.num_parts)
        return lambda: True

    @property
    def streams(self) -> LastStreams:
        """See `Runner`."""
        streams: LastStreams = self._buffers.streams
        return streams

    @property
    def is_all_or_nothing(self) -> bool:
        """See `Runner`."""
        return bool(self._layers.is_all_or_nothing)

    def queue_end(self, chunk: Chunk) -> None:
        """See `Runner`."""
        with _silently():
            self._layers.finish(self._rows[chunk.size], self._last)

    def store(self, first: int, last: int) -> None:
        """See `Runner`."""
        self._layers.exchange.share_overflow(self._buffers.overflow)
        self._layers.store_cache(first, last)

    def has_ended(self) -> bool:
        """See `Runner`."""
        return True

    def finish(self) -> bool:
        """See `Runner`."""
        self._layers.exchange.check()
        has_overflown = bool(self._buffers.overflow[0])
        if has_overflown:
            self._buffers.forget()
        return not has_overflown

    def stop(self) -> None:
        """See `Runner`."""
        self._layers.exchange.stop()


def _silently() -> np.errstate:
    """What leaves the range of a type is found where values are looked at, as on a GPU."""
    return np.errstate(over="ignore", invalid="ignore")
