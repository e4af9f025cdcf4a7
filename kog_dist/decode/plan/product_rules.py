"""What a rank's list of products must be: the steps that multiply, in their order, with every row and column of every matrix.

Written from the model alone, as `definition` is. A product stands for the steps of its lanes. Thread blocks own neighbouring
rows, so that all of them are there if there are enough; what they own beyond a matrix is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.products import Product, RowShare
from kog_dist.decode.plan.schedule import RankPlan
from kog_dist.decode.plan.steps import NONE, WEIGHT_PHASES, Phase, Value
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.spec import HeadType, ModelSpec

if TYPE_CHECKING:
    from kog_dist.decode.plan.plan import Plan

Reads = Mapping[tuple[Phase, int, int], tuple[Value, ...]]  # of the steps, by phase, layer and lane
# Rows that must have one owner: those of a pair, which RoPE rotates and which make one word; of GATE_UP gate and up of a pair.
_TOGETHER = {Phase.QKV: 2, Phase.OUT: 2, Phase.GATE_UP: 4, Phase.DOWN: 2, Phase.DELTA_IN: 2}


def product_findings(plan: Plan, part: RankPlan) -> Iterator[str]:
    """What is wrong with the products of a rank, in words."""
    if findings := [*_order_findings(part)]:
        yield from findings
        return
    reads = {(step.phase, step.layer, step.lane): step.reads for step in part.steps}
    for product in part.products:
        texts = [*_lane_findings(part, product, reads)] or [*_row_findings(plan, product)]
        yield from (f"rank {part.rank}, {_name(product)}: {text}" for text in texts)
    yield from (f"rank {part.rank}: {text}" for text in _likeness_findings(plan.spec, part))


def _name(product: Product) -> str:
    lanes = product.lanes
    of_lanes = "" if product.first_lane == NONE else f", lane {lanes[0]}"
    if len(lanes) > 1:
        of_lanes = f", lanes {lanes[0]} to {lanes[-1]}"
    return f"{product.op.name}{'' if product.layer == NONE else f' of layer {product.layer}'}{of_lanes}"


def _order_findings(part: RankPlan) -> Iterator[str]:
    """Products are the steps that multiply; those of a product stand together, and the lanes of a layer's op in their order."""
    steps = [(number, step) for number, step in enumerate(part.steps) if step.phase in WEIGHT_PHASES]
    done = 0
    before: Product | None = None
    for product in part.products:
        if product.num_lanes < 1:
            yield f"rank {part.rank}, {product.op.name} of layer {product.layer}: a product of {product.num_lanes} lanes"
            return
        if before is not None and product.source != NONE and product._replace(source=before.source) == before:
            before = product  # another part of the columns, of the same steps
            continue
        before = product
        own = steps[done : done + product.num_lanes]
        if [(step.phase, step.layer, step.lane) for _, step in own] != [
            (product.op, product.layer, lane) for lane in product.lanes
        ]:
            found = [f"{step.phase.name} of layer {step.layer}, lane {step.lane}" for _, step in own]
            yield f"rank {part.rank}, {_name(product)}: stands where the steps have {' and '.join(found) or 'nothing'}"
            return
        if any(after[0] != one[0] + 1 for one, after in pairwise(own)):
            yield f"rank {part.rank}, {_name(product)}: other steps stand between those of its lanes"
        done += product.num_lanes
    if done < len(steps):
        step = steps[done][1]
        yield f"rank {part.rank}: {step.phase.name} of layer {step.layer}, lane {step.lane} is in no product"
    last: dict[tuple[Phase, int, int], int] = {}
    for product in part.products:
        key = product.op, product.layer, product.source
        if product.first_lane <= last.get(key, NONE - 1):
            yield f"rank {part.rank}, {_name(product)}: stands behind lane {last[key]}, whose turn comes later"
        last[key] = product.first_lane


