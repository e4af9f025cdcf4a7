"""A listening Unix socket in a folder of one user: whose is replaced, and whose is not."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kog_dist.errors import ConfigError, KogError, LaunchError
from kog_dist.runtime.socket_file import SocketFile, listen_on_file

FLAG = "--http-socket"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "http.sock"


def listen(path: Path) -> tuple[socket.socket, SocketFile]:
    return listen_on_file(path, FLAG, 8)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_its_user_reaches_it(path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        listener, file = listen(path)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(found.stat().st_mode) for found in (path, path.parent)] == [0o600, 0o700]
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    file.remove()
    file.remove()
    assert list(path.parent.iterdir()) == []


def test_that_of_a_dead_process_is_replaced_and_not_removed_by_the_other(path: Path) -> None:
    listener, dead = listen(path)
    listener.close()
    listener, _ = listen(path)
    with listener:
        dead.remove()
        assert path.is_socket()


@pytest.mark.parametrize("backlog", [0, 8])
def test_that_of_a_live_process_is_left_alone(path: Path, backlog: int) -> None:
    listener, _ = listen_on_file(path, FLAG, backlog)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]  # with a backlog of 0 the listener takes no other one
    with listener:
        for client in waiting:
            client.setblocking(False)
            client.connect_ex(str(path))
        with pytest.raises(LaunchError, match=rf"it is in use by (process {os.getpid()} |another process)"):
            listen(path)
        assert path.is_socket()
        for client in waiting:
            client.close()


def in_an_open_folder(path: Path) -> None:
    path.parent.mkdir(mode=0o755)


def on_a_file(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("mine")


def in_a_linked_folder(path: Path) -> None:
    (path.parent.parent / "real").mkdir(mode=0o700)
    path.parent.symlink_to(path.parent.parent / "real")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [(in_an_open_folder, "mode 0700"), (on_a_file, "is no socket"), (in_a_linked_folder, "must be a directory of user")],
)
def test_what_is_in_the_way_is_said_and_left(path: Path, prepare: object, why: str) -> None:
    assert callable(prepare)
    prepare(path)
    before = sorted(path.parent.iterdir())
    with pytest.raises(LaunchError, match=why):
        listen(path)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("name", ["x" * 120, "a\nb", "a\x1b]0;b"])
def test_a_path_that_can_be_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        listen(tmp_path / name / "http.sock")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(KogError, match="choose a --http-socket in another folder"):
        listen(tmp_path / "missing" / "new" / "http.sock")


def test_a_folder_that_others_may_enter_is_the_users_to_keep(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(KogError, match="choose a --http-socket in another folder, which is made for it") as caught:
        listen(tmp_path / "http.sock")
    assert "remove" not in str(caught.value)
