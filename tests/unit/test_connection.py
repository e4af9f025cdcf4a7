"""A client's connection to the Unix socket of an engine: how it begins, what it carries, how it is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kog_dist.errors import LaunchError, RequestFailed
from kog_dist.rpc.client import Client, DeadlineExceeded
from kog_dist.rpc.connection import Connection
from kog_dist.rpc.file_end import FileEnd
from kog_dist.rpc.file_port import FilePort
from kog_dist.rpc.messages import MAX_MESSAGE_BYTES, Alive, Cancel, Generate, decode_request, encode
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from kog_dist.rpc.zmtp import ROUTER, framed, opening
from kog_dist.runtime.instance import Instance

PATIENCE_S = 20.0


class EchoEngine:
    """Answers each request with `Alive`, once it reads; leaves when told to."""

    def __init__(self, folder: Path) -> None:
        self.port = FilePort(folder / SOCKET_NAME, MAX_MESSAGE_BYTES)
        self.reads, self.is_over = threading.Event(), threading.Event()
        self.num_answered = 0
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self.is_over.is_set():
            if self.reads.wait(0.01):
                for peer, message in self.port.receive(4):
                    request = decode_request(message.frame)
                    assert isinstance(request, Generate | Cancel)
                    self.port.send(peer, encode(Alive(request.request_id, 7)))
                    self.num_answered += 1
                self.port.flush()
        self.port.close()

    def leave(self) -> None:
        self.is_over.set()
        self.thread.join(PATIENCE_S)


@contextmanager
def engine(folder: Path) -> Iterator[EchoEngine]:
    made = EchoEngine(folder)
    made.reads.set()
    made.thread.start()
    try:
        yield made
    finally:
        made.leave()


def until_s() -> float:
    return time.monotonic() + PATIENCE_S


def connected(folder: Path, *, patient: bool = False) -> Connection:
    connection = Connection(Access.from_folder(folder))
    try:
        connection.wait_connected(until_s(), patient=patient)
    except BaseException:
        connection.close()
        raise
    return connection


def test_requests_that_the_socket_does_not_take_arrive_while_the_client_waits(tmp_path: Path) -> None:
    long = Generate("long", "x" * (MAX_MESSAGE_BYTES - 100))
    with engine(tmp_path) as serving:
        connection = connected(tmp_path)
        serving.reads.clear()
        for message in (long, long, long, Cancel("short")):
            connection.send(message)
        serving.reads.set()
        assert [connection.receive(until_s()) for _ in range(4)] == [Alive(name, 7) for name in ("long", "long", "long", "short")]
        connection.close()
        connection.close()
        assert connection.closed
        with pytest.raises(RequestFailed, match="is closed"):
            connection.receive(until_s())


def test_an_engine_that_never_reads_takes_no_more_at_some_point(tmp_path: Path) -> None:
    long = Generate("long", "x" * (MAX_MESSAGE_BYTES - 100))
    with engine(tmp_path) as serving:
        connection = connected(tmp_path)
        serving.reads.clear()
        for _ in range(8):
            connection.send(long)
        with pytest.raises(RequestFailed, match="takes no more requests"):
            connection.send(long)
        connection.close()


def test_what_was_sent_is_read_before_the_engine_is_lost(tmp_path: Path) -> None:
    with engine(tmp_path) as serving:
        connection = connected(tmp_path)
        for name in "abc":
            connection.send(Cancel(name))
        assert connection.receive(until_s()) == Alive("a", 7)
        give_up_s = until_s()
        while serving.num_answered < 3:
            assert time.monotonic() < give_up_s
        serving.leave()
        assert [connection.receive(until_s()) for _ in range(2)] == [Alive(name, 7) for name in "bc"]
        for _ in range(2):
            with pytest.raises(RequestFailed, match="is gone") as lost:
                connection.receive(until_s())
            assert lost.value.code == "engine_lost"
        connection.send(Cancel("d"))  # nobody hears it, which `receive` has said
        connection.close()


def test_who_forgets_the_instance_is_told_which_run(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    other = Instance.acquire("other", tmp_path)
    with pytest.raises(LaunchError, match=r"start one with kog-launch, or give --instance: other runs$"):
        connected(tmp_path / "default")
    other.remove()
    with pytest.raises(LaunchError, match=r"start one with kog-launch$"):
        connected(tmp_path / "default")


def test_a_patient_client_waits_for_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"no engine listens at ipc://.*; start one with kog-launch"):
        connected(tmp_path)
    started: list[EchoEngine] = []

    def sleep(_seconds: float) -> None:
        if not started:
            started.append(EchoEngine(tmp_path))
            started[0].reads.set()
            started[0].thread.start()

    monkeypatch.setattr(time, "sleep", sleep)
    connection = connected(tmp_path, patient=True)
    connection.send(Cancel("a"))
    assert connection.receive(until_s()) == Alive("a", 7)
    connection.close()
    started[0].leave()


@pytest.mark.parametrize(
    ("says", "words"), [(b"", "closed the connection during the handshake"), (b"HTTP/1.1 400", "is no engine")]
)
def test_what_is_no_engine_is_refused(tmp_path: Path, says: bytes, words: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen(1)

        def hang_up() -> None:
            made, _ = listener.accept()
            with made:
                made.recv(1024)
                made.sendall(says)

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(LaunchError, match=words):
            connected(tmp_path)
        thread.join(PATIENCE_S)


def test_an_engine_that_says_nothing_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen(1)
        connection = Connection(Access.from_folder(tmp_path))
        with pytest.raises(LaunchError, match="in time"):
            connection.wait_connected(time.monotonic() + 0.01, patient=False)
        connection.close()


@contextmanager
def flood(folder: Path, content: bytes) -> Iterator[None]:
    """An engine that introduces itself, and then says `content` for ever and reads nothing."""
    is_over = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen(1)

        def serve() -> None:
            made, _ = listener.accept()
            made.settimeout(0.01)
            with made, suppress(ConnectionError):  # the client has left
                made.sendall(opening(ROUTER))
                unsent = b""
                while not is_over.is_set():
                    unsent = unsent or content
                    with suppress(TimeoutError):
                        unsent = unsent[made.send(unsent) :]

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(PATIENCE_S)


PINGS = b"\x04\x07\x04PING\x00\x00" * 4096


def test_an_engine_that_only_pings_does_not_hold_the_client_up(tmp_path: Path) -> None:
    with flood(tmp_path, PINGS):
        connection = connected(tmp_path)
        begin_s = time.monotonic()
        assert connection.receive(begin_s + 0.02) is None
        assert time.monotonic() < begin_s + PATIENCE_S / 4
        end: Any = connection._end
        assert len(end._end._unsent) < 1024, "answers to pings do not pile up"
        connection.close()


def test_no_call_of_an_end_takes_long(tmp_path: Path) -> None:
    with flood(tmp_path, PINGS):
        end = FileEnd(Access.from_folder(tmp_path).address)
        give_up_s = until_s()
        while not end.has_more:
            assert end.receive() is None
            assert time.monotonic() < give_up_s
        end.close()


def test_an_engine_that_talks_of_other_things_does_not_keep_a_question_open(tmp_path: Path) -> None:
    theirs = framed(encode(Alive("theirs", 1))) * 100
    with flood(tmp_path, theirs), pytest.raises(DeadlineExceeded, match="did not answer in time"):
        Client(Access.from_folder(tmp_path), connect_timeout_s=1.0)
