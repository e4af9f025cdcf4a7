"""What CI runs: all tests are in some group, and some are left out only where nothing that they look at has changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rooms

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


def plan(clone: Path) -> tuple[list[str], list[str]]:
    """The groups that are run besides those of `make test`, and files of twins that are left out."""
    environment = os.environ | {"PATH": f"{clone.parent / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([".ci/run"], cwd=clone, env=environment, capture_output=True, text=True, timeout=60, check=True)
    install, *left_out, tests = done.stdout.splitlines()
    assert install == "make .venv/.installed-dev"
    found = re.fullmatch(r"make test ALSO=(.*) UNTOUCHED=(.*)", tests)
    assert found is not None, tests
    also, untouched = (words.split() for words in found.groups())
    assert {line.split(":")[0].removeprefix("no ") for line in left_out} == set(ALL) - set(also) | set(untouched)
    return also, untouched


def besides(clone: Path) -> list[str]:
    """The groups, where no file is left out."""
    also, untouched = plan(clone)
    assert not untouched
    return also


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


@pytest.fixture
def twins(clone: Path) -> Path:
    """The clone with two twins, of which one has sweeps, behind its origin/main."""
    files = {
        "tests/conftest.py": "",
        "tests/unit/test_b_twin.py": f"import kog_dist.launch.b\npytest.mark.{'sweep'}",
        "tests/unit/test_c_twin.py": "def test_it():\n    from kog_dist import c",
        "kog_dist/c.py": "",
        "launch/b.py": "",
        ".gitignore": ".venv\n__pycache__\n",
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    (clone / ".venv/bin/python").chmod(0o755)
    (clone / "kog_dist/launch").symlink_to("../launch")
    shutil.copy(ROOT / "tests/rooms.py", clone / "tests")
    git(clone, "add", "--all")
    git(clone, "commit", "--message=twins")
    git(clone, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(clone, "commit", "--allow-empty", "--message=second")
    return clone


B, C = "tests/unit/test_b_twin.py", "tests/unit/test_c_twin.py"


@pytest.mark.parametrize(
    ("changed", "also", "untouched"),
    [
        ("docs/testing.md", [], [B, C]),
        ("launch/b.py", ["sweeps", "ray"], [C]),
        ("kog_dist/new.cuh", [], [B]),
        ("kog_dist/c.py", ["sweeps"], [B]),
        (C, ["sweeps"], [B]),
        ("constraints.txt", ALL, []),
    ],
)
def test_twins_run_where_anything_that_they_import_differs(
    twins: Path, changed: str, also: list[str], untouched: list[str]
) -> None:
    (twins / changed).write_text("2\n")
    assert plan(twins) == (also, untouched)
    git(twins, "add", "--all")
    git(twins, "commit", "--message=third")
    assert plan(twins) == (also, untouched)


def test_twins_run_where_something_that_they_import_is_gone(twins: Path) -> None:
    (twins / "launch/b.py").unlink()
    assert plan(twins) == (["sweeps", "ray"], [])


def test_all_twins_run_where_nothing_tells_what_they_import(twins: Path) -> None:
    (twins / "tests/rooms.py").write_text("raise SystemExit(1)\n")
    assert plan(twins) == (ALL, [])


def test_sweeps_are_left_out_by_what_they_import_or_by_rooms_that_have_all_of_it() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:everywhere|sweeps)=\((.*?)\)$", text, re.M | re.S)
    folders = {path for pattern in " ".join(listed).split() for path in ROOT.glob(pattern)}
    for group in ("unit", "multi"):
        for path in (ROOT / "tests" / group).rglob("test_*.py"):
            if re.search("tests[.]sweeps|mark[.]sweep", path.read_text(encoding="utf-8")) and path not in rooms.twins():
                assert group == "multi", f"{path} has sweeps, and tests/rooms.py does not have it"
                assert not [module for module in rooms.closure([path]) if folders.isdisjoint({module, *module.parents})]
