"""How each kind of mixer and FFN is computed: its stages in order, and what a rank keeps meanwhile.

Products, steps, what steps may look like, and the interpreter's memory are made of recipes; here alone it is asked of which kind
a layer is, and whether lanes share a stream. `definition` knows nothing of them: it says by itself what values must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property, lru_cache
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple

from kog_dist.decode.plan.steps import NONE, Kind, Phase, Site, Value
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.layout import SHARED
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

Shape = tuple[int, ...]


# Of a shared expert, as `Stage.tensors`: a layer's stages have none, since chosen experts have some each.
SHARED_TENSORS = {
    Phase.GATE_UP: (f"{SHARED[1:]}w1", f"{SHARED[1:]}w3"),
    Phase.DOWN: (f"{SHARED[1:]}w2",),
}


class Stage(NamedTuple):
    """One phase of a sublayer: each lane's, or once for the rank.

    `num_rows`, `num_columns`: of the matrix that it multiplies with, a lane's if it is each lane's; no rows: none, and then it
    runs with the next stage that has one.
    `together`: rows that have one owner wherever rows are divided: those that rotate together, gate and up of a column; and as
    words of thread blocks carry two values, two of what is written.
    `tensors`: of which the matrix is made, by their names within a layer (`layout`) without `.weight`; none where each expert
    has some.
    `compared_in`: the mailbox in which ranks may compare what it writes, which must be alike on all.
    `kept_rows`: the last ones of the matrix, which have 16 bit where the others are quantised. On a GPU each of them is then the
    sum of so many rows of codes (`Coding.terms`).
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
    kept_rows: int = 0

    def coded_rows(self, terms: int) -> int:
        """Rows of the matrix if each one that is kept is `terms` of them."""
        return self.num_rows + (terms - 1) * self.kept_rows

    def coded_together(self, terms: int) -> int:
        """`together` of these."""
        return self.together * (terms if self.kept_rows else 1)


class Vectors(NamedTuple):
    """What a recipe has besides matrices: biases, norms of heads, sinks.

    `tensors`: by their names within a layer (`layout`), one behind the other in each lane if they are lanes' (`is_by_lane`), else
    one below the other. `num_values`: of all of them, a lane's if they are lanes'.
    """

    tensors: tuple[str, ...]
    num_values: int
    is_by_lane: bool = False


class ByPosition(NamedTuple):
    """What a mixer keeps of each position for the tokens to come: keys and values (heads, values of a head) of a lane."""

    num_heads: int
    head_dim: int


class Recurrent(NamedTuple):
    """What a mixer keeps of all tokens together, and changes with each: float32 arrays of a lane, zeros before the first token.

    `replay`: values of a token that are enough to change the state by that token once more.
    """

    arrays: tuple[Shape, ...]
    replay: int

    @property
    def num_bytes(self) -> int:
        """Of a lane."""
        return _FLOAT_BYTES * sum(map(prod, self.arrays))

    @property
    def replay_bytes_per_token(self) -> int:
        """Of a lane."""
        return _FLOAT_BYTES * self.replay


_FLOAT_BYTES = 4
LASTING = (Kind.CACHE, Kind.STATE)  # what a mixer keeps for the tokens to come


@dataclass(frozen=True)
class Recipe:
    """How a sublayer goes from the stream to its partial outputs. `shapes`: of what its stages write on the way, a lane's or the
    rank's. `vectors`: by the names that arrays of them have on GPUs.
    """

    site: Site
    stages: tuple[Stage, ...]
    shapes: Mapping[Kind, Shape]
    has_one_stream: bool
    state: ByPosition | Recurrent | None = None
    vectors: Mapping[str, Vectors] = field(default_factory=dict)

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

    def behind(self, phase: Phase) -> tuple[Stage, ...]:
        """The stages without a matrix that follow that of a phase, up to the next one that has one."""
        first = [stage.phase for stage in self.stages].index(phase) + 1
        return tuple(takewhile(lambda stage: not stage.num_rows, self.stages[first:]))

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
    gates = (Kind.GATE,) if mixer.gated else ()
    of_qkv = ("attention.wq", "attention.wk", "attention.wv", *("attention.wgate" for _ in gates))
    made = (Kind.QUERY, Kind.CACHE, *gates)
    stages = (
        Stage(Phase.QKV, (Kind.STREAM,), made, mixer.lane_rows(lanes), d, 2, of_qkv),
        Stage(Phase.ATTEND, made, (Kind.MIXED,)),
        Stage(Phase.OUT, (Kind.MIXED,), (Kind.PARTIAL,), d, heads[0] * heads[1], 2, ("attention.wo",)),
    )
    shapes = dict.fromkeys((Kind.QUERY, Kind.MIXED, *gates), heads)
    state = ByPosition(mixer.lane_kv_heads(lanes), mixer.head_dim)
    vectors = dict[str, Vectors]()
    if mixer.qkv_bias:
        vectors["qkv_bias"] = Vectors(tuple(f"{name}.bias" for name in of_qkv), mixer.lane_rows(lanes), is_by_lane=True)
    if mixer.out_bias:
        vectors["out_bias"] = Vectors(("attention.wo.bias",), d)
    if mixer.sinks:
        vectors["sinks"] = Vectors(("attention.sinks",), heads[0], is_by_lane=True)
    if mixer.qk_norm:
        vectors["head_norms"] = Vectors(("attention.q_norm.weight", "attention.k_norm.weight"), 2 * mixer.head_dim)
    return Recipe(Site.ATTENTION, stages, shapes, spec.has_one_stream, state, vectors)


