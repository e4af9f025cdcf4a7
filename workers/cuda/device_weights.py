"""A rank's weights on its GPU, in the form in which the monokernel reads them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kog_dist.decode.order import Product
from kog_dist.decode.steps import Phase
from kog_dist.decode.tape_packing import interleave, pack, put_on_tape
from kog_dist.model.layout import EMBEDDING, head_name, layer_prefix, norm_name, tensor_layouts
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape

GpuArray = Any  # cupy.ndarray; cupy has no types

# Matrix (rows, K) of a phase as 16-bit words on the GPU: (phase, layer, hosted lane counted from 0, or the first of
# `KernelShape.lanes_of`, whose matrices stand one below the other). GATE_UP is interleaved.
# HEAD: all vocabulary rows of the rank; with `vocab_parallel` the lane's, with `lane` the columns of one of `shape.head_lanes`.
MatrixSource = Callable[[Phase, int, int], GpuArray]
# A tensor of a checkpoint as 16-bit words on the GPU, only the rows that `needed_rows` names.
TensorSource = Callable[[str], GpuArray]


@dataclass(frozen=True)
class DeviceWeights:
    """All arrays are on the GPU; 16-bit ones are kept as uint16 words of `KernelShape.weight_dtype`."""

    tape: GpuArray  # (num_ctas * tape_values,): those of all thread blocks, see decode/tape_packing.py
    embedding: GpuArray  # (vocab, hidden)
    norms: GpuArray  # (layers, 2, lanes or 1, hidden)
    final_norm: GpuArray  # (KernelShape.final_norm_lanes, hidden)
    rope: GpuArray  # (max_context, head_dim / 2, 2) float32
    qkv_bias: GpuArray | None = None  # (layers, lanes, QKV rows)
    head_norms: GpuArray | None = None  # (layers, 2, head_dim): of query heads, of key heads


def to_words(values: GpuArray, dtype: str) -> GpuArray:
    """Float32 values as 16-bit words, rounded to nearest even (exact for values that were stored in that type)."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def needed_parts(shape: KernelShape, name: str) -> range:
    """Which parts of a tensor (`TensorLayout.parts`) a rank needs: those of its lanes, but the whole embedding."""
    num_parts = len(tensor_layouts(shape.spec)[name].parts)
    if name == EMBEDDING or num_parts == 1:
        return range(num_parts)
    return shape.head_lanes if name == norm_name(shape.spec, "model.norm") else shape.hosted_lanes


def needed_rows(shape: KernelShape, name: str) -> tuple[int, int]:
    """First and one-past-last row of `needed_parts`, which are neighbours."""
    parts, needed = tensor_layouts(shape.spec)[name].parts, needed_parts(shape, name)
    return parts[needed[0]][0], parts[needed[-1]][1]


def pack_tape(shape: KernelShape, source: MatrixSource, tape: GpuArray) -> None:
    """Fill `tape` (num_ctas * tape_values,) with all thread blocks' weights, in the order in which the kernel's loaders read.

    That is the order of the plan (decode/tape.py), but for the LM head: there it is one product for each lane's slice of the
    vocabulary, here see `KernelShape.head`.
    """
    position = 0
    ops = shape.ops
    places: list[tuple[Product, int]] = []
    for product in shape.products:
        places.append((product, position))
        position += ops[product.phase].num_values
    for product, start in sorted(places, key=lambda item: item[0].layer):  # a layer's tensors are needed together
        op = ops[product.phase]
        matrix = source(product.phase, product.layer, product.lane - shape.hosted_lanes[0])
        put_on_tape(tape, start, op, pack(matrix, op, shape.num_ctas))
    for index in range(shape.num_head_products):
        put_on_tape(tape, position, shape.head, _packed_head(shape, source, index))
        position += shape.head.num_values


def _packed_head(shape: KernelShape, source: MatrixSource, index: int) -> GpuArray:
    """The tiles (head.num_tiles, num_ctas, head.tile_values) of a product of the LM head."""
    if shape.spec.head_type is not HeadType.VOCAB_PARALLEL:
        return pack(source(Phase.HEAD, 0, index), shape.head, shape.num_ctas)
    parts = [pack(source(Phase.HEAD, 0, lane), shape.head, shape.head_ctas) for lane in range(shape.num_lanes)]
    left_over = shape.num_ctas - shape.num_lanes * shape.head_ctas  # each lane has its own thread blocks
    parts.append(np.zeros_like(parts[0], shape=(shape.head.num_tiles, left_over, shape.head.tile_values)))
    return np.concatenate(parts, axis=1)


def from_tensors(shape: KernelShape, tensors: TensorSource) -> DeviceWeights:
    """Pack a model. Asks for each tensor once, in the order of `tensor_layouts`; a layer's tensors are dropped with the layer.

    GPU memory at the peak: tape, embedding, one layer, and two copies of one lane's largest matrix.
    """
    import cupy

    spec = shape.spec
    tape = cupy.empty(shape.num_ctas * shape.tape_values, cupy.uint16)
    embedding = tensors(EMBEDDING)
    layer = _LayerTensors(shape, tensors, embedding)
    pack_tape(shape, layer.matrix, tape)
    return DeviceWeights(
        tape=tape,
        embedding=embedding,
        norms=np.stack(layer.norms).reshape(spec.num_layers, 2, -1, spec.hidden_size),
        final_norm=layer.final_norm,
        rope=cupy.asarray(np.stack(rope_table(spec, spec.max_context), axis=-1)),  # cosines and sines, side by side
        qkv_bias=np.stack(layer.biases) if layer.biases else None,
        head_norms=np.stack(layer.head_norms) if layer.head_norms else None,
    )


