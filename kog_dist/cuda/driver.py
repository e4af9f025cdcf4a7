"""The few calls of the CUDA driver that a launch needs. Memory and contexts are cupy's; this loads cubins and launches them, and
maps host memory that somebody else has made.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.errors import LaunchError

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_HOST_REGISTER_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
_FLOAT16, _PROMOTE_256B = 6, 3  # of tensor maps: type, and what L2 reads at once
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_ by bytes
_MAP_BYTES = 128
_NOT_READY, _THREAD_LOCAL, _NODE_PRIORITIES = 600, 1, 8  # CUresult; CU_STREAM_CAPTURE_MODE_; CUDA_GRAPH_INSTANTIATE_FLAG_
# CU_LAUNCH_ATTRIBUTE_: CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION, PRIORITY
_CLUSTER, _EARLY, _PRIORITY = 4, 6, 8


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute whose value is up to three ints."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 3), ("rest", ctypes.c_char * 52))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


assert (ctypes.sizeof(_LaunchConfig), ctypes.sizeof(_LaunchAttribute)) == (56, 72)  # as cuda.h has them


class DriverError(LaunchError):
    """What the driver answered, without a remedy: who called it knows that."""


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"the CUDA driver cannot be loaded ({error}); install it, or use --device cpu") from None


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    raise DriverError(f"{what} failed: {(name.value or b'unknown error').decode()} ({code})")


def tensor_map(address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> NDArray[np.uint64]:
    """The 16 words of a CUtensorMap of binary16 values, the fastest dimension first; `strides` (bytes) of all but that one.

    A box has 16, 32 or 64 values in the fastest dimension, and is swizzled over as many bytes as they have. Address and strides
    are multiples of 16. What lies outside of the sizes is read as 0. Raises LaunchError.
    """
    raw = np.zeros(2 * _MAP_BYTES, np.uint8)
    start = -raw.ctypes.data % 64  # a map is aligned
    words = raw[start : start + _MAP_BYTES].view(np.uint64)
    rank = len(sizes)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(words.ctypes.data), _FLOAT16, rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0,
        _SWIZZLES[2 * box[0]], _PROMOTE_256B, 0,
    )  # fmt: skip
    _check(code, f"a tensor map of {tuple(sizes)} values with strides {tuple(strides)} and boxes {tuple(box)}")
    return words


def copy_to_device(device_ptr: int, host_ptr: int, num_bytes: int, stream_ptr: int) -> None:
    """Queue a copy of page-locked memory, which must stay as it is until it is done."""
    code = _driver().cuMemcpyHtoDAsync_v2(
        ctypes.c_uint64(device_ptr), ctypes.c_void_p(host_ptr), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream_ptr)
    )
    _check(code, f"copying {num_bytes} bytes to the GPU")


def copy_to_host(host_ptr: int, device_ptr: int, num_bytes: int, stream_ptr: int) -> None:
    """Queue a copy into page-locked memory."""
    code = _driver().cuMemcpyDtoHAsync_v2(
        ctypes.c_void_p(host_ptr), ctypes.c_uint64(device_ptr), ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream_ptr)
    )
    _check(code, f"copying {num_bytes} bytes from the GPU")


def has_ended(event_ptr: int) -> bool:
    """Whether the GPU has come to a CUevent. Raises LaunchError when what is before it has failed."""
    code = _driver().cuEventQuery(ctypes.c_void_p(event_ptr))
    if code != _NOT_READY:
        _check(code, "waiting for the GPU")
    return bool(code == 0)


class Graph:
    """What is queued on a CUDA stream, and on those that wait for it, within `captured_from`, to be launched as a whole."""

    def __init__(self) -> None:
        self.exec_ptr = 0

    @contextmanager
    def captured_from(self, stream_ptr: int) -> Iterator[None]:
        """Nothing that is queued within the block runs. Other threads may do what they like meanwhile. Raises LaunchError."""
        stream, captured, made = ctypes.c_void_p(stream_ptr), ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuStreamBeginCapture_v2(stream, _THREAD_LOCAL), "capturing a graph")
        try:
            yield
        except BaseException:
            _driver().cuStreamEndCapture(stream, ctypes.byref(captured))
            _driver().cuGraphDestroy(captured)
            raise
        _check(_driver().cuStreamEndCapture(stream, ctypes.byref(captured)), "capturing a graph")
        code = _driver().cuGraphInstantiateWithFlags(ctypes.byref(made), captured, ctypes.c_uint64(_NODE_PRIORITIES))
        _driver().cuGraphDestroy(captured)
        _check(code, "making a graph")
        self.exec_ptr = made.value or 0
        weakref.finalize(self, _driver().cuGraphExecDestroy, made).atexit = False

    def launch(self, stream_ptr: int) -> None:
        """Queue it."""
        launch_graph(self.exec_ptr, stream_ptr)


def launch_graph(graph_ptr: int, stream_ptr: int) -> None:
    """Queue a CUgraphExec, the same as the runtime's cudaGraphExec_t."""
    _check(_driver().cuGraphLaunch(ctypes.c_void_p(graph_ptr), ctypes.c_void_p(stream_ptr)), "launching a graph")


