"""Executes the plan of one rank in NumPy: the engine of CPU ranks, and the definition of what the kernel must compute.

The plan is compiled once into a flat list of calls; a token runs through it. Before each call the values that it reads are
compared with what the plan says they must be (value and token): a wrong plan ends in PlanError, never in a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kog_dist.decode.calls import CallBuilder, Cursor, Group, group_steps
from kog_dist.decode.memory import Memory
from kog_dist.decode.plan import Plan
from kog_dist.decode.sampling import Sampling
from kog_dist.decode.steps import Phase, Value, When
from kog_dist.errors import ConfigError, PlanError
from kog_dist.model.weights import RankWeights

KV_DTYPES = ("float32", "float16", "bfloat16")


class Exchange(Protocol):
    """What the interpreter needs of a communicator; `collectives.api.Communicator` has it."""

    rank: int
    world_size: int

    def publish(self, mailbox: str, slot: int, epoch: int, values: NDArray[np.float32]) -> None:
        """Push this rank's row to every peer."""

    def collect(self, mailbox: str, slot: int, epoch: int, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Wait for every rank's row: (world_size, length)."""

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: NDArray[np.float32]) -> NDArray[np.float32]:
        """Wait for every rank's row; their tree sum (length,)."""


@dataclass
class StepOutput:
    """Result of one token. `token_id` is -1 for a prompt token, and undefined if `finite` is false.

    `logits` (vocab,) are set on rank 0 when they were gathered. `finite` (equal on all ranks) says that no logit was NaN or
    infinite. `stopped` (equal on all ranks): rank 0 was called with `stop`; all ranks leave the request after the same token.
    """

    token_id: int
    logits: NDArray[Any] | None
    finite: bool
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """Consecutive steps of one phase, run as one. Cells and identities of what they read and write."""

    phase: Phase
    values: tuple[Value, ...]
    cells: tuple[int, ...]
    idents: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]
    run: Callable[[], None]

    def without_reads(self) -> _Call:
        """The same call, whose inputs are not looked at."""
        return replace(self, values=(), cells=(), idents=())

    def gate(self) -> tuple[Callable[[list[int]], Any], Any, Callable[[], None], tuple[tuple[int, int], ...]]:
        """What the loop over calls needs; `getter(tags) == wanted` checks all reads of a call in one go."""
        if not self.cells:
            return (lambda tags: None), None, self.run, self.writes
        wanted = self.idents if len(self.idents) > 1 else self.idents[0]
        return itemgetter(*self.cells), wanted, self.run, self.writes


