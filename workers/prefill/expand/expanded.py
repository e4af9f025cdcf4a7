"""Quantised weights as prefill multiplies them: no second copy, but one matrix at a time, expanded from the monokernel's tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda.driver import Kernel
from kog_dist.decode.plan.recipes import layer_matrix_stages, matrix_stages, share_stream
from kog_dist.decode.plan.steps import LAYER_OPS, Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.model.layers import DeltaNet
from kog_dist.records import dataclass
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address, library, on_host
from kog_dist.workers.prefill.base.matrices import PlainParts, stream_scale
from kog_dist.workers.prefill.expand.expand_abi import EXPAND_PARAMS, expand_header

Launch = Callable[[int, int, bytes, bool], None]  # see `kernel_calls.Launchers`


class ExpandedMatrices:
    """The matrices (hosted lanes, rows, columns) of all layers in binary16, by phase and layer.

    All share one memory, made when the first is asked for: a matrix stays until the next one is, on the same stream. `launch`
    runs expand.cu. `factors`: a phase's float32 (layers, lanes or 1, columns), which its columns are multiplied by. `places`:
    those of `places_on_tape`.
    """

    def __init__(
        self, shape: KernelShape, weights: DeviceWeights, launch: Launch, device: str, factors: dict[Phase, Array] | None = None
    ) -> None:
        self.shape, self._launch, self._tape, self._library = shape, launch, weights.tape, library(device)
        self.places, self._factors = self._library.asarray(places_on_tape(shape)), factors or {}
        self._sizes = matrix_shapes(shape)

    def __contains__(self, phase: Phase) -> bool:
        """Whether a phase has such matrices: of experts only the shared one's are expanded."""
        return phase in self._sizes

    @cached_property
    def _memory(self) -> Array:
        memory: Array = self._library.empty(max(map(prod, self._sizes.values())), np.float16)
        return memory

    @property
    def num_bytes(self) -> int:
        """Of memory that is not the monokernel's."""
        made = [self._memory] if "_memory" in vars(self) else []
        return sum(part.nbytes for part in (*made, self.places, *self._factors.values()))

    def matrix(self, phase: Phase, layer: int) -> Array:
        """Queue the expansion of a matrix."""
        op = _form_of(self.shape, phase)
        num_products = self.shape.num_lanes // self.shape.lanes_of(phase)
        num_ctas = num_products * op.num_tiles * self.shape.num_ctas
        self._launch(num_ctas, 32 * op.warps, self._params_of(phase, layer, self._factors.get(phase)), False)
        size = self._sizes[phase]
        matrix: Array = self._memory[: prod(size)].reshape(size)
        return matrix

    def _params_of(self, phase: Phase, layer: int, factors: Array | None) -> bytes:
        shape, op, params = self.shape, _form_of(self.shape, phase), np.zeros((), EXPAND_PARAMS.dtype)
        _, lane_rows, columns = self._sizes[phase]
        tape = address(self._tape)
        params["tape_ptr"], params["scales_ptr"] = tape, tape + 2 * shape.num_ctas * shape.tape.num_values
        params["places_ptr"] = address(self.places[layer, _number_of(phase)])
        params["out_ptr"] = address(self._memory)
        if factors is not None:
            params["factor_ptr"] = address(factors[layer])
            params["factor_stride"] = columns if factors.shape[1] > 1 else 0
        numbers = {
            "num_ctas": shape.num_ctas, "rows": op.rows, "last_rows": op.rows_of(op.blocks - 1), "blocks": op.blocks,
            "tiles": op.tiles, "warps": op.warps_of(0), "long_tiles": op.num_long_tiles, "columns": columns,
            "product_rows": shape.lanes_of(phase) * lane_rows, "lane_rows": lane_rows, "is_interleaved": phase is Phase.GATE_UP,
        }  # fmt: skip
        for name, number in numbers.items():
            params[name] = number
        return params.tobytes()


