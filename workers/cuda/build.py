"""The monokernel's cubins: the packaged sources of kernels, phases and collectives, with generated headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kog_dist.cuda import build as compiler

KERNEL_SOURCES = PLAIN_SOURCE, PROCESSORS_SOURCE = "decode.cu", "decode_processors.cu"  # the monokernel's two builds
# Both for a first step that is an LM head alone, and what comes before it: behind prefill.
HEAD_SOURCES = PLAIN_HEAD_SOURCE, PROCESSORS_HEAD_SOURCE, STREAMS_SOURCE = "head.cu", "head_processors.cu", "last_streams.cu"
_SOURCE_FOLDERS = (("kog_dist.workers", "kernels"), ("kog_dist.workers", "phases"), ("kog_dist.collectives", "device"))


def device_sources() -> dict[str, str]:
    """All packaged device sources of the monokernel by file name."""
    return compiler.read_sources(*_SOURCE_FOLDERS)


def program(generated: Mapping[str, str], kernel: str = PLAIN_SOURCE) -> compiler.Program:
    """A packaged kernel file with these generated headers, by file name."""
    return compiler.Program({**device_sources(), **generated}, kernel)


def build(generated: Mapping[str, str], kernel: str = PLAIN_SOURCE, *, folder: Path | None = None) -> compiler.Cubin:
    """The cubin of `program`, from the cache or built now.

    Raises CompileError with the compiler's log, or one that says what to install when there is no compiler.
    """
    return compiler.build(*program(generated, kernel), folder=folder)


def cubin_name(generated: Mapping[str, str], kernel: str = PLAIN_SOURCE) -> str:
    """The file name that `build` would give: equal only for equal sources, headers, options and compilers. Nothing is built."""
    return compiler.cubin_name(*program(generated, kernel))
