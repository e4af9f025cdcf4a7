"""A client's connection to one engine; every wait has a deadline. To its Unix socket without zmq, to its TCP port with it."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Protocol

import zmq

from kog_dist.errors import LaunchError, ProtocolError, RequestFailed
from kog_dist.rpc.file_end import FILE_SCHEME, EndLost, FileEnd
from kog_dist.rpc.messages import ErrorCode, Event, Request, decode_event, encode
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.port_end import PortEnd, PortEvent
from kog_dist.rpc.transport import RECONNECT_MS, Access


class _End(Protocol):
    """One way to reach an engine."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def wait_connected(self, deadline_s: float, *, patient: bool) -> None:
        """See Connection."""

    def send(self, frame: bytes) -> bool:
        """Send a message, or keep it; False if the engine does not read any more."""

    def receive(self) -> bytes | None:
        """The next message, None if there is none now. Raises EndLost, ProtocolError."""

    def wait(self, remaining_s: float) -> None:
        """Return when `receive` may have something to say, at the latest after so long."""

    def close(self) -> None:
        """See Connection."""


class Connection:
    """One engine: it never reconnects to another."""

    def __init__(self, access: Access) -> None:
        """Raises LaunchError for an address or keys that are none."""
        self.access = access
        self._end: _End = _ToFile(access.address) if access.address.startswith(FILE_SCHEME) else _ToPort(access)

    def wait_connected(self, deadline_s: float, *, patient: bool) -> None:
        """Return once the engine has taken the connection. `patient`: keep trying until the deadline (time.monotonic()).

        Raises LaunchError when nobody listens, when the keys are refused, or at the deadline.
        """
        self._end.wait_connected(deadline_s, patient=patient)

    def send(self, message: Request) -> None:
        """Hand a request over. Raises RequestFailed if the engine does not read any more."""
        if not self._end.send(encode(message)):
            raise RequestFailed(ErrorCode.ENGINE_LOST, f"the engine at {self.access.address} takes no more requests")

    def receive(self, deadline_s: float) -> Event | None:
        """The next event; None at the deadline (time.monotonic()).

        What has come by then is returned, whatever the time: whoever waits for one kind of event looks at the clock, too.
        Raises RequestFailed (`engine_lost`) once the engine is gone and everything it had sent is read, and after `close`;
        ProtocolError if what came is not the protocol.
        """
        if self.closed:
            raise RequestFailed(ErrorCode.ENGINE_LOST, f"the connection to {self.access.address} is closed")
        while True:
            try:
                frame = self._end.receive()
            except EndLost:
                raise RequestFailed(
                    ErrorCode.ENGINE_LOST, f"the engine at {self.access.address} is gone; start it again and repeat the request"
                ) from None
            if frame is not None:
                return decode_event(frame)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            self._end.wait(remaining_s)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._end.closed

    def close(self) -> None:
        """Close it. A second call does nothing."""
        if not self.closed:
            self._end.close()


class _ToFile:
    """To the Unix socket of an engine. zmq would wake two threads more for each message, here and there."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._end: FileEnd | None = None
        self.closed = False

    def wait_connected(self, deadline_s: float, *, patient: bool) -> None:
        """See Connection."""
        while self._end is None or not self._end.is_ready:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise LaunchError(f"no engine took the connection at {self._address} in time; is one running?")
            try:
                self._end = self._end or FileEnd(self._address)
                self._end.receive()
            except (LaunchError, EndLost, ProtocolError) as error:
                if not patient:
                    raise self._refusal(error) from None
                self._drop()
                time.sleep(min(RECONNECT_MS / 1000, remaining_s))
                continue
            if not self._end.is_ready:
                self.wait(remaining_s)

    def _refusal(self, error: Exception) -> LaunchError:
        match error:
            case LaunchError():
                from kog_dist.runtime.instance import running

                others = ", ".join(running(Path(self._address.removeprefix(FILE_SCHEME)).parent.parent))
                return LaunchError(f"{error}; start one with kog-launch{others and f', or give --instance: {others} runs'}")
            case EndLost():
                return LaunchError(
                    f"the engine at {self._address} closed the connection during the handshake; it may be stopping"
                )
        return LaunchError(f"what listens at {self._address} is no engine: {error}")

    def send(self, frame: bytes) -> bool:
        """See _End."""
        return self._end is not None and self._end.send(frame)

    def receive(self) -> bytes | None:
        """See _End."""
        return None if self._end is None else self._end.receive()

    def wait(self, remaining_s: float) -> None:
        """See _End."""
        assert self._end is not None, "not connected"
        if self._end.has_more:
            return
        poll = select.poll()
        poll.register(self._end, select.POLLIN | (select.POLLOUT if self._end.has_unsent else 0))
        poll.poll(max(1, round(remaining_s * 1000)))
        if self._end.has_unsent:
            self._end.flush()

    def _drop(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def close(self) -> None:
        """See Connection."""
        self._drop()
        self.closed = True


class _ToPort:
    """To the TCP port of an engine, in a zmq context of its own."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._context = zmq.Context()
        self._connected = self._is_lost = False
        try:
            self._end = PortEnd(self._context, access)
        except LaunchError:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        for socket in self._end.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wait_connected(self, deadline_s: float, *, patient: bool) -> None:
        """See Connection."""
        was_reached = False
        address = self._access.address
        while not self._connected:
            event = self._end.next_event(deadline_s - time.monotonic())
            match event:
                case None:
                    raise LaunchError(f"no engine took the connection at {address} in time; is one running?")
                case PortEvent.TAKEN:
                    self._connected = True
                case PortEvent.REFUSED:
                    raise LaunchError(f"the engine at {address} refuses this client's key")
                case PortEvent.REACHED:
                    was_reached = True
                case PortEvent.RETRIED if was_reached and not patient:
                    raise LaunchError(
                        f"{address} closed the connection during the handshake; the keys may be those of another engine: "
                        f"use the {ACCESS_NAME} that the engine wrote when it started"
                    )
                case PortEvent.RETRIED if not patient:
                    raise LaunchError(f"no engine listens at {address}; start one with kog-launch")

    def send(self, frame: bytes) -> bool:
        """See _End."""
        return self._end.send(frame)

    def receive(self) -> bytes | None:
        """See _End."""
        frame = self._end.receive()
        if frame is None and self._is_lost:
            raise EndLost
        return frame

    def wait(self, remaining_s: float) -> None:
        """See _End."""
        self._poller.poll(max(1, round(remaining_s * 1000)))
        while (event := self._end.next_event()) is not None:
            self._is_lost = self._is_lost or event is PortEvent.LOST

    @property
    def closed(self) -> bool:
        """See _End."""
        return self._end.closed

    def close(self) -> None:
        """See Connection."""
        self._end.close()
        self._context.term()
