"""The Unix socket of an engine: many zmq clients, one thread, nothing that blocks. See rpc/zmtp.py for why it is not zmq's."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Set
from pathlib import Path
from typing import Final

from kog_dist.errors import ProtocolError
from kog_dist.rpc.zmtp import ROUTER, Wire, ZmtpMessage, framed, opening

HANDSHAKE_S: Final = 2.0
HELD_BYTES: Final = 32 << 20  # of messages that are not complete, of all clients together
HALF_SENT_S: Final = 10.0  # a client that has begun a message and sends nothing more is given up
_NAME: Final = b"file-"
_BACKLOG: Final = 1024
_RECEIVE_BYTES: Final = 1 << 16
_BYTES_PER_CALL: Final = 1 << 18  # of all clients, in one `receive`; the rest stays where it is
_ACCEPTS_PER_TURN: Final = 16
_NO_FILES_S: Final = 0.1  # without a free descriptor, new clients wait for so long


class Gone(Exception):
    """The client is no longer connected."""


class _Peer:
    """One connected client."""

    def __init__(self, connection: socket.socket, max_bytes: int) -> None:
        self.connection = connection
        self.wire = Wire(ROUTER, max_bytes)
        self.is_drained = False  # the last `recv` of this turn has taken all there was
        self.unsent = opening(ROUTER)  # the rest of what the socket did not take as a whole
        self.until_s = time.monotonic() + HANDSHAKE_S

    def write(self) -> None:
        """Send what is left. Raises OSError when nobody is there."""
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                self.unsent = self.unsent[self.connection.send(self.unsent) :]


class FilePort:
    """Listens on a Unix socket. A client is known by a name that is given here and never again to another one."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Bind; a file that is there already is replaced. Raises OSError. `max_bytes`: of one message."""
        self._max_bytes = max_bytes
        self._budget = 0  # bytes that this call of `receive` may still take
        self._peers: dict[bytes, _Peer] = {}
        self._names: dict[int, bytes] = {}  # by descriptor
        self._held: dict[bytes, tuple[int, float]] = {}  # of messages that are not complete: bytes, and until when more must come
        self._num_held = 0  # of all of them
        self._strangers: dict[bytes, _Peer] = {}  # those that have not introduced themselves
        self._left: list[bytes] = []  # those from which more was received than was asked for
        self._behind: set[bytes] = set()  # those with something unsent
        self._num_peers = 0
        self._accept_at_s = 0.0
        unready = path.with_suffix(".new")  # its name comes when it listens: whoever finds the file can connect
        with contextlib.suppress(FileNotFoundError):
            unready.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(os.fspath(unready))
            unready.chmod(0o600)
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self._path, self._status = path, unready.lstat()
            unready.replace(path)
        except OSError:
            self._listener.close()
            with contextlib.suppress(OSError):
                unready.unlink()
            raise
        self._epoll = select.epoll()
        self._more = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # makes `fd` readable while messages are left
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._more, select.EPOLLIN)
        self.fd = self._epoll.fileno()  # readable when there is something to receive

    # ---- from clients ----
    def receive(self, max_messages: int) -> list[tuple[bytes, ZmtpMessage]]:
        """Messages with the names of their senders, of each client one in its turn. At most 256 KiB are read."""
        ready = [fd for fd, _ in self._epoll.poll(0)]
        if not (ready or self._strangers or self._accept_at_s or self._held):
            return []
        now_s = time.monotonic()
        if self._more in ready:
            os.eventfd_read(self._more)
        self._accept(now_s, self._listener.fileno() in ready)
        known = set(self._left)
        turns = deque(self._left)
        turns.extend(name for fd in ready if (name := self._names.get(fd)) is not None and name not in known)
        for name in turns:
            if (peer := self._peers.get(name)) is not None:
                peer.is_drained = False
        paused: list[bytes] = []
        received: list[tuple[bytes, ZmtpMessage]] = []
        self._budget = _BYTES_PER_CALL
        while turns and len(received) < max_messages and self._budget > 0:
            name = turns.popleft()
            message = self._next_of(name)
            self._count_held(name, now_s)
            if message is not None:
                received.append((name, message))
                turns.append(name)
            elif name in self._peers and self._peers[name].wire.is_paused:
                self._budget -= _RECEIVE_BYTES  # many commands take as long as many bytes
                paused.append(name)
        self._left = [*turns, *paused]
        if self._left:
            os.eventfd_write(self._more, 1)
        self._look_after_strangers(now_s)
        self._give_up_half_sent(now_s)
        return received

    def _count_held(self, name: bytes, now_s: float) -> None:
        """A client has had its turn: what is held of its message, in the order in which something last came."""
        self._num_held -= self._held.pop(name, (0, 0.0))[0]
        peer = self._peers.get(name)
        if peer is not None and (num_held := peer.wire.num_held):
            self._held[name] = (num_held, now_s + HALF_SENT_S)
            self._num_held += num_held

    def _give_up_half_sent(self, now_s: float) -> None:
        """Close those who have sent nothing for longest: all whose time is over, and as many as all together hold too much."""
        for name, (_, until_s) in tuple(self._held.items()):
            if now_s < until_s and self._num_held <= HELD_BYTES:
                return
            self.forget(name)

    def _next_of(self, name: bytes) -> ZmtpMessage | None:
        """The next message of a client; reads from its socket only when none is there."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        wire = peer.wire
        try:
            message = None if wire.is_between else wire.next()
            while message is None and not wire.is_paused and self._budget > 0 and not peer.is_drained:
                if not (data := _received(peer.connection)):
                    break
                self._budget -= len(data)
                peer.is_drained = len(data) < _RECEIVE_BYTES
                message = wire.next_of(data)
                if wire.num_missing:
                    peer.is_drained = False
                else:
                    break  # only a large frame is worth reading on for
            if wire.replies:
                peer.unsent, wire.replies = peer.unsent or wire.replies, b""
                self._write(name, peer)
        except (OSError, ProtocolError):
            self.forget(name)
            return None
        if wire.is_ready:
            self._strangers.pop(name, None)
        return message

    def _accept(self, now_s: float, has_come: bool) -> None:
        if self._accept_at_s:
            if now_s < self._accept_at_s:
                return
            self._accept_at_s = 0.0
            self._epoll.modify(self._listener.fileno(), select.EPOLLIN)
        elif not has_come:
            return
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free
                self._accept_at_s = now_s + _NO_FILES_S
                self._epoll.modify(self._listener.fileno(), 0)
                return
            connection.setblocking(False)
            self._num_peers += 1
            name = _NAME + b"%d" % self._num_peers
            peer = self._peers[name] = self._strangers[name] = _Peer(connection, self._max_bytes)
            self._names[connection.fileno()] = name
            self._epoll.register(connection.fileno(), select.EPOLLIN)
            self._write(name, peer)

    def _look_after_strangers(self, now_s: float) -> None:
        """Close those whose time is over, after what they had sent by now was read."""
        unheard = set(self._left)
        for name, peer in tuple(self._strangers.items()):  # in the order in which they came
            if now_s < peer.until_s:
                return
            if name not in unheard:
                self.forget(name)

    def forget(self, name: bytes) -> None:
        """Close the connection of a client, if there still is one."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            self._strangers.pop(name, None)
            self._num_held -= self._held.pop(name, (0, 0.0))[0]
            self._behind.discard(name)
            self._epoll.unregister(peer.connection.fileno())
            del self._names[peer.connection.fileno()]
            peer.connection.close()

    def has_input(self) -> bool:
        """Whether `receive` has something to do."""
        return bool(self._epoll.poll(0, 1))

    # ---- to clients ----
    def send(self, name: bytes, body: bytes) -> bool:
        """Send a message; False if the client has not read so much that nothing more can be sent. Raises Gone."""
        peer = self._peers.get(name)
        if peer is None:
            raise Gone
        if peer.unsent:
            self._write(name, peer)
            if name not in self._peers:
                raise Gone
            if peer.unsent:
                return False
        wire = framed(body)
        try:
            num_sent = peer.connection.send(wire)
        except BlockingIOError:
            return False
        except OSError:
            self.forget(name)
            raise Gone from None
        if num_sent < len(wire):
            peer.unsent = wire[num_sent:]
            self._behind.add(name)
        return True

    def _write(self, name: bytes, peer: _Peer) -> None:
        try:
            peer.write()
        except OSError:
            self.forget(name)
            return
        (self._behind.add if peer.unsent else self._behind.discard)(name)

    def flush(self) -> None:
        """Try again to send what is left of messages. Call once per turn of the loop."""
        for name in tuple(self._behind):
            self._write(name, self._peers[name])

    @property
    def behind(self) -> Set[bytes]:
        """Clients that have not read so much that part of a message waits."""
        return self._behind

    def await_room(self, names: Iterable[bytes], limit_s: float) -> None:
        """Return once one of these clients can be sent something, or has gone, and at the latest after `limit_s`."""
        poll = select.poll()
        for name in names:
            if (peer := self._peers.get(name)) is not None:
                poll.register(peer.connection, select.POLLOUT)
        poll.poll(limit_s * 1000)

    def close(self) -> None:
        """Close everything at once. Removes the socket file, unless it is another's."""
        for name in tuple(self._peers):
            self.forget(name)
        with contextlib.suppress(OSError):
            if os.path.samestat(self._path.lstat(), self._status):  # while the socket is open its inode has no other file
                self._path.unlink()
        self._listener.close()
        self._epoll.close()
        os.close(self._more)


def _received(connection: socket.socket) -> bytes:
    """What has come, empty if nothing has. Raises OSError when nobody is there any more."""
    try:
        data = connection.recv(_RECEIVE_BYTES)
    except BlockingIOError:
        return b""
    if not data:
        raise ConnectionResetError
    return data