def _delta(spec: ModelSpec, net: DeltaNet) -> Recipe:
    lanes, d = spec.num_lanes, spec.hidden_size
    rows, heads = net.num_rows // lanes, net.num_value_heads // lanes
    tensors = tuple(f"delta.{name}" for name in ("wq", "wk", "wv", "wz", "wa", "wb"))
    stages = (
        Stage(Phase.DELTA_IN, (Kind.STREAM,), (Kind.DELTA_INPUT,), rows, d, 2, tensors, kept_rows=2 * heads),
        Stage(Phase.DELTA, (Kind.DELTA_INPUT,), (Kind.STATE, Kind.MIXED)),
        Stage(Phase.OUT, (Kind.MIXED,), (Kind.PARTIAL,), d, heads * net.value_dim, 2, ("delta.wo",)),
    )
    shapes: dict[Kind, Shape] = {Kind.DELTA_INPUT: (rows,), Kind.MIXED: (heads, net.value_dim)}
    channels = net.channels // lanes
    state = Recurrent(((heads, net.key_dim, net.value_dim), (net.conv_width - 1, channels)), channels + 2 * heads)
    vectors = {
        "delta_taps": Vectors(tuple(f"delta.conv_{name}" for name in "qkv"), channels * net.conv_width, is_by_lane=True),
        "delta_factors": Vectors(("delta.decay", "delta.dt_bias"), 2 * heads, is_by_lane=True),
        "delta_norm": Vectors(("delta.norm.weight",), net.value_dim),
    }
    return Recipe(Site.ATTENTION, stages, shapes, spec.has_one_stream, state, vectors)


def _ffn(spec: ModelSpec, ffn: Ffn) -> Recipe:
    columns, d = ffn.width // spec.num_lanes, spec.hidden_size
    stages = (
        Stage(Phase.GATE_UP, (Kind.STREAM,), (Kind.ACTIVATION,), 2 * columns, d, 4, ("feed_forward.w1", "feed_forward.w3")),
        Stage(Phase.DOWN, (Kind.ACTIVATION,), (Kind.PARTIAL,), d, columns, 2, ("feed_forward.w2",)),
    )
    return Recipe(Site.MLP, stages, {Kind.ACTIVATION: (columns,)}, spec.has_one_stream)


def _experts(spec: ModelSpec, experts: Experts) -> Recipe:
    columns, d, choice = experts.width // spec.num_lanes, spec.hidden_size, experts.choice
    logits, chosen, shared = Kind.ROUTER_LOGITS, Kind.CHOICE, experts.shared_width // spec.num_lanes
    made = (Kind.ACTIVATION, Kind.SHARED_ACTIVATION) if shared else (Kind.ACTIVATION,)
    width = choice.per_token * columns + shared
    of_router = ("feed_forward.router", *(("feed_forward.shared_gate",) if shared else ()))
    router_bias = Vectors(("feed_forward.router.bias",), choice.num_experts)
    stages = (
        Stage(Phase.ROUTE, (Kind.STREAM,), (logits,), experts.num_logits, d, tensors=of_router, is_by_lane=False),
        Stage(Phase.SELECT, (logits,), (chosen,), is_by_lane=False, compared_in="experts"),
        Stage(Phase.GATE_UP, (Kind.STREAM, chosen), made, 2 * (columns + shared), d, 4),
        Stage(Phase.DOWN, (*made, chosen), (Kind.PARTIAL,), d, width, 2),
    )
    shapes: dict[Kind, Shape] = {
        logits: (experts.num_logits,),
        chosen: (2, experts.num_slots),
        Kind.ACTIVATION: (choice.per_token, columns),
    }
    shapes |= {Kind.SHARED_ACTIVATION: (shared,)} if shared else {}
    return Recipe(
        Site.MLP, stages, shapes, spec.has_one_stream, vectors={"router_bias": router_bias} if choice.router_bias else {}
    )


