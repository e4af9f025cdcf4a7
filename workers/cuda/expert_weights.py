"""The weights of experts on a GPU: every expert of every layer in one array, each in the form in which thread blocks read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kog_dist.decode.coded_packing import WORD_COLUMNS, Codes, CodeWords, put_codes
from kog_dist.decode.tape_packing import OpShape, pack
from kog_dist.records import dataclass
from kog_dist.workers.cuda.expert_shape import ExpertShape

GpuArray = Any  # cupy.ndarray; cupy has no types
Matrix = Any  # GpuArray of 16-bit words, Codes or CodeWords


@dataclass(frozen=True)
class DeviceExperts:
    """Arrays on the GPU, of 16-bit words; None where a model has no such biases."""

    matrices: GpuArray  # (layers, experts, ExpertShape.num_values)
    router_bias: GpuArray | None = None  # (layers, experts)
    gate_up_bias: GpuArray | None = None  # (layers, experts, gate and up rows of all hosted lanes in turn)
    down_bias: GpuArray | None = None  # (layers, experts, hidden)


@dataclass(frozen=True)
class ExpertsBatch:
    """Some experts of a layer on the GPU, for `put_expert`; biases are 16-bit words."""

    experts: range
    gate_up: CodeWords  # of several matrices: (experts, gate and up rows of all hosted lanes in turn, ...)
    downs: list[CodeWords]  # by hosted lane, with `ExpertShape.skew` columns in front
    gate_up_bias: GpuArray  # (experts, gate and up rows of all hosted lanes in turn)
    down_bias: GpuArray  # (experts, hidden)


def put_expert(slab: GpuArray, shape: ExpertShape, gate_up: Matrix, downs: Sequence[Matrix]) -> None:
    """Fill `slab` (num_values,) with an expert: gate and up rows of all hosted lanes in turn, and each lane's `down`.

    `CodeWords` may be those of several experts: `slab` (experts, num_values).
    """
    _put(slab[..., : shape.gate_up_values], shape.gate_up, shape.ctas, gate_up)
    for i, down in enumerate(downs):
        first = shape.gate_up_values + i * shape.down_values
        _put(slab[..., first : first + shape.down_values], shape.down_of_one, shape.num_ctas, down)


def lane_columns(shape: ExpertShape, lane: int, down: CodeWords) -> CodeWords:
    """A lane's columns of whole matrices `down`, with `ExpertShape.skew` columns of zeros in front. Lanes have whole words."""
    width, skew = shape.spec.lane_ffn, shape.skew(lane)
    assert width % WORD_COLUMNS == 0
    first, last, zeros = lane * width // WORD_COLUMNS, (lane + 1) * width // WORD_COLUMNS, skew // WORD_COLUMNS
    words = np.zeros_like(down.words, shape=(*down.words.shape[:-1], zeros + last - first))
    words[..., zeros:] = down.words[..., first:last]
    group = shape.group_columns
    return CodeWords(words, down.scales[..., lane * width // group : -(-(lane + 1) * width // group)])


def behind(skew: int, matrix: Codes) -> Codes:
    """The same with so many columns of zeros in front, which are in the first group, too."""
    if not skew:
        return matrix
    rows, columns = matrix.codes.shape
    codes = np.zeros_like(matrix.codes, shape=(rows, skew + columns))
    codes[:, skew:] = matrix.codes
    return Codes(codes, matrix.scales, matrix.zeros)


def _put(target: GpuArray, op: OpShape, num_ctas: int, matrix: Matrix) -> None:
    if isinstance(matrix, Codes | CodeWords):
        put_codes(target, 0, op, num_ctas, matrix)
        return
    first = 0
    for i, tile in enumerate(pack(matrix, op, num_ctas)):
        block, step = divmod(i, op.tiles)
        parts = tile.reshape(num_ctas, op.warps, op.steps, op.rows, -1)
        words = parts[:, : op.warps_of(step), :, : op.rows_of(block)].copy().reshape(-1)
        target[first : first + words.size] = words
        first += words.size


def interleaved(vectors: Callable[[str], GpuArray], gate: str, up: str) -> GpuArray:
    """Values of gate and up (lanes, columns) of all lanes, in turn."""
    return np.stack([vectors(gate).reshape(-1), vectors(up).reshape(-1)], axis=1).reshape(-1)
