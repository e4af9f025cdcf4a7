"""The products of a token on one rank, in the order in which it multiplies: one list, which is proved and which runs.

The plan holds the list, steps are made in its order, the validator proves it (`product_rules`). CPU ranks have one owner of all
rows of a lane (`undivided`). A GPU's list comes of how its kernel divides matrices among thread blocks; tape, the kernel's table
of products and the shapes that it is compiled for are made of that same list (workers/cuda/division.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kog_dist.decode.plan.order import LaneTurn, plain_order, product_order
from kog_dist.decode.plan.recipes import recipe_of, recipes
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.model.spec import ModelSpec


class RowShare(NamedTuple):
    """Who owns the `num_rows` rows of a product: thread block c those from c * `per_cta` on, the last ones fewer, or none.

    QKV counts query, then key, then value rows, GATE_UP a gate and an up row for each column, lane by lane. `num_ctas` thread
    blocks share them. Where there are `num_groups` of so many, each has a matrix of its own: one of the chosen experts, or a
    lane's slice of the vocabulary. `form`: what one thread block has, and how its warps divide the columns; None: the one owner
    has all. `num_shares`: where groups do not divide thread blocks, each of these has so many neighbouring shares of them, and
    `num_ctas` and `form` are those of shares. `beside`: rows of another matrix with the same input, that of a shared expert.
    """

    num_rows: int
    num_ctas: int = 1
    num_groups: int = 1
    form: OpShape | None = None
    num_shares: int = 1
    beside: RowShare | None = None

    @property
    def per_cta(self) -> int:
        """Rows of a thread block."""
        return self.num_rows if self.form is None else self.form.cta_rows


class Product(NamedTuple):
    """One matrix-vector product: the matrices of `num_lanes` lanes, one below the other, which are multiplied with one input.

    ROUTE has no lane. `source`: of an LM head of the form `lane`, the lane whose part of the columns this is, NONE for all.
    """

    op: Phase
    layer: int
    first_lane: int
    num_lanes: int
    rows: RowShare
    source: int = NONE

    @property
    def lanes(self) -> range:
        """Those whose steps this is; NONE where the steps have no lane."""
        return range(self.first_lane, self.first_lane + self.num_lanes)


LayerOp = tuple[Phase, int]


class Division(NamedTuple):
    """How the products of an op are made: of so many neighbouring lanes each, with these rows."""

    num_lanes: int
    rows: RowShare


def product_list(
    spec: ModelSpec,
    turns: Iterable[LaneTurn],
    lanes: range,
    division: Mapping[Phase, Division] | Mapping[LayerOp, Division] | Mapping[Phase | LayerOp, Division],
    sources: Sequence[int] = (NONE,),
) -> tuple[Product, ...]:
    """The list of a rank that hosts `lanes`. `division`: of each op, and of a layer's that has another one.

    A product of several lanes stands where that of the first of them would, one of the rank (ROUTE) in front of the first lane's
    that comes behind it. The LM head comes last: one product of all lanes for each of `sources`.
    """
    made = []
    by_layer: dict[object, Division] = dict(division)  # type: ignore[arg-type]

    def divided(op: Phase, layer: int) -> Division:
        return by_layer.get((op, layer)) or by_layer[op]

    for turn in turns:
        num_lanes, rows = divided(turn.phase, turn.layer)
        place = turn.lane - lanes[0]
        recipe = recipe_of(spec, turn.layer, turn.phase)
        if recipe is not None and place == 0:
            made += [Product(one.phase, turn.layer, NONE, *divided(one.phase, turn.layer)) for one in recipe.in_front(turn.phase)]
        if place % num_lanes == 0:
            made.append(Product(turn.phase, turn.layer, turn.lane, num_lanes, rows))
    if Phase.HEAD in by_layer:
        made += [Product(Phase.HEAD, NONE, lanes[0], *by_layer[Phase.HEAD], source) for source in sources]
    return tuple(made)


def undivided(spec: ModelSpec, lanes: range, *, staggered: bool = False) -> tuple[Product, ...]:
    """Each lane's products by themselves, as CPU ranks multiply: phase by phase, or `staggered` as on GPUs (`order`)."""
    num_rows = {
        (stage.phase, layer): stage.num_rows
        for layer, of_layer in enumerate(recipes(spec))
        for recipe in of_layer
        for stage in recipe.stages
        if stage.num_rows
    }
    turns = product_order(spec, lanes) if staggered else plain_order(spec, lanes, spec.num_layers)
    layers = product_list(spec, turns, lanes, {op: Division(1, RowShare(count)) for op, count in num_rows.items()})
    slices = {lane: spec.vocab_slice(lane) for lane in lanes}
    return (*layers, *(Product(Phase.HEAD, NONE, lane, 1, RowShare(last - first)) for lane, (first, last) in slices.items()))
