"""A rank's weights on its GPU, in the form in which the monokernel reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from kog_dist.decode.coded_packing import Codes, below_each_other, in_turn, put_codes, put_row_scales
from kog_dist.decode.coded_terms import as_terms
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.recipes import SHARED_TENSORS, Recipe, Stage, Vectors, recipes
from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.tape_packing import OpShape, interleave, pack, put_on_tape
from kog_dist.errors import CheckpointError
from kog_dist.model.formats.head import rounded_rows
from kog_dist.model.layout import (
    EMBEDDING,
    ffn_prefixes,
    head_name,
    is_layer_matrix,
    layer_prefix,
    norm_name,
    tensor_layouts,
)
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import HeadType
from kog_dist.records import dataclass
from kog_dist.workers.cuda.expert_weights import DeviceExperts, ExpertsBatch, GpuArray, Matrix, behind, interleaved, put_expert
from kog_dist.workers.cuda.kernel_shape import KernelShape

# Matrix (rows, K) of a phase as 16-bit words on the GPU: (phase, layer, hosted lane counted from 0, or the first of
# `KernelShape.lanes_of`, whose matrices stand one below the other). GATE_UP is interleaved, ROUTE has no lane (0).
# HEAD: all vocabulary rows of the rank; with `vocab_parallel` the lane's, with `lane` the columns of one of `shape.head.lanes`.
MatrixSource = Callable[[Phase, int, int], GpuArray]
# A tensor of a checkpoint as 16-bit words on the GPU, only the rows that `needed_rows` names.
TensorSource = Callable[[str], GpuArray]
# A quantised matrix: a tensor's name, and the hosted lane counted from 0.
CodesSource = Callable[[str, int], Codes]
# The experts of a layer, several at once; asked for in the order of layers.
StackedExperts = Callable[[int], Iterator[ExpertsBatch]]
ProductCodes = Callable[[Phase, int, int], Codes]  # like MatrixSource

_LARGEST_BINARY16 = 65504.0


@dataclass(frozen=True)
class DeviceWeights:
    """All arrays are on the GPU; 16-bit ones are kept as uint16 words of `KernelShape.weight_dtype`."""

    tape: GpuArray  # (weight_words,): those of all thread blocks, see decode/tape_packing.py, and scales of rows
    embedding: GpuArray  # (vocab, hidden)
    norms: GpuArray  # (layers, 2, lanes or 1, hidden)
    final_norm: GpuArray  # (HeadShape.norm_lanes, hidden)
    rope: GpuArray  # (max_context, head_dim / 2, 2) float32
    qkv_bias: GpuArray | None = None  # (layers, lanes, QKV rows)
    head_norms: GpuArray | None = None  # (layers, 2, head_dim): of query heads, of key heads
    out_bias: GpuArray | None = None  # (layers, hidden)
    sinks: GpuArray | None = None  # (layers, lanes, heads)
    delta_taps: GpuArray | None = None  # (delta nets, lanes, channels, width); head_norms have the layers with attention then
    delta_factors: GpuArray | None = None  # (delta nets, lanes, 2 * heads): logarithms of rates, what is added to decays
    delta_norm: GpuArray | None = None  # (delta nets, value_dim)
    experts: DeviceExperts | None = None


def to_words(values: GpuArray, dtype: str) -> GpuArray:
    """Float32 values as 16-bit words, rounded to nearest even (exact for values that were stored in that type)."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def to_values(words: GpuArray, dtype: str) -> GpuArray:
    """Float32 values of 16-bit words."""
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def needed_parts(shape: KernelShape, name: str) -> range:
    """Which parts of a tensor (`TensorLayout.parts`) a rank needs: those of its lanes, but the whole embedding."""
    num_parts = len(tensor_layouts(shape.spec)[name].parts)
    if name == EMBEDDING or num_parts == 1:
        return range(num_parts)
    return shape.head.lanes if name == norm_name(shape.spec, "model.norm") else shape.hosted_lanes


def needed_rows(shape: KernelShape, name: str) -> tuple[int, int]:
    """First and one-past-last row of `needed_parts`, which are neighbours."""
    parts, needed = tensor_layouts(shape.spec)[name].parts, needed_parts(shape, name)
    return parts[needed[0]][0], parts[needed[-1]][1]


