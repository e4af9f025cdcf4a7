"""A rank's weights on its GPU, in the form in which the monokernel reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kog_dist.decode.steps import Phase
from kog_dist.decode.tape_packing import interleave, pack
from kog_dist.model.rope import rope_table
from kog_dist.model.weights import RankWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape

GpuArray = Any  # cupy.ndarray; cupy has no types

# Matrix (rows, K) of a phase as 16-bit words on the GPU: (phase, layer, hosted lane counted from 0). GATE_UP is interleaved.
MatrixSource = Callable[[Phase, int, int], GpuArray]


@dataclass(frozen=True)
class DeviceWeights:
    """All arrays are on the GPU; 16-bit ones are kept as uint16 words of `KernelShape.weight_dtype`."""

    tape: GpuArray  # (num_ctas, tape_values)
    embedding: GpuArray  # (vocab, hidden)
    norms: GpuArray  # (layers, 2, lanes or 1, hidden)
    final_norm: GpuArray  # (lanes or 1, hidden)
    rope: GpuArray  # (max_context, head_dim / 2, 2) float32


def to_words(values: GpuArray, dtype: str) -> GpuArray:
    """Float32 values as 16-bit words, rounded to nearest even (exact for values that were stored in that type)."""
    import cupy

    if dtype == "float16":
        return values.astype(cupy.float16).view(cupy.uint16)
    bits = values.view(cupy.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(cupy.uint16)


def pack_tape(shape: KernelShape, source: MatrixSource) -> GpuArray:
    """The tapes of all thread blocks, in the order in which the kernel's loader reads them."""
    import cupy

    tape = cupy.empty((shape.num_ctas, shape.tape_values), cupy.uint16)
    position = 0
    ops = {Phase.QKV: shape.qkv, Phase.OUT: shape.out, Phase.GATE_UP: shape.gate_up, Phase.DOWN: shape.down}
    for layer in range(shape.spec.num_layers):
        for phase, op in ops.items():
            for lane in range(shape.num_lanes):
                tape[:, position : position + op.num_values] = pack(source(phase, layer, lane), op, shape.num_ctas)
                position += op.num_values
    tape[:, position:] = pack(source(Phase.HEAD, 0, 0), shape.head, shape.num_ctas)
    return tape


def rope_pairs(shape: KernelShape) -> GpuArray:
    """Cosines and sines, side by side."""
    import cupy

    return cupy.asarray(np.stack(rope_table(shape.spec, shape.spec.max_context), axis=-1))


def from_rank_weights(shape: KernelShape, weights: RankWeights) -> DeviceWeights:
    """Upload and pack what a checkpoint gave (float32 arrays on the host that are exact in 16 bit)."""
    import cupy

    spec, dtype = shape.spec, shape.weight_dtype

    def words(values: Any) -> GpuArray:
        return to_words(cupy.asarray(np.ascontiguousarray(values, np.float32)), dtype)

    def matrix(phase: Phase, layer_idx: int, lane_idx: int) -> GpuArray:
        if phase is Phase.HEAD:
            return cupy.concatenate([words(weights.heads[lane]) for lane in shape.hosted_lanes])
        layer = weights.lanes[shape.hosted_lanes[lane_idx]].layers[layer_idx]
        if phase is Phase.GATE_UP:
            return interleave(words(layer.w1), words(layer.w3))
        return words({Phase.QKV: layer.wqkv, Phase.OUT: layer.wo, Phase.DOWN: layer.w2}[phase])

    norm_lanes = shape.hosted_lanes[:1] if spec.shared_norm_scale else shape.hosted_lanes
    final_lanes = shape.hosted_lanes[:1] if spec.shared_norm_scale or spec.pre_norm_lane_agg else shape.hosted_lanes
    layers = [
        [[getattr(weights.lanes[lane].layers[i], name) for lane in norm_lanes] for name in ("attention_norm", "ffn_norm")]
        for i in range(spec.num_layers)
    ]
    return DeviceWeights(
        tape=pack_tape(shape, matrix),
        embedding=words(weights.embedding),
        norms=words(np.array(layers)),
        final_norm=words(np.array([weights.norms[lane] for lane in final_lanes])),
        rope=rope_pairs(shape),
    )


def random_weights(shape: KernelShape, seed: int) -> DeviceWeights:
    """Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of."""
    import cupy

    spec, lanes = shape.spec, shape.num_lanes
    generator = cupy.random.default_rng(seed)
    columns = {Phase.QKV: spec.hidden_size, Phase.OUT: spec.lane_heads * spec.head_dim, Phase.GATE_UP: spec.hidden_size,
               Phase.DOWN: spec.lane_ffn, Phase.HEAD: spec.hidden_size}  # fmt: skip
    first, last = shape.vocab_rows
    rows = {Phase.QKV: (spec.lane_heads + 2 * spec.lane_kv_heads) * spec.head_dim, Phase.OUT: spec.hidden_size,
            Phase.GATE_UP: 2 * spec.lane_ffn, Phase.DOWN: spec.hidden_size, Phase.HEAD: last - first}  # fmt: skip

    def normal(*size: int, std: float = 1.0, mean: float = 0.0) -> GpuArray:
        values = generator.standard_normal(size, dtype=cupy.float32) * np.float32(std) + np.float32(mean)
        return to_words(values, shape.weight_dtype)

    def matrix(phase: Phase, _layer: int, _lane: int) -> GpuArray:
        summed = lanes if phase in (Phase.OUT, Phase.DOWN) else 1
        return normal(rows[phase], columns[phase], std=(columns[phase] * summed) ** -0.5)

    norm_lanes = 1 if spec.shared_norm_scale else lanes
    final_lanes = 1 if spec.shared_norm_scale or spec.pre_norm_lane_agg else lanes
    return DeviceWeights(
        tape=pack_tape(shape, matrix),
        embedding=normal(spec.vocab_size, spec.hidden_size),
        norms=normal(spec.num_layers, 2, norm_lanes, spec.hidden_size, std=0.1, mean=1.0),
        final_norm=normal(final_lanes, spec.hidden_size, std=0.1, mean=1.0),
        rope=rope_pairs(shape),
    )
