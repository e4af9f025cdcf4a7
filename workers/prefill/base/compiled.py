"""The device sources of prefill: built, and launched on cupy's current stream."""

from __future__ import annotations

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel
from kog_dist.workers.prefill.base.arrays import current_stream

_ROOMS = ("base", "lanes", "dense", "delta", "experts", "expand", "tape", "gemm", "attention", "exchange")
SOURCE_FOLDERS = (
    *(("kog_dist.workers.prefill", room) for room in _ROOMS),
    ("kog_dist.collectives", "device"),
)


def program(stem: str, header: str) -> compiler.Program:
    """`stem`.cu with this `stem`_shape.cuh."""
    return compiler.Program({**compiler.read_sources(*SOURCE_FOLDERS), f"{stem}_shape.cuh": header}, f"{stem}.cu")


def build(stem: str, header: str) -> compiler.Cubin:
    """The cubin of `program`. Raises CompileError with the compiler's log."""
    return compiler.build(*program(stem, header))


def launch(kernel: Kernel, num_ctas: int, num_threads: int, params: bytes, early: bool = False, *, priority: int = 0) -> None:
    """Queue a kernel; `early`: see `Kernel.launch_grid`. Raises LaunchError."""
    kernel.launch_grid(num_ctas, num_threads, params, current_stream(), priority=priority, early=early)