class Interpreter:
    """One rank's engine. `step` is collective: every rank calls it with the same arguments.

    With world size 1 `comm` may be None. float64 is for checks and needs world size 1, since mailboxes carry float32.
    Raises PlanError if the plan is not fit to run, ConfigError if plan, weights and options do not go together.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        weights: RankWeights,
        comm: Exchange | None,
        *,
        dtype: DTypeLike = np.float32,
        kv_dtype: str = "float32",
    ) -> None:
        self._check_options(plan, rank, comm, np.dtype(dtype), kv_dtype)
        self.plan, self.rank = plan, rank
        part = plan.ranks[rank]
        self.memory = Memory(plan.spec, part.lanes, np.dtype(dtype))
        self._cursor = Cursor(plan, len(part.lanes))
        builder = CallBuilder(plan, rank, weights, comm, self.memory, self._cursor, kv_dtype)
        self._cells: dict[tuple[int, ...], int] = {}
        self._idents: dict[Value, int] = {}
        groups = group_steps(part.steps)
        calls = [(group.when, self._compile(builder, group)) for group in groups]
        self._calls = {when: [call for at, call in calls if at <= when] for when in When}
        # A prompt token has no logits for SAMPLE to read; it exchanges empty candidates all the same.
        self._calls[When.ALWAYS] = [
            call.without_reads() if call.phase is Phase.SAMPLE else call for call in self._calls[When.ALWAYS]
        ]
        self._programs = {when: [call.gate() for call in calls] for when, calls in self._calls.items()}
        self._tags: list[int] = []  # by cell: identity of the value that it holds; 0 = none of this token

    @staticmethod
    def _check_options(plan: Plan, rank: int, comm: Exchange | None, dtype: np.dtype[Any], kv_dtype: str) -> None:
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not supported; use one of {', '.join(KV_DTYPES)}")
        if dtype not in (np.float32, np.float64):
            raise ConfigError(f"the interpreter computes in float32 or float64, not {dtype}")
        if plan.world_size > 1:
            if dtype != np.float32:
                raise ConfigError(
                    f"{dtype} needs world size 1: mailboxes carry float32, and the plan has {plan.world_size} ranks"
                )
            if comm is None or (comm.rank, comm.world_size) != (rank, plan.world_size):
                found = "none" if comm is None else f"that of rank {comm.rank} of {comm.world_size}"
                raise PlanError(f"rank {rank} of {plan.world_size} needs its own communicator, got {found}")

    def _compile(self, builder: CallBuilder, group: Group) -> _Call:
        def cell(value: Value) -> int:
            return self._cells.setdefault(self.plan.place(value), len(self._cells))

        def ident(value: Value) -> int:
            return self._idents.setdefault(value, len(self._idents) + 1)

        reads = [value for step in group.steps for value in step.reads]
        return _Call(
            phase=group.phase,
            values=tuple(reads),
            cells=tuple(map(cell, reads)),
            idents=tuple(map(ident, reads)),
            writes=tuple((cell(value), ident(value)) for step in group.steps for value in step.writes),
            run=builder.build(group),
        )

    @property
    def num_positions(self) -> int:
        """Positions that the KV cache holds."""
        return self._cursor.num_positions

    def reset(self) -> None:
        """Forget the KV cache. Epochs go on: every rank must have run the same number of steps."""
        self._cursor.num_positions = 0

    def step(
        self, token_id: int, position: int, sampling: Sampling | None, gather_logits: bool = False, *, stop: bool = False
    ) -> StepOutput:
        """Run one token through the model and choose its successor; `sampling` None = a prompt token, which has none.

        `stop`, which only rank 0 may decide, travels to all ranks with this token's candidates.

        `position` may be at most the number of positions in the cache: a smaller one drops those from it on.
        Raises PlanError if a value is not what the plan says; AbortedError or DeviceError from a wait that did not end well.
        """
        cursor = self._cursor
        cursor.begin(token_id, position, sampling, stop)
        when = When.ALWAYS if sampling is None else When.GATHERED if gather_logits else When.SAMPLED
        tags = self._tags = [0] * len(self._cells)
        with np.errstate(all="ignore"):  # what overflows ends in logits that are not finite, and is reported so
            for number, (getter, wanted, run, writes) in enumerate(self._programs[when]):
                if getter(tags) != wanted:
                    raise PlanError(self._complaint(self._calls[when][number]))
                run()
                for cell, ident in writes:
                    tags[cell] = ident
        cursor.num_positions = position + 1
        logits = cursor.all_logits if when is When.GATHERED else None
        return StepOutput(cursor.next_token, logits, cursor.finite, cursor.stopped)

    def _complaint(self, call: _Call) -> str:
        held_by_cell = dict(zip(call.cells, call.values, strict=True))
        wrong = next(cell for cell, ident in zip(call.cells, call.idents, strict=True) if self._tags[cell] != ident)
        held = next((value for value, ident in self._idents.items() if ident == self._tags[wrong]), "nothing of this token")
        return (
            f"rank {self.rank}, phase {call.phase.name}, token {self._cursor.token}: the step reads {held_by_cell[wrong]}, "
            f"but its place holds {held}; the plan runs its steps in a wrong order"
        )
