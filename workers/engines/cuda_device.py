"""The GPU of a rank: its name, what its kernel is compiled for, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kog_dist.cuda.driver import DriverError
from kog_dist.errors import LaunchError

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.cuda.kernel_shape import KernelShape


def kernel_shapes(
    checkpoint: Checkpoint, kv_dtype: str, world_size: int, *, whole_windows: bool = False, checks_experts: bool = False
) -> list[KernelShape]:
    """What the kernel of each rank is compiled for.

    Raises ConfigError for a model or a number of ranks that it cannot run, PlanError if words of its thread blocks could be lost.
    """
    from kog_dist.workers.cuda.coded_source import codings_of
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.kernel_words import check_words
    from kog_dist.workers.cuda.model_limits import refuse_untried

    spec, codings = checkpoint.spec, codings_of(checkpoint)
    refuse_untried(spec, codings["coding"])
    lanes = [spec.lanes_of_rank(rank, world_size) for rank in range(world_size)]
    shapes = [
        KernelShape(
            spec,
            hosted,
            weight_dtype=checkpoint.dtype,
            kv_dtype=kv_dtype,
            num_ranks=world_size,
            whole_windows=whole_windows,
            checks_experts=checks_experts,
            **codings,
        )
        for hosted in lanes
    ]
    check_words(shapes[0])  # all ranks do the same
    return shapes


def use_device(device: str) -> None:
    """From now on this thread uses that GPU."""
    import cupy

    cupy.cuda.Device(device_index(device)).use()


def device_index(device: str) -> int:
    """GPU of a device name: `cuda` or `cuda:INDEX`."""
    return int(device.partition(":")[2] or 0)


@contextmanager
def translated_errors(device: str) -> Iterator[None]:
    """Errors of cupy and the driver as one sentence of ours. cupy is not imported here: tests run the engine without it."""
    try:
        yield
    except DriverError as error:
        raise LaunchError(f"{device} failed: {error}; start the engine again") from error
    except Exception as error:
        if not type(error).__module__.startswith("cupy"):
            raise
        name = type(error).__name__
        if name == "OutOfMemoryError":
            raise LaunchError(f"{device} has too little free memory for the model: {error}; stop what else uses it") from error
        if "insufficient" in str(error) or "NoDevice" in str(error):
            raise LaunchError(f"{device} cannot be used: no NVIDIA driver or no GPU ({error}); use --device cpu") from error
        raise LaunchError(f"{device} failed: {name}: {error}; start the engine again") from error
