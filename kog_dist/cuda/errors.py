"""Errors of cupy as one sentence of ours. Nothing is imported from it, so that the callers' logic runs without it in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kog_dist.errors import LaunchError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of cupy or the driver, or the one that it was made of, says that GPU memory is used up."""
    names = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY")
    is_it = type(error).__name__ == "OutOfMemoryError" or any(name in str(error) for name in names)
    return is_it or (error.__cause__ is not None and is_out_of_memory(error.__cause__))


@contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """LaunchError instead of an exception of cupy. `doing`: what was attempted, and by which rank."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("cupy"):
            raise
        text = str(error)
        if is_out_of_memory(error):
            raise LaunchError(f"{doing} failed: too little free GPU memory ({text}); stop what else uses the GPU") from error
        if "insufficient" in text or "NoDevice" in text or "InvalidDevice" in text:
            raise LaunchError(f"{doing} failed: no NVIDIA driver or no such GPU ({text}); see kog-doctor") from error
        raise LaunchError(f"{doing} failed: {text}; start the engine again") from error
