"""As much of cupy as KCCL's host side uses, played with host memory, and its exchange kernel played by a thread.

The kernel reads its parameters from the bytes that the host packed and does what kernels/exchange.cu does, in NumPy on the same
addresses, so that the host side can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.collectives import cuda, words
from kog_dist.collectives.cuda_abi import EXCHANGE_PARAMS, KCCL_HOST, PEERS, WAITS
from kog_dist.collectives.reference import tree_sum
from kog_dist.cuda.build import Cubin
from kog_dist.runtime.abi import WaitOp, WaitRecord

NOT_READY = 600


def at(address: int, dtype: Any, count: int) -> NDArray[Any]:
    """An array on memory at an address."""
    num_bytes = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype)


class FakeStream:
    """Runs one kernel after the other."""

    by_ptr: ClassVar[dict[int, FakeStream]] = {}
    numbers = itertools.count(1)

    def __init__(self, non_blocking: bool = False) -> None:
        assert non_blocking, "the default stream waits for all others"
        self.ptr = next(self.numbers)
        self.by_ptr[self.ptr] = self
        self.kernels: list[threading.Thread] = []
        self.failed = False

    def launch(self, kernel: threading.Thread) -> None:
        assert all(not thread.is_alive() for thread in self.kernels), "the played stream holds one kernel at a time"
        self.kernels = [kernel]
        kernel.start()

    def synchronize(self) -> None:
        for thread in self.kernels:
            thread.join()
        if self.failed:
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def query(self) -> int:
        if any(thread.is_alive() for thread in self.kernels):
            return NOT_READY
        return 700 if self.failed else 0


class CUDARuntimeError(RuntimeError):
    __module__ = "cupy_backends.cuda.api.runtime"


class FakeRuntime:
    """cupy.cuda.runtime."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.gpu_names: dict[int, bytes] = {}
        self._queued = list[tuple[int, int, int]]()  # what is filled before the device is waited for

    def malloc(self, size: int) -> int:
        array = np.full(size + 256, 0xCD, np.uint8)
        address = -(-array.ctypes.data // 256) * 256
        self.memory[address] = array
        return address

    def free(self, ptr: int) -> None:
        del self.memory[ptr]

    def memset(self, ptr: int, value: int, size: int) -> None:
        self._queued.append((ptr, value, size))

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        assert kind in (1, 2)
        ctypes.memmove(to, source, size)

    def deviceSynchronize(self) -> None:  # noqa: N802
        while self._queued:
            ctypes.memset(*self._queued.pop(0))

    def deviceGetPCIBusId(self, ordinal: int) -> str:  # noqa: N802
        return f"0000:{ordinal:02x}:00.0"

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:  # noqa: N802
        return {"name": self.gpu_names.get(ordinal, b"PLAYED GPU")}

    def driverGetVersion(self) -> int:  # noqa: N802
        return 13000

    def deviceEnablePeerAccess(self, ordinal: int) -> None:  # noqa: N802
        raise CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled")

    def ipcGetMemHandle(self, ptr: int) -> bytes:  # noqa: N802
        return ptr.to_bytes(64, "little")

    def streamQuery(self, ptr: int) -> int:  # noqa: N802
        return FakeStream.by_ptr[ptr].query()


class PlayedDevice:
    def __init__(self, ordinal: int = 0) -> None:
        pass

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def zeros(shape: int, dtype: Any) -> Any:
    array = np.zeros(shape, dtype)
    return SimpleNamespace(array=array, data=SimpleNamespace(ptr=array.ctypes.data))


class PlayedKernel:
    """kog_dist.cuda.driver.Kernel for kernels/exchange.cu."""

    def __init__(self, cubin: Path, name: str, shared_bytes: int) -> None:
        assert (name, shared_bytes) == ("kccl_exchange", 0)

    def launch(self, num_ctas: int, num_threads: int, params: bytes, stream_ptr: int) -> None:
        assert (num_ctas, num_threads) == (1, 288)
        assert len(params) == EXCHANGE_PARAMS.size_bytes + WAITS.size_bytes + PEERS.size_bytes
        FakeStream.by_ptr[stream_ptr].launch(threading.Thread(target=exchange, args=(params,)))


def exchange(raw: bytes) -> None:
    """What the kernel does with its parameters."""
    params = np.frombuffer(raw, EXCHANGE_PARAMS.dtype, 1)[0]
    waits = np.frombuffer(raw, WAITS.dtype, 1, EXCHANGE_PARAMS.size_bytes)[0]
    peers = np.frombuffer(raw, PEERS.dtype, 1, EXCHANGE_PARAMS.size_bytes + WAITS.size_bytes)[0]
    host, mirror = at(int(waits["host_ptr"]), KCCL_HOST.dtype, 1), at(int(waits["mirror_ptr"]), np.uint32, 1)
    rank, num_ranks, length = int(peers["rank"]), int(peers["num_ranks"]), int(params["length"])
    tag, row_words = int(params["tag"]), int(params["row_words"])
    first = int(params["first_word"]) + int(params["slot"]) * num_ranks * row_words
    values = at(int(params["values_ptr"]), np.float32, length)
    heaps = [int(start) for start in peers["heap_ptr"][:num_ranks]]
    if params["publishes"]:
        for peer in set(range(num_ranks)) - {rank}:
            words.store(at(heaps[peer] + 8 * (first + rank * row_words), np.uint64, length), words.pack(values, tag))
    if params["collects"]:
        rows = at(heaps[rank] + 8 * first, np.uint64, num_ranks * row_words).reshape(num_ranks, row_words)[:, :length]
        others = [peer for peer in range(num_ranks) if peer != rank]
        begin_s = time.monotonic()
        while (words.tags(rows[others]) != tag).any():
            elapsed_s = time.monotonic() - begin_s
            if host["abort"][0]:
                mirror[0] = 1
            elif elapsed_s > float(waits["limit_us"]) / 1e6 and not mirror[0]:
                mirror[0] = 1
                missing = np.argwhere(words.tags(rows) != tag)
                missing = missing[missing[:, 0] != rank]
                op = WaitOp.BARRIER if params["collects"] == 3 else WaitOp.COLLECT
                seen = int(words.tags(rows)[tuple(missing[0])])
                record = WaitRecord(
                    rank,
                    op,
                    int(params["mailbox"]),
                    int(params["slot"]),
                    int(missing[0][0]),
                    len(missing),
                    tag,
                    seen,
                    int(elapsed_s * 1e9),
                )
                host["record"][0] = np.frombuffer(record.pack(), np.uint8)
            if mirror[0]:
                host["status"] = 2
                return
            time.sleep(0.0002)
        gathered = words.payload(rows.copy())
        gathered[rank] = values
        if params["collects"] == 1:
            at(int(params["result_ptr"]), np.float32, num_ranks * length)[:] = gathered.reshape(-1)
        elif params["collects"] == 2:
            at(int(params["result_ptr"]), np.float32, length)[:] = tree_sum(gathered)
    host["status"] = 2 if mirror[0] else 1


def install(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Put all of it in the place of cupy and of the compiler."""
    runtime = FakeRuntime()
    gpu = SimpleNamespace(
        runtime=runtime, Stream=FakeStream, Device=PlayedDevice, alloc_pinned_memory=lambda size: np.empty(size, np.uint8)
    )
    played = SimpleNamespace(cuda=gpu, zeros=zeros, uint32=np.uint32)
    monkeypatch.setitem(sys.modules, "cupy", played)
    monkeypatch.setattr(cuda, "Kernel", PlayedKernel)
    monkeypatch.setattr(cuda, "exchange_cubin", lambda num_ranks: Cubin(Path(f"exchange-{num_ranks}.cubin"), ""))
    return runtime
