"""The replicas that a launcher keeps alive: each a slot with one generation after the other. It waits for nothing.

Whether a replica is ready, and whether it has finished, is the router's to say; that one has ended is the replica's own.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kog_dist.errors import KogError
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_RANK_DIED, Outcome
from kog_dist.launch.replicas.places import Replica, StartReplica
from kog_dist.launch.restarts import RestartBudget
from kog_dist.records import dataclass
from kog_dist.router.orders import FleetReport, ReplicaOrder, ReplicaReport

STOP_S: Final = 5.0  # for a replica with nothing to do to stop; then it is killed


class ReplicaPhase(enum.Enum):
    """What is being done with a replica."""

    STARTING = "starting"
    SERVING = "serving"
    RETIRING = "retiring"  # finishes what it has
    STOPPING = "stopping"
    DOWN = "down"  # it died too often


class Say(Protocol):
    """How the user is told (`EventLog.say`)."""

    def __call__(self, text: str, *, error: bool = False) -> None:
        """One line."""


@dataclass(slots=True)
class Slot:
    """A replica's place: its name, and the generation that has it now."""

    name: str
    restarts: RestartBudget
    generation: int = 0
    phase: ReplicaPhase = ReplicaPhase.STARTING
    replica: Replica | None = None
    since_s: float = 0.0  # of the phase
    is_restarting: bool = False  # while retiring or stopping: a new generation follows