class _LayerTensors:
    """The matrices of a model, layer by layer, made of its tensors; collects the norms on the way."""

    def __init__(self, shape: KernelShape, tensors: TensorSource, embedding: GpuArray) -> None:
        self.shape, self.tensors, self.embedding = shape, tensors, embedding
        self.norms: list[GpuArray] = []  # attention, MLP, of layer 0, 1, ...
        self.biases: list[GpuArray] = []  # by layer, (hosted lanes, QKV rows)
        self.head_norms: list[GpuArray] = []  # by layer, (2, head_dim)
        self.final_norm: GpuArray = None
        self._head: GpuArray = None
        self._layer = -1
        self._matrices: dict[Phase, tuple[GpuArray, ...]] = {}  # each (hosted lanes, rows, K)

    def matrix(self, phase: Phase, layer: int, lane: int) -> GpuArray:
        """See `MatrixSource`."""
        if phase is Phase.HEAD:
            return self._head_matrix(lane)
        if layer != self._layer:
            self._load(layer)
        lanes = range(lane, lane + self.shape.lanes_of(phase))
        by_lane = [[tensor[one] for tensor in self._matrices[phase]] for one in lanes]
        parts = (
            [interleave(*parts) for parts in by_lane] if phase is Phase.GATE_UP else [part for parts in by_lane for part in parts]
        )
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _load(self, layer: int) -> None:
        self._matrices.clear()  # the memory of the layer before
        prefix, tensors = layer_prefix(layer), self.tensors
        self.norms.append(self._norm(f"{prefix}attention_norm"))
        query, key, value, out = (tensors(f"{prefix}attention.{name}.weight") for name in ("wq", "wk", "wv", "wo"))
        if self.shape.spec.qkv_bias:
            parts = [tensors(f"{prefix}attention.{name}.bias") for name in ("wq", "wk", "wv")]
            self.biases.append(np.concatenate(parts, axis=1))
        if self.shape.spec.qk_norm:
            self.head_norms.append(np.stack([tensors(f"{prefix}attention.{name}.weight") for name in ("q_norm", "k_norm")]))
        self.norms.append(self._norm(f"{prefix}ffn_norm"))
        gate, up, down = (tensors(f"{prefix}feed_forward.{name}.weight") for name in ("w1", "w3", "w2"))
        self._matrices |= {Phase.QKV: (query, key, value), Phase.OUT: (out,), Phase.GATE_UP: (gate, up), Phase.DOWN: (down,)}
        self._layer = layer

    def _head_matrix(self, lane: int) -> GpuArray:
        spec = self.shape.spec
        if self._head is None:
            self._matrices.clear()
            self.final_norm = self._norm("model.norm")
            first, last = self.shape.vocab_rows
            self._head = self.embedding[first:last] if spec.tied_embeddings else self.tensors(head_name(spec))
        if spec.head_type is HeadType.VOCAB_PARALLEL:
            return self._head[lane]
        if spec.head_type is HeadType.LANE:
            first = self.shape.head_lanes[lane] * spec.hidden_size
            return self._head[:, first : first + spec.hidden_size]
        return self._head

    def _norm(self, stem: str) -> GpuArray:
        return self.tensors(norm_name(self.shape.spec, stem)).reshape(-1, self.shape.spec.hidden_size)


def random_weights(shape: KernelShape, seed: int, observe: Callable[[str, GpuArray], None] | None = None) -> DeviceWeights:
    """Random weights of the right scale, made on the GPU: for timing shapes that no checkpoint exists of.

    `observe`: see `load_weights`.
    """

    def tensor(name: str) -> GpuArray:
        first, last = needed_rows(shape, name)
        words = random_tensor(shape.spec, name, seed, shape.weight_dtype)[first:last]
        if observe is not None:
            observe(name, words)
        return words

    return from_tensors(shape, tensor)


def random_tensor(spec: ModelSpec, name: str, seed: int, dtype: str = "bfloat16") -> GpuArray:
    """A whole tensor of random 16-bit words, made on the GPU; equal for equal arguments.

    Scaled as `checkpoint.random_tensors` does it: matrices by 1 / sqrt(fan-in), norm weights around 1.
    """
    import cupy

    shape = tensor_layouts(spec)[name].shape
    generator = cupy.random.default_rng(seed << 32 | zlib.crc32(name.encode()))
    values = generator.standard_normal(shape, dtype=cupy.float32)
    if "norm." in name:  # of heads, too
        values = np.float32(1.0) + np.float32(0.1) * values
    elif name != EMBEDDING:
        fan_in = shape[-1] * (spec.num_lanes if name.endswith(("wo.weight", "w2.weight")) else 1)  # those are summed over lanes
        values *= np.float32(fan_in**-0.5)
    return to_words(values, dtype)