def pack_tape(shape: KernelShape, source: MatrixSource, tape: GpuArray, coded: ProductCodes | None = None) -> None:
    """Fill `tape` (weight_words,) with all thread blocks' weights, in the order in which the kernel's loaders read.

    That is the order of the plan's products. `coded`: the matrices of the layers, where they are quantised.
    """
    position = 0
    numbers = {product: number for number, product in enumerate(shape.layer_products)}  # those that may have scales of rows
    places: list[tuple[Product, OpShape, int]] = []
    for product in shape.products:
        if product.op is not Phase.HEAD and (op := shape.tape.form_of(product)) is not None:
            places.append((product, op, position))
            position += op.num_values
    for product, op, start in sorted(places, key=lambda item: item[0].layer):  # a layer's tensors are needed together
        place = product.op, product.layer, 0 if product.op is Phase.ROUTE else product.first_lane - shape.hosted_lanes[0]
        if op.coding is None:
            put_on_tape(tape, start, op, pack(source(*place), op, shape.num_ctas))
            if shape.tape.scale_rows and product in numbers:
                _row_scales(shape, tape)[numbers[product]] = 1
            continue
        assert coded is not None
        matrix = coded(*place)
        put_codes(tape, start, op, shape.num_ctas, matrix)
        if shape.tape.scale_rows:
            put_row_scales(_row_scales(shape, tape)[numbers[product]], op, matrix.scales)
    for index in range(shape.head.num_products):
        if shape.head_coding is None:
            put_on_tape(tape, position, shape.head.form, _packed_head(shape, source, index))
        else:
            _put_coded_head(shape, tape, position, source, index)
        position += shape.head.form.num_values


def _row_scales(shape: KernelShape, tape: GpuArray) -> GpuArray:
    """View (products, num_ctas, scale_rows) of what lies behind the tapes, float32."""
    behind = tape[shape.num_ctas * shape.tape.num_values : shape.tape.head_scales_place].view(np.float32)
    return behind.reshape(len(shape.layer_products), shape.num_ctas, shape.tape.scale_rows)


def _packed_head(shape: KernelShape, source: MatrixSource, index: int) -> GpuArray:
    """The tiles (head.num_tiles, num_ctas, head.tile_values) of a product of the LM head."""
    if shape.spec.head_type is not HeadType.VOCAB_PARALLEL:
        return pack(source(Phase.HEAD, 0, index), shape.head.form, shape.num_ctas)
    parts = [pack(source(Phase.HEAD, 0, lane), shape.head.form, shape.head.num_ctas) for lane in range(shape.num_lanes)]
    left_over = shape.num_ctas - shape.num_lanes * shape.head.num_ctas  # each lane has its own thread blocks
    parts.append(np.zeros_like(parts[0], shape=(shape.head.form.num_tiles, left_over, shape.head.form.tile_values)))
    return np.concatenate(parts, axis=1)


def _put_coded_head(shape: KernelShape, tape: GpuArray, position: int, source: MatrixSource, index: int) -> None:
    """The same of integers, rounded a block of rows at a time, with its scales."""
    head, num_ctas = shape.head.form, shape.num_ctas
    by_lane = shape.spec.head_type is HeadType.VOCAB_PARALLEL
    parts = [source(Phase.HEAD, 0, lane) for lane in (range(shape.num_lanes) if by_lane else [index])]
    rows = np.zeros_like(parts[0], shape=(num_ctas, head.cta_rows, parts[0].shape[1]))
    for lane, part in enumerate(parts):  # each lane has its own thread blocks
        first = lane * shape.head.num_ctas * head.cta_rows
        rows.reshape(-1, rows.shape[2])[first : first + len(part)] = part
    scales = tape[shape.tape.head_scales_place :].view(np.float32).reshape(-1, num_ctas, head.cta_rows)[index]
    one = replace(head, blocks=1)
    for block in range(head.blocks):
        own = slice(block * head.rows, (block + 1) * head.rows)
        words = rows[:, own].reshape(-1, rows.shape[2])
        coded = rounded_rows(to_values(words, shape.weight_dtype))
        put_codes(tape, position + block * one.num_values, one, num_ctas, Codes(coded.codes, coded.scales))
        scales[:, own] = coded.scales.reshape(num_ctas, head.rows)


