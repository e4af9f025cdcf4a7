"""A client's end of a connection to an engine's Unix socket, without zmq and its threads. The engine's end is file_port."""

from __future__ import annotations

import socket
import struct
from typing import Final

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.rpc.messages import MAX_MESSAGE_BYTES
from kog_dist.rpc.zmtp import DEALER, Wire, framed, only_message, opening

FILE_SCHEME: Final = "ipc://"
_RECEIVE_BYTES: Final = 1 << 12  # a token has 150; room for more costs time, though it is not used
_STEPS_PER_CALL: Final = 32  # reads, or 64 commands each
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_UNSENT_BYTES: Final = 8 * MAX_MESSAGE_BYTES  # of requests that the engine has not read


class EndLost(Exception):
    """The engine closed the connection, and everything that it had sent was received."""


class EngineBusy(LaunchError):
    """No connection is to be had now, which says nothing against the engine: it or this process has too many."""


class FileEnd:
    """A DEALER. Nothing blocks: whoever uses it watches `fileno`, for writing too while `has_unsent`."""

    def __init__(self, address: str) -> None:
        """Begin to connect. Raises LaunchError where nobody listens, EngineBusy where too many connections wait."""
        self._wire = Wire(DEALER, MAX_MESSAGE_BYTES)
        self._unsent = bytearray()
        self._is_drained = False  # the last `recv` has taken all there was
        self.has_more = False  # `receive` has left something: call it again before waiting for the socket
        self._socket = _connected(address)
        self._write(opening(DEALER))

    @property
    def is_ready(self) -> bool:
        """Whether the engine has taken the connection."""
        return self._wire.is_ready

    @property
    def listener_pid(self) -> int:
        """The process that listens there, as this one sees it; 0 where it cannot see it (in another container)."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket takes more."""
        return bool(self._unsent)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Send a message, now or with `flush`; False if the engine has left too much unread."""
        if len(self._unsent) + len(frame) > _UNSENT_BYTES:
            return False
        self._write(framed(frame))
        return True

    def _write(self, wire: bytes) -> None:
        if self._unsent:
            self._unsent += wire
            return
        try:
            num_sent = self._socket.send(wire)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return  # what it has sent is still to be read; then `receive` finds out
        self._unsent += wire[num_sent:]

    def flush(self) -> None:
        """Send what is left of messages, as far as the socket takes it."""
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()

    def receive(self) -> bytes | None:
        """The next message; None if there is none now, or if `has_more`.

        It never takes long, whatever the engine sends. Raises EndLost, and ProtocolError for what is no message of an engine.
        """
        self.has_more = False
        for _ in range(_STEPS_PER_CALL):
            is_between = self._wire.is_between
            message = None if is_between else self._wire.next()
            if message is not None:
                if message.num_frames != 1:
                    raise ProtocolError(f"the engine sent a message of {message.num_frames} frames, expected one")
                return message.frame
            self._reply()
            if self._wire.is_paused:
                continue
            if self._is_drained:
                self._is_drained = False
                return None
            data = self._received()
            if data is None:
                return None
            if is_between and (frame := only_message(data)) is not None:
                return frame
            self._wire.feed(data)
        self.has_more = True
        return None

    def _reply(self) -> None:
        """Answer a PING, unless other things wait to be sent: the engine hears that this end lives from those."""
        if self._wire.replies and not self._unsent:
            self._write(self._wire.replies)
        self._wire.replies = b""

    def _received(self) -> bytes | None:
        """What has come, None if nothing has."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            raise EndLost from None
        if not data:
            raise EndLost
        self._is_drained = len(data) < _RECEIVE_BYTES
        return data

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._socket.close()


def _connected(address: str) -> socket.socket:
    """A socket connected to a Unix socket. Raises LaunchError, EngineBusy."""
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is free
        raise EngineBusy(f"cannot connect to the engine at {address} ({error.strerror})") from None
    made.setblocking(False)
    try:
        made.connect(address.removeprefix(FILE_SCHEME))
    except OSError as error:
        made.close()
        if isinstance(error, BlockingIOError):
            raise EngineBusy(f"the engine at {address} is busy: too many connections wait for it") from None
        raise LaunchError(f"no engine listens at {address} ({error.strerror})") from None
    return made
