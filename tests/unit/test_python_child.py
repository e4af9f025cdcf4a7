"""The command line of Python children."""

from __future__ import annotations

import json
import resource
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.system import python_child


@pytest.fixture(autouse=True)
def _unknown() -> Iterator[None]:
    python_child._has_user_packages.cache_clear()
    yield
    python_child._has_user_packages.cache_clear()


@pytest.mark.parametrize(
    ("is_enabled", "has_ours", "options"),
    [(True, True, ["-P"]), (True, False, ["-P", "-s"]), (False, True, ["-P", "-s"]), (None, True, ["-P", "-s"])],
)
def test_children_see_the_users_packages_only_where_their_parent_needs_them(
    monkeypatch: pytest.MonkeyPatch, is_enabled: bool | None, has_ours: bool, options: list[str]
) -> None:
    folder = str(Path(pytest.__file__).parent) if has_ours else "/nowhere"
    monkeypatch.setattr(site, "ENABLE_USER_SITE", is_enabled)
    monkeypatch.setattr(site, "getusersitepackages", lambda: folder)
    assert python_child.command("module", "{}") == [sys.executable, *options, "-m", "module", "{}"]


def test_a_child_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    command = python_child.interpreter("-c", "import json; print(json.dumps(1))")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


_HARDENED = """
import json, resource
from pathlib import Path
from kog_dist.system import python_child
python_child._UNIFIED_MEMORY = Path({unified_memory!r})
python_child.shutil.which = lambda name: {program!r}
python_child.harden()
[line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("NoNewPrivs")]
print(json.dumps([resource.getrlimit(resource.RLIMIT_CORE), line.split()[1]]))
"""


@pytest.mark.parametrize(
    ("unified_memory", "program", "is_kept_from_more"),
    [("/", "/bin/nvidia-modprobe", True), ("/nowhere", None, True), ("/nowhere", "/bin/nvidia-modprobe", False)],
)
def test_a_hardened_process_leaves_no_core_and_gets_no_more_rights(
    unified_memory: str, program: str | None, is_kept_from_more: bool
) -> None:
    """But for the first program that uses CUDA on a machine, which needs a setuid program."""
    script = _HARDENED.format(unified_memory=unified_memory, program=program)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    done = subprocess.run(python_child.interpreter("-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    core, no_new = json.loads(done.stdout)
    assert core == [0, 0]
    assert (no_new == "1") is is_kept_from_more
    assert resource.getrlimit(resource.RLIMIT_CORE) == before


def test_a_process_whose_parent_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(python_child, "die_with_parent", lambda _pid: False)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, _limits: limits.append(kind))
    assert python_child.begin_helper(1, 1 << 30) is False
    assert limits == []