def from_tensors(
    shape: KernelShape,
    tensors: TensorSource,
    codes: CodesSource | None = None,
    *,
    stacked: StackedExperts | None = None,
    repeats_experts: bool = False,
) -> DeviceWeights:
    """Pack a model. Asks for each tensor once, in the order of `tensor_layouts`; a layer's tensors are dropped with the layer.

    With `shape.coding` the matrices of layers are those of `codes`, and with `stacked` experts and their biases come from there.
    `repeats_experts`: those of all layers are alike, and only the first layer's are asked for.
    GPU memory at the peak: tape, embedding, experts, one layer's other tensors, and two copies of one lane's largest matrix, or
    five of what is packed at once of `stacked`.
    """
    import cupy

    spec = shape.spec
    assert (shape.coding is None) == (codes is None)
    tape = cupy.empty(shape.tape.weight_words, cupy.uint16)
    embedding = tensors(EMBEDDING)
    experts = None if shape.experts is None else _Experts(shape, tensors, codes, stacked, repeats=repeats_experts)
    layer = _LayerTensors(shape, tensors, embedding, codes, experts)
    pack_tape(shape, layer.matrix, tape, layer.codes if codes is not None else None)
    return DeviceWeights(
        tape=tape,
        embedding=embedding,
        norms=np.stack(layer.norms).reshape(spec.num_layers, 2, -1, spec.hidden_size),
        final_norm=layer.final_norm,
        rope=cupy.asarray(np.stack(rope_table(spec, spec.max_context), axis=-1)),  # cosines and sines, side by side
        experts=None if experts is None else experts.weights(),
        **{name: np.stack(of_layers) for name, of_layers in layer.vectors.items()},
    )


def beside_codes(words: GpuArray, name: str, coding: Coding, weight_dtype: str) -> GpuArray:
    """16-bit weights in the type of x of codes. Raises CheckpointError for weights that are too large for it."""
    dtype, scale = coding.plain_dtype(weight_dtype), coding.plain_scale(weight_dtype)
    if dtype == weight_dtype:
        return words
    values = to_values(words, weight_dtype) * np.float32(scale)
    if float(abs(values).max()) > _LARGEST_BINARY16:
        raise CheckpointError(f"{name} has a weight beyond {_LARGEST_BINARY16 / scale:g}; use --device cpu")
    return to_words(values, dtype)


