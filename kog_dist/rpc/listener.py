"""The engine's end of RPC, which never blocks, never trusts a client and never waits for one.

A Unix socket (file_port) and, if asked for, a TCP port (tcp_port). Addresses, key files and the client's end are in transport.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from pathlib import Path

import zmq

from kog_dist.errors import LaunchError
from kog_dist.foreign_file import read_file
from kog_dist.records import dataclass
from kog_dist.rpc.file_port import FilePort, Gone
from kog_dist.rpc.messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    Error,
    ErrorCode,
    Event,
    Request,
    decode_request,
    encode,
    looks_like_generate,
)
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.rpc.tcp_port import TCP_NAME, TcpPort
from kog_dist.rpc.transport import Access, socket_address
from kog_dist.rpc.zmtp import ZmtpMessage
from kog_dist.runtime.port_holder import process_name
from kog_dist.system.files import write_at_once

OUTBOX_EVENTS, OUTBOX_BYTES = 16_384, 1 << 20  # two seconds of 4,000 tokens/s: a client may be stopped for a moment
OUTBOXES_BYTES = 64 << 20  # of all clients together; beyond it the one with the fullest outbox is disconnected
OUTBOX_GRACE_S = 10.0  # a client that reads nothing for so long is given up, unless more is sent to it meanwhile
_TCP_RETRY_S = 0.005  # zmq does not tell when there is room for whom


class Delivery(enum.Enum):
    """What became of an event that was handed to `RpcListener.send`."""

    TAKEN = "taken"  # on its way, or in the client's outbox
    GONE = "gone"  # the client is no longer connected
    FULL = "full"  # the client does not read and its outbox is full: nothing was kept


@dataclass(slots=True)
class _Outbox:
    """Events for a client that does not read fast enough; none if only the rest of one waits in its FilePort."""

    give_up_at: float
    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    is_dropped: bool = False  # these are the last messages, and `give_up_at` stays


class RpcListener:
    """Clients at the Unix socket and at the TCP port. Nothing here blocks; `fds` become readable when `receive` should be called.

    Descriptors of a TCP port are edge-triggered: look at `has_input` before sleeping.
    """

    def __init__(self, folder: Path, *, tcp_port: int | None = None, tcp_host: str = "127.0.0.1") -> None:
        """Bind at once. Raises LaunchError naming who holds the address. `tcp_port` 0 takes a free one."""
        self._folder = folder
        self._path = folder / SOCKET_NAME
        self._access_content = b""  # of the access file that this listener has written
        self._outboxes: dict[bytes, _Outbox] = {}
        self._outboxes_bytes = 0  # at most as many wait: exact after `flush`
        self.num_bad_messages = 0
        self._file = self._open_file()
        self._tcp: TcpPort | None = None
        if tcp_port is not None:
            try:
                self._tcp = TcpPort(tcp_host, tcp_port, MAX_MESSAGE_BYTES)
                self._write_access(self._tcp.access)
            except BaseException:
                self.close()
                raise
        self.tcp_address = None if self._tcp is None else self._tcp.access.address
        self.fds = [self._file.fd, *([] if self._tcp is None else self._tcp.fds)]

    def _open_file(self) -> FilePort:
        address = socket_address(self._folder)
        info = self._folder.stat()
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise LaunchError(
                f"the instance folder {self._folder} must belong to this user with mode 0700, it belongs to user {info.st_uid} "
                f"with mode {stat.S_IMODE(info.st_mode):04o}; remove it or use another instance name"
            )
        holder = _holder_of_file(self._path)
        if holder is not None:
            raise LaunchError(f"the socket {self._path} is in use by {holder}; stop that engine or use another instance name")
        try:
            return FilePort(self._path, MAX_MESSAGE_BYTES)
        except OSError as error:
            raise LaunchError(f"cannot listen on {address}: {error.strerror}") from error

    def _write_access(self, access: Access) -> None:
        content = json.dumps({name: getattr(access, name) for name in Access.__slots__})
        self._access_content = content.encode()
        write_at_once(self._folder / ACCESS_NAME, self._access_content, is_private=True)

    def has_input(self) -> bool:
        """Whether `receive` has something to do."""
        return self._file.has_input() or (self._tcp is not None and self._tcp.has_input())

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        """Those from which `receive` reads, for a zmq poller."""
        return [self._file.fd, *([] if self._tcp is None else self._tcp.sockets)]

    def receive(self, max_messages: int, on_generate: Callable[[], None] = lambda: None) -> list[tuple[bytes, Request]]:
        """The next well-formed requests with their senders. What is not one is answered and counted, here and in the limit.

        `on_generate` is called before a message is read that looks like a `generate`.
        """
        messages = self._file.receive(max_messages)
        if self._tcp is not None:  # those who came in by TCP have as many turns
            messages += self._tcp.receive(max_messages)
        received = []
        for peer, message in messages:
            if looks_like_generate(message.frame):
                on_generate()
            try:
                received.append((peer, decode_request(_only_frame(message))))
            except BadMessage as error:
                self.num_bad_messages += 1
                self.send(peer, error_event(error.code, str(error), error.request_id))
        return received

    def send(self, peer: bytes, event: Event) -> Delivery:
        """Send an event, or keep it in the client's bounded outbox while the client does not read."""
        return self.send_frame(peer, encode(event))

    def send_frame(self, peer: bytes, frame: bytes) -> Delivery:
        """The same for an event that is encoded already."""
        outbox = self._outboxes.get(peer)
        if outbox is None or not (outbox.frames or outbox.is_dropped):  # else it comes after what waits
            delivery = self._try_send(peer, frame)
            if delivery is not Delivery.FULL:
                if outbox is not None:
                    outbox.give_up_at = time.monotonic() + OUTBOX_GRACE_S
                return delivery
            if outbox is None:
                outbox = self._outboxes[peer] = _Outbox(0.0)
        if outbox.is_dropped:
            return Delivery.FULL
        if len(outbox.frames) >= OUTBOX_EVENTS or outbox.num_bytes + len(frame) > OUTBOX_BYTES:
            return Delivery.FULL
        if self._outboxes_bytes + len(frame) > OUTBOXES_BYTES:
            self._make_room()
            if self._outboxes[peer] is not outbox:
                return Delivery.FULL
        outbox.frames.append(frame)
        outbox.num_bytes += len(frame)
        self._outboxes_bytes += len(frame)
        outbox.give_up_at = time.monotonic() + OUTBOX_GRACE_S
        return Delivery.TAKEN

    def _make_room(self) -> None:
        """Forget what waits for the client for whom most waits; `flush` disconnects it."""
        fullest = max(self._outboxes, key=lambda peer: self._outboxes[peer].num_bytes)
        self._outboxes[fullest] = _Outbox(-math.inf, is_dropped=True)
        self._count_bytes()

    def _count_bytes(self) -> None:
        self._outboxes_bytes = sum(outbox.num_bytes for outbox in self._outboxes.values())

    def is_behind(self, peer: bytes) -> bool:
        """Whether a client has not read what it was sent."""
        return peer in self._outboxes

    def drop(self, peer: bytes, last: Sequence[Event]) -> None:
        """Forget what a client has not read; the events `last` are offered to it for a while, and nothing after them."""
        frames = deque(encode(event) for event in last)
        former = self._outboxes.get(peer)
        give_up_at = former.give_up_at if former is not None and former.is_dropped else time.monotonic() + OUTBOX_GRACE_S
        self._outboxes[peer] = _Outbox(give_up_at, frames, sum(map(len, frames)), is_dropped=True)
        self._count_bytes()

    def flush(self) -> list[bytes]:
        """Try the outboxes again; returns clients that are gone, or are given up. Call once per turn of the loop."""
        self._file.flush()
        if not self.has_backlog:
            return []
        now_s, gone = time.monotonic(), []
        for peer in self._file.behind - self._outboxes.keys():
            self._outboxes[peer] = _Outbox(now_s + OUTBOX_GRACE_S)
        for peer, outbox in list(self._outboxes.items()):
            delivery = Delivery.TAKEN
            while outbox.frames and (delivery := self._try_send(peer, outbox.frames[0])) is Delivery.TAKEN:
                outbox.num_bytes -= len(outbox.frames.popleft())
                if not outbox.is_dropped:
                    outbox.give_up_at = now_s + OUTBOX_GRACE_S
            has_all = not outbox.frames and peer not in self._file.behind and delivery is Delivery.TAKEN
            if has_all and outbox.give_up_at > -math.inf:
                del self._outboxes[peer]
            elif delivery is Delivery.GONE or now_s >= outbox.give_up_at:
                del self._outboxes[peer]
                self._file.forget(peer)
                gone.append(peer)
        self._count_bytes()
        return gone

    @property
    def has_backlog(self) -> bool:
        """Whether some client has not read what it was sent."""
        return bool(self._outboxes or self._file.behind)

    def _try_send(self, peer: bytes, frame: bytes) -> Delivery:
        port = self._tcp if self._tcp is not None and peer.startswith(TCP_NAME) else self._file
        try:
            return Delivery.TAKEN if port.send(peer, frame) else Delivery.FULL
        except Gone:
            return Delivery.GONE

    def close(self, linger_s: float = 0.0) -> None:
        """Close, and remove the socket file and the access file, unless they are another engine's by now.

        What waits for clients gets at most `linger_s`: one that was behind learns how its request ended, too.
        """
        deadline_s = time.monotonic() + linger_s
        self.flush()  # forgets those who are gone, for whom nobody need wait
        while self.has_backlog and (remaining_s := deadline_s - time.monotonic()) > 0:
            limit_s = min(remaining_s, _TCP_RETRY_S) if any(peer.startswith(TCP_NAME) for peer in self._outboxes) else remaining_s
            self._file.await_room(self._outboxes.keys() | self._file.behind, limit_s)
            self.flush()
        self._file.close()
        if self._tcp is not None:
            self._tcp.close(max(0.0, deadline_s - time.monotonic()))
        access_file = self._folder / ACCESS_NAME
        with contextlib.suppress(OSError):
            content = self._access_content
            if content and read_file(access_file, len(content)) == content:  # its keys are nobody else's
                access_file.unlink()


def _only_frame(message: ZmtpMessage) -> bytes:
    if message.num_frames != 1:
        found = f"{message.num_frames} frames of {message.num_bytes} bytes"
        raise BadMessage(f"a message must be one frame from a DEALER socket, got {found}")
    return message.frame


def error_event(code: ErrorCode, message: str, request_id: str | None = None, retry_after_s: float | None = None) -> Error:
    """An `Error`, its message cut to what the protocol carries."""
    short = message.encode("utf-8", "replace")[:4096].decode("utf-8", "ignore") or code.value
    return Error(code, short, request_id, retry_after_s)


def _holder_of_file(path: Path) -> str | None:
    """The process that listens on a Unix socket, or None if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process_name(pid)
