"""Steps that run as one call, and the arrays that they work on.

Neighbouring steps of one phase that differ only in the lane become one call, so that exactly rounded operations run over all of
them at once; what depends on the order of additions stays one call per lane (see `lane_math`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kog_dist.decode.cpu.memory import Memory
from kog_dist.decode.plan.recipes import LASTING
from kog_dist.decode.plan.steps import NONE, Kind, Phase, Step, Value, When
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive steps that run as one call: one phase and layer, neighbouring lanes."""

    steps: tuple[Step, ...]

    @property
    def phase(self) -> Phase:
        """The phase of all steps."""
        return self.steps[0].phase

    @property
    def when(self) -> When:
        """When all steps run."""
        return self.steps[0].when


def group_steps(steps: Iterable[Step]) -> list[Group]:
    """Join neighbouring steps that differ only in the lane, which grows by one."""
    groups: list[list[Step]] = []
    for step in steps:
        last = groups[-1][-1] if groups else None
        joins = last is not None and last.lane != NONE and step.lane == last.lane + 1 and _pattern(step) == _pattern(last)
        if joins:
            groups[-1].append(step)
        else:
            groups.append([step])
    return [Group(tuple(group)) for group in groups]


def _pattern(step: Step) -> Step:
    """A step with its lane taken out of its values."""

    def without_lane(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(value._replace(lane=-2) if value.lane == step.lane else value for value in values)

    return step._replace(lane=0, reads=without_lane(step.reads), writes=without_lane(step.writes))


class Operands(NamedTuple):
    """Arrays that a group reads and writes, in the order of its values; without caches, states and tokens, which are none."""

    reads: tuple[Array, ...]
    writes: tuple[Array, ...]


class Finder:
    """Finds the arrays of a group in the memory of a rank, for passes of `num_tokens` tokens.

    `num_chosen`: of how many there are logits, in passes that choose. Raises PlanError if the steps are not what their phase
    allows.
    """

    def __init__(self, rank: int, memory: Memory, num_tokens: int, num_chosen: int) -> None:
        self.rank, self.memory, self.num_tokens, self.num_chosen = rank, memory, num_tokens, num_chosen

    def own(self, group: Group) -> slice:
        """Own lanes of a group as rows of the arrays in memory."""
        first = self.memory.local(group.steps[0].lane)
        return slice(first, first + len(group.steps))

    def of(self, group: Group, reads: Sequence[Kind], writes: Sequence[Kind]) -> Operands:
        """Arrays of a group's values: (lanes, tokens, ...), or (tokens, ...) of values without a lane. Checks their kinds."""
        step = group.steps[0]
        if [v.kind for v in step.reads] != list(reads) or [v.kind for v in step.writes] != list(writes):
            raise PlanError(f"rank {self.rank}: step {step} does not read {list(reads)} and write {list(writes)}")

        def array(value: Value) -> Array:
            if value.lane == NONE:
                return self.memory.rows(value, self.num_tokens)
            if value.lane != step.lane:
                raise PlanError(f"rank {self.rank}: step {step} of lane {step.lane} uses {value} of another lane")
            return self.memory.rows(value, self.num_tokens)[self.own(group)]

        return Operands(
            tuple(array(v) for v in step.reads if v.kind not in LASTING),
            tuple(array(v) for v in step.writes if v.kind not in (*LASTING, Kind.TOKEN)),
        )

    def own_rows(self, step: Step, kind: Kind, num_tokens: int | None = None) -> Array:
        """The array (own lanes, tokens, ...) of a kind of which the step must read each own lane's, in order."""
        if [(v.kind, v.lane) for v in step.reads] != [(kind, lane) for lane in self.memory.lanes]:
            raise PlanError(f"rank {self.rank}: step {step} does not read {kind.name} of each lane of {self.memory.lanes}")
        return self.memory.rows(step.reads[0], num_tokens or self.num_tokens)
