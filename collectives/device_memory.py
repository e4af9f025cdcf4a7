"""What the symmetric heap asks of a GPU's memory, and cupy's answer to it."""

from __future__ import annotations

import os
from ctypes import addressof as address_of
from ctypes import c_uint64, sizeof
from types import ModuleType
from typing import Final, Protocol

from kog_dist.cuda.errors import cuda_errors
from kog_dist.errors import LaunchError, install
from kog_dist.records import dataclass
from kog_dist.runtime.instance import process_start_time

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
_LAZY_PEER_ACCESS: Final = 1
_PEER_ALREADY_ENABLED: Final = "PeerAccessAlreadyEnabled"


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory is: `host` tells machines apart, `process` processes, `bus_id` GPUs whatever their ordinal is in a process."""

    host: bytes
    pid: int
    started: int
    bus_id: str
    ordinal: int

    @property
    def process(self) -> tuple[bytes, int, int]:
        """The process, told apart from a later one with the same number."""
        return (self.host, self.pid, self.started)


class DeviceMemory(Protocol):
    """Memory of one GPU, seen from one process. Pointers are device addresses. Failures raise LaunchError."""

    place: Place

    def allocate(self, size_bytes: int) -> int:
        """Memory that can be exported, zeroed before this returns."""

    def export(self, ptr: int) -> bytes:
        """A handle with which other processes open memory that `allocate` returned."""

    def open(self, handle: bytes) -> int:
        """Map the exported memory of another process."""

    def close(self, ptr: int) -> None:
        """Unmap what `open` returned."""

    def enable_peer(self, ordinal: int) -> None:
        """Let this GPU address the memory of another one of the same process."""

    def write_word(self, ptr: int, value: int) -> None:
        """Write 8 bytes, which may be a peer's, and wait until they are there."""

    def read_word(self, ptr: int) -> int:
        """Read 8 bytes."""

    def synchronize(self) -> None:
        """Wait for everything that was queued on this GPU. Kernels bound their own waits."""

    def free(self, ptr: int) -> None:
        """Give back what `allocate` returned."""


class CupyMemory:
    """See `DeviceMemory`. `ordinal` is the GPU's number in this process; it becomes the thread's current device."""

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError:
            raise LaunchError(f"ranks on GPUs need cupy, which is not installed: {install('cuda')}") from None
        with cuda_errors(f"using GPU {ordinal}"):
            self._runtime: ModuleType = cupy.cuda.runtime
            cupy.cuda.Device(ordinal).use()
            self._runtime.deviceSynchronize()  # makes the context, which modules are loaded into
            bus_id = str(self._runtime.deviceGetPCIBusId(ordinal))
        self._gpu = f"GPU {ordinal} ({bus_id})"
        self.place = Place(_host_identity(), os.getpid(), process_start_time(os.getpid()) or 0, bus_id, ordinal)

    def allocate(self, size_bytes: int) -> int:
        """Plain cudaMalloc: what a memory pool returns cannot be exported on its own."""
        with cuda_errors(f"allocating {size_bytes} bytes on {self._gpu}"):
            ptr = int(self._runtime.malloc(size_bytes))
            self._runtime.memset(ptr, 0, size_bytes)
            self._runtime.deviceSynchronize()
        return ptr

    def export(self, ptr: int) -> bytes:
        """cudaIpcGetMemHandle."""
        with cuda_errors(f"exporting memory of {self._gpu}"):
            return bytes(self._runtime.ipcGetMemHandle(ptr))

    def open(self, handle: bytes) -> int:
        """cudaIpcOpenMemHandle; peer access comes with it, and the exporting GPU need not be visible to this process."""
        with cuda_errors(f"opening a peer's memory on {self._gpu}"):
            return int(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))

    def close(self, ptr: int) -> None:
        """cudaIpcCloseMemHandle."""
        with cuda_errors(f"unmapping a peer's memory on {self._gpu}"):
            self._runtime.ipcCloseMemHandle(ptr)

    def enable_peer(self, ordinal: int) -> None:
        """cudaDeviceEnablePeerAccess; harmless if it was enabled before."""
        with cuda_errors(f"letting {self._gpu} address GPU {ordinal}"):
            try:
                self._runtime.deviceEnablePeerAccess(ordinal)
            except self._runtime.CUDARuntimeError as error:
                if _PEER_ALREADY_ENABLED not in str(error):
                    raise

    def write_word(self, ptr: int, value: int) -> None:
        """A copy by the driver."""
        self._copy(ptr, c_uint64(value), to_device=True)

    def read_word(self, ptr: int) -> int:
        """A copy by the driver."""
        word = c_uint64()
        self._copy(ptr, word, to_device=False)
        return word.value

    def _copy(self, ptr: int, word: c_uint64, *, to_device: bool) -> None:
        with cuda_errors(f"copying a word at {ptr:#x} by {self._gpu}"):
            if to_device:
                self._runtime.memcpy(ptr, address_of(word), sizeof(word), _HOST_TO_DEVICE)
            else:
                self._runtime.memcpy(address_of(word), ptr, sizeof(word), _DEVICE_TO_HOST)
            self._runtime.deviceSynchronize()

    def synchronize(self) -> None:
        """cudaDeviceSynchronize."""
        with cuda_errors(f"waiting for {self._gpu}"):
            self._runtime.deviceSynchronize()

    def free(self, ptr: int) -> None:
        """cudaFree."""
        with cuda_errors(f"freeing memory of {self._gpu}"):
            self._runtime.free(ptr)


def _host_identity() -> bytes:
    """16 bytes that differ between machines, and between two starts of one."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))
