"""NVIDIA's management library as a context; it creates no CUDA context and disturbs nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NvmlUnavailable(Exception):
    """There is nobody to ask about GPUs; the text says why, in words that fit behind "no GPU can be used: "."""


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The binding `pynvml`, initialised. Raises NvmlUnavailable where package or driver are missing or refuse."""
    try:
        import pynvml
    except ImportError:
        raise NvmlUnavailable("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(_cause(pynvml, error)) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _cause(pynvml: Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        return "this machine has no NVIDIA driver"
    if code == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the NVIDIA driver was updated and its old kernel module still runs; restart the machine"
    return f"the NVIDIA driver refuses to answer ({error})"