class HostMapping:
    """Host memory, from `address` on, that the current context's GPU reads and writes at `device_ptr` until `close`."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address: int | None = address
        what = f"mapping {num_bytes} bytes of host memory into the GPU's addresses"
        _check(_driver().cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _HOST_REGISTER_MAPPED), what)
        found = ctypes.c_uint64()
        _check(_driver().cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0), what)
        self.device_ptr = found.value

    def close(self) -> None:
        """End the mapping; nothing on the GPU may use it any more. A context that is broken has ended it by itself."""
        if self._address is not None:
            _driver().cuMemHostUnregister(ctypes.c_void_p(self._address))
            self._address = None


class Kernel:
    """One function of a cubin, loaded into the current context; it stays loaded until the process ends.

    Its code is on the GPU from now on. CUDA would load it at the first launch, which would wait for kernels that run, and they
    may wait for a peer.
    """

    def __init__(self, cubin: Path, name: str, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoad(ctypes.byref(self._module), str(cubin).encode()), f"loading {cubin}")
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"finding kernel {name}")
        _check(
            _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes),
            f"asking for {shared_bytes} bytes of shared memory",
        )
        _check(_driver().cuFuncLoad(self._function), f"loading kernel {name}")

    def launch(self, num_ctas: int, num_threads: int, params: bytes, stream_ptr: int) -> None:
        """Queue a cooperative launch (all thread blocks resident at once, or an error) with one by-value parameter."""
        self._launch(_driver().cuLaunchCooperativeKernel, num_ctas, num_threads, params, stream_ptr)

    def launch_grid(
        self, num_ctas: int, num_threads: int, params: bytes, stream_ptr: int, *, priority: int = 0, early: bool = False
    ) -> None:
        """Queue an ordinary launch of any number of thread blocks, with one by-value parameter.

        A negative `priority` (to -5) puts its thread blocks before those of other kernels that wait for places. A graph keeps
        it if it is instantiated to use its nodes' priorities. `early`: it may begin before the launch before it has ended, and
        waits for that by itself (pdl.cuh); what is queued before it is a kernel.
        """
        if priority == 0 and not early:
            self._launch(_driver().cuLaunchKernel, num_ctas, num_threads, params, stream_ptr, ctypes.c_void_p(0))
            return
        chosen = ((_PRIORITY, (priority,)),) if priority else ()
        self._launch_with((*chosen, (_EARLY, (1,))) if early else chosen, num_ctas, num_threads, params, stream_ptr)

    def clusters_at_once(self, cluster: int, num_threads: int) -> int:
        """How many clusters of `cluster` thread blocks the GPU runs at a time. Raises LaunchError."""
        attributes = (_LaunchAttribute * 1)(_LaunchAttribute(_CLUSTER, 0, (cluster, 1, 1)))
        config = _LaunchConfig(cluster, 1, 1, num_threads, 1, 1, self._shared_bytes, None, attributes, 1)
        found = ctypes.c_int()
        code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, ctypes.byref(config))
        _check(code, f"asking how many clusters of {cluster} thread blocks of {num_threads} threads run at once")
        if found.value == 0:
            raise LaunchError(f"the GPU runs no cluster of {cluster} thread blocks of {num_threads} threads")
        return found.value

    def _launch_with(
        self, chosen: tuple[tuple[int, tuple[int, ...]], ...], num_ctas: int, num_threads: int, params: bytes, stream_ptr: int
    ) -> None:
        """A launch with attributes: their numbers and values."""
        raw = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(raw))
        attributes = (_LaunchAttribute * len(chosen))(*(_LaunchAttribute(kind, 0, value) for kind, value in chosen))
        config = _LaunchConfig(num_ctas, 1, 1, num_threads, 1, 1, self._shared_bytes, stream_ptr, attributes, len(chosen))
        code = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, ctypes.c_void_p(0))
        _check(code, f"launching {num_ctas} thread blocks of {num_threads} threads with attributes {chosen}")

    def _launch(self, call: Any, num_ctas: int, num_threads: int, params: bytes, stream_ptr: int, *extra: Any) -> None:
        raw = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(raw))
        code = call(
            self._function, num_ctas, 1, 1, num_threads, 1, 1, self._shared_bytes, ctypes.c_void_p(stream_ptr), pointers, *extra
        )
        _check(code, f"launching {num_ctas} thread blocks of {num_threads} threads")
