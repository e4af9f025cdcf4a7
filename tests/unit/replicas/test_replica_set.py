"""Replicas die, are started again, restart one by one and go, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kog_dist.errors import LaunchError
from kog_dist.launch.outcome import Outcome
from kog_dist.launch.replicas.places import Replica
from kog_dist.launch.replicas.replica_set import STOP_S, ReplicaPhase, ReplicaSet
from kog_dist.launch.restarts import MAX_RESTARTS, WINDOW_S
from kog_dist.router.orders import FleetReport, ReplicaReport
from kog_dist.rpc.transport import Access


class FakeReplica:
    def __init__(self, name: str, generation: int) -> None:
        self.name, self.generation = name, generation
        self.outcome: Outcome | None = None
        self.access: Access | None = Access(f"ipc:///{name}")
        self.doing = "starting"
        self.stops: list[bool] = []
        self.is_closed = False

    def poll(self) -> list[str]:
        return []

    def wake_fds(self) -> list[int]:
        return []

    def begin_stop(self, *, drain: bool) -> None:
        self.stops.append(drain)

    def close(self) -> None:
        self.is_closed = True

    def die(self, sentence: str = "rank 0 was killed", exit_code: int = 4) -> None:
        self.outcome = Outcome(exit_code, "died", sentence)


class World:
    """A replica set, the replicas it has started, and a router that sees them all as ready."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self.started: list[FakeReplica] = []
        self.cannot_start = False
        self.busy: set[str] = set()
        self.loading: set[str] = set()
        self.set = ReplicaSet(self._start, self._say, lambda: self.now_s)

    def _start(self, name: str, generation: int) -> Replica:
        if self.cannot_start:
            raise LaunchError("no memory")
        self.started.append(FakeReplica(name, generation))
        return self.started[-1]

    def _say(self, text: str, *, error: bool = False) -> None:
        self.said.append(text)

    def report(self) -> FleetReport:
        replicas = tuple(
            ReplicaReport(
                order.name, order.generation, "loading" if order.name in self.loading else "ready", "",
                int(order.name in self.busy), order.is_retiring,
            )
            for order in self.set.orders()
        )  # fmt: skip
        return FleetReport(replicas, 0, False, "ipc:///router")

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.set.look(self.report())

    def phases(self) -> dict[str, tuple[ReplicaPhase, int]]:
        return {slot.name: (slot.phase, slot.generation) for slot in self.set.slots.values()}

    def of(self, name: str) -> FakeReplica:
        return next(replica for replica in reversed(self.started) if replica.name == name)


@pytest.fixture
def world() -> World:
    """Two replicas that serve."""
    made = World()
    made.set.grow(2)
    made.look()
    made.set.is_announced = True
    assert made.phases() == {"r0": (ReplicaPhase.SERVING, 1), "r1": (ReplicaPhase.SERVING, 1)}
    assert made.said == []
    return made


def retiring(world: World) -> list[str]:
    return [order.name for order in world.set.orders() if order.is_retiring]


def generations(replicas: Iterable[FakeReplica]) -> list[tuple[str, int]]:
    return [(replica.name, replica.generation) for replica in replicas]


def test_dead_replica_is_started_again_as_a_new_generation(world: World) -> None:
    world.of("r1").die()
    world.look()
    assert world.phases()["r1"] == (ReplicaPhase.STARTING, 2)
    assert world.started[1].is_closed
    assert world.said == ["replica r1: rank 0 was killed; starting generation 2"]
    world.now_s = 2.0
    world.look()
    assert world.phases() == {"r0": (ReplicaPhase.SERVING, 1), "r1": (ReplicaPhase.SERVING, 2)}
    assert world.said[1:] == ["replica r1 is ready, generation 2, after 2.0 s"]


def test_replica_that_dies_too_often_stays_down(world: World) -> None:
    for _ in range(MAX_RESTARTS + 1):
        world.of("r1").die()
        world.look(2)
    assert world.phases()["r1"] == (ReplicaPhase.DOWN, MAX_RESTARTS + 1)
    assert world.said[-1] == "replica r1: rank 0 was killed; it stays down after 3 restarts in 10 min"
    assert [order.name for order in world.set.orders()] == ["r0"]
    assert not world.set.is_lost()
    for _ in range(MAX_RESTARTS + 1):
        world.of("r0").die()
        world.look(2)
    assert world.set.is_lost()


