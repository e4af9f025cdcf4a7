"""In which order a rank multiplies: the products of one token, and so the order of its weights on the tape.

Lanes take turns, so that one lane's waits are covered by another's work. Two things decide how well that works:

- OUT waits for attention, which takes longer than any other step between products, and longer than the ring of weights lasts.
- A product of few weights (QKV, OUT) takes the matrix warps longer than its weights take to arrive, one of many (GATE_UP, DOWN)
  the reverse. Many small ones in a row stop the stream.

So with two lanes or more, and from the first layer on in which no lane waits for another's current work, half of the lanes run
half a layer behind the others: while these are in attention, those go through their MLP, and a small product stands beside each
large one. OUT comes as late as it can (docs/history/monokernel.md has the times of other orders).

At both ends half of the lanes are alone, and a product stands elsewhere for their sake. In the first such layer QKV of the lanes
behind comes before OUT of those ahead, and covers some of their attention. In the last one OUT of the lanes behind comes before
DOWN of those ahead, which covers the way from that OUT to what comes next, the same lanes' GATE_UP.
"""

from __future__ import annotations

from typing import NamedTuple

from kog_dist.decode.plan.recipes import recipes
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer


class LaneTurn(NamedTuple):
    """A lane's turn at a product of its own, or at one that it has together with others (`products`)."""

    layer: int
    phase: Phase
    lane: int


_MIN_STAGGERED_LANES = 2


def product_order(spec: ModelSpec, lanes: range) -> list[LaneTurn]:
    """The turns of the lanes that a rank hosts; each lane's own are in the order of its computation."""
    if len(lanes) < _MIN_STAGGERED_LANES:
        return plain_order(spec, lanes, spec.num_layers)
    first_free = next(layer for layer in range(spec.num_layers + 1) if _is_free(spec, layer))
    order = plain_order(spec, lanes, first_free)
    ahead, behind = lanes[: len(lanes) // 2], lanes[len(lanes) // 2 :]
    num_halves = 2 * (spec.num_layers - first_free)
    for turn in range(num_halves + 1 if num_halves else 0):
        # The lanes ahead are in half `turn`, the others in the one before; attention first, since it has the longest way.
        groups = [(half, group) for half, group in ((turn, ahead), (turn - 1, behind)) if 0 <= half < num_halves]
        groups.sort(key=lambda item: item[0] % 2)
        ops = {half: recipes(spec)[first_free + half // 2][half % 2].lane_ops for half, _ in groups}
        for i in range(max(map(len, ops.values()))):
            for j in range(max(len(group) for _, group in groups)):
                order += [
                    LaneTurn(first_free + half // 2, ops[half][i], group[j])
                    for half, group in groups
                    if j < len(group) and i < len(ops[half])
                ]
            groups.reverse()  # OUT comes as late as it can: it waits for attention
    if num_halves:
        last, (first_op, *_, last_op) = spec.num_layers - 1, recipes(spec)[first_free][0].lane_ops
        order = _moved(order, [LaneTurn(first_free, first_op, lane) for lane in behind], LaneTurn(first_free, last_op, ahead[0]))
        of_mixer, of_ffn = (recipe.lane_ops[-1] for recipe in recipes(spec)[last])
        order = _moved(order, [LaneTurn(last, of_mixer, lane) for lane in behind], LaneTurn(last, of_ffn, ahead[0]))
    return order


def _moved(order: list[LaneTurn], turns: list[LaneTurn], before: LaneTurn) -> list[LaneTurn]:
    """The order with `turns` together, in front of another one."""
    rest = [turn for turn in order if turn not in turns]
    place = rest.index(before)
    return rest[:place] + turns + rest[place:]


def plain_order(spec: ModelSpec, lanes: range, num_layers: int) -> list[LaneTurn]:
    """The turns in the first layers phase by phase, and within a phase lane by lane."""
    halves = [(layer, recipe) for layer in range(num_layers) for recipe in recipes(spec)[layer]]
    return [LaneTurn(layer, phase, lane) for layer, recipe in halves for phase in recipe.lane_ops for lane in lanes]


def _is_free(spec: ModelSpec, first_layer: int) -> bool:
    """Whether no sublayer from this layer on waits for the present work of other lanes."""
    return all(
        spec.reduce_mode(layer, sublayer) is not ReduceMode.BLOCKING
        for layer in range(first_layer, spec.num_layers)
        for sublayer in Sublayer
    )
