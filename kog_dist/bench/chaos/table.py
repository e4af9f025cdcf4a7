"""What is promised when a process of some role is killed, stopped, terminated or paused at some point: as data."""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterator

from kog_dist.bench.engine.injection import PAUSE_S, FaultKind, Point
from kog_dist.records import dataclass

STALL_S = 1.0  # --stall-timeout
KILLED_S, STOPPED_S = 0.25, STALL_S + 0.25  # until the client has its error
CLEAN_S = 2.0  # from the end of that until nothing is left
READY_S = 2.0  # from the error until what is restarted serves again
ENGINE_READY_S = 3.0  # the same of an engine with its gateway
READY_LIMIT_S = 60.0  # after which the judge gives it up
STARTUP_S = 8.0  # --startup-timeout: a process that is stopped while it loads
DRAIN_S = 6.0  # --shutdown-timeout

_DIED, _TIMED_OUT, _CANNOT_START, _TERMINATED = 4, 5, 3, 128 + signal.SIGTERM
_RUNNING = (Point.IDLE, Point.PREFILL, Point.DECODE)


class Layout(enum.StrEnum):
    """What is started."""

    SINGLE = "single"
    REPLICAS = "replicas"


class Harm(enum.StrEnum):
    """Which clients may lose their requests."""

    NONE = "none"
    HTTP = "http"
    GRAMMAR = "grammar"  # those whose answers are constrained
    ONE = "one"  # of one replica
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Promise:
    """Who is harmed, how soon they know, and what the launcher does then: `codes` if it ends, none if it goes on.

    `may_go_on`: it depends on what has happened before, and either is right.
    """

    harm: Harm = Harm.NONE
    limit_s: float = 0.0
    codes: frozenset[int] = frozenset()
    may_go_on: bool = False
    ready_s: float = READY_S


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table."""

    layout: Layout
    role: str
    kind: FaultKind
    point: Point

    def __str__(self) -> str:
        return f"{self.layout} {self.role} {self.kind} {self.point}"

    @property
    def needs_grammar(self) -> bool:
        """Whether a request with a grammar must have run."""
        return self.role in ("grammar runner", "grammar checker")

    @property
    def answer_s(self) -> float:
        """How long a request takes at most that needs the process, from then on."""
        return READY_S + (_limit_s(self.kind) if self.kind is not FaultKind.PAUSE else PAUSE_S[1])

    @property
    def promise(self) -> Promise:
        """What is promised of it."""
        if self.kind is FaultKind.PAUSE:
            return Promise(codes=_codes(0) if self.point is Point.DRAIN else _codes())
        return _PROMISES[self.layout](self.role, self.kind, self.point)

    @property
    def ends(self) -> frozenset[str]:
        """What a client may be told whose request is lost by it: a code, over HTTP 503 before the answer begins, or nothing."""
        role = self.role.removesuffix(" of r0")
        if role == "gateway":
            return frozenset({"broken off"})
        if role == "grammar runner":
            return frozenset({"constraint_failed"})
        told = {"status 503", "rank_failed" if role.startswith("rank") else "engine_lost"}
        if self.role == "launcher":  # the gateway dies with it
            told.add("broken off")
        if self.layout is Layout.REPLICAS:  # the router may see the connection close before it reads why
            told.add("engine_lost")
        return frozenset(told)


# Children that the processes of an engine start on demand, and so are not there while it loads.
HELPERS = ("grammar runner", "grammar checker", "body process", "template process")
ROLES = {
    Layout.SINGLE: ("rank 0", "rank 1", "coordinator", "gateway", *HELPERS, "reaper", "launcher"),
    Layout.REPLICAS: ("rank 0 of r0", "coordinator of r0", "launcher of r0", "reaper of r0", "router", "gateway", "launcher"),
}
KINDS = (FaultKind.KILL, FaultKind.STOP, FaultKind.TERM, FaultKind.PAUSE)


def cells() -> Iterator[Cell]:
    """The whole table."""
    for layout, roles in ROLES.items():
        for role in roles:
            for kind in KINDS:
                for point in Point:
                    is_held_up = (role, kind) == ("launcher", FaultKind.STOP) and point in (Point.LOAD, Point.DRAIN)
                    is_there = role not in HELPERS or point is not Point.LOAD
                    if is_there and not is_held_up:  # a launcher that is stopped then goes on when it is continued
                        yield Cell(layout, role, kind, point)


def _codes(*codes: int) -> frozenset[int]:
    return frozenset(codes)


def _limit_s(kind: FaultKind) -> float:
    return STOPPED_S if kind is FaultKind.STOP else KILLED_S


def _of_launcher(kind: FaultKind, point: Point) -> Promise:
    match kind:
        case FaultKind.KILL:
            return Promise(Harm.ALL, KILLED_S, _codes(-signal.SIGKILL))
        case FaultKind.TERM if point is Point.LOAD:  # nothing runs that could be drained; the program may not have begun
            return Promise(Harm.ALL, DRAIN_S, _codes(_TERMINATED, -signal.SIGTERM))
        case FaultKind.TERM:  # asked for: a drain, and at once when it is said again
            return Promise(Harm.ALL if point is Point.DRAIN else Harm.NONE, DRAIN_S, _codes(0, _TERMINATED))
    return Promise()  # nobody needs it to decode: it is continued after a while


def _of_single(role: str, kind: FaultKind, point: Point) -> Promise:
    match role:
        case "launcher":
            return _of_launcher(kind, point)
        case "reaper" | "grammar checker" | "body process" | "template process":
            return Promise(codes=_codes(0) if point is Point.DRAIN else _codes())
        case "gateway":
            return Promise(Harm.HTTP, _limit_s(kind), _codes(0) if point is Point.DRAIN else _codes())
        case "grammar runner":
            return Promise(Harm.GRAMMAR, _limit_s(kind), _codes(0) if point is Point.DRAIN else _codes())
    if point is Point.LOAD:
        is_late = kind is FaultKind.STOP
        return Promise(Harm.ALL, STARTUP_S if is_late else KILLED_S, _codes(_TIMED_OUT if is_late else _CANNOT_START))
    if point is not Point.DRAIN:  # a service starts its engine again
        return Promise(Harm.ALL, _limit_s(kind), ready_s=ENGINE_READY_S)
    return Promise(Harm.ALL, _limit_s(kind), _codes(_TIMED_OUT if kind is FaultKind.STOP else _DIED))


def _of_replicas(role: str, kind: FaultKind, point: Point) -> Promise:
    ended = _codes(0) if point is Point.DRAIN else _codes()
    match role:
        case "launcher":
            return _of_launcher(kind, point)
        case "gateway":
            return Promise(Harm.HTTP, _limit_s(kind), ended)
        case "router":  # while it drains it is not started again: the requests cannot be finished
            return Promise(Harm.ALL, _limit_s(kind), _codes(0, _DIED, _TIMED_OUT) if ended else _codes())
        case "reaper of r0":
            return Promise(codes=ended)
        case _ if point is Point.LOAD:  # a fleet none of whose replicas has ever served does not start; else it starts again
            return Promise(Harm.ALL, STARTUP_S, _codes(_CANNOT_START, _DIED, _TIMED_OUT), may_go_on=True)
        case "launcher of r0" if kind is FaultKind.TERM:  # its own drain: what it runs may be finished
            return Promise(Harm.ONE, DRAIN_S, ended)
    return Promise(Harm.ONE, _limit_s(kind), ended)


_PROMISES = {Layout.SINGLE: _of_single, Layout.REPLICAS: _of_replicas}
