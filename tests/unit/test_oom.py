"""Whether a death by SIGKILL was the out-of-memory killer's, from what control groups count."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kog_dist.launch.oom import OomKills

V2, V1 = "0::/user/engine\n", "4:memory:/user/engine\n3:cpuset:/\n0::/\n"
LAYOUTS = [
    (V2, "user/engine/memory.events"), (V2, "user/engine/memory.events.local"), (V2, "unified/user/engine/memory.events"),
    (V2, "memory.events"), (V1, "memory/user/engine/memory.oom_control"), (V1, "memory/memory.oom_control"),
    ("9:cpu,memory:/user/engine\n", "cpu,memory/user/engine/memory.oom_control"),
]  # fmt: skip


def kills(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom 7\noom_kill {count}\noom_group_kill 9\n")


def group_of(tmp_path: Path, groups: str) -> OomKills:
    (tmp_path / "proc" / "4711").mkdir(parents=True)
    (tmp_path / "proc" / "4711" / "cgroup").write_text(groups)
    return OomKills(4711, mount=tmp_path / "cgroup", proc=tmp_path / "proc")


@pytest.mark.parametrize(("groups", "file"), LAYOUTS, ids=[file for _, file in LAYOUTS])
def test_a_count_that_rises_is_a_kill(tmp_path: Path, groups: str, file: str) -> None:
    kills(tmp_path / "cgroup" / file, 3)
    found = group_of(tmp_path, groups)
    assert not found.has_risen()
    kills(tmp_path / "cgroup" / file, 4)
    assert found.has_risen()


def test_a_count_that_rose_long_ago_was_another_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path = tmp_path / "cgroup" / "user/engine/memory.events"
    kills(path, 0)
    found = group_of(tmp_path, V2)
    kills(path, 1)
    found.look()
    assert found.has_risen()
    now_s += 6
    found.look()
    assert found.has_risen(), "it has just been seen"
    now_s += 6
    found.look()
    assert not found.has_risen()


@pytest.mark.parametrize("text", ["", "oom_kill", "oom_kill x", "high 0\n"])
def test_what_cannot_be_read_is_no_kill(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cgroup" / "user/engine/memory.events"
    kills(path, 1)
    found = group_of(tmp_path, V2)
    path.write_text(text)
    assert not found.has_risen()
    assert not OomKills(1 << 30, mount=tmp_path, proc=tmp_path).has_risen()
