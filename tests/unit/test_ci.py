"""What CI runs: all tests are in some group, and sweeps are left out only where nothing that they look at has changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("bash", "git", "make"))), reason="needs bash, git and make")
ELSEWHERE = {"tests/clients", "tests/gpu"}  # `make clients`, and `make alone`, which skips what has no GPU


def test_every_folder_of_tests_is_in_a_group() -> None:
    folders = {str(path.relative_to(ROOT).parent.parent / path.parent.name) for path in ROOT.glob("tests/*/test_*.py")}
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    groups = [found[1].split() for name in ("PROCESSES", "UNITS") if (found := re.search(rf"^{name} := (.*)$", text, re.M))]
    assert set().union(*groups) == folders - ELSEWHERE
    planned = subprocess.run(
        ["make", "-n", "timed", "computed"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for folder in folders - {"tests/clients"}:
        assert re.search(rf"pytest .* {folder}\b", planned.stdout), folder


def git(clone: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x.x", "-c", "init.defaultBranch=main", *arguments]
    subprocess.run(command, cwd=clone, capture_output=True, timeout=60, check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose origin/main is its first commit; `make` only says what it was asked for."""
    folder, programs = tmp_path / "clone", tmp_path / "bin"
    for file in (folder / "docs/testing.md", folder / "workers/worker.py", folder / "tests/unit/test_x.py"):
        file.parent.mkdir(parents=True)
        file.write_text("1\n")
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    programs.mkdir()
    for name, script in (("make", 'echo "make $*"'), ("apt-get", "exit 1")):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    git(folder, "init")
    git(folder, "add", "--all")
    git(folder, "commit", "--message=first")
    git(folder, "update-ref", "refs/remotes/origin/main", "HEAD")
    return folder


def sweeps(clone: Path) -> bool:
    environment = os.environ | {"PATH": f"{clone.parent / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([".ci/run"], cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=True)
    install, *_, tests = done.stdout.splitlines()
    assert install == "make .venv/.installed-dev"
    assert tests in ("make test", "make test ALSO=sweeps")
    return tests == "make test ALSO=sweeps"


@pytest.mark.parametrize(
    ("changed", "swept"), [("docs/testing.md", False), ("workers/worker.py", True), ("tests/unit/test_x.py", True)]
)
@pytest.mark.parametrize("committed", [True, False])
def test_sweeps_run_where_their_rooms_differ_from_the_merge_base(
    clone: Path, changed: str, swept: bool, committed: bool
) -> None:  # fmt: skip
    git(clone, "commit", "--allow-empty", "--message=second")
    (clone / changed).write_text("2\n")
    if committed:
        git(clone, "commit", "--all", "--message=third")
    assert sweeps(clone) == swept


def test_sweeps_run_where_no_merge_base_is_seen(clone: Path) -> None:
    assert sweeps(clone), "origin/main is this very commit"
    git(clone, "checkout", "--orphan", "other")
    git(clone, "commit", "--message=nothing in common")
    assert sweeps(clone)
    git(clone, "update-ref", "-d", "refs/remotes/origin/main")
    assert sweeps(clone)
    shutil.rmtree(clone / ".git")
    assert sweeps(clone), "no repository"
