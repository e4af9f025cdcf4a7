"""Somebody removes the folder of a running engine, or files in it: the launcher's look at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.launch.instance_watch import LOOK_EVERY_S, InstanceWatch
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.runtime.instance import LEASE_FILE, Instance


class Watched:
    """An instance with a socket file, watched on a clock of the test's own. `beat_s`: when the coordinator last beat."""

    def __init__(self, root: Path) -> None:
        self.instance = Instance.acquire("demo", root)
        self.folder, self.socket = self.instance.folder, self.instance.folder / SOCKET_NAME
        self.socket.touch()
        self.now_s = self.beat_s = 100.0
        self.watch = InstanceWatch(self.instance, lambda: self.now_s)

    def look(self, *, after_s: float = LOOK_EVERY_S, is_beating: bool = True) -> str | None:
        self.now_s += after_s
        if is_beating:
            self.beat_s = self.now_s
        return self.watch.look(self.now_s - self.beat_s)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.instance.remove()


def test_a_folder_that_is_gone(watched: Watched) -> None:
    assert watched.look() is None
    shutil.rmtree(watched.folder.parent)
    assert watched.look(after_s=LOOK_EVERY_S / 2) is None, "it looks now and then only"
    sentence = watched.look(after_s=LOOK_EVERY_S / 2)
    assert sentence is not None
    assert sentence.startswith(f"the instance folder {watched.folder} was removed while the engine ran, so no client ")
    assert "; the engine was stopped (" in sentence
    assert "loginctl enable-linger" in sentence
    assert "XDG_RUNTIME_DIR" in sentence


def test_before_there_is_a_socket_file_none_is_missed(watched: Watched) -> None:
    watched.socket.unlink()
    for _ in range(3):
        watched.now_s += LOOK_EVERY_S
        assert watched.watch.look() is None
    (watched.folder / LEASE_FILE).unlink()
    watched.now_s += LOOK_EVERY_S
    assert f"the lease {watched.folder / LEASE_FILE} was removed while" in str(watched.watch.look())


def test_a_socket_file_that_is_gone_while_its_maker_goes_on(watched: Watched) -> None:
    watched.socket.unlink()
    assert watched.look() is None, "its maker may be ending"
    assert str(watched.look()).startswith(f"the socket file {watched.socket} was removed while the engine ran")


def test_a_maker_that_ends_has_removed_its_socket_file_itself(watched: Watched) -> None:
    assert watched.look() is None
    watched.socket.unlink()
    for _ in range(5):
        assert watched.look(is_beating=False) is None


def test_a_socket_file_that_is_there_again_was_not_lost(watched: Watched) -> None:
    watched.socket.unlink()
    assert watched.look() is None
    watched.socket.touch()
    assert watched.look() is None
    watched.socket.unlink()
    assert watched.look() is None
