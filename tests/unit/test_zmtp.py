"""The wire of zmq as engine and gateway write and read it. That zmq's own sockets understand it, tests/multi/rpc shows."""

from __future__ import annotations

import contextlib
import itertools
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.errors import ProtocolError
from kog_dist.rpc import file_port
from kog_dist.rpc.file_port import FilePort, Gone
from kog_dist.rpc.zmtp import DEALER, ROUTER, Wire, ZmtpMessage, framed, only_message, opening

LIMIT = 1 << 16
WAIT_S = 5.0


def messages_of(wire: Wire, data: bytes, cuts: list[int]) -> list[ZmtpMessage]:
    found = []
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    for begin, end in itertools.pairwise(places):
        wire.feed(data[begin:end])
        while (message := wire.next()) is not None:
            found.append(message)
    return found


@given(bodies=st.lists(st.binary(max_size=700), max_size=5), cuts=st.lists(st.integers(0, 5000), max_size=8))
def test_messages_survive_any_cut(bodies: list[bytes], cuts: list[int]) -> None:
    found = messages_of(Wire(ROUTER, LIMIT), opening(DEALER) + b"".join(map(framed, bodies)), cuts)
    assert found == [ZmtpMessage(1, len(body), body) for body in bodies]


@given(body=st.binary(max_size=600), rest=st.binary(max_size=3))
def test_the_short_way_of_a_message_takes_only_whole_ones(body: bytes, rest: bytes) -> None:
    taken = only_message(framed(body) + rest)
    assert taken == (None if rest else body)
    for wrong in (1, 4, 8):  # more frames follow, a command, no frame at all
        assert only_message(bytes([framed(body)[0] | wrong]) + framed(body)[1:]) is None


@given(bodies=st.lists(st.binary(max_size=700), max_size=5), cuts=st.lists(st.integers(0, 4000), max_size=4))
def test_what_comes_at_once_is_the_same_message(bodies: list[bytes], cuts: list[int]) -> None:
    wire, data, found = Wire(ROUTER, LIMIT), b"".join(map(framed, bodies)), []
    assert wire.next_of(opening(DEALER)) is None
    ends = list(itertools.accumulate(map(len, map(framed, bodies))))
    for begin, end in itertools.pairwise(sorted([0, *(min(cut, len(data)) for cut in cuts), *ends])):
        message = wire.next_of(data[begin:end])
        while message is not None:
            found.append(message)
            message = wire.next()
    assert found == [ZmtpMessage(1, len(body), body) for body in bodies]


def test_what_comes_at_once_has_the_same_limit() -> None:
    wire = Wire(ROUTER, 1000)
    wire.next_of(opening(DEALER))
    assert wire.next_of(framed(bytes(991))) == (1, 991, bytes(991))
    with pytest.raises(ProtocolError, match="at most 1000 are taken"):
        wire.next_of(framed(bytes(1001)))


def test_frames_of_a_message_are_counted_and_not_kept() -> None:
    parts = b"".join(b"\x01%c%b" % (len(part), part) for part in (b"ab", b"", b"c")) + framed(b"de")
    assert messages_of(Wire(ROUTER, LIMIT), opening(DEALER) + parts, [80, 90]) == [ZmtpMessage(4, 5, b"")]


def test_a_message_has_a_bounded_number_of_frames() -> None:
    more = b"\x01\x00"
    assert messages_of(Wire(ROUTER, LIMIT), opening(DEALER) + 63 * more + framed(b""), []) == [ZmtpMessage(64, 0, b"")]
    with pytest.raises(ProtocolError, match="more than 64 frames"):
        messages_of(Wire(ROUTER, LIMIT), opening(DEALER) + 64 * more, [])


