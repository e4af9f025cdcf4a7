"""Errors of cupy as one sentence of ours. Nothing is imported from it, so that the callers' logic runs without it in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kog_dist.errors import LaunchError


@contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """LaunchError instead of an exception of cupy. `doing`: what was attempted, and by which rank."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("cupy"):
            raise
        text = str(error)
        if type(error).__name__ == "OutOfMemoryError" or "cudaErrorMemoryAllocation" in text:
            raise LaunchError(f"{doing} failed: too little free GPU memory ({text}); stop what else uses the GPU") from error
        if "insufficient" in text or "NoDevice" in text or "InvalidDevice" in text:
            raise LaunchError(f"{doing} failed: no NVIDIA driver or no such GPU ({text}); see kog-doctor") from error
        raise LaunchError(f"{doing} failed: {text}; start the engine again") from error
