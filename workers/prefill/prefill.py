"""A prompt into the KV cache, block by block: `Prefill.run`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kog_dist.errors import ConfigError
from kog_dist.workers.prefill.blocks import BLOCK_SIZES, Block, blocks
from kog_dist.workers.prefill.buffers import Buffers, Rows
from kog_dist.workers.prefill.layers import Layers
from kog_dist.workers.prefill.operations import Operations

BLOCKS_QUEUED = 2  # the next one starts without the host
POLL_S = 20e-6


class Runner(Protocol):
    """Runs the blocks of one prompt, one after the other."""

    def begin(self, token_ids: Sequence[int], start: int) -> None:
        """A new prompt, whose first `start` tokens are in the monokernel's cache."""

    def queue(self, block: Block) -> Callable[[], bool]:
        """Queue the next block; what comes back says whether it has ended."""

    def finish(self, first: int, last: int) -> bool:
        """Store these positions in the monokernel's cache, when all blocks have ended; False if a value was not finite."""


class Prefill:
    """Fills the KV cache of one rank. One request at a time, never while the monokernel runs.

    With several ranks `run` is collective, and `should_stop` must say the same on all ranks each time that it is asked.
    """

    def __init__(self, runner: Runner, *, max_context: int, sizes: Sequence[int] = BLOCK_SIZES) -> None:
        self._runner, self._max_context, self._sizes = runner, max_context, tuple(sizes)

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
        waited for, and what is queued by then (at most `BLOCKS_QUEUED` blocks, some milliseconds) still counts. If a value left
        the range of the products' type, nothing is stored and `start` comes back; the monokernel can go on from there. `on_progress`
        is called with the number of positions after every block. Raises ConfigError if the tokens do not fit into the context.
        """
        if not 0 <= start <= len(token_ids) <= self._max_context:
            raise ConfigError(
                f"prefill from position {start} to {len(token_ids)} is not within the model's context of {self._max_context}"
            )
        waiting = deque(blocks(start, len(token_ids), self._sizes))
        if not waiting:
            return start
        self._runner.begin(token_ids, start)
        queued: deque[tuple[Block, Callable[[], bool]]] = deque()
        reached = start
        while waiting or queued:
            if waiting and should_stop():
                waiting.clear()
            elif waiting and len(queued) < BLOCKS_QUEUED:
                block = waiting.popleft()
                queued.append((block, self._runner.queue(block)))
            elif queued[0][1]():
                reached = queued.popleft()[0].end
                on_progress(reached)
            else:
                time.sleep(POLL_S)
        return reached if self._runner.finish(start, reached) else start


class HostRunner:
    """Runs blocks on a CPU, at once: for tests, and as the definition of what a GPU does."""

    def __init__(self, layers: Layers, buffers: Buffers, sizes: Sequence[int] = BLOCK_SIZES) -> None:
        self._layers, self._buffers = layers, buffers
        self._rows: dict[int, Rows] = {size: buffers.rows(size) for size in sizes}

    def begin(self, token_ids: Sequence[int], start: int) -> None:
        """See `Runner`."""
        load_prompt(self._buffers, self._layers.operations, token_ids, start)

    def queue(self, block: Block) -> Callable[[], bool]:
        """See `Runner`."""
        self._layers.run(self._rows[block.size])
        return lambda: True

    def finish(self, first: int, last: int) -> bool:
        """See `Runner`."""
        self._layers.operations.store_cache(first, last)
        return not int(self._buffers.overflow)


def load_prompt(buffers: Buffers, operations: Operations, token_ids: Sequence[int], start: int) -> None:
    """Put a prompt and the keys and values of its first `start` tokens in place."""
    import torch

    buffers.prompt[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
    buffers.prompt[len(token_ids) :] = 0  # padding: any token will do
    buffers.place[3] = start
    buffers.overflow.zero_()
    if start:
        operations.load_cache(start)
