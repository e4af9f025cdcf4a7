"""A stand-in for the binding `pynvml` and a node of H200s, for tests of everything that asks about GPUs."""

# ruff: noqa: N802 - the names are the binding's

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")

H200_BYTES = 141 * 2**30


class NVMLError(Exception):
    """Of any call; `value` is the code."""

    def __init__(self, value: int = 999) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """What the fake says of one GPU; a field that is None is a call that fails."""

    uuid: str
    name: str = "NVIDIA H200"
    bus: int = 0
    compute: tuple[int, int] = (9, 0)
    total: int = H200_BYTES
    free: int = H200_BYTES - 2**29
    mig: tuple[int, int] | None = (0, 0)
    cpu_words: tuple[int, ...] | None = (0xFF,)
    clock_mhz: int | None = 3201
    bus_bits: int | None = 6144
    ecc: tuple[int, int] | None = (1, 1)
    ecc_errors: int = 0
    compute_mode: int = 0
    processes: tuple[tuple[int, int | None], ...] = ()
    nvlinks: tuple[int, ...] = (1,) * 18
    fabric: tuple[int, int] | None = (3, 0)
    is_lost: bool = False
    peers_blocked: frozenset[int] = field(default_factory=frozenset)
    peer_status: int | None = 0  # of those that are not blocked


class FakeNvml(ModuleType):
    """Answers like the binding. `init_error`: code with which nvmlInit fails."""

    NVMLError = NVMLError
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 12, 9, 18
    NVML_AFFINITY_SCOPE_NODE, NVML_CLOCK_MEM, NVML_NVLINK_MAX_LINKS = 0, 2, 36
    NVML_P2P_STATUS_OK = 0
    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, NVML_GPU_FABRIC_STATE_COMPLETED = 0, 3

    def __init__(self, gpus: Sequence[FakeGpu] = (), *, init_error: int | None = None) -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)
        self.init_error = init_error
        self.num_sessions = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise NVMLError(self.init_error)
        self.num_sessions += 1

    def nvmlShutdown(self) -> None:
        self.num_sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.48.01"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].is_lost:
            raise NVMLError(15)
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(domain=0, bus=gpu.bus, device=0)

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(total=gpu.total, free=gpu.free)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return gpu.compute

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> tuple[int, int]:
        return _known(gpu.mig)

    def nvmlDeviceGetCpuAffinityWithinScope(self, gpu: FakeGpu, num_words: int, _scope: int) -> tuple[int, ...]:
        words = _known(gpu.cpu_words)
        return words + (0,) * (num_words - len(words))

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, _clock: int) -> int:
        return _known(gpu.clock_mhz)

    def nvmlDeviceGetMemoryBusWidth(self, gpu: FakeGpu) -> int:
        return _known(gpu.bus_bits)

    def nvmlDeviceGetEccMode(self, gpu: FakeGpu) -> tuple[int, int]:
        return _known(gpu.ecc)

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, _kind: int, _counter: int) -> int:
        return gpu.ecc_errors

    def nvmlDeviceGetComputeMode(self, gpu: FakeGpu) -> int:
        return gpu.compute_mode

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= len(gpu.nvlinks):
            raise NVMLError(3)
        return gpu.nvlinks[link]

    def nvmlDeviceGetP2PStatus(self, first: FakeGpu, second: FakeGpu, _caps: int) -> int:
        return 1 if self.gpus.index(second) in first.peers_blocked else _known(first.peer_status)

    def c_nvmlGpuFabricInfo_t(self) -> Any:
        return SimpleNamespace()

    def nvmlDeviceGetGpuFabricInfo(self, gpu: FakeGpu, answer: Any) -> None:
        answer.state, answer.status = _known(gpu.fabric)


def _known(value: T | None) -> T:
    if value is None:
        raise NVMLError(3)
    return value


def node(count: int = 8, change: Callable[[int, FakeGpu], None] | None = None) -> FakeNvml:
    """Eight H200s, four to each of two NUMA nodes of 48 CPUs."""
    gpus = [FakeGpu(f"GPU-{index:08x}-0000-1111-2222-{index:012x}", bus=0x10 + index) for index in range(count)]
    for index, gpu in enumerate(gpus):
        gpu.cpu_words = ((1 << 48) - 1,) if index < 4 else (0xFFFF << 48, (1 << 32) - 1)
        if change is not None:
            change(index, gpu)
    return FakeNvml(gpus)
