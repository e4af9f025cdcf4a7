"""What builds the device program: nvcc where it is installed, NVRTC otherwise; and whether it can be kept."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kog_dist.doctor.commands import output_of, python_output
from kog_dist.doctor.gpus import graded
from kog_dist.doctor.report import Finding, ok, warning
from kog_dist.errors import install
from kog_dist.hardware.gpus import read_inventory

_OLDEST_CUDA = (13, 0)
_NVRTC_PROGRAM = "from cupy_backends.cuda.libs import nvrtc; print('.'.join(map(str, nvrtc.getVersion())))"


def cupy() -> Iterator[Finding]:
    """The package through which GPUs are used."""
    inventory = read_inventory()
    if inventory.gpus and find_spec("cupy") is None:
        yield graded(inventory, f"GPUs are here, but the package cupy is not: {install('cuda')}")


def compiler() -> Iterator[Finding]:
    """Its version, or what to install."""
    inventory = read_inventory()
    path = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if path is not None:
        found = re.search(r"release (\d+)\.(\d+)", output_of(path, "--version") or "")
        name, version = path, (int(found[1]), int(found[2])) if found else None
    elif find_spec("cupy") is not None:
        text = (python_output(_NVRTC_PROGRAM) or "").strip()
        major, _, minor = text.partition(".")
        name, version = "NVRTC", (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
    else:
        if inventory.gpus:
            yield graded(
                inventory, "no CUDA compiler for the kernel: install the CUDA toolkit 13, or pip install 'cupy-cuda13x[ctk]'"
            )
        return
    if version is None:
        yield graded(inventory, f"{name} cannot be run; install the CUDA toolkit 13, or pip install 'cupy-cuda13x[ctk]'")
    elif version < _OLDEST_CUDA:
        old = ".".join(map(str, version))
        yield graded(inventory, f"{name} is of CUDA {old}, the kernel needs 13; update it or take it out of PATH", version=old)
    else:
        yield ok(f"CUDA compiler {name} {version[0]}.{version[1]}", path=name, version=f"{version[0]}.{version[1]}")


def cubin_cache() -> Iterator[Finding]:
    """Whether built device programs can be kept for the next start."""
    inventory = read_inventory()
    if not inventory.gpus:
        return
    from kog_dist.cuda.build import cache_folder

    folder = cache_folder()
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    if os.access(existing, os.W_OK | os.X_OK):
        yield ok(f"built kernels are kept in {folder}")
    else:
        yield graded(inventory, f"built kernels cannot be kept in {folder}: {existing} cannot be written; set XDG_CACHE_HOME")


def host_library() -> Iterator[Finding]:
    """What CPU ranks compute with."""
    from kog_dist.decode.cpu.host_library import library

    path, instead = library(), "CPU ranks widen weights to float32, twice the memory and half as fast"
    if path is not None:
        yield ok("CPU ranks multiply 16-bit weights as they are", library=str(path))
    elif shutil.which("cc") is None:
        yield warning(f"no C compiler (cc): {instead}; install gcc")
    else:
        yield warning(
            f"the C compiler (cc) cannot build products of 16-bit weights, so {instead}; install gcc 12 or newer, and give "
            f"this user a cache folder (XDG_CACHE_HOME) that nobody else can write to"
        )