def test_restarts_long_ago_do_not_count(world: World) -> None:
    for _ in range(3 * MAX_RESTARTS):
        world.now_s += WINDOW_S / MAX_RESTARTS + 1
        world.of("r1").die()
        world.look(2)
    assert world.phases()["r1"] == (ReplicaPhase.SERVING, 3 * MAX_RESTARTS + 1)


def test_start_that_fails_counts_as_a_death(world: World) -> None:
    world.cannot_start = True
    world.of("r1").die()
    world.look()
    assert world.phases()["r1"][0] is ReplicaPhase.DOWN
    assert world.said[-1] == "replica r1: no memory; it stays down after 3 restarts in 10 min"


def test_first_start_that_fails_is_a_failure_of_the_run() -> None:
    world = World()
    world.set.grow(2)
    world.loading = {"r0"}
    world.of("r1").die("the checkpoint is damaged", exit_code=3)
    world.look()
    assert world.set.failure is not None
    assert (world.set.failure.exit_code, world.set.failure.sentence) == (
        3, "replica r1 could not start: the checkpoint is damaged",
    )  # fmt: skip


def test_rolling_restart_takes_one_replica_at_a_time(world: World) -> None:
    world.busy = {"r0"}
    assert world.set.begin_roll()
    assert not world.set.begin_roll(), "one at a time"
    world.look(3)
    assert retiring(world) == ["r0"]
    assert world.of("r0").stops == [], "it has not finished yet"
    world.busy = set()
    world.look()
    assert world.of("r0").stops == [True]
    world.loading = {"r0"}
    world.of("r0").die("", exit_code=0)
    world.look(3)
    assert world.phases() == {"r0": (ReplicaPhase.STARTING, 2), "r1": (ReplicaPhase.SERVING, 1)}
    assert retiring(world) == [], "r1 serves until r0 does again"
    world.loading = set()
    world.look(3)
    assert retiring(world) == ["r1"]
    world.of("r1").die("", exit_code=0)
    world.look(3)
    assert world.phases() == {"r0": (ReplicaPhase.SERVING, 2), "r1": (ReplicaPhase.SERVING, 2)}
    assert world.set.is_settled
    assert generations(world.started) == [("r0", 1), ("r1", 1), ("r0", 2), ("r1", 2)]


def test_replica_that_does_not_stop_is_killed(world: World) -> None:
    world.set.begin_roll()
    world.look(3)
    assert world.of("r0").stops == [True]
    world.now_s += STOP_S + 0.1
    world.look()
    assert world.started[0].is_closed
    assert world.phases()["r0"] == (ReplicaPhase.STARTING, 2)


def test_roll_ends_when_a_new_generation_does_not_come_up(world: World) -> None:
    world.set.begin_roll()
    world.look(3)
    world.loading = {"r0"}
    world.of("r0").die("", exit_code=0)
    for _ in range(MAX_RESTARTS + 1):
        world.look()
        world.of("r0").die("bad configuration", exit_code=3)
    world.look(5)
    assert world.phases()["r0"][0] is ReplicaPhase.DOWN
    assert world.phases()["r1"] == (ReplicaPhase.SERVING, 1), "what serves is left alone"
    assert world.set.is_settled


def test_shrinking_lets_the_newest_finish(world: World) -> None:
    world.busy = {"r1"}
    world.set.shrink()
    world.look(3)
    assert (retiring(world), world.of("r1").stops) == (["r1"], [])
    world.busy = set()
    world.look()
    world.of("r1").die("", exit_code=0)
    world.look()
    assert world.phases() == {"r0": (ReplicaPhase.SERVING, 1)}
    world.set.grow()
    assert world.phases()["r1"] == (ReplicaPhase.STARTING, 1)


def test_replica_that_dies_while_it_retires_for_good_is_gone(world: World) -> None:
    world.busy = {"r1"}
    world.set.shrink()
    world.look()
    world.of("r1").die()
    world.look()
    assert world.phases() == {"r0": (ReplicaPhase.SERVING, 1)}


def test_replica_that_dies_while_it_retires_for_a_restart_is_started_again(world: World) -> None:
    world.busy = {"r0"}
    world.set.begin_roll()
    world.look()
    world.of("r0").die()
    world.look()
    assert world.phases()["r0"] == (ReplicaPhase.STARTING, 2)


def test_everything_stops(world: World) -> None:
    world.set.begin_stop(drain=False)
    assert [replica.stops for replica in world.started] == [[False], [False]]
    assert not world.set.ended()
    for replica in world.started:
        replica.die("", exit_code=143)
    assert world.set.ended()
    world.set.close()
    assert all(replica.is_closed for replica in world.started)
