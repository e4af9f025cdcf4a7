"""Files that others look for while they are written: whole, or not under their name."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from kog_dist.system.files import write_at_once
from tests.unit.resource_limits import soft_limit


@pytest.fixture
def at_replace(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes, bytes | None]]:
    """What has been put in place: name, content, and what stood there until then."""
    seen: list[tuple[str, bytes, bytes | None]] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((target.name, self.read_bytes(), target.read_bytes() if target.exists() else None))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    return seen


def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path, at_replace: list[tuple[str, bytes, bytes | None]]) -> None:
    path = tmp_path / "state.json"
    write_at_once(path, b"one")
    write_at_once(path, b"another")
    assert at_replace == [("state.json", b"one", None), ("state.json", b"another", b"one")]
    assert path.read_bytes() == b"another"
    assert os.listdir(tmp_path) == ["state.json"]


def test_only_a_private_file_has_a_mode_of_its_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_at_once(tmp_path / "shared", b"")
        write_at_once(tmp_path / "secret", b"", is_private=True)
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "secret")}
    assert modes == {"shared": 0o640, "secret": 0o600}


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_at_once(path, b"old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_at_once(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_full_disk_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_at_once(path, b"old")
    with soft_limit(resource.RLIMIT_FSIZE, 2), pytest.raises(OSError, match="File too large"):
        write_at_once(path, b"longer")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_folder_is_not_made(tmp_path: Path) -> None:
    """An engine's folder that somebody has removed must not come back without its mode and its lease."""
    with pytest.raises(FileNotFoundError):
        write_at_once(tmp_path / "gone" / "state.json", b"")
    assert os.listdir(tmp_path) == []