def joined(vectors: Vectors, parts: Sequence[GpuArray]) -> GpuArray:
    """The tensors of `vectors` as one array, on whichever device they are; the only one as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, axis=1) if vectors.is_by_lane else np.stack(parts)


class _LayerTensors:
    """The matrices of a model, layer by layer, made of its tensors; collects the norms on the way."""

    def __init__(
        self,
        shape: KernelShape,
        tensors: TensorSource,
        embedding: GpuArray,
        codes_of: CodesSource | None,
        experts: _Experts | None,
    ) -> None:
        self.shape, self.tensors, self.embedding, self.codes_of = shape, tensors, embedding, codes_of
        self.norms: list[GpuArray] = []  # attention, MLP, of layer 0, 1, ...
        self.vectors = defaultdict[str, list[GpuArray]](list)  # of mixers, by layer: see `DeviceWeights`
        self.experts = experts
        self.final_norm: GpuArray = None
        self._head: GpuArray = None
        self._layer = -1
        self._matrices: dict[Phase, tuple[GpuArray, ...]] = {}  # each (hosted lanes, rows, K)
        self._kept: dict[str, GpuArray] = {}  # the same of those that have 16 bit in a product of codes, by name

    def matrix(self, phase: Phase, layer: int, lane: int) -> GpuArray:
        """See `MatrixSource`."""
        if phase is Phase.HEAD:
            return self._head_matrix(lane)
        if layer != self._layer:
            self._load(layer)
        if phase is Phase.ROUTE:
            assert self.experts is not None
            return self.experts.router
        lanes = range(lane, lane + self.shape.lanes_of(phase))
        by_lane = [[tensor[one] for tensor in self._matrices[phase]] for one in lanes]
        parts = (
            [interleave(*parts) for parts in by_lane] if phase is Phase.GATE_UP else [part for parts in by_lane for part in parts]
        )
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def codes(self, phase: Phase, layer: int, lane: int) -> Codes:
        """The same of a quantised matrix of a layer."""
        if layer != self._layer:
            self._load(layer)
        names = [f"{layer_prefix(layer)}{name}.weight" for name in self._stages(layer)[phase].tensors or SHARED_TENSORS[phase]]
        by_lane = [[self._codes(phase, name, one) for name in names] for one in range(lane, lane + self.shape.lanes_of(phase))]
        if phase is Phase.GATE_UP:
            return below_each_other([in_turn(gate, up) for gate, up in by_lane])
        return below_each_other([part for parts in by_lane for part in parts])

    def _codes(self, phase: Phase, name: str, lane: int) -> Codes:
        """A lane's part of a tensor in a product of codes."""
        if name not in self._kept:
            assert self.codes_of is not None
            return self.codes_of(name, lane)
        coding = self.shape.ops[phase].coding
        assert coding is not None
        return as_terms(to_values(self._kept[name][lane], self.shape.weight_dtype), coding)

    def _plain(self, name: str) -> GpuArray:
        """A tensor of 16 bit; beside codes of attention, of delta nets."""
        words, coding = self.tensors(name), self.shape.attention_coding
        return words if coding is None else beside_codes(words, name, coding, self.shape.weight_dtype)

    def _load(self, layer: int) -> None:
        self._matrices.clear()  # the memory of the layer before
        self._kept.clear()
        prefix, tensors = layer_prefix(layer), self.tensors
        layouts = tensor_layouts(self.shape.spec)

        mixer, ffn = recipes(self.shape.spec)[layer]

        def matrices(recipe: Recipe) -> dict[Phase, tuple[GpuArray, ...]]:
            with_tensors = [stage for stage in recipe.stages if stage.is_by_lane and stage.tensors]
            coded = [stage for stage in with_tensors if self.shape.forms[stage.phase, layer].coding is not None]
            names = [f"{prefix}{name}.weight" for stage in coded if stage.kept_rows for name in stage.tensors]
            self._kept |= {name: tensors(name) for name in names if not is_layer_matrix(layouts, name)}
            stages = [stage for stage in with_tensors if stage not in coded]
            return {stage.phase: tuple(self._plain(f"{prefix}{name}.weight") for name in stage.tensors) for stage in stages}

        self.norms.append(self._norm(f"{prefix}attention_norm"))
        self._matrices |= matrices(mixer)
        for name, vectors in mixer.vectors.items():
            self.vectors[name].append(joined(vectors, [tensors(f"{prefix}{part}") for part in vectors.tensors]))
        self.norms.append(self._norm(f"{prefix}ffn_norm"))
        self._matrices |= matrices(ffn)
        if self.experts is not None:
            self.experts.load(layer)
            if self.experts.has_shared and self.shape.coding is None:
                for phase, names in SHARED_TENSORS.items():
                    self._matrices[phase] = tuple(tensors(f"{prefix}{name}.weight") for name in names)
        self._layer = layer

    def _stages(self, layer: int) -> dict[Phase, Stage]:
        return {stage.phase: stage for recipe in recipes(self.shape.spec)[layer] for stage in recipe.stages}

    def _head_matrix(self, lane: int) -> GpuArray:
        spec = self.shape.spec
        if self._head is None:
            self._matrices.clear()
            self.final_norm = self._norm("model.norm")
            first, last = self.shape.head.vocab_rows
            self._head = self.embedding[first:last] if spec.tied_embeddings else self.tensors(head_name(spec))
        if spec.head_type is HeadType.VOCAB_PARALLEL:
            return self._head[lane]
        if spec.head_type is HeadType.LANE:
            first = self.shape.head.lanes[lane] * spec.hidden_size
            return self._head[:, first : first + spec.hidden_size]
        return self._head

    def _norm(self, stem: str) -> GpuArray:
        return self.tensors(norm_name(self.shape.spec, stem)).reshape(-1, self.shape.spec.hidden_size)


