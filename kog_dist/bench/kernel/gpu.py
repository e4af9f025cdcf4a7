"""The GPU that a benchmark runs on."""

from __future__ import annotations

from kog_dist.errors import LaunchError, install
from kog_dist.workers.engines.cuda_device import translated_errors


def gpu_name() -> str:
    """Name of the current GPU. Raises LaunchError when there is none or cupy is missing."""
    try:
        import cupy
    except ImportError:
        raise LaunchError(f"this benchmark needs a GPU and cupy, which is not installed: {install('cuda')}") from None
    with translated_errors("cuda"):
        return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())


def require_gpus(count: int) -> str:
    """Name of the GPUs. Raises LaunchError when there are fewer than `count`."""
    name = gpu_name()
    import cupy

    present = int(cupy.cuda.runtime.getDeviceCount())
    if present < count:
        raise LaunchError(f"this benchmark was asked to use {count} GPUs, and {present} can be seen; give --gpus {present}")
    return name


def free_memory() -> None:
    """Give unused memory of cupy's pool back."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