RECIPES: dict[type, Callable[[ModelSpec, Any], Recipe]] = {
    AttentionMixer: _attention,
    DeltaNet: _delta,
    Ffn: _ffn,
    Experts: _experts,
}


@lru_cache(maxsize=64)
def recipes(spec: ModelSpec) -> tuple[tuple[Recipe, Recipe], ...]:
    """Of each layer: that of its mixer, that of its FFN. Layers of one kind share them."""
    made = {kind: RECIPES[type(kind)](spec, kind) for layer in spec.layers for kind in (layer.mixer, layer.ffn)}
    return tuple((made[layer.mixer], made[layer.ffn]) for layer in spec.layers)


@lru_cache(maxsize=64)
def all_recipes(spec: ModelSpec) -> tuple[Recipe, ...]:
    """Each once."""
    return tuple({id(recipe): recipe for layer in recipes(spec) for recipe in layer}.values())


def matrix_stages(spec: ModelSpec) -> dict[Phase, Stage]:
    """The stages with a matrix that is a lane's own, which those of experts are not."""
    return {stage.phase: stage for stage in _stages_with_tensors(spec) if stage.is_by_lane}


def layer_matrix_stages(spec: ModelSpec, layer: int) -> dict[Phase, Stage]:
    """The same of one layer: where mixers are of several kinds, stages of one phase have other tensors in other layers. Of a
    layer with experts those of the shared one, if there is one.
    """
    stages = [stage for recipe in recipes(spec)[layer] for stage in recipe.stages]
    ffn, d = spec.layers[layer].ffn, spec.hidden_size
    if isinstance(ffn, Experts) and ffn.shared_width:
        columns = ffn.shared_width // spec.num_lanes
        stages = [stage for stage in stages if stage.phase not in SHARED_TENSORS]
        for phase, num_rows, num_columns, together in ((Phase.GATE_UP, 2 * columns, d, 4), (Phase.DOWN, d, columns, 2)):
            stages.append(Stage(phase, (), (), num_rows, num_columns, together, SHARED_TENSORS[phase]))
    return {stage.phase: stage for stage in stages if stage.tensors and stage.is_by_lane}


def layer_vectors(spec: ModelSpec, layer: int) -> dict[str, Vectors]:
    """What one layer has besides matrices and the norms of streams."""
    return {name: vectors for recipe in recipes(spec)[layer] for name, vectors in recipe.vectors.items()}


def router_stage(spec: ModelSpec) -> Stage | None:
    """The stage with a matrix of the rank, that of a model with experts."""
    return next((stage for stage in _stages_with_tensors(spec) if not stage.is_by_lane), None)


def _stages_with_tensors(spec: ModelSpec) -> Iterator[Stage]:
    return (stage for recipe in all_recipes(spec) for stage in recipe.stages if stage.tensors)


def vectors_of(spec: ModelSpec) -> dict[str, Vectors]:
    """What layers have besides matrices and the norms of streams, in the order of tensors."""
    return {name: vectors for recipe in all_recipes(spec) for name, vectors in recipe.vectors.items()}


def recipe_of(spec: ModelSpec, layer: int, phase: Phase) -> Recipe | None:
    """The recipe that has a phase in a layer; None: the layer has no such phase, or the model no such layer."""
    if not 0 <= layer < spec.num_layers:
        return None
    return next((recipe for recipe in recipes(spec)[layer] if recipe.stage(phase) is not None), None)


def op_numbers(spec: ModelSpec) -> dict[Phase, int]:
    """What each lane multiplies with in layers of all kinds, and which of its layer's products that is: GPUs number them so."""
    ops = (tuple(op for recipe in layer for op in recipe.lane_ops) for layer in recipes(spec))
    return {op: number for of_layer in ops for number, op in enumerate(of_layer)}


def share_stream(spec: ModelSpec) -> bool:
    """Whether lanes share one residual stream."""
    return spec.has_one_stream


def stream_lanes(spec: ModelSpec, lanes: tuple[int, ...]) -> tuple[int, ...]:
    """The lanes of a rank that have a residual stream of their own; NONE for the one that all share."""
    return (NONE,) if share_stream(spec) else lanes


def position_values(spec: ModelSpec) -> int:
    """Keys and values of one position, of all layers and lanes; those that several lanes have count for each."""
    states = [mixer.state for mixer, _ in recipes(spec)]
    return spec.num_lanes * sum(2 * state.num_heads * state.head_dim for state in states if isinstance(state, ByPosition))


def state_bytes(spec: ModelSpec) -> int:
    """What all layers and lanes keep of a sequence besides."""
    states = [mixer.state for mixer, _ in recipes(spec)]
    return spec.num_lanes * sum(state.num_bytes for state in states if isinstance(state, Recurrent))
