"""A client's end of a connection to an engine's Unix socket, without zmq and its threads. The engine's end is file_port."""

from __future__ import annotations

import socket
from typing import Final

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.rpc.messages import MAX_MESSAGE_BYTES
from kog_dist.rpc.zmtp import DEALER, Message, Wire, framed, only_message, opening

FILE_SCHEME: Final = "ipc://"
_RECEIVE_BYTES: Final = 1 << 12  # a token has 150; room for more costs time, though it is not used
_UNSENT_BYTES: Final = 8 * MAX_MESSAGE_BYTES  # of requests that the engine has not read


class EndLost(Exception):
    """The engine closed the connection, and everything that it had sent was received."""


class FileEnd:
    """A DEALER. Nothing blocks: whoever uses it watches `fileno`, for writing too while `has_unsent`."""

    def __init__(self, address: str) -> None:
        """Begin to connect. Raises LaunchError where nobody listens, and where too many connections wait."""
        self._wire = Wire(DEALER, MAX_MESSAGE_BYTES)
        self._unsent = bytearray()
        self._is_drained = False  # the last `recv` has taken all there was
        self._socket = _connected(address)
        self._write(opening(DEALER))

    @property
    def is_ready(self) -> bool:
        """Whether the engine has taken the connection."""
        return self._wire.is_ready

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
        """The next message; None if there is none now. Raises EndLost, and ProtocolError for what is no message of an engine."""
        wire = self._wire
        message: Message | None = None
        while (is_between := wire.is_between) or (message := wire.next()) is None:
            if wire.replies:
                self._write(wire.replies)
                wire.replies = b""
            if wire.is_paused:
                continue
            if self._is_drained:
                self._is_drained = False
                return None
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return None
            except OSError:
                raise EndLost from None
            self._is_drained = 0 < len(data) < _RECEIVE_BYTES
            if not data:
                raise EndLost
            if is_between and (frame := only_message(data)) is not None:
                return frame
            wire.feed(data)
        if message.num_frames != 1:
            raise ProtocolError(f"the engine sent a message of {message.num_frames} frames, expected one")
        return message.frame

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._socket.close()


def _connected(address: str) -> socket.socket:
    """A socket connected to a Unix socket. Raises LaunchError."""
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is free
        raise LaunchError(f"cannot connect to the engine at {address} ({error.strerror})") from None
    made.setblocking(False)
    try:
        made.connect(address.removeprefix(FILE_SCHEME))
    except OSError as error:
        made.close()
        if isinstance(error, BlockingIOError):
            raise LaunchError(f"the engine at {address} is busy: too many connections wait for it") from None
        raise LaunchError(f"no engine listens at {address} ({error.strerror})") from None
    return made
