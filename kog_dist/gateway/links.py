"""Connections to an engine for an event loop: to its Unix socket without zmq, to its TCP port with zmq.

zmq's own descriptors are watched, without its asyncio layer, which takes longer for a message than a token may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.rpc.file_end import FILE_SCHEME, EndLost, FileEnd
from kog_dist.rpc.port_end import PortEnd, PortEvent
from kog_dist.rpc.transport import Access


class LinkLost(Exception):
    """The engine closed the connection, or refuses it. The text says which."""


class Link(Protocol):
    """One connection. `on_readable` is called by the event loop when `receive` may have something to return."""

    @property
    def is_connected(self) -> bool:
        """Whether the engine has taken the connection."""

    @property
    def engine(self) -> str:
        """Which run of an engine is at the other end: another run has another name."""

    @property
    def absence(self) -> str:
        """One sentence on an engine that has not taken the connection for a while."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def send(self, frame: bytes) -> None:
        """Send a message, now or when the engine reads. Raises LaunchError if it takes no more."""

    def receive(self) -> bytes | None:
        """The next message; None if there is none now. Raises LinkLost."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


def open_link(context: zmq.Context[zmq.Socket[bytes]], access: Access, on_readable: Callable[[], None]) -> Link:
    """Begin to connect. Raises LaunchError for a wrong address or key and where no engine listens at a socket file, EngineBusy
    where it has too many connections.
    """
    if access.address.startswith(FILE_SCHEME):
        return FileLink(access.address, on_readable)
    return ZmqLink(context, access, on_readable)


def _send(end: FileEnd | PortEnd, address: str, frame: bytes) -> None:
    if end.closed:
        raise LaunchError("the connection to the engine is closed")
    if not end.send(frame):
        raise LaunchError(f"the engine at {address} takes no more messages")


class FileLink:
    """A connection to the Unix socket of an engine, as a DEALER."""

    def __init__(self, address: str, on_readable: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._end, self._on_readable = FileEnd(address), on_readable
        self.engine = f"process {self._end.listener_pid}"
        self._loop.add_reader(self._end.fileno(), on_readable)
        self._watch_unsent()

    @property
    def is_connected(self) -> bool:
        """See Link."""
        return self._end.is_ready

    @property
    def absence(self) -> str:
        """See Link."""
        return f"the engine at {self._address} has not answered yet"

    @property
    def closed(self) -> bool:
        """See Link."""
        return self._end.closed

    def send(self, frame: bytes) -> None:
        """See Link."""
        _send(self._end, self._address, frame)
        self._watch_unsent()

    def _watch_unsent(self) -> None:
        if self._end.has_unsent:
            self._loop.add_writer(self._end.fileno(), self._write_rest)

    def _write_rest(self) -> None:
        self._end.flush()
        if not self._end.has_unsent:
            self._loop.remove_writer(self._end.fileno())

    def receive(self) -> bytes | None:
        """See Link."""
        try:
            frame = self._end.receive()
        except EndLost:
            raise LinkLost("is gone") from None
        except ProtocolError as error:
            raise LinkLost(f"does not follow the protocol: {error}") from None
        if frame is None:
            self._watch_unsent()  # it may have answered a PING
            if self._end.has_more:
                self._loop.call_soon(self._on_readable)
        return frame

    def close(self) -> None:
        """See Link."""
        if not self.closed:
            self._loop.remove_reader(self._end.fileno())
            self._loop.remove_writer(self._end.fileno())
            self._end.close()


class ZmqLink:
    """A connection to the TCP port of an engine. Edge-triggered: `receive` until it returns None."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], access: Access, on_readable: Callable[[], None]) -> None:
        self.is_connected = False
        self._loop = asyncio.get_running_loop()
        self._address, self._on_readable = access.address, on_readable
        self.engine = f"the key {access.server_public}"  # made by each run of an engine for itself
        self._end = PortEnd(context, access)
        self._fds = [int(one.getsockopt(zmq.FD)) for one in self._end.sockets]
        for fd in self._fds:
            self._loop.add_reader(fd, on_readable)

    @property
    def absence(self) -> str:
        """See Link."""
        return f"no engine listens at {self._address}"

    @property
    def closed(self) -> bool:
        """See Link."""
        return self._end.closed

    def send(self, frame: bytes) -> None:
        """See Link."""
        _send(self._end, self._address, frame)
        self._loop.call_soon(self._on_readable)  # sending may have used up the edge that announces what came meanwhile

    def receive(self) -> bytes | None:
        """See Link."""
        try:
            frame = self._end.receive()
        except ProtocolError as error:
            raise LinkLost(f"does not follow the protocol: {error}") from None
        while frame is None and (event := self._end.next_event()) is not None:
            if event is PortEvent.TAKEN:
                self.is_connected = True
            elif event is PortEvent.LOST and self.is_connected:
                raise LinkLost("is gone")
            elif event is PortEvent.REFUSED:
                raise LinkLost("refuses this gateway's key")
        return frame

    def close(self) -> None:
        """See Link."""
        if not self.closed:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._end.close()