class _Experts:
    """The experts of a model, which go to their places layer by layer, and the router of the layer that was loaded last."""

    def __init__(
        self,
        shape: KernelShape,
        tensors: TensorSource,
        codes_of: CodesSource | None,
        stacked: StackedExperts | None,
        *,
        repeats: bool,
    ) -> None:
        import cupy

        assert shape.experts is not None
        self._spec, self._experts, self._hosted = shape.spec, shape.experts, shape.hosted_lanes
        self._tensors, self._codes_of, self._stacked, self._repeats = tensors, codes_of, stacked, repeats
        experts = shape.experts
        self._matrices = cupy.empty((shape.spec.num_layers, experts.num_experts, experts.num_values), cupy.uint16)
        self._biases: dict[str, list[GpuArray]] = {"router": [], "gate_up": [], "down": []}
        self.router: GpuArray = None  # and the shared expert's gate
        self.has_shared = experts.lane_shared > 0

    def load(self, layer: int) -> None:
        """Put a layer's experts in their places."""
        prefix = layer_prefix(layer)
        self.router = self._router(f"{prefix}feed_forward.router.weight")
        self._put(layer)
        if self.has_shared:
            self.router = np.concatenate([self.router, self._router(f"{prefix}feed_forward.shared_gate.weight")])

    def _put(self, layer: int) -> None:
        """What is chosen from."""
        numbers, prefix = self._spec.experts, layer_prefix(layer)
        assert numbers is not None
        if numbers.router_bias:
            self._biases["router"].append(self._tensors(f"{prefix}feed_forward.router.bias"))
        if self._repeats and layer:
            self._matrices[layer] = self._matrices[0]
            for name in ("gate_up", "down") if numbers.bias else ():
                self._biases[name] += self._biases[name][: numbers.num_experts]
            return
        if self._stacked is not None:
            for batch in self._stacked(layer):
                slabs = self._matrices[layer, batch.experts.start : batch.experts.stop]
                put_expert(slabs, self._experts, batch.gate_up, batch.downs)
                self._biases["gate_up"].append(batch.gate_up_bias)
                self._biases["down"].append(batch.down_bias)
            return
        for expert, start in enumerate(ffn_prefixes(self._spec, layer)):
            put_expert(self._matrices[layer, expert], self._experts, *self._parts(start))
            if numbers.bias:
                self._biases["gate_up"].append(interleaved(self._tensors, f"{start}w1.bias", f"{start}w3.bias"))
                self._biases["down"].append(self._tensors(f"{start}w2.bias"))

    def _router(self, name: str) -> GpuArray:
        """In the type of what it is multiplied with."""
        words, experts = self._tensors(name), self._experts
        return words if experts.coding is None else beside_codes(words, name, experts.coding, experts.weight_dtype)

    def _parts(self, start: str) -> tuple[Matrix, list[Matrix]]:
        """Gate and up rows of all hosted lanes in turn, and each lane's `down`."""
        gate, up, down = (f"{start}{name}.weight" for name in ("w1", "w3", "w2"))
        lanes = range(len(self._hosted))
        if self._codes_of is None:
            gates, ups, downs = (self._tensors(name) for name in (gate, up, down))
            return np.concatenate([interleave(gates[lane], ups[lane]) for lane in lanes]), list(downs)
        codes = self._codes_of
        both = below_each_other([in_turn(codes(gate, lane), codes(up, lane)) for lane in lanes])
        return both, [behind(self._experts.skew(self._hosted[lane]), codes(down, lane)) for lane in lanes]

    def weights(self) -> DeviceExperts:
        """Those of all layers, once all were loaded."""
        layers = self._spec.num_layers
        shape = (layers, self._experts.num_experts, -1)
        found = {
            f"{name}_bias": np.concatenate([bias.reshape(-1) for bias in biases]).reshape(shape)
            for name, biases in self._biases.items()
            if biases
        }
        return DeviceExperts(self._matrices, **found)