def _lane_findings(part: RankPlan, product: Product, reads: Reads) -> Iterator[str]:
    """Lanes of a product are hosted here, and have one input; but those of an LM head that has thread blocks for each lane."""
    if (product.first_lane == NONE) != (product.op is Phase.ROUTE) or not set(product.lanes) - {NONE} <= set(part.lanes):
        yield f"is of lanes {tuple(product.lanes)} on a rank that hosts {part.lanes}"
        return
    inputs = {reads.get((product.op, product.layer, lane), ()) for lane in product.lanes}
    if len(inputs) > 1 and product.rows.num_groups != product.num_lanes:
        yield f"its lanes have {len(inputs)} inputs, and are multiplied with one"


class Matrix(NamedTuple):
    """What a product multiplies with: rows for each group of thread blocks, columns, groups; and what stands beside it."""

    num_rows: int
    num_columns: int
    num_groups: int
    beside: Matrix | None = None


def _of_attention(spec: ModelSpec, mixer: AttentionMixer, product: Product) -> Matrix:
    d, lanes = spec.hidden_size, spec.num_lanes
    queries, keys = mixer.num_heads // lanes * mixer.head_dim, max(1, mixer.num_kv_heads // lanes) * mixer.head_dim
    if product.op is Phase.QKV:
        return Matrix(product.num_lanes * (queries + 2 * keys + (queries if mixer.gated else 0)), d, 1)
    return Matrix(d, queries, 1)


