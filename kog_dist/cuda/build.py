"""Device programs: built from their sources once, then read from a cache.

A cubin's key is a hash of all that enters: sources, generated headers, options and the compiler's version.
nvcc is used where it is installed, NVRTC (through cupy) otherwise.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from kog_dist.errors import CompileError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.startup import compiling
from kog_dist.system.files import user_cache_folder, write_at_once

OPTIONS = ("-arch=sm_90a", "-std=c++17", "-lineinfo", "-ftz=false", "-prec-div=true")
_TIMEOUT_S = 300.0
_MOST_COMPILERS = 8  # at the same time, of a gigabyte each


@dataclass(frozen=True, slots=True)
class Cubin:
    """A built device program. `log` is the compiler's report (registers, spills); empty when it came from the cache."""

    path: Path
    log: str


class Program(NamedTuple):
    """What `build` is asked for."""

    sources: Mapping[str, str]
    kernel: str


def cache_folder() -> Path:
    """Where cubins are kept. Raises OSError: there is no home."""
    return user_cache_folder() / "cubins"


def read_sources(*folders: tuple[str, str]) -> dict[str, str]:
    """The device sources in folders of packages, (package, folder) each, by file name. Names are unique over the folders."""
    sources: dict[str, str] = {}
    for package, folder in folders:
        for entry in sorted((resources.files(package) / folder).iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith((".cu", ".cuh")):
                assert entry.name not in sources, f"two device sources are called {entry.name}"
                sources[entry.name] = entry.read_text(encoding="utf-8")
    return sources


def build(sources: Mapping[str, str], kernel: str, *, folder: Path | None = None) -> Cubin:
    """The cubin of the file `kernel` among `sources` (text by file name, all that it includes), from the cache or built now.

    Raises CompileError with the compiler's log, or one that says what to install when there is no compiler, and LaunchError
    where it cannot be kept.
    """
    folder = folder or cache_folder()
    compiler = _nvcc() or "nvrtc"
    path = folder / cubin_name(sources, kernel)
    if path.exists():
        return Cubin(path, "")
    with _keeping(folder):  # seen before the minute that building may take
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    with compiling():
        code, log = _with_nvrtc(kernel, sources) if compiler == "nvrtc" else _with_nvcc(compiler, kernel, sources)
    with _keeping(folder):
        write_at_once(path, code)
    return Cubin(path, log)


def prebuild(programs: Iterable[Program]) -> None:
    """Have `build` find all of these: those that are not there yet are compiled side by side.

    One that cannot be built is left out: whoever asks `build` for it hears why.
    """
    by_name = {cubin_name(*program): program for program in programs}
    missing = [program for name, program in by_name.items() if not (cache_folder() / name).exists()]
    if not missing:
        return

    def attempt(program: Program) -> None:
        with suppress(CompileError, LaunchError):
            build(*program)

    with compiling(), ThreadPoolExecutor(min(len(missing), _MOST_COMPILERS)) as pool:  # its threads tell nobody of theirs
        list(pool.map(attempt, missing))


@contextmanager
def _keeping(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"built device programs cannot be kept in {folder}: {error.strerror}; make room there, or set XDG_CACHE_HOME to a "
            f"folder that can be written"
        ) from error


def cubin_name(sources: Mapping[str, str], kernel: str) -> str:
    """The file name of a cubin, which says all that enters it. Nothing is built. Raises CompileError without a compiler."""
    key = hashlib.sha256()
    for part in (kernel, _version(_nvcc() or "nvrtc"), *OPTIONS, *(text for item in sorted(sources.items()) for text in item)):
        key.update(len(part).to_bytes(8, "little") + part.encode())
    return f"{Path(kernel).stem}-{key.hexdigest()[:32]}.cubin"


def _nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


@functools.cache
def _version(compiler: str) -> str:
    if compiler == "nvrtc":
        return str(_nvrtc().getVersion())
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout


def _nvrtc() -> ModuleType:
    try:
        return importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError:
        raise CompileError("no CUDA compiler was found: install nvcc (CUDA toolkit 13) or cupy-cuda13x", "") from None


def _with_nvcc(compiler: str, kernel: str, sources: Mapping[str, str]) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="kog-build-") as name:
        folder = Path(name)
        for file_name, text in sources.items():
            (folder / file_name).write_text(text, encoding="utf-8")
        report = ("-Xptxas", "-v,-warn-spills")
        command = [compiler, "-cubin", *OPTIONS, *report, "-I", name, "-o", f"{name}/out.cubin", f"{name}/{kernel}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{compiler} did not finish {kernel} within {_TIMEOUT_S:.0f} s", "") from None
        if done.returncode != 0:
            raise CompileError(f"{compiler} could not compile {kernel} (exit {done.returncode})", done.stdout + done.stderr)
        return (folder / "out.cubin").read_bytes(), done.stdout + done.stderr


def _with_nvrtc(kernel: str, sources: Mapping[str, str]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    headers = {name: text for name, text in sources.items() if name != kernel}
    texts, names = (tuple(text.encode() for text in part) for part in (headers.values(), headers))
    program = nvrtc.createProgram(sources[kernel], kernel, texts, names)
    try:
        nvrtc.compileProgram(program, OPTIONS)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"NVRTC could not compile {kernel}: {error}", log) from None
    finally:
        nvrtc.destroyProgram(program)