@dataclass(frozen=True)
class ExpandedLayer:
    """A layer as `Layers` and `DenseLayers` take it. Whoever reads a matrix queues its expansion, and uses it before the next."""

    matrices: ExpandedMatrices
    layer: int
    plain: PlainParts | None = field(default=None, kw_only=True)

    @property
    def wqkv(self) -> Array:
        """Query rows, key rows, value rows, or all rows of a delta net's input, whose last ones are terms of factors."""
        is_net = isinstance(self.matrices.shape.spec.layers[self.layer].mixer, DeltaNet)
        if self.plain is not None and self.plain.wqkv is not None:
            return self.plain.wqkv
        return self.matrices.matrix(Phase.DELTA_IN if is_net else Phase.QKV, self.layer)

    @property
    def wo(self) -> Array:
        """Of the attention's output."""
        if self.plain is not None and self.plain.wo is not None:
            return self.plain.wo
        return self.matrices.matrix(Phase.OUT, self.layer)

    @property
    def w13(self) -> Array | None:
        """Gate rows, up rows, of a shared expert where there are experts; None without such a one, and so is `w2`."""
        return self.matrices.matrix(Phase.GATE_UP, self.layer) if Phase.GATE_UP in self.matrices else None

    @property
    def w2(self) -> Array | None:
        """Of the FFN's output."""
        return self.matrices.matrix(Phase.DOWN, self.layer) if Phase.DOWN in self.matrices else None


@dataclass(frozen=True)
class ExpandedLaneLayer(ExpandedLayer):
    """See `LayerMatrices`."""

    scale: Array
    unscale: Array


@dataclass(frozen=True)
class ExpandedDenseLayer(ExpandedLayer):
    """See `DenseMatrices`."""

    attention_norm: Array
    ffn_norm: Array
    qkv_bias: Array | None = None
    head_norms: Array | None = None
    out_bias: Array | None = None  # where the first lane is hosted
    sinks: Array | None = None
    router: Array | None = None
    router_bias: Array | None = None
    shared_gate: Array | None = None
    delta_taps: Array | None = None
    delta_factors: Array | None = None
    delta_norm: Array | None = None


def expanded_on_gpu(shape: KernelShape, weights: DeviceWeights, routers: Sequence[Any]) -> list[Any]:
    """All layers, on cupy's current stream. `routers`: of each, or `PlainParts`. Raises CompileError or LaunchError."""
    assert shape.coding is not None
    cubin = compiled.build("expand", expand_header(shape.coding, shape.tape.scale_rows))
    return expanded_layers(shape, weights, partial(compiled.launch, Kernel(cubin.path, "expand", 0)), "cuda", routers)


def expanded_layers(shape: KernelShape, weights: DeviceWeights, launch: Launch, device: str, routers: Sequence[Any]) -> list[Any]:
    """All layers of the model's kind; what is neither a matrix nor a router is read from the monokernel's weights."""
    there = library(device).asarray

    def values(words: Array) -> NDArray[np.float32]:  # they are few: no kernels of cupy's need be compiled for them
        return on_host(words if shape.weight_dtype == "bfloat16" else words.view(np.float16))

    layers = range(shape.spec.num_layers)
    norms = values(weights.norms)  # layers, 2, lanes or 1, hidden
    if not share_stream(shape.spec):
        scales = np.stack([stream_scale(norms[layer, 0]) for layer in layers])
        factors = {Phase.QKV: there(norms[:, 0] / scales), Phase.GATE_UP: there(np.ascontiguousarray(norms[:, 1]))}
        matrices = ExpandedMatrices(shape, weights, launch, device, factors)
        return [ExpandedLaneLayer(matrices, i, there(scales[i]), there(1 / scales[i])) for i in layers]
    matrices = ExpandedMatrices(shape, weights, launch, device)
    out_bias = weights.out_bias if shape.hosted_lanes[0] == 0 else None
    router_bias = None if weights.experts is None else weights.experts.router_bias
    vectors = (weights.qkv_bias, weights.head_norms, out_bias, weights.sinks, router_bias)
    biases, head_norms, out_biases, sinks, router_biases = (None if words is None else there(values(words)) for words in vectors)

    def of(layer: int, vectors: Array | None) -> Array | None:
        return None if vectors is None else vectors[layer]

    if shape.spec.mixed_layers:
        return _mixed_layers(shape, weights, matrices, values, there, routers)
    return [
        ExpandedDenseLayer(
            matrices, i, there(norms[i, 0, 0]), there(norms[i, 1, 0]), of(i, biases), of(i, head_norms), of(i, out_biases),
            None if sinks is None else sinks[i].reshape(-1), routers[i], of(i, router_biases),
        )
        for i in layers
    ]  # fmt: skip


