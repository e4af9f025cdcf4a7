"""What the experts of a chunk work in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.prefill.base.arrays import Array

TILE_BYTES = 8  # see PairsTile in experts.cu
_FEWEST_TILE_ROWS = 32
View = Callable[..., Array]  # a name, a shape, and the type as `dtype`: memory that is made for the largest chunk


@dataclass(frozen=True)
class ExpertRows:
    """Views for a chunk of `size` tokens with K of E experts each. L: hosted lanes, F: FFN columns of one, T: the products' type.

    A row and one of its experts are a pair. Pairs lie in the order of experts, those of an expert in the order of rows. On a GPU
    `operands` and `activation` are in the order of products (weights.cuh). W: F and what is beside it in groups of 32 columns.
    `operands` are where `result` comes to be.
    """

    planes: Array  # (2, size, D) T: x, and what its rounding left of the norm
    logits: Array  # (2, size, E) float32: of both planes, without biases
    chosen: Array  # (size, K) int32: experts in ascending order; -1 in rows behind the prompt's last token
    weights: Array  # (size, K) float32
    places: Array  # (size, K) int32: of a row's pairs
    offsets: Array  # (E + 1) int32: the first pair of each expert
    tiles: Array  # uint32 (TILE_BYTES / 4 * (tiles + 1)): how a GPU cuts pairs; their number is in front of them
    operands: Array  # (size * K, D) T: x of each pair
    activation: Array  # (size * K, L, W) T: times ACTIVATION_SCALE, without the weights; 0 beside a lane's columns
    result: Array  # (size * K, L, D) T: what the experts' `down` gives

    @property
    def shared(self) -> Array:
        """(L, size, D) T: what the shared expert's `down` gives, in the place of `result`, once that is summed up."""
        num_pairs, lanes, width = self.result.shape
        size = num_pairs // self.chosen.shape[1]
        return self.result.reshape(-1)[: lanes * size * width].reshape(lanes, size, width)


def expert_rows(spec: ModelSpec, num_lanes: int, size: int, half: np.dtype[np.generic], view: View) -> ExpertRows | None:
    """None of a model without experts."""
    if spec.experts is None:
        return None
    num_experts, chosen, d = spec.experts.num_experts, spec.experts.per_token, spec.hidden_size
    result = view("result of experts", size * chosen, num_lanes, d, dtype=half)
    return ExpertRows(
        planes=view("planes", 2, size, d, dtype=half),
        logits=view("router logits", 2, size, num_experts, dtype=np.float32),
        chosen=view("chosen", size, chosen, dtype=np.int32),
        weights=view("weights", size, chosen, dtype=np.float32),
        places=view("places", size, chosen, dtype=np.int32),
        offsets=view("offsets", size, num_experts + 1, dtype=np.int32)[0],
        tiles=view("tiles", size, _tile_words(spec), dtype=np.uint32),
        operands=result.reshape(-1)[: size * chosen * d].reshape(size * chosen, d),
        activation=view("activation of experts", size * chosen, num_lanes, padded_columns(spec), dtype=half),
        result=result,
    )


def _tile_words(spec: ModelSpec) -> int:
    """For each token of a chunk: there are at most as many tiles as full ones and one more for each expert."""
    assert spec.experts is not None
    return TILE_BYTES // 4 * (spec.experts.per_token // _FEWEST_TILE_ROWS + spec.experts.num_experts + 2)


def padded_columns(spec: ModelSpec) -> int:
    """FFN columns of a lane in whole groups of 32, wherever in a group of the model it begins."""
    return spec.lane_ffn if spec.lane_ffn % 32 == 0 else -(-(spec.lane_ffn + 24) // 32) * 32


def expert_row_bytes(spec: ModelSpec, num_lanes: int) -> int:
    """Of `ExpertRows`, for each token; without the plane that is x."""
    if spec.experts is None:
        return 0
    num_experts, chosen, d = spec.experts.num_experts, spec.experts.per_token, spec.hidden_size
    of_pair = 3 * 4 + 2 * num_lanes * (padded_columns(spec) + d)
    return 2 * d + 4 * (2 * num_experts + num_experts + 1 + _tile_words(spec)) + chosen * of_pair
