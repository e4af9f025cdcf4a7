"""A prompt into the KV cache, block by block: `Prefill.run`."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kog_dist.errors import ConfigError
from kog_dist.workers.prefill.blocks import BLOCK_SIZES, PAIRED_FROM, Block, blocks, pairs
from kog_dist.workers.prefill.buffers import Buffers, Rows
from kog_dist.workers.prefill.layers import Layers
from kog_dist.workers.prefill.operations import Operations

if TYPE_CHECKING:
    from torch import Tensor

GROUPS_QUEUED = 2  # the next one starts without the host
POLL_S = 20e-6


class Runner(Protocol):
    """Runs the blocks of one prompt, one after the other."""

    def begin(self, token_ids: Sequence[int], start: int) -> None:
        """A new prompt, whose first `start` tokens are in the monokernel's cache. What was queued before must have ended."""

    def queue(self, group: tuple[Block, ...]) -> Callable[[], bool]:
        """Queue the next block, or two of one size that run at the same time; what comes back says whether they have ended."""

    def store(self, first: int, last: int) -> None:
        """Queue behind all blocks: these positions go to the monokernel's cache if all values are finite."""

    def finish(self) -> bool:
        """Wait until what was queued has ended; False if a value was not finite, and nothing was stored."""


class Prefill:
    """Fills the KV cache of one rank. One request at a time, never while the monokernel runs.

    With several ranks `run` is collective, and `should_stop` must say the same on all ranks each time that it is asked.
    """

    def __init__(
        self, runner: Runner, *, max_context: int, sizes: Sequence[int] = BLOCK_SIZES, paired_from: int = PAIRED_FROM
    ) -> None:
        self._runner, self._max_context, self._sizes, self._paired_from = runner, max_context, tuple(sizes), paired_from

    def run(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        on_progress: Callable[[int], None] = lambda position: None,
    ) -> int:
        """Go on behind the first `start` tokens, which are in the cache; returns how many it holds then.

        That is all of `token_ids`, or fewer when `should_stop` became true: it is asked before every block and while one is
        waited for, and what is queued by then (some milliseconds of work) still counts. If a value left the range of the
        products' type, nothing is stored and `start` comes back; the monokernel can go on from there. `on_progress` is called
        with the number of positions after every block or pair. Raises ConfigError if the tokens do not fit into the context.
        """
        if not 0 <= start <= len(token_ids) <= self._max_context:
            raise ConfigError(
                f"prefill from position {start} to {len(token_ids)} is not within the model's context of {self._max_context}"
            )
        waiting = deque(pairs(blocks(start, len(token_ids), self._sizes), self._paired_from))
        if not waiting:
            return start
        self._runner.begin(token_ids, start)
        queued: deque[tuple[int, Callable[[], bool]]] = deque()  # where it ends, whether it has
        reached = end = start
        is_stored = False
        while queued or not is_stored:
            if waiting and should_stop():
                waiting.clear()
            elif waiting and len(queued) < GROUPS_QUEUED:
                group = waiting.popleft()
                end = group[-1].end
                queued.append((end, self._runner.queue(group)))
            elif not waiting and not is_stored:
                self._runner.store(start, end)
                is_stored = True
            elif queued[0][1]():
                reached = queued.popleft()[0]
                on_progress(reached)
            else:
                time.sleep(POLL_S if waiting else 0)  # the GPU has more to do, or the first token waits for this thread
        return reached if self._runner.finish() else start


class HostRunner:
    """Runs blocks on a CPU, at once: for tests, and as the definition of what a GPU does."""

    def __init__(self, layers: Layers, buffers: Buffers, sizes: Sequence[int] = BLOCK_SIZES) -> None:
        self._layers, self._buffers = layers, buffers
        self._rows: dict[int, Rows] = {size: buffers.rows(size) for size in sizes}

    def begin(self, token_ids: Sequence[int], start: int) -> None:
        """See `Runner`."""
        load_prompt(self._buffers, self._layers.operations, token_ids, start)

    def queue(self, group: tuple[Block, ...]) -> Callable[[], bool]:
        """See `Runner`. Two blocks run one after the other, which is the same function."""
        for block in group:
            self._layers.run(self._rows[block.size])
        return lambda: True

    def store(self, first: int, last: int) -> None:
        """See `Runner`."""
        self._layers.operations.store_cache(first, last)

    def finish(self) -> bool:
        """See `Runner`."""
        return was_finite(self._buffers, self._buffers.overflow)


def load_prompt(buffers: Buffers, operations: Operations, token_ids: Sequence[int], start: int) -> None:
    """Put the tokens of a prompt from `start` on, and the keys and values of those before, in place.

    Queues two copies from page-locked memory, which must not be in use any more.
    """
    end = min(len(token_ids) + buffers.max_size, len(buffers.prompt))
    staged = buffers.staged_prompt.numpy()
    staged[start : len(token_ids)] = np.frombuffer(array("i", token_ids[start:]), np.int32)  # a third of np.array's time
    staged[len(token_ids) : end] = 0  # padding: any token will do
    buffers.staged_flags[0], buffers.staged_flags[1] = start, 0
    buffers.flags.copy_(buffers.staged_flags, non_blocking=True)
    buffers.prompt[start:end].copy_(buffers.staged_prompt[start:end], non_blocking=True)
    if start:
        operations.load_cache(start)


def was_finite(buffers: Buffers, overflow: Tensor) -> bool:
    """Whether `overflow`, or its copy on the host, is 0. If not, plain keys and values are forgotten: masked NaN spreads, too."""
    if not int(overflow):
        return True
    buffers.keys.zero_()
    buffers.values.zero_()
    return False
