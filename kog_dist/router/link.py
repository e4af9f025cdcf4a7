"""The router's connection to one replica: it connects again by itself, and says in what state the replica is."""

from __future__ import annotations

import enum
import math
from typing import Final

import zmq

from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.records import dataclass
from kog_dist.router.orders import ReplicaOrder
from kog_dist.rpc.messages import EngineState, Hello, Request, Status, StatusReport, Welcome, build_hash, encode
from kog_dist.rpc.port_end import PortEnd, PortEvent

BEAT_S: Final = 0.25  # between two `status`
SILENT_S: Final = 3.0  # without any answer: the coordinator hangs, though its host and its zmq may live
RECONNECT_S: Final = 0.2
_CONNECT_TIMEOUT_MS: Final = 2000
_OPTIONS: Final = {
    int(zmq.RECONNECT_IVL_MAX): round(RECONNECT_S * 1000),
    int(zmq.HANDSHAKE_IVL): _CONNECT_TIMEOUT_MS,
    int(zmq.CONNECT_TIMEOUT): _CONNECT_TIMEOUT_MS,
}
_LAST_FRAMES_S: Final = 0.005  # zmq may say that a connection closed before it hands over what came last


class LinkState(enum.StrEnum):
    """What a replica is to the router. Only a READY one gets requests."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"  # it says so itself, or a request of ours has just failed there
    REFUSED = "refused"  # another build or model, or it refuses us
    LOST = "lost"  # was connected, and is not


_OF_ENGINE = {
    EngineState.LOADING: LinkState.LOADING,
    EngineState.READY: LinkState.READY,
    EngineState.DRAINING: LinkState.DRAINING,
    EngineState.FAILED: LinkState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Served:
    """What replicas must have in common, since a request may go to any of them."""

    model: str
    max_context: int
    vocab_size: int
    has_tokenizer: bool

    @classmethod
    def of(cls, welcome: Welcome) -> Served:
        """From a replica's greeting."""
        return cls(welcome.model, welcome.max_context, welcome.vocab_size, welcome.has_tokenizer)

    def __str__(self) -> str:
        tokenizer = "a" if self.has_tokenizer else "no"
        return f"{self.model} (context {self.max_context}, vocabulary {self.vocab_size}, {tokenizer} tokenizer)"


