"""The C of CPU ranks (`SOURCES`), built for this machine at the first use and kept.

Without a C compiler there is none (`library` is None): weights are float32 then, and NumPy computes all.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Final

from kog_dist.runtime.startup import compiling
from kog_dist.system.files import is_ours_alone, user_cache_folder, write_at_once

SOURCES: Final = ("matrix_products.c", "attention.c", "activation.c", "delta_rule.c")
HEADERS: Final = ("vectors.h",)
OPTIONS: Final = ("-O3", "-std=gnu17", "-ffp-contract=off", "-shared", "-fPIC")
_BUILD_S: Final = 60.0


@functools.cache
def library() -> Path | None:
    """The built library, None where it cannot be had: no C compiler, nowhere to keep it, or a folder that runs nothing.

    A folder that somebody else can write to is not used: what lies there would run as this user.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    options = (*OPTIONS, "-march=native")
    try:
        folder = user_cache_folder() / "host"
        version = _output(compiler, "--version")
        key = hashlib.sha256("\0".join([*texts().values(), *options, version, _processor()]).encode()).hexdigest()[:32]
        path = folder / f"host-{key}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_ours_alone(folder):
            return None
        if not path.exists():
            with compiling(), tempfile.TemporaryDirectory(prefix="kog-build-") as made:
                made_here = built(compiler, options, Path(made))
                write_at_once(path, made_here.read_bytes(), is_private=True)
        if not is_ours_alone(path):
            return None
        ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None
    return path


@functools.cache
def loaded() -> ctypes.CDLL:
    """The library, in this process. Only where there is one."""
    path = library()
    assert path is not None, "nobody asks for what needs the library where there is none"
    return ctypes.CDLL(str(path))


def texts() -> dict[str, str]:
    """Sources and headers, by name."""
    return {name: (resources.files("kog_dist.decode.cpu") / name).read_text(encoding="utf-8") for name in (*SOURCES, *HEADERS)}


def built(compiler: str, options: tuple[str, ...], folder: Path) -> Path:
    """The library, made in an empty folder. Raises OSError or SubprocessError where that cannot be."""
    for name, text in texts().items():
        (folder / name).write_text(text, encoding="utf-8")
    _output(compiler, *options, "-o", f"{folder}/out.so", *(f"{folder}/{name}" for name in SOURCES))
    return folder / "out.so"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_S, stdin=subprocess.DEVNULL).stdout


def _processor() -> str:
    """What `-march=native` stands for: a home folder may be that of several machines."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    told = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return "\n".join([platform.machine(), *sorted(told)])
