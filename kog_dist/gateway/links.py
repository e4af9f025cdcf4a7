"""Connections to an engine for an event loop: to its Unix socket without zmq, to its TCP port with zmq.

zmq's own descriptors are watched, without its asyncio layer, which takes longer for a message than a token may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.rpc.file_end import FILE_SCHEME, EndLost, FileEnd
from kog_dist.rpc.transport import Access, open_dealer


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
        if self.closed:
            raise LaunchError("the connection to the engine is closed")
        if not self._end.send(frame):
            raise LaunchError(f"the engine at {self._address} takes no more messages")
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
    """A DEALER and its monitor. Edge-triggered: `receive` until it returns None."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], access: Access, on_readable: Callable[[], None]) -> None:
        self.is_connected = False
        self._loop = asyncio.get_running_loop()
        self._address, self._on_readable = access.address, on_readable
        self.engine = f"the key {access.server_public}"  # made by each run of an engine for itself
        self._dealer = open_dealer(context, access)
        self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )  # fmt: skip
        try:
            self._dealer.connect(access.address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise LaunchError(f"{access.address!r} is not an address of an engine: {error.strerror}") from None
        self._fds = [int(one.getsockopt(zmq.FD)) for one in (self._dealer, self._monitor)]
        for fd in self._fds:
            self._loop.add_reader(fd, on_readable)

    @property
    def absence(self) -> str:
        """See Link."""
        return f"no engine listens at {self._address}"

    @property
    def closed(self) -> bool:
        """See Link."""
        return bool(self._dealer.closed)

    def send(self, frame: bytes) -> None:
        """See Link."""
        if self.closed:
            raise LaunchError("the connection to the engine is closed")
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise LaunchError(f"the engine at {self._address} takes no more messages: {error.strerror}") from None
        self._loop.call_soon(self._on_readable)  # sending may have used up the edge that announces what came meanwhile

    def receive(self) -> bytes | None:
        """See Link."""
        try:
            return self._dealer.recv(zmq.NOBLOCK)
        except zmq.Again:
            self._read_monitor()
            return None

    def _read_monitor(self) -> None:
        while not self._monitor.closed and int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
            elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
                raise LinkLost("is gone")
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                raise LinkLost("refuses this gateway's key")

    def close(self) -> None:
        """See Link."""
        if not self.closed:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0)
