"""NVIDIA's management library as a context; it creates no CUDA context and disturbs nobody."""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from kog_dist.system import python_child

ANSWER_S = 30.0  # a driver that was asleep takes about 2 s for each GPU
_END_S = 1.0
_DRIVER = Path("/dev/nvidiactl")  # where it is missing, NVML says so at once
_PROBE = "kog_dist.hardware.nvml_probe"


class NvmlUnavailable(Exception):
    """There is nobody to ask about GPUs; the text says why, in words that fit behind "no GPU can be used: "."""


class DriverHangs(NvmlUnavailable):
    """The driver is there and does not answer."""


@contextmanager
def nvml_session() -> Iterator[ModuleType]:
    """The binding `pynvml`, initialised.

    Raises NvmlUnavailable where package or driver are missing or refuse, DriverHangs after ANSWER_S without an answer.
    """
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable("the package nvidia-ml-py is not installed") from None
    try:
        with _answering_driver() if _DRIVER.exists() else contextlib.nullcontext():
            pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(_cause(pynvml, error)) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def _answering_driver() -> Iterator[None]:
    """Another process has had an answer of the driver. Whoever asks one that hangs may not end any more, not even by SIGKILL.

    Raises DriverHangs.
    """
    command = python_child.command(_PROBE)
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert probe.stdin is not None
    assert probe.stdout is not None
    with probe.stdin, probe.stdout:
        try:
            if not select.select([probe.stdout], [], [], ANSWER_S)[0]:  # a probe that fails closes it
                probe.kill()
                raise DriverHangs(
                    f"the NVIDIA driver has not answered for {ANSWER_S:g} s; see whether nvidia-smi hangs, too, look at dmesg "
                    "for Xid messages, and restart the machine"
                )
            yield
        finally:
            probe.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                probe.wait(_END_S)


def _cause(pynvml: ModuleType, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "this machine has no NVIDIA driver"
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated and its old kernel module still runs; restart the machine"
    return f"the NVIDIA driver refuses to answer ({error})"
