"""What CI runs: all tests are in some group, and some are left out only where nothing that they look at has changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("bash", "git", "make"))), reason="needs bash, git and make")
ALL = ["sweeps", "page", "ray"]
CHANGED = {  # a file, and the groups that look at it
    "docs/testing.md": [],
    "workers/worker.py": ["sweeps", "ray"],
    "workers/phases/attend.cuh": ["sweeps"],
    "kog_dist/gateway/static/page.js": ["sweeps", "page"],
    "launch/ray/gang.py": ["ray"],
    "tests/unit/test_x.py": ["sweeps"],
    "tests/e2e/browser/test_x.py": ALL,
    "constraints.txt": ALL,
}
ELSEWHERE = {"tests/clients", "tests/gpu"}  # `make clients`, and `make alone`, which skips what has no GPU


def test_every_folder_of_tests_is_in_a_group() -> None:
    folders = {str(path.relative_to(ROOT).parent.parent / path.parent.name) for path in ROOT.glob("tests/*/test_*.py")}
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    groups = [found[1].split() for name in ("PROCESSES", "UNITS") if (found := re.search(rf"^{name} := (.*)$", text, re.M))]
    assert set().union(*groups) == folders - ELSEWHERE
    planned = subprocess.run(
        ["make", "-n", "timed", "computed"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    for left_out in re.findall(r"--ignore=(\S+)", planned.stdout):
        group = "page" if left_out == "tests/e2e/browser" else "ray"
        also = ["make", "-n", group], ["make", "-n", "timed", f"ALSO={group}"]
        shown, among = (subprocess.check_output(one, cwd=ROOT, text=True, timeout=60) for one in also)
        assert re.search(rf"pytest .* {left_out}\b", shown)
        assert f"--ignore={left_out}" not in among
    for folder in folders - {"tests/clients"}:
        assert re.search(rf"pytest .* {folder}\b", planned.stdout), folder


def git(clone: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x.x", "-c", "init.defaultBranch=main", *arguments]
    subprocess.run(command, cwd=clone, capture_output=True, timeout=60, check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose origin/main is its first commit; `make` only says what it was asked for."""
    folder, programs = tmp_path / "clone", tmp_path / "bin"
    for file in (folder / file for file in CHANGED):
        file.parent.mkdir(parents=True, exist_ok=True)
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


def besides(clone: Path) -> list[str]:
    """The groups that are run besides those of `make test`."""
    environment = os.environ | {"PATH": f"{clone.parent / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([".ci/run"], cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=True)
    install, *left_out, tests = done.stdout.splitlines()
    assert install == "make .venv/.installed-dev"
    found = re.fullmatch(r"make test ALSO=(.*)", tests)
    assert found is not None, tests
    assert {line.split(":")[0].removeprefix("no ") for line in left_out} == set(ALL) - set(found[1].split())
    return found[1].split()


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("committed", [True, False])
def test_groups_run_where_their_rooms_differ_from_the_merge_base(clone: Path, changed: str, committed: bool) -> None:
    git(clone, "commit", "--allow-empty", "--message=second")
    (clone / changed).write_text("2\n")
    if committed:
        git(clone, "commit", "--all", "--message=third")
    assert besides(clone) == CHANGED[changed]


def test_all_groups_run_where_no_merge_base_is_seen(clone: Path) -> None:
    assert besides(clone) == ALL, "origin/main is this very commit"
    git(clone, "checkout", "--orphan", "other")
    git(clone, "commit", "--message=nothing in common")
    assert besides(clone) == ALL
    git(clone, "update-ref", "-d", "refs/remotes/origin/main")
    assert besides(clone) == ALL
    shutil.rmtree(clone / ".git")
    assert besides(clone) == ALL, "no repository"
