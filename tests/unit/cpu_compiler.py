"""g++ for device sources that tests run on a CPU, with a twin's header in the place of CUDA's.

A program is compiled once, whoever asks for it: cases that differ in data alone, other files, other workers of pytest-xdist, and
the next run, of another clone as well. The user's cache keeps each under a hash of all that it is made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from kog_dist.system.files import is_ours_alone, user_cache_folder

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
# -Og takes two thirds of the compiler's time with -O1, and a program runs a quarter longer: for most that is far less.
COMMAND = ("g++", "-std=c++20", "-Og", "-ffp-contract=off", "-mavx2", "-mf16c", "-w")
SYSTEM = "system.h"  # beside a source, if there is one: the system's headers that it includes, a quarter of the compiler's time
BOTH_TWINS = Path(__file__).parent / "both_twins"  # what kccl_twin/ and decode_twin/ share
SOURCES = (".cpp", ".cu", ".cuh", ".h")
KEPT_S = 86400.0  # since it was used last


def build(source: Path, output: str, *flags: str) -> Path:
    """The program or library `output`, beside `source`, which includes what lies there.

    Products are not fused into sums, as in the twins' arithmetic. The CPU's own conversions of 16-bit floats round like those of
    the compiler's library, which take most of the time of models with codes.
    """
    folder = source.parent
    texts = {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in SOURCES}
    with _kept(source.name, flags, texts) as kept:
        if not kept.exists():
            first: tuple[str, ...] = ()
            if SYSTEM in texts:
                (folder / f"{SYSTEM}.gch").unlink(missing_ok=True)
                (folder / f"{SYSTEM}.gch").symlink_to(_precompiled(texts[SYSTEM], flags))
                first = ("-include", SYSTEM)
            _compile([*first, *flags, "-s", "-I", ".", source.name], folder, kept)
        shutil.copy(kept, folder / output)  # a link would be the same library: copies have variables of their own
    return folder / output


def _precompiled(text: str, flags: tuple[str, ...]) -> Path:
    """The compiled header of this text."""
    with _kept(SYSTEM, flags, {SYSTEM: text}) as kept, tempfile.TemporaryDirectory() as folder:
        if not kept.exists():
            (Path(folder) / SYSTEM).write_text(text)
            _compile([*flags, "-x", "c++-header", SYSTEM], Path(folder), kept)
    return kept


@contextmanager
def _kept(name: str, flags: tuple[str, ...], texts: dict[str, str]) -> Iterator[Path]:
    """Where it is kept, and nobody else compiles it meanwhile. It need not be there yet."""
    key = hashlib.sha256(repr((COMMAND, _compiler(), name, flags, sorted(texts.items()))).encode()).hexdigest()
    kept, lock = _folder() / f"{name}-{key[:24]}", int(key[:8], 16)
    locks = _locks()
    fcntl.lockf(locks, fcntl.LOCK_EX, 1, lock)
    try:
        if kept.exists():
            os.utime(kept)
        yield kept
    finally:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, lock)


@cache
def _folder() -> Path:
    """`kog_dist_tests/twins` in the user's cache, or this clone's `build/twins` where others could write. Old files go."""
    folder = Path(__file__).parents[2] / "build" / "twins"
    with suppress(OSError):
        own = user_cache_folder().with_name("kog_dist_tests") / "twins"
        own.mkdir(parents=True, exist_ok=True)
        if is_ours_alone(own):
            folder = own
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # others look, too
            if path.name != "locks" and path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink()
    return folder


@cache
def _locks() -> int:
    """A file of which everyone locks a byte. It is never closed: that would end all locks of this process."""
    return os.open(_folder() / "locks", os.O_RDWR | os.O_CREAT, 0o644)


@cache
def _compiler() -> str:
    return subprocess.run([COMMAND[0], "--version"], capture_output=True, text=True, timeout=60, check=True).stdout


def _compile(arguments: list[str], folder: Path, kept: Path) -> None:
    unfinished = kept.with_name(f"{kept.name}.{os.getpid()}")
    command = [*COMMAND, "-o", str(unfinished), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    unfinished.rename(kept)
