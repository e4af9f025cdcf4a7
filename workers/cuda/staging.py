"""Page-locked memory through which bytes of files go to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeAlias

import numpy as np

READERS = 8  # threads
BUFFER_BYTES = 4 * 2**20  # two for each reader

# Pieces of bytes, each the used front of a buffer that the callable gives.
Chunks: TypeAlias = Callable[[Callable[[], memoryview]], Iterator[memoryview]]


class Stages:
    """As many pairs of buffers as there are readers, which are threads with one job at a time. Made with the GPU in use."""

    def __init__(self) -> None:
        import cupy

        self._device = cupy.cuda.Device()
        self._free: SimpleQueue[_Stage] = SimpleQueue()
        for _ in range(READERS):
            self._free.put(_Stage())

    def send(self, chunks: Chunks, target_ptr: int) -> None:
        """Copy what `chunks` gives to GPU memory; copies are queued on the null stream. Raises what `chunks` raises."""
        self._device.use()
        stage = self._free.get()
        try:
            for chunk in chunks(stage.next_buffer):
                stage.send(len(chunk), target_ptr)
                target_ptr += len(chunk)
        finally:
            self._free.put(stage)


class _Stage:
    """Two page-locked buffers that take turns: one is filled while the other is copied to the GPU."""

    def __init__(self) -> None:
        import cupy

        self._memory = [cupy.cuda.alloc_pinned_memory(BUFFER_BYTES) for _ in range(2)]
        self._buffers = [np.frombuffer(memory, np.uint8, BUFFER_BYTES).data for memory in self._memory]
        self._copied = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._turn = 0

    def next_buffer(self) -> memoryview:
        """A buffer whose copy has ended."""
        self._turn ^= 1
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def send(self, num_bytes: int, target_ptr: int) -> None:
        """Queue the copy of the front of the newest buffer."""
        from cupy.cuda import Stream, runtime

        source_ptr = self._memory[self._turn].ptr
        runtime.memcpyAsync(target_ptr, source_ptr, num_bytes, runtime.memcpyHostToDevice, Stream.null.ptr)
        self._copied[self._turn].record(Stream.null)
