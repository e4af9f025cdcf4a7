"""`make` in a fresh clone where something is missing: what it says, and that it can be run again once that was mended."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
# As Debian's, where python3-venv is not installed: there is an environment, and no pip in it.
WITHOUT_ENSUREPIP = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .venv/bin && ln -s {python} .venv/bin/python
echo "ensurepip is not available" >&2
exit 1
"""


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_an_environment_without_pip_is_not_taken_for_a_good_one(clone: Path) -> None:
    python = clone / "python"
    python.write_text(WITHOUT_ENSUREPIP.format(python=sys.executable))
    python.chmod(0o755)
    assert "ensurepip is not available" in make(clone, "demo", f"PYTHON={python}").stderr
    planned = make(clone, "--dry-run", "demo", "PYTHON=another").stdout
    assert "another -m venv .venv" in planned, "it goes on with the half of an environment"


def test_an_old_python_is_refused_with_the_way_out(clone: Path) -> None:
    python = clone / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10)\n'\"$2\"\n")
    python.chmod(0o755)
    done = make(clone, "demo", f"PYTHON={python}")
    assert done.returncode == 2
    assert "kog_dist needs Python 3.11 or newer; try: make PYTHON=python3.11" in done.stderr
    assert not (clone / ".venv").exists()


def test_ctrl_c_in_make_chat_is_for_kog_chat(clone: Path) -> None:
    """A terminal sends it to all that `make chat` has in the foreground."""
    called, binaries = clone / "called", clone / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, script in (
        ("python", ""),  # else an environment is made first, from a package index
        ("kog-launch", ""),
        ("kog-chat", "trap 'echo its answer is ended >> called' INT; kill -INT 0; sleep 0"),
        ("kog-client", ""),
    ):
        (binaries / name).write_text(f'#!/bin/sh\necho {name} "$@" >> called\n{script}\n')
        (binaries / name).chmod(0o755)
    model = clone / "build" / "models" / "SmolLM2-135M-Instruct" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.parent.mkdir(parents=True)
    for made in (clone / ".venv" / ".installed", model):
        made.touch()
    subprocess.run(["make", "chat"], cwd=clone, start_new_session=True, capture_output=True, timeout=60, check=False)
    launched, *others = called.read_text().splitlines()
    assert launched.startswith("kog-launch build/models/SmolLM2-135M-Instruct")
    assert launched.endswith("--detach"), "it is no process of this terminal"
    assert others == ["kog-chat --instance chat", "its answer is ended", "kog-client stop --instance chat"]