class ReplicaLink:
    """One replica of one generation. All times are seconds on the monotonic clock, given by the caller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], order: ReplicaOrder, own_prefix: str, now_s: float) -> None:
        """Begin to connect. `own_prefix` is how the request ids of this router begin."""
        self.order = order
        self._own_prefix = own_prefix
        self.state = LinkState.CONNECTING
        self.reason = ""
        self.welcome: Welcome | None = None
        self.report: StatusReport | None = None
        self.attempt_ids: set[str] = set()  # ours that have not ended there, given up ones included
        self.idle_since_s = now_s
        self.busy_until_s = now_s  # at the earliest, see `Seat`
        self.blocked_until_s = 0.0
        self._context = context
        self._end: PortEnd | None = None
        self._is_open = False  # the handshake is done
        self._closed_s: float | None = None  # when the connection was seen to close
        self._next_beat_s = self._next_open_s = now_s
        self._last_heard_s = now_s
        self._open(now_s)

    @property
    def name(self) -> str:
        """The replica's name, such as r0."""
        return self.order.name

    def is_usable(self) -> bool:
        """Whether it takes requests, now or when it has finished what it has."""
        return self.state is LinkState.READY and not self.order.is_retiring

    def num_free(self, now_s: float) -> int:
        """How many requests it would begin at once: it has as many places as it decodes together."""
        if not self.is_usable() or now_s < self.blocked_until_s:
            return 0
        return max(self.num_places - len(self.attempt_ids) - self._num_foreign_requests(), 0)

    @property
    def num_places(self) -> int:
        """How many it decodes together; one before it has said so."""
        return 1 if self.report is None else self.report.parallel

    def is_refused(self) -> bool:
        """Whether it must not be used."""
        return self.state is LinkState.REFUSED

    def _num_foreign_requests(self) -> int:
        """How many clients that do not come through this router have there; as of the last report."""
        if self.report is None:
            return 0
        ids = (*self.report.all_running, *self.report.waiting)
        return sum(not request_id.startswith(self._own_prefix) for request_id in ids)

    # ---- the connection ----
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those that a poller should watch."""
        return [] if self._end is None else self._end.sockets

    def _open(self, now_s: float) -> None:
        self._next_open_s = now_s + RECONNECT_S
        try:
            self._end = PortEnd(self._context, self.order.access, _OPTIONS)
        except LaunchError as error:
            self.state, self.reason = LinkState.REFUSED, str(error)

    def close(self) -> None:
        """Disconnect; the replica cancels what it still has for us."""
        if self._end is not None:
            self._end.close()
        self._end = None
        self._is_open, self._closed_s = False, None

    def look(self, now_s: float) -> str | None:
        """Notice that the connection opens or closes, ask for the status, connect again. Says why one was just lost."""
        self._read_monitor(now_s)
        if self._closed_s is not None and now_s - self._closed_s >= _LAST_FRAMES_S:
            return self._lose("the connection closed", now_s)
        if self._is_open and now_s - self._last_heard_s > SILENT_S:
            return self._lose(f"it has said nothing for {SILENT_S:g} s", now_s)
        if self._end is None and now_s >= self._next_open_s:
            self._open(now_s)
        elif self._is_open and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self.send(Status())
        return None

    def next_look_s(self) -> float:
        """When `look` should be called again, though no socket is readable."""
        if self._closed_s is not None:
            return self._closed_s + _LAST_FRAMES_S
        if self._end is None:
            return self._next_open_s
        return self._next_beat_s if self._is_open else math.inf

    def _read_monitor(self, now_s: float) -> None:
        while self._end is not None and (event := self._end.next_event()) is not None:
            if event is PortEvent.TAKEN:
                self._is_open = True
                self.state, self.reason = LinkState.CONNECTING, ""
                self._last_heard_s = self._next_beat_s = now_s
                self.send(Hello(build=build_hash()))
            elif event is PortEvent.REFUSED:
                self.state, self.reason = LinkState.REFUSED, "it refuses the router's key; the access file may be an old one"
            elif event is PortEvent.BROKEN_OFF:
                self.reason = "it closed the connection during the handshake; the keys may be those of another engine"
            elif event is PortEvent.LOST and self._is_open and self._closed_s is None:
                self._closed_s = now_s

    def _lose(self, reason: str, now_s: float) -> str:
        self.close()
        self.state, self.reason = LinkState.LOST, reason
        self.report = None
        self.attempt_ids.clear()
        self._next_open_s = now_s + RECONNECT_S
        return reason

    def send(self, message: Request) -> bool:
        """Hand a message to zmq; False if the replica does not read."""
        return self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> bool:
        """The same for one that is encoded already."""
        return self._end is not None and self._end.send(frame)

    def receive(self, max_frames: int, now_s: float) -> list[bytes]:
        """What the replica has sent, in order."""
        frames: list[bytes] = []
        while self._end is not None and len(frames) < max_frames:
            try:
                frame = self._end.receive()
            except ProtocolError:
                continue  # nothing that this release sends
            if frame is None:
                break
            frames.append(frame)
        if frames:
            self._last_heard_s = now_s
        return frames

    # ---- what it says of itself ----
    def greeted(self, welcome: Welcome, expected: Served | None) -> None:
        """Take note of who answers there; it is refused unless it is what the others are."""
        self.welcome = welcome
        if welcome.build != build_hash():
            self.refuse(f"it is build {welcome.build}, this router is {build_hash()}; use one kog_dist release")
        elif expected is not None and Served.of(welcome) != expected:
            self.refuse(f"it serves {Served.of(welcome)}, the others serve {expected}")

    def reported(self, report: StatusReport) -> None:
        """Take note of its state."""
        self.report = report
        if self.welcome is not None and self.state is not LinkState.REFUSED:
            self.state, self.reason = _OF_ENGINE[report.state], ""

    def refuse(self, reason: str) -> None:
        """Use it no more, until it is another process."""
        self.state, self.reason = LinkState.REFUSED, reason

    def failed(self, reason: str) -> None:
        """A request failed there: it gets no other before it has said again that it is ready."""
        if self.state is LinkState.READY:
            self.state, self.reason = LinkState.FAILED, reason
