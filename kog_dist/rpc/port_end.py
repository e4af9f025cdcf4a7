"""A client's end of a connection to an engine's TCP port: a zmq DEALER, and its monitor. The engine's end is tcp_port."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping

import zmq

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.rpc.transport import Access, open_dealer


class PortEvent(enum.Enum):
    """What becomes of the connection. zmq connects again by itself."""

    REACHED = enum.auto()  # somebody listens there
    TAKEN = enum.auto()  # the engine has taken the connection
    REFUSED = enum.auto()  # it does not know the key
    BROKEN_OFF = enum.auto()  # closed during the handshake, without a reason
    LOST = enum.auto()  # closed
    RETRIED = enum.auto()  # nobody listens, or BROKEN_OFF: zmq tries again soon


_MEANINGS = {
    zmq.EVENT_CONNECTED: PortEvent.REACHED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: PortEvent.TAKEN,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: PortEvent.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: PortEvent.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: PortEvent.BROKEN_OFF,
    zmq.EVENT_DISCONNECTED: PortEvent.LOST,
    zmq.EVENT_CONNECT_RETRIED: PortEvent.RETRIED,
}
_EVENT = struct.Struct("=Hi")  # zmq_socket_monitor(3): event and value; zmq's own reader of it imports asyncio


class PortEnd:
    """Nothing blocks: whoever uses it watches `sockets`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], access: Access, options: Mapping[int, int] | None = None) -> None:
        """Begin to connect. Raises LaunchError for an address or keys that are none. `options` of the DEALER besides its own."""
        self._dealer = open_dealer(context, access)
        for option, value in (options or {}).items():
            self._dealer.setsockopt(option, value)
        events = zmq.Event(0)
        for event in _MEANINGS:
            events |= event
        self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(events)
        self.sockets = [self._dealer, self._monitor]
        try:
            self._dealer.connect(access.address)
        except zmq.ZMQError as error:
            self.close()
            raise LaunchError(f"{access.address!r} is not an address of an engine: {error.strerror}") from None

    def next_event(self, timeout_s: float = 0.0) -> PortEvent | None:
        """What has become of the connection, in order; None if nothing new has come of it by then."""
        if self.closed or not self._monitor.poll(max(0, round(timeout_s * 1000))):
            return None
        return _MEANINGS[zmq.Event(_EVENT.unpack(self._monitor.recv_multipart()[0])[0])]

    def send(self, frame: bytes) -> bool:
        """Send a message, or keep it; False if the engine does not read any more."""
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """The next message, None if there is none now. Raises ProtocolError for one of several frames."""
        try:
            parts = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(parts) != 1:
            raise ProtocolError(f"the engine sent a message of {len(parts)} frames, expected one; use the same kog_dist release")
        return parts[0]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._dealer.closed)

    def close(self) -> None:
        """Close it; a second call does nothing."""
        if not self.closed:
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(0)
