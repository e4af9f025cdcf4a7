"""The GPUs of this machine as NVML shows them, whatever CUDA_VISIBLE_DEVICES says: NVML ignores that variable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from types import ModuleType
from typing import TypeVar

from kog_dist.hardware.cpu_lists import parse_cpu_list
from kog_dist.hardware.nvml import DriverHangs, NvmlUnavailable, nvml_session
from kog_dist.hardware.peers import peer_obstacle
from kog_dist.records import dataclass

_CPU_WORD_BITS = 64
_MAX_CPUS = 8192  # NR_CPUS of distribution kernels

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. What the driver does not tell is 0, empty or False."""

    index: int  # as nvidia-smi counts: in the order of PCI bus ids
    uuid: str  # "GPU-" and 32 hexadecimal digits with dashes
    name: str
    bus_id: str  # domain:bus:device.function, as CUDA takes it
    compute: tuple[int, int] = (0, 0)  # compute capability
    memory_bytes: int = 0
    free_bytes: int = 0
    has_mig: bool = False  # split into instances, or about to be
    cpus: frozenset[int] = frozenset()  # those near it
    peak_bytes_s: float = 0.0  # of its memory: clock x bus width

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid[:12]})"


@dataclass(frozen=True, slots=True)
class Inventory:
    """All GPUs that answer, by index. `findings`: why there are none, and those that do not answer.

    `apart`: why two of them (indices, the lower one first) cannot read and write each other's memory, as far as is known.
    """

    gpus: tuple[Gpu, ...] = ()
    findings: tuple[str, ...] = ()
    apart: Mapping[tuple[int, int], str] = field(default_factory=dict)
    driver_hangs: bool = False

    def obstacle_between(self, gpus: Iterable[Gpu]) -> str:
        """Why these GPUs cannot serve one engine, in a sentence about the first pair of them; empty if they can."""
        for first, second in itertools.combinations(gpus, 2):
            low, high = sorted((first.index, second.index))
            if reason := self.apart.get((low, high)):
                return f"{first} and {second} cannot read and write each other's memory: {reason}"
        return ""


def read_inventory() -> Inventory:
    """Ask NVML. Never raises: a machine without driver, package or permission has no GPU, and the findings say why."""
    try:
        with nvml_session() as nvml:
            return inventory_from(nvml)
    except NvmlUnavailable as error:
        return Inventory((), (str(error),), driver_hangs=isinstance(error, DriverHangs))


def inventory_from(nvml: ModuleType) -> Inventory:
    """The same of an initialised binding."""
    gpus: list[Gpu] = []
    findings: list[str] = []
    count = _asked(nvml, nvml.nvmlDeviceGetCount, 0)
    for index in range(count):
        try:
            gpus.append(_read_gpu(nvml, index))
        except nvml.NVMLError as error:
            findings.append(f"GPU {index} does not answer ({error})")
    if not count:
        findings.append("the NVIDIA driver has no GPU")
    pairs = itertools.combinations([gpu.index for gpu in gpus if not gpu.has_mig], 2)
    apart = {(index, peer): reason for index, peer in pairs if (reason := peer_obstacle(nvml, index, peer))}
    return Inventory(tuple(gpus), tuple(findings), apart)


def _read_gpu(nvml: ModuleType, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    bus_id = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    memory = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    compute = _asked(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle), (0, 0))
    return Gpu(
        index=index,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        bus_id=bus_id,
        compute=(int(compute[0]), int(compute[1])),
        memory_bytes=int(memory.total) if memory else 0,
        free_bytes=int(memory.free) if memory else 0,
        has_mig=any(_asked(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle), (0, 0))),
        cpus=_near_cpus(nvml, handle, bus_id),
        peak_bytes_s=_peak_bandwidth(nvml, handle),
    )


def _near_cpus(nvml: ModuleType, handle: object, bus_id: str) -> frozenset[int]:
    """CPUs of the GPU's NUMA node, from NVML, or from the PCI bus where NVML does not know."""
    num_words, scope = _MAX_CPUS // _CPU_WORD_BITS, nvml.NVML_AFFINITY_SCOPE_NODE
    words: Iterable[int] = _asked(nvml, lambda: nvml.nvmlDeviceGetCpuAffinityWithinScope(handle, num_words, scope), ())
    found = frozenset(
        place * _CPU_WORD_BITS + bit for place, word in enumerate(words) for bit in range(_CPU_WORD_BITS) if int(word) >> bit & 1
    )
    if found:
        return found
    try:
        with open(f"/sys/bus/pci/devices/{bus_id}/local_cpulist", encoding="ascii") as file:
            return parse_cpu_list(file.read())
    except (OSError, ValueError):
        return frozenset()


def _peak_bandwidth(nvml: ModuleType, handle: object) -> float:
    """Bytes per second: two transfers per clock over the whole bus."""
    clock_mhz = _asked(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM), 0)
    bus_bits = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryBusWidth(handle), 0)
    return 2.0 * clock_mhz * 1e6 * bus_bits / 8


def _asked(nvml: ModuleType, question: Callable[[], T], otherwise: T) -> T:
    """The answer, or `otherwise` where this driver or GPU does not know the question."""
    try:
        return question()
    except nvml.NVMLError:
        return otherwise
