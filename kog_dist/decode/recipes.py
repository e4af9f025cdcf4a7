"""How each kind of mixer and FFN is computed: its stages in order, and what a rank keeps meanwhile.

Products, steps, what steps may look like, and the interpreter's memory are made of recipes; here alone it is asked of which kind
a layer is, and whether lanes share a stream. `definition` knows nothing of them: it says by itself what values must be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from kog_dist.decode.steps import NONE, Kind, Phase, Site, Value
from kog_dist.model.layers import AttentionMixer, Experts, Ffn
from kog_dist.model.spec import ModelSpec

Shape = tuple[int, ...]


class Stage(NamedTuple):
    """One phase of a sublayer: each lane's, or once for the rank.

    `num_rows`, `num_columns`: of the matrix that it multiplies with, a lane's if it is each lane's; no rows: none, and then it
    runs with the next stage that has one.
    `together`: rows that have one owner wherever rows are divided: those that rotate together, gate and up of a column; and as
    words of thread blocks carry two values, two of what is written.
    `tensors`: of which the matrix is made, by their names within a layer (`layout`) without `.weight`; none of experts, each of
    which has some.
    `compared_in`: the mailbox in which ranks may compare what it writes, which must be alike on all.
    """

    phase: Phase
    reads: tuple[Kind, ...]
    writes: tuple[Kind, ...]
    num_rows: int = 0
    num_columns: int = 0
    together: int = 1
    tensors: tuple[str, ...] = ()
    is_by_lane: bool = True
    compared_in: str = ""


class ByPosition(NamedTuple):
    """What a mixer keeps of each position for the tokens to come: keys and values (heads, values of a head) of a lane."""

    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Recipe:
    """How a sublayer goes from the stream to its partial outputs. `shapes`: of what its stages write on the way, a lane's or the
    rank's.
    """

    site: Site
    stages: tuple[Stage, ...]
    shapes: Mapping[Kind, Shape]
    has_one_stream: bool
    state: ByPosition | None = None

    @cached_property
    def of_rank(self) -> set[Kind]:
        """Kinds that stages write once for the rank."""
        return {kind for stage in self.stages if not stage.is_by_lane for kind in stage.writes}

    def value(self, kind: Kind, layer: int, lane: int) -> Value:
        """What a stage reads or writes of a layer, in a step of a lane or of the rank."""
        if kind is Kind.STREAM:
            return Value(kind, 2 * layer + self.site, NONE if self.has_one_stream else lane)
        if kind is Kind.PARTIAL:
            return Value(kind, layer, lane, self.site)
        return Value(kind, layer, NONE if kind in self.of_rank else lane)

    def stage(self, phase: Phase) -> Stage | None:
        """The stage of a phase."""
        return next((stage for stage in self.stages if stage.phase is phase), None)

    def up_to(self, phase: Phase) -> tuple[Stage, ...]:
        """The stage of a phase with a matrix, and those in front of it that run with it."""
        stages = list(self.stages)
        last = [stage.phase for stage in stages].index(phase)
        first = last
        while first > 0 and not stages[first - 1].num_rows:
            first -= 1
        return tuple(stages[first : last + 1])

    def in_front(self, phase: Phase) -> tuple[Stage, ...]:
        """Stages of the rank with a matrix that stand between a lane's stage and the lane's one with a matrix before it."""
        found: list[Stage] = []
        for stage in self.stages:
            if stage.phase is phase:
                break
            if stage.num_rows:
                found = [] if stage.is_by_lane else [*found, stage]
        return tuple(found)

    @property
    def lane_ops(self) -> tuple[Phase, ...]:
        """The phases in which each lane multiplies with a matrix."""
        return tuple(stage.phase for stage in self.stages if stage.num_rows and stage.is_by_lane)

    def writes(self, phase: Phase, layer: int, lane: int) -> tuple[Value, ...]:
        """What a step of a phase writes."""
        stage = self.stage(phase)
        return () if stage is None else tuple(self.value(kind, layer, lane) for kind in stage.writes)


def _attention(spec: ModelSpec, mixer: AttentionMixer) -> Recipe:
    lanes, d = spec.num_lanes, spec.hidden_size
    heads = (mixer.num_heads // lanes, mixer.head_dim)
    of_qkv = ("attention.wq", "attention.wk", "attention.wv")
    stages = (
        Stage(Phase.QKV, (Kind.STREAM,), (Kind.QUERY, Kind.CACHE), mixer.num_rows // lanes, d, 2, of_qkv),
        Stage(Phase.ATTEND, (Kind.QUERY, Kind.CACHE), (Kind.MIXED,)),
        Stage(Phase.OUT, (Kind.MIXED,), (Kind.PARTIAL,), d, heads[0] * heads[1], 2, ("attention.wo",)),
    )
    shapes = {Kind.QUERY: heads, Kind.MIXED: heads}
    state = ByPosition(mixer.num_kv_heads // lanes, mixer.head_dim)
    return Recipe(Site.ATTENTION, stages, shapes, spec.has_one_stream, state)


def _ffn(spec: ModelSpec, ffn: Ffn) -> Recipe:
    columns, d = ffn.width // spec.num_lanes, spec.hidden_size
    stages = (
        Stage(Phase.GATE_UP, (Kind.STREAM,), (Kind.ACTIVATION,), 2 * columns, d, 4, ("feed_forward.w1", "feed_forward.w3")),
        Stage(Phase.DOWN, (Kind.ACTIVATION,), (Kind.PARTIAL,), d, columns, 2, ("feed_forward.w2",)),
    )
    return Recipe(Site.MLP, stages, {Kind.ACTIVATION: (columns,)}, spec.has_one_stream)


def _experts(spec: ModelSpec, experts: Experts) -> Recipe:
    columns, d, choice = experts.width // spec.num_lanes, spec.hidden_size, experts.choice
    logits, chosen = Kind.ROUTER_LOGITS, Kind.CHOICE
    stages = (
        Stage(Phase.ROUTE, (Kind.STREAM,), (logits,), choice.num_experts, d, is_by_lane=False),
        Stage(Phase.SELECT, (logits,), (chosen,), is_by_lane=False, compared_in="experts"),
        Stage(Phase.GATE_UP, (Kind.STREAM, chosen), (Kind.ACTIVATION,), 2 * columns, d, 4),
        Stage(Phase.DOWN, (Kind.ACTIVATION, chosen), (Kind.PARTIAL,), d, choice.per_token * columns, 2),
    )
    shapes: dict[Kind, Shape] = {
        logits: (choice.num_experts,), chosen: (2, choice.per_token), Kind.ACTIVATION: (choice.per_token, columns),
    }  # fmt: skip
    return Recipe(Site.MLP, stages, shapes, spec.has_one_stream)


_RECIPES: dict[type, Callable[[ModelSpec, Any], Recipe]] = {AttentionMixer: _attention, Ffn: _ffn, Experts: _experts}


@lru_cache(maxsize=64)
def recipes(spec: ModelSpec) -> tuple[tuple[Recipe, Recipe], ...]:
    """Of each layer: that of its mixer, that of its FFN. Layers of one kind share them."""
    made = {kind: _RECIPES[type(kind)](spec, kind) for layer in spec.layers for kind in (layer.mixer, layer.ffn)}
    return tuple((made[layer.mixer], made[layer.ffn]) for layer in spec.layers)


def all_recipes(spec: ModelSpec) -> list[Recipe]:
    """Each once."""
    return list({id(recipe): recipe for layer in recipes(spec) for recipe in layer}.values())


def matrix_stages(spec: ModelSpec) -> dict[Phase, Stage]:
    """The stages with a matrix that is a lane's own, which those of experts are not."""
    return {stage.phase: stage for recipe in all_recipes(spec) for stage in recipe.stages if stage.tensors}


def recipe_of(spec: ModelSpec, layer: int, phase: Phase) -> Recipe | None:
    """The recipe that has a phase in a layer; None: the layer has no such phase, or the model no such layer."""
    if not 0 <= layer < spec.num_layers:
        return None
    return next((recipe for recipe in recipes(spec)[layer] if recipe.stage(phase) is not None), None)


def stream_lanes(spec: ModelSpec, lanes: tuple[int, ...]) -> tuple[int, ...]:
    """The lanes of a rank that have a residual stream of their own; NONE for the one that all share."""
    return (NONE,) if spec.has_one_stream else lanes
