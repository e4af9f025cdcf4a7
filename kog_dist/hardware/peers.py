"""Which GPUs may read and write each other's memory, as NVML knows it without creating a CUDA context."""

from __future__ import annotations

from types import ModuleType

_READ, _WRITE = 0, 1  # NVML_P2P_CAPS_INDEX_*; the binding's constants are one-element tuples by mistake
# By NVML_P2P_STATUS_*. What NVML does not know (6) does not stop anybody.
_REASONS = {
    1: "the chipset between them does not support it",
    2: "one of them does not support it",
    3: "the way between them does not support it",
    4: "it is switched off in the driver's settings",
    5: "it is not supported",
}


def peer_access(nvml: ModuleType, index: int, peer: int) -> str:
    """What GPU `index` may do with the memory of GPU `peer`: rw, r, w or nothing."""
    statuses = zip("rw", _statuses(nvml, index, peer), strict=True)
    return "".join(letter for letter, status in statuses if status == nvml.NVML_P2P_STATUS_OK)


def peer_obstacle(nvml: ModuleType, index: int, peer: int) -> str:
    """Why two GPUs cannot read and write each other's memory; empty if they can, or if nobody knows."""
    statuses = (*_statuses(nvml, index, peer), *_statuses(nvml, peer, index))
    return next((_REASONS[status] for status in statuses if status in _REASONS), "")


def _statuses(nvml: ModuleType, index: int, peer: int) -> tuple[int | None, int | None]:
    """Of reading and of writing; None where the driver does not know the question."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(one) for one in (index, peer)]

    def status(capability: int) -> int | None:
        try:
            return int(nvml.nvmlDeviceGetP2PStatus(*handles, capability))
        except nvml.NVMLError:
            return None

    return status(_READ), status(_WRITE)
