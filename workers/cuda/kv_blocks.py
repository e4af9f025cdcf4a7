"""The pool of a GPU: keys and values of beginnings of sequences, beside the monokernel's KV caches and on the host, and copies of
states that every token changes.

A block is a batch of 16 positions of every split of every KV head and layer (see prefill/base/cache_layout.py), so the positions
of a block are neighbours, and in the cache its batches lie `CacheShape.full_batches` apart: each copy is one of rows.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda.device_array import DevicePointer
from kog_dist.cuda.driver import HostMapping
from kog_dist.decode.cpu.pool_sizes import states_within
from kog_dist.decode.request import KvCopyKind, KvUse
from kog_dist.workers.cuda.cache_shape import BATCH

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape

_PAGE_THREADS = 8  # that have the system make pages, which takes one of them 0.4 s per GiB
_DEFAULT = 4  # cudaMemcpyDefault: the addresses say from where to where


def block_tokens(shape: KernelShape) -> int:
    """Positions of a block; 0 where there can be none: windowed layers keep a ring, from which old positions are gone."""
    return 0 if shape.cache.ring_positions else BATCH * shape.splits


def block_bytes(shape: KernelShape) -> int:
    """Of one block."""
    return _num_rows(shape) * shape.cache.batch_bytes


def net_bytes(shape: KernelShape) -> int:
    """Of the state of a sequence that every token changes; 0: the model has none."""
    return 0 if shape.delta is None else shape.delta.num_bytes


def pool_slots(shape: KernelShape, num_bytes: int) -> tuple[int, int]:
    """Blocks, and copies of a state, that so many bytes have room for.

    No blocks where there can be none, or where there is no room for a copy of a state: nobody could go on behind them.
    """
    of_state = net_bytes(shape)
    states = states_within(num_bytes, of_state)
    if not block_tokens(shape) or (of_state and not states):
        return 0, 0
    return (num_bytes - states * of_state) // block_bytes(shape), states


class KvBlocks:
    """`slots` blocks on the current GPU and `host_slots` in page-locked memory of the host. `kv_ptr`: the KV caches.

    And `states` copies of a state on the GPU, `host_states` on the host; `nets_ptr`: the states that belong to the KV caches.

    Memory is taken at once. Copies are queued on a CUDA stream.
    """

    def __init__(
        self, shape: KernelShape, kv_ptr: int, slots: int, host_slots: int, *, nets_ptr: int = 0, states: int = 0,
        host_states: int = 0,
    ) -> None:  # fmt: skip
        import cupy

        self.shape, self._kv_ptr, self._slots, self._nets_ptr = shape, kv_ptr, slots, nets_ptr
        self._block_bytes, self._state_bytes = block_bytes(shape), net_bytes(shape)
        self._memory: DevicePointer = cupy.cuda.Memory(slots * self._block_bytes)  # not of the pool, which rounds up
        self._states: DevicePointer | None = cupy.cuda.Memory(states * self._state_bytes) if states else None
        self._host = _HostMemory(host_slots * self._block_bytes) if host_slots else None
        self._num_states = states
        self._host_states = _HostMemory(host_states * self._state_bytes) if host_states else None

    def close(self) -> None:
        """Give the host's memory back. No copy runs any more."""
        for host in (self._host, self._host_states):
            if host is not None:
                host.close()
        self._host = self._host_states = None

    def copy(self, kv: KvUse, stream_ptr: int) -> None:
        """Queue the copies of `kv`, in order, behind what is queued on the stream."""
        from cupy.cuda import runtime

        width, height = self.shape.cache.batch_bytes, _num_rows(self.shape)
        pitch = self.shape.cache.full_batches * width
        for kind, slot, place in kv.copies:
            if kind in (KvCopyKind.LOAD_STATE, KvCopyKind.SAVE_STATE):
                self._copy_state(slot, kv.cache, stream_ptr, saves=kind is KvCopyKind.SAVE_STATE)
                continue
            if kind is KvCopyKind.MOVE_STATE:
                runtime.memcpyAsync(
                    self._state_address(place), self._state_address(slot), self._state_bytes, _DEFAULT, stream_ptr
                )
                continue
            block = self._address(slot)
            if kind is KvCopyKind.MOVE:
                runtime.memcpyAsync(self._address(place), block, self._block_bytes, _DEFAULT, stream_ptr)
                continue
            cache = self._kv_ptr + kv.cache * self.shape.cache.num_bytes + place * width
            if kind is KvCopyKind.LOAD:
                runtime.memcpy2DAsync(cache, pitch, block, width, width, height, _DEFAULT, stream_ptr)
            else:
                runtime.memcpy2DAsync(block, width, cache, pitch, width, height, _DEFAULT, stream_ptr)

    def _copy_state(self, slot: int, cache: int, stream_ptr: int, *, saves: bool) -> None:
        from cupy.cuda import runtime

        own, kept = self._nets_ptr + cache * self._state_bytes, self._state_address(slot)
        to, source = (kept, own) if saves else (own, kept)
        runtime.memcpyAsync(to, source, self._state_bytes, _DEFAULT, stream_ptr)

    def _state_address(self, slot: int) -> int:
        if slot < self._num_states:
            assert self._states is not None
            return int(self._states.ptr) + slot * self._state_bytes
        assert self._host_states is not None
        return self._host_states.address + (slot - self._num_states) * self._state_bytes

    def _address(self, slot: int) -> int:
        if slot < self._slots:
            return int(self._memory.ptr) + slot * self._block_bytes
        assert self._host is not None
        return self._host.address + (slot - self._slots) * self._block_bytes


class _HostMemory:
    """Zeroed page-locked memory from `address` on. Several threads make its pages: cudaHostAlloc does it in one, and 4 GiB take
    longer than all else of a start.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_bytes)
        with suppress(OSError):  # a kernel without them
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        bytes_ = np.frombuffer(self._memory, np.uint8)
        with ThreadPoolExecutor(_PAGE_THREADS) as pool:
            list(pool.map(_touch, np.array_split(bytes_, _PAGE_THREADS)))
        self.address = int(bytes_.ctypes.data)
        self._mapping = HostMapping(self.address, num_bytes)

    def close(self) -> None:
        self._mapping.close()


def _touch(part: NDArray[np.uint8]) -> None:
    part[:: mmap.PAGESIZE] = 0


def copy_beginning(shape: KernelShape, kv_ptr: int, source: int, cache: int, num_positions: int, stream_ptr: int) -> None:
    """Queue that a KV cache gets the first positions of another one; where layers keep rings, all that these hold."""
    from cupy.cuda import runtime

    num_bytes = shape.cache.num_bytes
    to, start = kv_ptr + cache * num_bytes, kv_ptr + source * num_bytes
    if shape.cache.ring_positions:
        runtime.memcpyAsync(to, start, num_bytes, _DEFAULT, stream_ptr)
        return
    pitch, num_batches = shape.cache.full_batches * shape.cache.batch_bytes, -(-num_positions // (BATCH * shape.splits))
    width = min(num_batches, shape.cache.full_batches) * shape.cache.batch_bytes
    runtime.memcpy2DAsync(to, pitch, start, pitch, width, _num_rows(shape), _DEFAULT, stream_ptr)


def _num_rows(shape: KernelShape) -> int:
    """Batches of a block."""
    return len(shape.cache.layers) * shape.cache.kv_heads * shape.splits
