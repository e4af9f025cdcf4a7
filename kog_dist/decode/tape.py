"""The weight tape: what each compute CTA of the kernel reads from memory, in the order of use.

A segment is a range of rows of one lane's matrix. Weights do not depend on activations, so a loader streams the segments one
after another and wraps at the end of a token. How rows become tiles (16-bit words in the order that one warp consumes them),
and where these lie, is decided by the kernel's packer; which rows, and in which order, is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.plan import Plan
from kog_dist.decode.steps import WEIGHT_PHASES, Phase
from kog_dist.model.weights import RankWeights


class TapeSegment(NamedTuple):
    """Rows `first_row` .. `first_row + num_rows` of a lane's matrix; see `RowSplit` for what a row is."""

    phase: Phase
    layer: int  # NONE for HEAD
    lane: int
    first_row: int
    num_rows: int


def tape(plan: Plan, rank: int, cta: int) -> Iterator[TapeSegment]:
    """The segments of one compute CTA in the order in which the rank's steps use them; empty ones are left out."""
    part = plan.ranks[rank]
    rows = {(split.phase, split.lane): split.rows[cta] for split in part.splits}
    for step in part.steps:
        if step.phase in WEIGHT_PHASES:
            first, count = rows[step.phase, step.lane]
            if count:
                yield TapeSegment(step.phase, step.layer, step.lane, first, count)


def segment_weights(segment: TapeSegment, weights: RankWeights) -> tuple[NDArray[Any], ...]:
    """Views (num_rows, K) of a segment's weights; for GATE_UP two of them: gate rows, then up rows of the same columns."""
    first, last = segment.first_row, segment.first_row + segment.num_rows
    if segment.phase is Phase.HEAD:
        return (weights.heads[segment.lane][first:last],)
    layer = weights.lanes[segment.lane].layers[segment.layer]
    if segment.phase is Phase.GATE_UP:
        return layer.w1[first:last], layer.w3[first:last]
    matrix = {Phase.QKV: layer.wqkv, Phase.OUT: layer.wo, Phase.DOWN: layer.w2}[segment.phase]
    return (matrix[first:last],)


def tape_values(plan: Plan, rank: int, cta: int, weights: RankWeights) -> int:
    """Number of weights on one CTA's tape."""
    return sum(int(np.size(part)) for segment in tape(plan, rank, cta) for part in segment_weights(segment, weights))