def _of_delta(spec: ModelSpec, net: DeltaNet, product: Product) -> Matrix:
    d, lanes, heads = spec.hidden_size, spec.num_lanes, net.num_value_heads
    if product.op is Phase.DELTA_IN:  # q and k; v and z; a and b, whose 16 bits several rows of codes have
        rows = 2 * net.num_key_heads * net.key_dim + 2 * heads * net.value_dim + _terms(product) * 2 * heads
        return Matrix(product.num_lanes * rows // lanes, d, 1)
    return Matrix(d, heads * net.value_dim // lanes, 1)


def _terms(product: Product) -> int:
    """Rows of codes for one that is kept in 16 bit."""
    form = product.rows.form
    return 1 if form is None or form.coding is None else form.coding.terms


def _of_ffn(spec: ModelSpec, ffn: Ffn, product: Product) -> Matrix:
    d, columns = spec.hidden_size, ffn.width // spec.num_lanes
    return Matrix(product.num_lanes * 2 * columns, d, 1) if product.op is Phase.GATE_UP else Matrix(d, columns, 1)


def _of_experts(spec: ModelSpec, experts: Experts, product: Product) -> Matrix:
    d, choice, is_shared = spec.hidden_size, experts.choice, experts.shared_width > 0
    columns, shared = experts.width // spec.num_lanes, experts.shared_width // spec.num_lanes
    if product.op is Phase.ROUTE:
        return Matrix(choice.num_experts + (1 if is_shared else 0), d, 1)
    if product.op is Phase.GATE_UP and product.rows.form is None:
        return Matrix(product.num_lanes * 2 * (columns + shared), d, 1)
    if product.op is Phase.GATE_UP:  # each chosen expert has thread blocks of its own, the shared one all of them
        beside = Matrix(product.num_lanes * 2 * shared, d, 1) if is_shared else None
        return Matrix(product.num_lanes * 2 * columns, d, choice.per_token, beside)
    return Matrix(d, choice.per_token * columns + shared, 1)


# Of each kind of mixer and FFN, what a lane multiplies with in its ops.
MATRICES: dict[type, Callable[[ModelSpec, Any, Product], Matrix]] = {
    AttentionMixer: _of_attention,
    DeltaNet: _of_delta,
    Ffn: _of_ffn,
    Experts: _of_experts,
}
_OF_FFNS = (Phase.ROUTE, Phase.GATE_UP, Phase.DOWN)


def _matrix(spec: ModelSpec, product: Product) -> Matrix:
    if product.op is not Phase.HEAD:
        layer = spec.layers[product.layer]
        part = layer.ffn if product.op in _OF_FFNS else layer.mixer
        return MATRICES[type(part)](spec, part, product)
    slices = [last - first for first, last in map(spec.vocab_slice, product.lanes)]
    if spec.head_type is HeadType.VOCAB_PARALLEL:
        return Matrix(slices[0], spec.hidden_size, product.num_lanes)
    whole = spec.head_type is HeadType.LANE and product.source == NONE
    return Matrix(sum(slices), spec.hidden_size * (spec.num_lanes if whole else 1), 1)


def _row_findings(plan: Plan, product: Product) -> Iterator[str]:
    """Every row of the matrix has an owner, every column a warp, and what belongs together one owner."""
    rows, matrix = product.rows, _matrix(plan.spec, product)
    together = _TOGETHER.get(product.op, 1) * (_terms(product) if product.op is Phase.DELTA_IN else 1)
    yield from _share_findings(plan, rows, matrix, together)
    if (rows.beside is None) != (matrix.beside is None):
        yield f"a matrix stands beside it in the {'model' if rows.beside is None else 'product'} alone"
    elif rows.beside is not None and matrix.beside is not None:
        yield from (f"beside it: {text}" for text in _share_findings(plan, rows.beside, matrix.beside, together))


def _share_findings(plan: Plan, rows: RowShare, matrix: Matrix, together: int) -> Iterator[str]:
    if rows.num_rows != matrix.num_rows:
        yield f"{rows.num_rows} rows, the matrix has {matrix.num_rows}"
    if rows.num_groups != matrix.num_groups:
        yield f"{rows.num_groups} groups of thread blocks, expected {matrix.num_groups}"
    if not 1 <= rows.num_ctas * rows.num_groups <= plan.num_ctas * rows.num_shares:
        yield f"{rows.num_groups} times {rows.num_ctas} thread blocks, of which there are {plan.num_ctas}"
    if rows.per_cta * rows.num_ctas < rows.num_rows:
        yield f"rows {rows.per_cta * rows.num_ctas} to {rows.num_rows - 1} are on no thread block"
    yield from _form_findings(rows, matrix, together)


def _form_findings(rows: RowShare, matrix: Matrix, together: int) -> Iterator[str]:
    form = rows.form
    if form is None:
        if rows.num_ctas > 1:
            yield f"each of {rows.num_ctas} thread blocks has all rows"
        return
    if form.rows % together or form.cta_rows % together:
        yield f"thread blocks own {form.cta_rows} rows in blocks of {form.rows}: {together} that belong together have two owners"
    columns = form.num_columns if form.real_steps == 0 else min(form.real_steps * form.step_columns, form.num_columns)
    if columns < matrix.num_columns:
        yield f"columns {columns} to {matrix.num_columns - 1} are multiplied by no warp"


def _likeness_findings(spec: ModelSpec, part: RankPlan) -> Iterator[str]:
    """Equal matrices that are coded alike are divided alike in all layers; the rows of the residual have one owner; an LM head
    has all its columns.
    """
    alike: dict[tuple[Phase, Matrix, Coding | None], set[tuple[int, RowShare]]] = {}
    for product in part.products:
        if product.op is not Phase.HEAD:
            of_one, form = _matrix(spec, product._replace(num_lanes=1)), product.rows.form
            coding = None if form is None else form.coding
            alike.setdefault((product.op, of_one, coding), set()).add((product.num_lanes, product.rows))
    for op in dict.fromkeys(op for (op, *_), found in alike.items() if len(found) > 1):
        yield f"{op.name} is not divided alike in all layers and lanes"
    residual = [product.rows for product in part.products if product.op in (Phase.OUT, Phase.DOWN)]
    if len({(rows.num_ctas, rows.per_cta, rows.form and rows.form.rows) for rows in residual}) > 1:
        yield "rows of the hidden size have different owners in OUT and DOWN"
    sources = [product.source for product in part.products if product.op is Phase.HEAD]
    if set(sources) != {NONE} and (spec.head_type is not HeadType.LANE or sources != list(range(spec.num_lanes))):
        yield f"the LM head has the columns of lanes {sources}"
    if any(product.source != NONE for product in part.products if product.op is not Phase.HEAD):
        yield "a layer's product has the columns of one lane"
