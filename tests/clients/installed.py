"""Clients of the package indexes, each in a folder of its own in build/clients: none of them is needed for anything else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients.pinned import NODE, PYTHON

FOLDER = Path(__file__).parents[2] / "build" / "clients"
INSTALL_S = 600.0


def python_client(name: str) -> Path:
    """`bin` of a virtual environment with the client; skips the test, with the reason, where it cannot be installed."""
    folder = _folder(f"{name.partition('[')[0]}-{PYTHON[name]}")
    if not _is_there(folder):
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        _run([*pip, f"{name}=={PYTHON[name]}"])
        _done(folder)
    return folder / "bin"


def node_client(*names: str) -> Path:
    """`node_modules/.bin` with a client, which may be several packages; skips like `python_client`."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("npm is not installed")
    folder = _folder(f"{names[0].rpartition('/')[2]}-{NODE[names[0]]}")
    if not _is_there(folder):
        install = [npm, "install", "--no-fund", "--no-audit", "--loglevel=error", "--prefix", str(folder)]
        _run([*install, *(f"{name}@{NODE[name]}" for name in names)])
        _done(folder)
    return folder / "node_modules" / ".bin"


def _folder(name: str) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FOLDER / name


def _is_there(folder: Path) -> bool:
    """Whether it was installed to the end; what is left of a failed attempt goes."""
    if (folder / ".installed").is_file():
        return True
    shutil.rmtree(folder, ignore_errors=True)
    return False


def _done(folder: Path) -> None:
    (folder / ".installed").touch()


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"not installed within {INSTALL_S:.0f} s: {' '.join(command[-2:])}")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        pytest.skip(f"{command[-1]} cannot be installed: {last[:200]}")
