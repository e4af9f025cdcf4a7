"""Commits since the rules of docs/development.md hold: subjects, names of merges, bodies where GPU code is touched.

Nothing is said where the commits are not there to be looked at: in a shallow clone, and in a copy without git's folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BEHIND = "dfd0188f9eb944463cdb4f375271343c25eb7150"
MOST_CHARACTERS = 72
WORKING_NAMES = re.compile(r"(?<![\w-])(h-[\w-]+|integ)(?![\w-])")  # of branches: they say nothing to who reads the log
NEEDS_BODY = ("workers/phases/", "collectives/device/")
RECORD, FIELD = "\x1e", "\x1f"


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)


def faults(folder: Path, behind: str) -> list[str]:
    """One line for each fault of the commits behind that one; none where they are not there."""
    shallow = git(folder, "rev-parse", "--is-shallow-repository")
    if shallow.stdout.strip() != "false" or git(folder, "merge-base", "--is-ancestor", behind, "HEAD").returncode != 0:
        return []
    pretty = f"--format={RECORD}%h{FIELD}%p{FIELD}%s{FIELD}%b{FIELD}"
    log = git(folder, "-c", "core.quotePath=off", "log", "--name-only", pretty, f"{behind}..HEAD").stdout
    found = []
    for record in log.split(RECORD)[1:]:
        commit, parents, subject, body, files = record.split(FIELD)
        if len(subject) > MOST_CHARACTERS:
            found.append(f"{commit}: a subject of {len(subject)} characters, {MOST_CHARACTERS} at most: {subject}")
        if len(parents.split()) > 1 and (name := WORKING_NAMES.search(subject)):
            found.append(f"{commit}: a merge that is called {name[0]}: say what it brings")
        touched = [file for file in files.split("\n") if file.startswith(NEEDS_BODY)]
        if touched and not body.strip():
            found.append(f"{commit}: changes {touched[0]} without a body that says why")
    return found


def test_commits_keep_the_rules() -> None:
    assert faults(ROOT, BEHIND) == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    git(made, "init", "--quiet", "--initial-branch=main")
    for name, value in (("user.name", "A"), ("user.email", "a@example.org"), ("commit.gpgsign", "false")):
        git(made, "config", name, value)
    commit(made, "README.md", "First")
    return made


def commit(folder: Path, file: str, *messages: str) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"{messages}")
    git(folder, "add", file)
    done = git(folder, "commit", "--quiet", *(word for message in messages for word in ("-m", message)))
    assert done.returncode == 0, done.stderr


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD").stdout.strip()


CASES = {
    "a subject that fits": ("a.py", ("s" * 72,), ""),
    "one character more": ("a.py", ("s" * 73,), "a subject of 73 characters"),
    "characters, not bytes": ("a.py", ("ü" * 72,), ""),
    "a phase with its why": ("workers/phases/a.cuh", ("Wait", "Since words come late."), ""),
    "a phase without": ("workers/phases/a.cuh", ("Wait",), "changes workers/phases/a.cuh without a body"),
    "device code without": ("collectives/device/ptx.cuh", ("Wait",), "changes collectives/device/ptx.cuh without a body"),
    "others need none": ("workers/cuda/a.py", ("Wait",), ""),
    "no merge, whatever it speaks of": ("a.py", ("Give h-attn its integ",), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(repository: Path, case: str) -> None:
    file, messages, finding = CASES[case]
    behind = head(repository)
    commit(repository, file, *messages)
    found = faults(repository, behind)
    assert len(found) == bool(finding)
    assert finding in "".join(found)
    assert faults(repository, head(repository)) == [], "it is not behind itself"


@pytest.mark.parametrize(
    ("subject", "is_fault"),
    [
        ("Merge branch 'h-ci'", True), ("Merge branch 'h-ci' into h-attn", True), ("Merge integ", True),
        ("Merge the integration of prefixes", False), ("Bring drafts of eight tokens", False),
    ],
)  # fmt: skip
def test_names_of_merges(repository: Path, subject: str, is_fault: bool) -> None:
    behind = head(repository)
    git(repository, "checkout", "--quiet", "-b", "side")
    commit(repository, "a.py", "Change a")
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "-m", subject, "side")
    assert len(faults(repository, behind)) == is_fault


def test_nothing_is_said_of_what_is_not_there(repository: Path, tmp_path: Path) -> None:
    behind = head(repository)
    commit(repository, "a.py", "s" * 80)
    assert len(faults(repository, behind)) == 1
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    assert (tmp_path / "shallow" / "a.py").exists()
    assert faults(tmp_path / "shallow", behind) == []
    assert faults(repository, "1" * 40) == []
    assert faults(tmp_path, behind) == []