def _mixed_layers(
    shape: KernelShape,
    weights: DeviceWeights,
    matrices: ExpandedMatrices,
    values: Callable[[Array], NDArray[np.float32]],
    there: Callable[[NDArray[np.float32]], Array],
    plain: Sequence[PlainParts | None],
) -> list[ExpandedDenseLayer]:
    """Layers of several kinds. What a kind of mixer has stands there for the layers of that kind alone."""
    spec, made = shape.spec, list[ExpandedDenseLayer]()
    added = np.float32(spec.layers[0].norm.adds_one)
    norms = there(values(weights.norms)[:, :, 0] + added)
    held = {name: getattr(weights, name) for name in ("delta_taps", "delta_factors", "delta_norm", "head_norms")}
    vectors = {name: values(words) + added * (name == "head_norms") for name, words in held.items() if words is not None}
    seen = {True: 0, False: 0}  # by whether it is a delta net
    for layer, (attention_norm, ffn_norm) in enumerate(norms):
        is_net = isinstance(spec.layers[layer].mixer, DeltaNet)
        own = {name: there(every[seen[is_net]]) for name, every in vectors.items() if name.startswith("delta") == is_net}
        parts = plain[layer] or PlainParts()
        made.append(
            ExpandedDenseLayer(
                matrices, layer, attention_norm, ffn_norm, router=parts.router, shared_gate=parts.shared_gate, plain=plain[layer],
                **own,
            )
        )  # fmt: skip
        seen[is_net] += 1
    return made


def matrix_shapes(shape: KernelShape) -> dict[Phase, tuple[int, int, int]]:
    """Hosted lanes, rows and columns of the matrices of a layer, but for those of experts that are chosen."""
    terms = 1 if shape.delta is None else shape.delta.terms
    stages = {op: stage for op, stage in matrix_stages(shape.spec).items() if shape.ops[op].coding is not None}
    if shape.experts is not None:
        of_layer = layer_matrix_stages(shape.spec, 0)
        stages |= {op: of_layer[op] for op, form in shape.experts.taped.items() if form.coding is not None}
    return {op: (shape.num_lanes, stage.coded_rows(terms), stage.num_columns) for op, stage in stages.items()}


def _form_of(shape: KernelShape, phase: Phase) -> OpShape:
    """What a thread block has of such a matrix."""
    taped = {} if shape.experts is None else shape.experts.taped
    return taped[phase] if phase in taped else shape.ops[phase]


def _number_of(phase: Phase) -> int:
    """Of a layer's product among those of the layer."""
    return LAYER_OPS.index(Phase.QKV if phase is Phase.DELTA_IN else phase)


def places_on_tape(shape: KernelShape) -> Any:
    """int64 (layers, phases, lanes, 2): the first byte of each product on the tape, and its number among all."""
    places = np.zeros((shape.spec.num_layers, len(LAYER_OPS), shape.num_lanes, 2), np.int64)
    position, numbers = 0, {product: number for number, product in enumerate(shape.layer_products)}
    for product in shape.products:  # as `device_weights.pack_tape` writes them
        if (form := shape.tape.form_of(product)) is None:
            continue
        if product in numbers:
            lane = product.first_lane - shape.hosted_lanes[0]
            index = product.layer, _number_of(product.op), lane // product.num_lanes
            places[index] = 2 * shape.num_ctas * position, numbers[product]
        position += form.num_values
    return places
