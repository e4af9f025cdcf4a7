"""The coordinator's socket: a ROUTER that never blocks, never trusts a peer and never waits for one.

Addresses, key files and the client's end are in rpc/transport.py.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kog_dist.errors import LaunchError
from kog_dist.port_holder import holder_of_port, process_name
from kog_dist.rpc.messages import MAX_MESSAGE_BYTES, BadMessage, Error, ErrorCode, Event, Request, decode_request, encode
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.rpc.transport import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, PEER_HWM, Access, socket_address

OUTBOX_EVENTS = 1024
OUTBOX_BYTES = 256 << 10
OUTBOX_GRACE_S = 10.0  # how long a dropped client's last message is offered to it

_HANDSHAKE_MS = 2000
_FRAME, _ADDRESS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `send_multipart` takes three times as long
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_CURVE_DOMAIN = b"kog"


class Delivery(enum.Enum):
    """What became of an event that was handed to `RpcListener.send`."""

    TAKEN = "taken"  # on its way, or in the client's outbox
    GONE = "gone"  # the client is no longer connected
    FULL = "full"  # the client does not read and its outbox is full: nothing was kept


@dataclass(slots=True)
class _Outbox:
    """Events for a client that does not read fast enough."""

    frames: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    give_up_at: float | None = None  # a dropped client's last message is offered until then


class RpcListener:
    """The coordinator's ROUTER. Nothing here blocks; `fds` become readable when `receive` should be called.

    zmq's descriptors are edge-triggered: look at `has_input` before sleeping.
    """

    def __init__(self, folder: Path, *, tcp_port: int | None = None, tcp_host: str = "127.0.0.1") -> None:
        """Bind at once. Raises LaunchError naming who holds the address. `tcp_port` 0 takes a free one."""
        self._folder = folder
        self._path = folder / SOCKET_NAME
        self._has_file = False
        self._outboxes: dict[bytes, _Outbox] = {}
        self.num_bad_messages = 0
        self.tcp_address: str | None = None
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._zap: zmq.Socket[bytes] | None = None
        self._allowed_key = b""
        try:
            self._set_options()
            self._bind_file()
            if tcp_port is not None:
                self._bind_tcp(tcp_host, tcp_port)
        except BaseException:
            self.close()
            raise
        self.fds = [int(s.getsockopt(zmq.FD)) for s in self.sockets()]

    def _set_options(self) -> None:
        router = self._router
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, PEER_HWM)
        router.setsockopt(zmq.RCVHWM, PEER_HWM)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)  # of one frame; `receive` counts them together
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

    def _bind_file(self) -> None:
        address = socket_address(self._folder)
        info = self._folder.stat()
        if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise LaunchError(
                f"the instance folder {self._folder} must belong to this user with mode 0700, it belongs to user {info.st_uid} "
                f"with mode {stat.S_IMODE(info.st_mode):04o}; remove it or use another instance name"
            )
        holder = _holder_of_file(self._path)  # zmq would silently take the name away from a living engine
        if holder is not None:
            raise LaunchError(f"the socket {self._path} is in use by {holder}; stop that engine or use another instance name")
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise LaunchError(f"cannot listen on {address}: {error.strerror}") from error
        self._has_file = True
        self._path.chmod(0o600)

    def _bind_tcp(self, host: str, port: int) -> None:
        if not zmq.has("curve"):
            raise LaunchError("this build of zmq has no CURVE encryption, so no TCP port can be opened; use the socket file")
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._allowed_key = z85.decode(client_public)
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ADDRESS)
        router = self._router  # what is set now holds for binds from here on, not for the socket file
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        router.setsockopt(zmq.ZAP_DOMAIN, _CURVE_DOMAIN)
        router.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        router.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        try:
            router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            holder = holder_of_port(port) if error.errno == zmq.EADDRINUSE else None
            by = f"; it is in use by {holder}" if holder else ""
            raise LaunchError(
                f"cannot listen on {host} port {port}: {error.strerror}{by}; choose another --rpc-port, or 0 for a free one"
            ) from error
        self.tcp_address = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._write_access(Access(self.tcp_address, server_public.decode(), client_public.decode(), client_secret.decode()))

    def _write_access(self, access: Access) -> None:
        path = self._folder / ACCESS_NAME
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            json.dump({name: getattr(access, name) for name in Access.__slots__}, stream)

    def has_input(self) -> bool:
        """Whether `receive` has something to do."""
        return any(int(s.getsockopt(zmq.EVENTS)) & zmq.POLLIN for s in self.sockets())

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those from which `receive` reads, for a zmq poller."""
        return [self._router] if self._zap is None else [self._router, self._zap]

    def receive(self, max_messages: int) -> list[tuple[bytes, Request]]:
        """The next well-formed requests with their senders. What is not one is answered and counted, here and in the limit."""
        self._answer_zap()
        received = []
        for _ in range(max_messages):
            try:
                peer = self._router.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                received.append((peer, decode_request(self._only_frame())))
            except BadMessage as error:
                self.num_bad_messages += 1
                self.send(peer, error_event(error.code, str(error), error.request_id))
        return received

    def _only_frame(self) -> bytes:
        """The one frame of the message whose sender was just read. Frames of a message arrive together."""
        num_frames, num_bytes, frame = 0, 0, b""
        while self._router.getsockopt(zmq.RCVMORE):
            part = self._router.recv(zmq.NOBLOCK)
            num_frames, num_bytes = num_frames + 1, num_bytes + len(part)
            frame = part if num_frames == 1 else b""
        if num_frames != 1:
            raise BadMessage(f"a message must be one frame from a DEALER socket, got {num_frames} frames of {num_bytes} bytes")
        return frame

    def _answer_zap(self) -> None:
        """Decide on new TCP connections (ZMQ RFC 27): CURVE with the one allowed client key, nothing else."""
        while self._zap is not None:
            try:
                parts = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, sequence, domain, mechanism = (
                (parts[0], parts[1], parts[2], parts[5]) if len(parts) >= 6 else (b"1.0", b"", b"", b"")
            )
            accepted = domain == _CURVE_DOMAIN and mechanism == b"CURVE" and len(parts) == 7 and parts[6] == self._allowed_key
            verdict = [b"200", b"OK"] if accepted else [b"400", b"this client key is not allowed"]
            self._zap.send_multipart([version, sequence, *verdict, b"client" if accepted else b"", b""])

    def send(self, peer: bytes, event: Event) -> Delivery:
        """Send an event, or keep it in the client's bounded outbox while the client does not read."""
        return self.send_frame(peer, encode(event))

    def send_frame(self, peer: bytes, frame: bytes) -> Delivery:
        """The same for an event that is encoded already."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            delivery = self._try_send(peer, frame)
            if delivery is not Delivery.FULL:
                return delivery
            outbox = self._outboxes[peer] = _Outbox()
        if outbox.give_up_at is not None:
            return Delivery.FULL
        if len(outbox.frames) >= OUTBOX_EVENTS or outbox.num_bytes + len(frame) > OUTBOX_BYTES:
            return Delivery.FULL
        outbox.frames.append(frame)
        outbox.num_bytes += len(frame)
        return Delivery.TAKEN

    def is_behind(self, peer: bytes) -> bool:
        """Whether a client has not read what it was sent."""
        return peer in self._outboxes

    def drop(self, peer: bytes, last: Sequence[Event]) -> None:
        """Forget what a client has not read; the events `last` are offered to it for a while, and nothing after them."""
        frames = deque(encode(event) for event in last)
        self._outboxes[peer] = _Outbox(frames, sum(map(len, frames)), time.monotonic() + OUTBOX_GRACE_S)

    def flush(self) -> list[bytes]:
        """Try the outboxes again; returns the clients that turned out to be gone. Call once per turn of the loop."""
        gone = []
        for peer, outbox in list(self._outboxes.items()):
            delivery = Delivery.TAKEN
            while outbox.frames and (delivery := self._try_send(peer, outbox.frames[0])) is Delivery.TAKEN:
                outbox.num_bytes -= len(outbox.frames.popleft())
            if delivery is Delivery.GONE:
                gone.append(peer)
            expired = outbox.give_up_at is not None and time.monotonic() >= outbox.give_up_at
            if not outbox.frames or delivery is Delivery.GONE or expired:
                del self._outboxes[peer]
        return gone

    @property
    def has_backlog(self) -> bool:
        """Whether some client has not read what it was sent."""
        return bool(self._outboxes)

    def _try_send(self, peer: bytes, frame: bytes) -> Delivery:
        try:
            self._router.send(peer, _ADDRESS)  # what takes an address also takes the frame that belongs to it
            self._router.send(frame, _FRAME)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Delivery.GONE
        return Delivery.TAKEN

    def close(self, linger_s: float = 0.0) -> None:
        """Close and remove the socket file. What is under way to clients that read gets at most `linger_s`."""
        self._router.setsockopt(zmq.LINGER, round(linger_s * 1000))
        self._router.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        if self._has_file:
            for path in (self._path, self._folder / ACCESS_NAME):
                with contextlib.suppress(OSError):
                    path.unlink()


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
