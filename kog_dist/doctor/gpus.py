"""GPUs one by one: what they are, how full, who uses them, and what CUDA_VISIBLE_DEVICES makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kog_dist.doctor.report import Finding, Level, ok, problem, warning
from kog_dist.hardware.gpus import Gpu, Inventory, inventory_from, read_inventory
from kog_dist.hardware.nvml import NvmlUnavailable, nvml_session
from kog_dist.hardware.visible import visible_gpus
from kog_dist.launch.gpu_choice import KERNEL_COMPUTE

_GIB = 2**30
_BUSY_SHARE = 0.1  # of the memory; less is what drivers and displays take
_NVIDIA, _DISPLAY_CLASS = "0x10de", "0x03"
_UNUSABLE_MODES = {2: "PROHIBITED"}  # NVML_COMPUTEMODE_*
_EXCLUSIVE = 3


def can_run_kernel(inventory: Inventory) -> bool:
    """Whether a GPU is here that the kernel is made for: then what stops it is a problem, elsewhere no more than a warning."""
    return any(gpu.compute == KERNEL_COMPUTE for gpu in inventory.gpus)


def graded(inventory: Inventory, text: str, **details: object) -> Finding:
    """A finding that stops engines on GPUs: a problem where they could run, else a warning."""
    return (problem if can_run_kernel(inventory) else warning)(text, **details)


def driver() -> Iterator[Finding]:
    """Version of the driver, and the CUDA version up to which programs may be built."""
    try:
        with nvml_session() as nvml:
            version, number = str(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
            inventory = inventory_from(nvml)
    except NvmlUnavailable as error:
        on_bus = _nvidia_devices_on_bus()
        if on_bus:
            yield warning(
                f"{error}, though NVIDIA devices are on the PCI bus ({', '.join(on_bus)}); GPUs need a driver for CUDA 13"
            )
        else:
            yield ok(f"no GPU can be used: {error}; engines run on CPU ranks")
        return
    cuda = f"{number // 1000}.{number % 1000 // 10}"
    details = {"driver": version, "cuda": cuda}
    if number < 13000:
        yield graded(
            inventory, f"driver {version} is for CUDA {cuda}, and programs here are built for 13; update the driver", **details
        )
    else:
        yield ok(f"driver {version} for CUDA up to {cuda}", **details)


def devices() -> Iterator[Finding]:
    """Every GPU, and those that do not answer."""
    try:
        with nvml_session() as nvml:
            inventory = inventory_from(nvml)
            for text in inventory.findings:
                yield warning(
                    f"{text}; look at dmesg for Xid messages" if "answer" in text else f"{text}; engines run on CPU ranks"
                )
            for gpu in inventory.gpus:
                yield _device(nvml, gpu)
    except NvmlUnavailable:
        return


def visible() -> Iterator[Finding]:
    """What the environment shows to CUDA."""
    inventory = read_inventory()
    found = visible_gpus(inventory.gpus, os.environ)
    if found.why:
        details = {"visible": [gpu.index for gpu in found.gpus]}
        yield (ok if found.gpus else warning)(found.why + ("" if found.gpus else "; unset it to use GPUs"), **details)


def _device(nvml: ModuleType, gpu: Gpu) -> Finding:
    handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
    ecc = _answer(nvml, lambda: nvml.nvmlDeviceGetEccMode(handle)[0])
    errors = _answer(
        nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    )
    mode = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle))
    users = _users(nvml, handle)
    details = {
        "index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "bus_id": gpu.bus_id, "compute": ".".join(map(str, gpu.compute)),
        "memory_bytes": gpu.memory_bytes, "free_bytes": gpu.free_bytes, "mig": gpu.has_mig, "ecc": bool(ecc),
        "uncorrected_ecc_errors": errors, "processes": users,
    }  # fmt: skip
    used_by = ", ".join(f"{user['name']} ({user['pid']})" for user in users)
    free, total = gpu.free_bytes / _GIB, gpu.memory_bytes / _GIB
    text = (
        f"GPU {gpu.index} {gpu.name}: {gpu.uuid}, compute capability {details['compute']}, {free:.1f} of {total:.1f} GiB free, "
        f"used by {used_by or 'nobody'}, ECC {'on' if ecc else 'off'}, MIG {'on' if gpu.has_mig else 'off'}"
    )
    concern = _concern(gpu, details, mode)
    return Finding(Level.WARNING if concern else Level.OK, f"{text}; {concern}" if concern else text, details)


def _concern(gpu: Gpu, details: Mapping[str, Any], mode: int | None) -> str:
    if gpu.has_mig:
        return "engines leave it alone because it is split into MIG instances: nvidia-smi -mig 0 makes it whole"
    if gpu.compute != KERNEL_COMPUTE:
        return f"the kernel needs compute capability {'.'.join(map(str, KERNEL_COMPUTE))} (H100, H200)"
    if details["uncorrected_ecc_errors"]:
        return f"{details['uncorrected_ecc_errors']} uncorrected memory errors since the last reset: have it reset or replaced"
    if mode in _UNUSABLE_MODES:
        return "its compute mode forbids programs: nvidia-smi -c DEFAULT"
    if mode == _EXCLUSIVE and details["processes"]:
        return "its compute mode allows one program, and it has one: stop that, or nvidia-smi -c DEFAULT"
    if gpu.free_bytes < (1 - _BUSY_SHARE) * gpu.memory_bytes:
        return "a model may not fit, and another program costs speed: stop what uses it"
    return ""


def _users(nvml: ModuleType, handle: object) -> list[dict[str, Any]]:
    """Processes on a GPU; those of other containers have a number but no name here."""
    found = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return [{"pid": int(user.pid), "name": _process_name(int(user.pid)), "bytes": user.usedGpuMemory} for user in found]


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process that is not visible here"


def _nvidia_devices_on_bus() -> list[str]:
    found = []
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / leaf).read_text(encoding="ascii").strip() for leaf in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASS):
            found.append(device.name)
    return sorted(found)


def _answer(nvml: ModuleType, question: Any) -> Any:
    try:
        return question()
    except nvml.NVMLError:
        return None
