"""A router with fake replicas and raw clients, all turned by the test's own thread: nothing happens between two turns."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kog_dist.router.orders import FleetOrder, FleetReport, ReplicaOrder, latest_packet, socket_pair
from kog_dist.router.router import Router
from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import (
    Accepted,
    Cancel,
    Done,
    Drain,
    EngineState,
    Error,
    ErrorCode,
    Event,
    FinishReason,
    Generate,
    Hello,
    Request,
    Status,
    StatusReport,
    Tokens,
    Welcome,
    build_hash,
    decode_event,
    encode,
)
from kog_dist.rpc.transport import Access, socket_address

PATIENCE_S = 10.0
VOCAB_SIZE = 1000


class FakeReplica:
    """Answers greetings by itself; what becomes of requests is for the test to say."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(mode=0o700)
        self.name = name
        self.folder = folder
        self.state = EngineState.READY
        self.model, self.build = "fake", build_hash()
        self.running: list[Generate] = []
        self.cancelled: list[str] = []
        self.is_silent = False
        self.is_drained = False
        self.num_asked = 0
        self.epochs_waited: tuple[int | None, ...] = ()
        self._peers: dict[str, bytes] = {}
        self._listener: RpcListener | None = RpcListener(folder)

    def turn(self) -> None:
        if self._listener is None or self.is_silent:
            return
        for peer, message in self._listener.receive(100):
            self._answer(self._listener, peer, message)
        self._listener.flush()

    def _answer(self, listener: RpcListener, peer: bytes, message: Request) -> None:
        match message:
            case Hello():
                listener.send(peer, Welcome(self.build, self.name, self.model, self.state, 2, 256, VOCAB_SIZE, True))
            case Status():
                self.num_asked += 1
                listener.send(peer, self._report())
            case Generate():
                self.running.append(message)
                self._peers[message.request_id] = peer
            case Cancel():
                self.cancelled.append(message.request_id)
                self.finish(FinishReason.CANCELLED, self._named(message.request_id))
            case Drain():
                self.is_drained = True

    def _report(self) -> StatusReport:
        running = self.running[0].request_id if self.running else None
        return StatusReport(
            self.state, self.name, self.model, self.build, 1, 2, ("ready", "ready"), (0.0, 0.0), 1.0, running, (), 16,
            0, 0, 0, 0, 0, 0, 0, epochs_waited=self.epochs_waited,
        )  # fmt: skip

    def _named(self, request_id: str) -> Generate:
        return next(request for request in self.running if request.request_id == request_id)

    def send(self, event: Event, request: Generate | None = None) -> None:
        request = request if request is not None else self.running[0]
        assert self._listener is not None
        assert self._listener.send(self._peers[request.request_id], event) is Delivery.TAKEN

    def send_frame(self, frame: bytes) -> None:
        assert self._listener is not None
        self._listener.send_frame(self._peers[self.running[0].request_id], frame)

    def accept(self) -> None:
        self.send(Accepted(self.running[0].request_id, 0, 3, 100))

    def generate(self, index: int, *token_ids: int) -> None:
        text = "".join(f"<{token_id}>" for token_id in token_ids)
        stamps_s = tuple(float(index + i) for i in range(len(token_ids)))
        self.send(Tokens(self.running[0].request_id, index, token_ids, text, stamps_s))

    def finish(self, reason: FinishReason = FinishReason.LENGTH, request: Generate | None = None) -> None:
        request = request if request is not None else self.running[0]
        self.send(Done(request.request_id, reason, 3, 2, queue_s=0.5, total_s=2.0, ttft_s=1.0), request)
        self.running.remove(request)

    def fail(self, code: ErrorCode, message: str = "said the replica") -> None:
        self.send(Error(code, message, self.running[0].request_id))
        del self.running[0]

    def die(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def come_back(self) -> None:
        self.running.clear()
        self._listener = RpcListener(self.folder)


class RawClient:
    """A client that reads only when it is told to."""

    def __init__(self, address: str, **options: int) -> None:
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        for name, value in options.items():
            self._dealer.setsockopt(getattr(zmq, name), value)
        self._dealer.connect(address)
        self.events: list[Event] = []

    def send(self, message: Request) -> None:
        self._dealer.send(encode(message))

    def generate(self, request_id: str, prompt: str = "x", **fields: object) -> None:
        self.send(Generate(request_id, prompt, **fields))  # type: ignore[arg-type]

    def read(self) -> list[Event]:
        """All events so far."""
        while True:
            try:
                self.events.append(decode_event(self._dealer.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return self.events

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.read() if isinstance(event, kind)]

    def close(self) -> None:
        self._dealer.close()
        self._context.term()


class World:
    """Everything, on a clock that the test can push forward."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        router_folder = folder / "router"
        router_folder.mkdir(mode=0o700)
        self.launcher, theirs = socket_pair()
        self._theirs: socket.socket = theirs
        self.skipped_s = 0.0
        listener = RpcListener(router_folder)
        self.address = socket_address(router_folder)
        self.router = Router("fleet", listener, self.address, theirs, drain_s=30.0, clock=self.now_s)
        self.replicas: dict[str, FakeReplica] = {}
        self.orders: dict[str, ReplicaOrder] = {}
        self._clients: list[RawClient] = []
        self._report: FleetReport | None = None
        self.exit_code: int | None = None

    def now_s(self) -> float:
        return time.monotonic() + self.skipped_s

    def add(self, name: str, generation: int = 0) -> FakeReplica:
        if name not in self.replicas:
            self.replicas[name] = FakeReplica(self.folder / name, name)
        self.orders[name] = ReplicaOrder(name, generation, Access(socket_address(self.folder / name)))
        self.order()
        return self.replicas[name]

    def order(self, *, is_draining: bool = False) -> None:
        self.launcher.send(FleetOrder(tuple(self.orders.values()), is_draining).to_bytes())

    def client(self, **options: int) -> RawClient:
        self._clients.append(RawClient(self.address, **options))
        return self._clients[-1]

    def report(self) -> FleetReport | None:
        packet = latest_packet(self.launcher)
        if packet is not None:
            self._report = FleetReport.from_bytes(packet)
        return self._report

    def states(self) -> dict[str, str]:
        report = self.report()
        return {replica.name: replica.state for replica in report.replicas} if report is not None else {}

    def turn(self) -> None:
        self.router.turn(0.002)
        for replica in self.replicas.values():
            replica.turn()

    def until(self, condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"the condition did not come true; replicas: {self.states()}"
            self.turn()

    def skip(self, seconds: float) -> None:
        """Push the clock forward, slowly enough for replicas to be asked how they are."""
        until_s = self.skipped_s + seconds
        while self.skipped_s < until_s:
            self.skipped_s = min(until_s, self.skipped_s + 1.0)
            asked = {name: replica.num_asked for name, replica in self.replicas.items() if not replica.is_silent}
            self.until(lambda asked=asked: all(self.replicas[name].num_asked > num for name, num in asked.items()))  # type: ignore[misc]
            for _ in range(3):
                self.turn()

    def settle(self) -> None:
        """Long enough for everything that is under way to arrive: a message that is answered comes after those before it."""
        probe = self.client()
        for _ in range(2):
            num_reports = len(probe.of(StatusReport))
            probe.send(Status())
            self.until(lambda seen=num_reports: len(probe.of(StatusReport)) > seen)  # type: ignore[misc]
            beats = self.now_s() + 0.02
            self.until(lambda beats=beats: self.now_s() > beats)  # type: ignore[misc]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for replica in self.replicas.values():
            replica.die()
        self.router.close()
        self.launcher.close()
        self._theirs.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def pair(world: World) -> tuple[FakeReplica, FakeReplica]:
    """Two replicas that are ready."""
    replicas = world.add("r0"), world.add("r1")
    world.until(lambda: world.states() == {"r0": "ready", "r1": "ready"})
    return replicas
