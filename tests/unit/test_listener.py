"""The engine's end of RPC among clients that are one thread with it: nothing happens between two turns."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kog_dist.rpc import listener as listener_module
from kog_dist.rpc.listener import OUTBOX_EVENTS, OUTBOX_GRACE_S, Delivery, RpcListener, _Outbox
from kog_dist.rpc.messages import Alive, Cancel, Generate, Request, Status, decode_event, encode
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.rpc.transport import Access, open_dealer
from kog_dist.rpc.zmtp import DEALER, framed, opening

WAIT_S = 10.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[RpcListener]:
    tmp_path.chmod(0o700)
    made = RpcListener(tmp_path, tcp_port=0)
    yield made
    made.close()


@pytest.fixture
def ending(tmp_path: Path) -> RpcListener:
    """One that the test closes."""
    tmp_path.chmod(0o700)
    return RpcListener(tmp_path, tcp_port=0)


def received(listener: RpcListener) -> tuple[bytes, Request]:
    """The next message, which must be the only one."""
    deadline_s = time.monotonic() + WAIT_S
    while not (found := listener.receive(16)):
        assert time.monotonic() < deadline_s, "no message came"
    [message] = found
    return message


def test_a_tcp_client_cannot_take_the_name_of_another(listener: RpcListener, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as local:
        local.linger = 0
        local.connect(Access.from_folder(tmp_path).address)
        local.send(encode(Status()))
        name, _ = received(listener)
        access = Access.from_file(tmp_path / ACCESS_NAME)
        with open_dealer(context, access) as remote:
            remote.setsockopt(zmq.IDENTITY, name)
            remote.connect(access.address)
            remote.send(encode(Status()))
            impostor, _ = received(listener)
            assert impostor != name
            assert listener.send(impostor, Alive("theirs", 1)) is Delivery.TAKEN
            assert remote.poll(round(WAIT_S * 1000))
            assert decode_event(remote.recv()) == Alive("theirs", 1)
            assert listener.send(name, Alive("ours", 1)) is Delivery.TAKEN
            assert local.poll(round(WAIT_S * 1000))
            assert decode_event(local.recv()) == Alive("ours", 1)


def test_files_by_which_an_engine_is_found_appear_when_it_can_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher calls the engine ready when both are there, and reads them at once."""
    tmp_path.chmod(0o700)
    appeared: list[str] = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        assert not target.exists()
        if target.name == SOCKET_NAME:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(str(self))
        else:
            assert Access.from_file(self).address.startswith("tcp://")
        appeared.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    listener = RpcListener(tmp_path, tcp_port=0)
    try:
        assert appeared == [SOCKET_NAME, ACCESS_NAME]
        assert sorted(os.listdir(tmp_path)) == sorted(appeared)
    finally:
        listener.close()
    assert os.listdir(tmp_path) == []


# ---- clients that do not read ----
def test_closing_late_leaves_the_files_of_a_successor(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    first = RpcListener(tmp_path, tcp_port=0)
    for name in (SOCKET_NAME, ACCESS_NAME):
        (tmp_path / name).unlink()
    successor = RpcListener(tmp_path, tcp_port=0)
    try:
        first.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(tmp_path / SOCKET_NAME))
        assert Access.from_file(tmp_path / ACCESS_NAME).address == successor.tcp_address
    finally:
        successor.close()
    assert os.listdir(tmp_path) == []


def is_idle(listener: RpcListener) -> bool:
    return not listener.has_backlog


class Sleeper:
    """A client at the socket file that reads only when it is told to, and the clock of the listener."""

    def __init__(self, listener: RpcListener, path: Path) -> None:
        self.now_s = 1000.0
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.socket.sendall(opening(DEALER) + framed(encode(Status())))
        self.name, _ = received(listener)

    def is_closed(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))


@pytest.fixture
def sleeper(listener: RpcListener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sleeper]:
    made = Sleeper(listener, tmp_path / SOCKET_NAME)
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    yield made
    made.socket.close()


def test_a_generate_is_announced_before_it_is_read(listener: RpcListener, tmp_path: Path) -> None:
    announced: list[int] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as local:
        local.linger = 0
        local.connect(Access.from_folder(tmp_path).address)
        frames = [encode(Status()), encode(Generate("a", "x")), encode(Generate("b", "x"))[:-1], b"KOG", encode(Cancel("a"))]
        for frame in frames:
            local.send(frame)
        found: list[Request] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(found) < 3:
            assert time.monotonic() < deadline_s, "no message came"
            found += [message for _, message in listener.receive(16, lambda: announced.append(1))]
    assert found == [Status(), Generate("a", "x"), Cancel("a")]
    assert len(announced) == 2, "also one that turns out to be broken"


def test_who_leaves_half_a_message_unread_is_given_up(listener: RpcListener, sleeper: Sleeper) -> None:
    while is_idle(listener):
        assert listener.send_frame(sleeper.name, bytes(50_000)) is Delivery.TAKEN
    assert listener.flush() == []
    sleeper.now_s += OUTBOX_GRACE_S - 0.1
    assert listener.flush() == []
    assert not is_idle(listener)
    sleeper.now_s += 0.1
    assert listener.flush() == [sleeper.name]
    assert is_idle(listener)
    assert sleeper.is_closed()
    assert listener.send_frame(sleeper.name, b"x") is Delivery.GONE


