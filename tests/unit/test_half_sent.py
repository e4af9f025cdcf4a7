"""What clients have begun to send is bounded for all of them together, and given up when no more of it comes."""

from __future__ import annotations

import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.rpc import file_port
from kog_dist.rpc.file_port import HALF_SENT_S, HELD_BYTES, FilePort
from kog_dist.rpc.zmtp import DEALER, framed, opening
from kog_dist.runtime.wait import Deadline

MESSAGE_BYTES = 1 << 20
HALF = framed(b"x" * MESSAGE_BYTES)[:-1000]
PATIENCE_S = 20.0
NUM_PEERS = 500


@pytest.fixture
def port(tmp_path: Path) -> Iterator[FilePort]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    made = FilePort(tmp_path / "rpc.sock", MESSAGE_BYTES)
    yield made
    made.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(tmp_path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(str(tmp_path / "rpc.sock"))
    made.sendall(opening(DEALER))
    return made


def send(port: FilePort, connection: socket.socket, sent: bytes) -> bool:
    """Send all of it while the port reads; False if the port has closed the connection."""
    connection.setblocking(False)
    deadline, rest = Deadline.after(PATIENCE_S), memoryview(sent)
    try:
        while rest:
            assert not deadline.expired()
            try:
                rest = rest[connection.send(rest) :]
            except BlockingIOError:
                pass
            port.receive(64)
        while select.select([port.fd], [], [], 0)[0]:
            port.receive(64)
    except ConnectionError:
        return False
    return True


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1 << 12):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_half_sent_messages_of_500_clients_have_one_bound(port: FilePort, tmp_path: Path) -> None:
    before_bytes = psutil.Process().memory_info().rss
    connections = []
    for _ in range(NUM_PEERS):
        connections.append(connect(tmp_path))
        send(port, connections[-1], HALF)
    grown_bytes = psutil.Process().memory_info().rss - before_bytes
    print(f"grown by {grown_bytes >> 20} MiB")
    assert grown_bytes < 2.5 * HELD_BYTES, "what is held, as much for its growing, and 500 sockets"
    assert send(port, connections[-1], b"x" * 1000), "who sent last is not given up"
    assert is_closed(connections[0])
    for connection in connections:
        connection.close()


def test_the_bound_itself_may_be_held_and_who_was_silent_longest_makes_room(
    port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3 * len(HALF) + 50
    monkeypatch.setattr(file_port, "HELD_BYTES", most)
    first, second, third, small = (connect(tmp_path) for _ in range(4))
    try:
        assert all(send(port, connection, HALF) for connection in (first, second, third))
        assert send(port, small, HALF[:49])
        assert send(port, first, b"x"), "all that may be held"
        assert not any(map(is_closed, (first, second, third, small)))
        send(port, small, b"x")  # one byte more
        assert is_closed(second), "the first one has sent since"
        assert not any(map(is_closed, (first, third, small)))
        third.close()
        assert send(port, first, b"x" * 998)
        assert send(port, first, b"x"), "its message is complete: nothing of it is held"
        later = [connect(tmp_path) for _ in range(2)]
        assert all(send(port, connection, HALF) for connection in later)
        assert send(port, later[0], b"x" * 99), "what was closed or completed counts no more"
        assert not any(map(is_closed, (first, small, *later)))
        for connection in later:
            connection.close()
    finally:
        for connection in (first, second, third, small):
            connection.close()


def test_who_sends_no_more_of_a_message_is_given_up(port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(tmp_path) as silent, connect(tmp_path) as idle:
        assert send(port, idle, b"")
        assert send(port, silent, HALF)
        later_s = file_port.time.monotonic() + HALF_SENT_S - 1  # type: ignore[attr-defined]
        monkeypatch.setattr(file_port.time, "monotonic", lambda: later_s)  # type: ignore[attr-defined]
        port.receive(64)
        assert not is_closed(silent)
        later_s += 2
        port.receive(64)
        assert is_closed(silent)
        assert not is_closed(idle), "a client that has begun nothing may be silent"