def test_the_limit_counts_all_frames_of_a_message() -> None:
    half, rest = b"\x03" + (LIMIT // 2).to_bytes(8, "big") + bytes(LIMIT // 2), framed(bytes(LIMIT // 2))
    wire = Wire(ROUTER, LIMIT)
    assert messages_of(wire, opening(DEALER) + half + rest + framed(bytes(LIMIT)), []) == [
        ZmtpMessage(2, LIMIT, b""), ZmtpMessage(1, LIMIT, bytes(LIMIT)),
    ]  # fmt: skip
    with pytest.raises(ProtocolError, match="at most 32768 are taken"):
        messages_of(wire, half + framed(bytes(LIMIT // 2 + 1))[:20], [])


def test_commands_without_end_pause_the_wire() -> None:
    wire = Wire(ROUTER, LIMIT)
    wire.feed(opening(DEALER) + 300 * b"\x04\x05\x04PONG" + framed(b"after"))
    num_calls = 1
    while (message := wire.next()) is None:
        assert wire.is_paused
        assert not wire.is_between
        num_calls += 1
    assert message.frame == b"after"
    assert num_calls == 5  # READY and 300 times PONG, 64 each
    wire.feed(64 * b"\x04\x05\x04PONG")
    assert wire.next() is None
    assert not wire.is_paused, "nothing is left to be read"


def test_a_ping_is_answered() -> None:
    wire = Wire(ROUTER, LIMIT)
    assert messages_of(wire, opening(DEALER) + b"\x04\x09\x04PING\x00\x10hi", []) == []
    assert wire.replies == b"\x04\x07\x04PONGhi"


GREETING = opening(DEALER)[:64]
BAD = {
    "http": b"GET / HTTP/1.1\r\n",
    "an old zmq": b"\xff" + bytes(8) + b"\x7f\x01",
    "encrypted": GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:],
    "a subscriber": opening(b"SUB"),
    "cut property": GREETING + b"\x04\x0c\x05READY\x0bSocke",
    "message too early": GREETING + framed(b"x"),
    "unknown flags": opening(DEALER) + b"\x08\x00",
    "unknown command": opening(DEALER) + b"\x04\x05\x04STOP",
    "twice": opening(DEALER) + opening(DEALER)[64:],
    "too large": opening(DEALER) + b"\x02" + (LIMIT + 1).to_bytes(8, "big"),
    "large command": opening(DEALER) + b"\x06" + (4096).to_bytes(8, "big"),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_what_is_not_the_protocol_is_refused(data: bytes, cuts: list[int]) -> None:
    with pytest.raises(ProtocolError):
        messages_of(Wire(ROUTER, LIMIT), data, cuts)


# ---- the port ----
@pytest.fixture
def port(tmp_path: Path) -> Iterator[FilePort]:
    port = FilePort(tmp_path / "rpc.sock", LIMIT)
    yield port
    port.close()


def connect(path: Path, first: bytes = opening(DEALER)) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(WAIT_S)
    client.connect(str(path))
    client.sendall(first)
    return client


def received(port: FilePort, count: int, max_messages: int = 16) -> list[tuple[bytes, ZmtpMessage]]:
    """Turns the port until so many messages have come."""
    found: list[tuple[bytes, ZmtpMessage]] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline_s, "the messages did not come"
        found += port.receive(max_messages)
    return found


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.0)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_clients_take_turns(port: FilePort, tmp_path: Path) -> None:
    with connect(tmp_path / "rpc.sock") as many, connect(tmp_path / "rpc.sock") as one:
        many.sendall(b"".join(framed(b"%d" % i) for i in range(20)))
        one.sendall(framed(b"x"))
        first = received(port, 4, max_messages=4)
        assert sorted(message.frame for _, message in first[:2]) == [b"0", b"x"]
        assert port.has_input(), "the others are announced though the socket is empty"
        rest = received(port, 17)
        assert [message.frame for _, message in (*first, *rest) if message.frame != b"x"] == [b"%d" % i for i in range(20)]
        assert not port.has_input()


def test_a_client_with_frames_without_end_is_closed(port: FilePort, tmp_path: Path) -> None:
    with connect(tmp_path / "rpc.sock") as client:
        client.sendall(b"\x01\x00" * 100)
        for _ in range(2):  # it is accepted, and read
            assert port.receive(16) == []
        assert is_closed(client)


def test_clients_that_send_much_are_read_in_portions(port: FilePort, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(tmp_path / "rpc.sock")) for _ in range(10)]
        assert port.receive(16) == []
        for client in clients:
            client.sendall(framed(bytes(60_000)))
        first = port.receive(16)
        assert len(first) == 5, "256 KiB, and the rest of what was begun"
        rest = received(port, 5)
        assert len({name for name, _ in (*first, *rest)}) == 10


def test_clients_with_commands_without_end_leave_time_for_others(port: FilePort, tmp_path: Path) -> None:
    with connect(tmp_path / "rpc.sock") as flood, connect(tmp_path / "rpc.sock") as other:
        flood.sendall(5000 * b"\x04\x05\x04PONG" + framed(b"at last"))
        other.sendall(framed(b"x"))
        [(_, message)] = port.receive(16) + port.receive(16)
        assert message.frame == b"x"
        assert port.has_input()
        assert [message.frame for _, message in received(port, 1)] == [b"at last"]


def test_a_slow_reader_gets_whole_messages(port: FilePort, tmp_path: Path) -> None:
    with connect(tmp_path / "rpc.sock") as client:
        client.sendall(framed(b"hello"))
        [(name, _)] = received(port, 1)
        body, num_sent = b"t" * 50_000, 0
        while port.send(name, body):
            num_sent += 1
        assert num_sent > 0
        assert not port.send(name, body)
        wire, found = Wire(DEALER, LIMIT), 0
        while found < num_sent:
            port.flush()
            found += len(messages_of(wire, client.recv(1 << 16), []))
        assert not port.behind
        assert port.send(name, b"again")


def test_a_short_message_takes_one_look_at_the_socket(
    port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with connect(tmp_path / "rpc.sock") as client:
        client.sendall(framed(b"hello"))
        received(port, 1)
        look, num_looks = file_port._received, 0

        def looking(connection: socket.socket) -> bytes:
            nonlocal num_looks
            num_looks += 1
            return look(connection)

        monkeypatch.setattr(file_port, "_received", looking)
        for body in (b"a prompt of 1,000 ids" * 200, b"hello"):
            client.sendall(framed(body))
            assert [message.frame for _, message in received(port, 1)] == [body]
        assert num_looks == 2
        client.sendall(framed(b"last words"))
        client.close()
        assert [message.frame for _, message in received(port, 1)] == [b"last words"]
        [(name, _)] = [(name, peer) for name, peer in port._peers.items()]
        assert port.receive(16) == []
        with pytest.raises(Gone):
            port.send(name, b"x")


def test_a_client_that_goes_is_gone(port: FilePort, tmp_path: Path) -> None:
    with connect(tmp_path / "rpc.sock") as client:
        client.sendall(framed(b"last words"))
        [(name, message)] = received(port, 1)
        assert message.frame == b"last words"
    assert port.receive(16) == []
    with pytest.raises(Gone):
        port.send(name, b"x")


def test_a_stranger_that_has_spoken_is_heard_first(port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_port, "HANDSHAKE_S", 0.0)  # as if the loop had been held up since the client was accepted
    with connect(tmp_path / "rpc.sock") as client:
        client.sendall(framed(b"hello"))
        assert [message.frame for _, message in port.receive(16) + port.receive(16)] == [b"hello"]
        assert not is_closed(client)


def test_a_stranger_whose_turn_has_not_come_is_heard_first(
    port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(tmp_path / "rpc.sock") as busy:
        port.receive(16)
        monkeypatch.setattr(file_port, "HANDSHAKE_S", 0.0)
        with connect(tmp_path / "rpc.sock") as client:
            busy.sendall(framed(b"a") + framed(b"b") + framed(b"c"))
            client.sendall(framed(b"hello"))
            frames = [message.frame for _ in range(4) for _, message in port.receive(1)]
            assert sorted(frames) == [b"a", b"b", b"c", b"hello"]
            assert not is_closed(client)


def test_the_socket_file_is_its_owner_s_alone(port: FilePort, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "rpc.sock").stat().st_mode) == 0o600


def test_strangers_are_closed_in_time(port: FilePort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_port, "HANDSHAKE_S", 0.0)
    with connect(tmp_path / "rpc.sock", b"\xff") as silent, connect(tmp_path / "rpc.sock", b"GET /") as other:
        port.receive(16)
        port.receive(16)
        assert is_closed(silent)
        assert is_closed(other)