def test_who_was_behind_gets_all_before_the_end(ending: RpcListener, tmp_path: Path) -> None:
    """Its last event says how its request ended."""
    client = Sleeper(ending, tmp_path / SOCKET_NAME)
    frames = [b"token %d" % number for number in range(3000)]
    for frame in frames:
        assert ending.send_frame(client.name, frame) is Delivery.TAKEN
    assert len(ending._outboxes[client.name].frames) > 100, "more waits than the rest of a frame"
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(everything, client.socket)
        ending.close(WAIT_S)
        assert found.result(WAIT_S).endswith(b"".join(map(framed, frames)))
    client.socket.close()


def test_who_was_behind_by_tcp_gets_all_before_the_end(ending: RpcListener, tmp_path: Path) -> None:
    access = Access.from_file(tmp_path / ACCESS_NAME)
    with zmq.Context() as context, open_dealer(context, access) as remote:
        remote.setsockopt(zmq.RCVHWM, 1)
        remote.connect(access.address)
        remote.send(encode(Status()))
        name, _ = received(ending)
        num_sent, text = 0, bytes(10_000)
        while is_idle(ending) or len(ending._outboxes[name].frames) < 50:
            assert ending.send_frame(name, b"%d " % num_sent + text) is Delivery.TAKEN
            num_sent += 1

        def read_all() -> list[int]:
            return [int(remote.recv().split()[0]) for _ in range(num_sent) if remote.poll(round(WAIT_S * 1000))]

        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(read_all)
            ending.close(WAIT_S)
            assert found.result(2 * WAIT_S) == list(range(num_sent))


def test_who_reads_nothing_holds_the_end_up_for_so_long_only(
    ending: RpcListener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(ending, tmp_path / SOCKET_NAME)
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: sleeper.now_s))
    while is_idle(ending):
        assert ending.send_frame(sleeper.name, bytes(50_000)) is Delivery.TAKEN
    waits: list[float] = []

    def await_room(names: Iterable[bytes], limit_s: float) -> None:
        assert set(names) == {sleeper.name}
        waits.append(limit_s)
        sleeper.now_s += 0.1

    ending._file.await_room = await_room  # type: ignore[method-assign]
    ending.close(0.25)
    assert waits == pytest.approx([0.25, 0.15, 0.05])
    assert sleeper.is_closed()
    sleeper.socket.close()


def everything(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    connection.settimeout(WAIT_S)
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_who_reads_a_little_is_not_given_up(listener: RpcListener, sleeper: Sleeper) -> None:
    while listener.send_frame(sleeper.name, bytes(20_000)) is Delivery.TAKEN:
        pass
    for _ in range(3):
        sleeper.now_s += OUTBOX_GRACE_S - 0.1
        assert len(sleeper.socket.recv(1 << 16)) > 20_000
        assert listener.flush() == []
    sleeper.now_s += OUTBOX_GRACE_S
    assert listener.flush() == [sleeper.name]
    assert sleeper.is_closed()


def test_who_reads_again_gets_what_comes_at_once(listener: RpcListener, sleeper: Sleeper) -> None:
    while is_idle(listener):
        assert listener.send_frame(sleeper.name, bytes(50_000)) is Delivery.TAKEN
    assert listener.flush() == []  # the rest of a frame waits, and nothing behind it
    sleeper.socket.setblocking(False)
    for _ in range(OUTBOX_EVENTS + 100):  # all in one turn of the engine's loop
        with contextlib.suppress(BlockingIOError):
            while sleeper.socket.recv(1 << 16):
                pass
        assert listener.send_frame(sleeper.name, b"token") is Delivery.TAKEN


def test_of_all_outboxes_together_the_fullest_makes_room(
    listener: RpcListener, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kog_dist.rpc.listener.OUTBOXES_BYTES", 100_000)
    listener._outboxes[b"file-other"] = _Outbox(sleeper.now_s + OUTBOX_GRACE_S, deque([bytes(60_000)]), 60_000)
    listener._count_bytes()
    while is_idle(listener) or listener._outboxes_bytes < 90_000:
        assert listener.send_frame(sleeper.name, bytes(10_000)) is Delivery.TAKEN
    while b"file-other" in listener._outboxes and not listener._outboxes[b"file-other"].is_dropped:
        assert listener.send_frame(sleeper.name, bytes(10_000)) is Delivery.TAKEN
    assert listener._outboxes_bytes <= 100_000
    assert listener.flush() == [b"file-other"]
    while listener.send_frame(sleeper.name, bytes(10_000)) is Delivery.TAKEN:  # now it has the fullest itself
        assert listener._outboxes_bytes <= 100_000
    assert listener._outboxes_bytes == 0
    assert listener.flush() == [sleeper.name]
    assert sleeper.is_closed()


def test_a_dropped_client_is_closed_after_its_grace(listener: RpcListener, sleeper: Sleeper) -> None:
    while listener.send_frame(sleeper.name, bytes(20_000)) is Delivery.TAKEN:
        pass
    sleeper.now_s += OUTBOX_GRACE_S / 2  # its grace begins when it is dropped
    listener.drop(sleeper.name, [Alive("a", 1)])
    sleeper.now_s += OUTBOX_GRACE_S - 0.1
    assert listener.send_frame(sleeper.name, b"x") is Delivery.FULL
    listener.drop(sleeper.name, [Alive("b", 1)])  # it has asked again: that buys no time
    assert listener.flush() == []
    sleeper.now_s += 0.1
    assert listener.flush() == [sleeper.name]
    assert is_idle(listener)
    assert sleeper.is_closed()