class ReplicaSet:
    """All slots. Call `look` often; it acts on what has happened since."""

    def __init__(self, start: StartReplica, say: Say, clock: Callable[[], float]) -> None:
        self.slots: dict[str, Slot] = {}
        self.failure: Outcome | None = None  # why no replica could be started at all
        self.has_served = False
        self.is_announced = False  # the user knows that the fleet serves; from then on every new replica is news
        self._start, self._say, self._clock = start, say, clock
        self._to_roll: list[str] = []

    # ---- what is wanted ----
    def grow(self, count: int = 1) -> None:
        """Start more replicas, under the lowest free names r0, r1, ..."""
        for _ in range(count):
            name = next(f"r{i}" for i in range(len(self.slots) + 1) if f"r{i}" not in self.slots)
            self.slots[name] = Slot(name, RestartBudget(self._clock))
            self._begin(self.slots[name])

    def shrink(self) -> None:
        """Let the newest replica that serves finish and go."""
        serving = [slot for slot in self.slots.values() if slot.phase is ReplicaPhase.SERVING]
        if serving:
            self._enter(serving[-1], ReplicaPhase.RETIRING)

    def begin_roll(self) -> bool:
        """Restart all replicas, one after the other; False if that is under way."""
        if self._to_roll:
            return False
        self._to_roll = [slot.name for slot in self.slots.values() if slot.phase is not ReplicaPhase.DOWN]
        return True

    @property
    def is_settled(self) -> bool:
        """Whether no replica is starting or stopping, or about to."""
        return not self._to_roll and all(slot.phase in (ReplicaPhase.SERVING, ReplicaPhase.DOWN) for slot in self.slots.values())

    @property
    def num_serving(self) -> int:
        """Replicas that are ready."""
        return sum(slot.phase is ReplicaPhase.SERVING for slot in self.slots.values())

    def is_lost(self) -> bool:
        """Whether no replica is left that could serve again."""
        return bool(self.slots) and all(slot.phase is ReplicaPhase.DOWN for slot in self.slots.values())

    def orders(self) -> tuple[ReplicaOrder, ...]:
        """What the router shall use."""
        return tuple(
            ReplicaOrder(
                slot.name, slot.generation, slot.replica.access, slot.phase in (ReplicaPhase.RETIRING, ReplicaPhase.STOPPING)
            )
            for slot in self.slots.values()
            if slot.replica is not None and slot.replica.access is not None
        )

    # ---- what happens ----
    def look(self, report: FleetReport | None) -> None:
        """Take in how the replicas are, and go on with what was begun."""
        reported = {} if report is None else {(replica.name, replica.generation): replica for replica in report.replicas}
        for slot in list(self.slots.values()):
            self._look_at(slot, reported)
        if self._to_roll and all(slot.phase in (ReplicaPhase.SERVING, ReplicaPhase.DOWN) for slot in self.slots.values()):
            slot_or_none = self.slots.get(self._to_roll.pop(0))
            if slot_or_none is not None and slot_or_none.phase is ReplicaPhase.SERVING:
                self._enter(slot_or_none, ReplicaPhase.RETIRING, restart=True)

    def _look_at(self, slot: Slot, reported: Mapping[tuple[str, int], ReplicaReport]) -> None:
        replica = slot.replica
        if replica is None:
            return
        for line in replica.poll():
            self._say(f"replica {slot.name}: {line}")
        report = reported.get((slot.name, slot.generation))
        if replica.outcome is not None:
            self._ended(slot, replica.outcome)
        elif slot.phase is ReplicaPhase.STARTING and report is not None and report.state == "ready":
            self._serves(slot)
        elif slot.phase is ReplicaPhase.RETIRING and report is not None and report.is_retiring and not report.num_running:
            replica.begin_stop(drain=True)
            self._enter(slot, ReplicaPhase.STOPPING, restart=slot.is_restarting)
        elif slot.phase is ReplicaPhase.STOPPING and self._clock() - slot.since_s > STOP_S:
            self._ended(slot, Outcome(EXIT_RANK_DIED, "killed", f"it did not stop within {STOP_S:g} s and was killed"))

    def _serves(self, slot: Slot) -> None:
        took_s = self._clock() - slot.since_s
        if self.is_announced or slot.generation > 1:
            self._say(f"replica {slot.name} is ready, generation {slot.generation}, after {took_s:.1f} s")
        self.has_served = True
        self._enter(slot, ReplicaPhase.SERVING)

    def _ended(self, slot: Slot, outcome: Outcome) -> None:
        assert slot.replica is not None
        slot.replica.close()
        slot.replica = None
        if slot.phase in (ReplicaPhase.RETIRING, ReplicaPhase.STOPPING) and not slot.is_restarting:
            del self.slots[slot.name]
        elif slot.phase is ReplicaPhase.STOPPING:
            self._begin(slot)
        else:
            self._died(slot, outcome)

    def _died(self, slot: Slot, outcome: Outcome) -> None:
        """Start it again, unless none has ever served, or this one has died too often."""
        why = outcome.sentence or "it stopped by itself"
        if not self.has_served:
            code = EXIT_CANNOT_START if outcome.signal else outcome.exit_code or EXIT_CANNOT_START
            sentence = f"replica {slot.name} could not start: {why}"
            self.failure = Outcome(code, "startup_failed", sentence, outcome.rank, outcome.pid, outcome.signal)
            return
        if not slot.restarts.take():
            self._enter(slot, ReplicaPhase.DOWN)
            self._to_roll.clear()
            self._say(f"replica {slot.name}: {why}; it stays down after {slot.restarts}", error=True)
            return
        self._say(f"replica {slot.name}: {why}; starting generation {slot.generation + 1}", error=True)
        self._begin(slot)

    def _begin(self, slot: Slot) -> None:
        slot.generation += 1
        self._enter(slot, ReplicaPhase.STARTING)
        try:
            slot.replica = self._start(slot.name, slot.generation)
        except KogError as error:
            self._died(slot, Outcome(error.exit_code, "cannot_start", str(error)))

    def _enter(self, slot: Slot, phase: ReplicaPhase, *, restart: bool = False) -> None:
        slot.phase, slot.since_s, slot.is_restarting = phase, self._clock(), restart

    # ---- the end ----
    def begin_stop(self, *, drain: bool) -> None:
        """Tell all replicas to stop; `ended` says when they have."""
        for slot in self.slots.values():
            if slot.replica is not None:
                slot.replica.begin_stop(drain=drain)
            self._enter(slot, ReplicaPhase.STOPPING)

    def ended(self) -> bool:
        """Whether all have, in order or not."""
        for slot in self.slots.values():
            if slot.replica is not None:
                slot.replica.poll()
        return all(slot.replica is None or slot.replica.outcome is not None for slot in self.slots.values())

    def close(self) -> None:
        """Kill what is left."""
        for slot in self.slots.values():
            if slot.replica is not None:
                slot.replica.close()
                slot.replica = None
