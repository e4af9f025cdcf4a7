"""A rank's weights as matrices: a second copy, beside the monokernel's tape, which whole chunks of tokens are multiplied with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.recipes import Vectors, layer_matrix_stages, layer_vectors, router_stage
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.layout import layer_prefix, norm_name, tensor_layouts
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.device_weights import joined
from kog_dist.workers.prefill.base.arrays import Array, library_of, on_host, put_scaled

_NORMS = ("attention_norm", "ffn_norm")
_OF_FIRST_LANE = "out_bias"  # the rank that hosts it adds that
_LEAST_SCALE = 2.0**-6


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """One layer of the hosted lanes, (lanes, out, in), in the type of the products.

    FFN norm weights are multiplied into the columns of `w13`, in float32, before these are rounded. Roundings of `wqkv` would go
    straight into keys and values, so streams are multiplied by `scale` instead: the attention norm's weights but for a power of
    two, and for those so small that a stream would lose bits; what is missing is multiplied into the columns.
    """

    wqkv: Array  # query rows, key rows, value rows
    wo: Array
    w13: Array  # gate rows, up rows
    w2: Array
    scale: Array  # (lanes or 1, D) float32
    unscale: Array  # its inverse


@dataclass(frozen=True, slots=True)
class DenseMatrices:
    """One layer of the hosted lanes of a model with one residual stream, (lanes, out, in), in the type of the products.

    In a layer with experts `w13` and `w2` are those of the shared one, or None: experts are read where the monokernel has them.
    """

    wqkv: Array  # query rows, key rows, value rows, and gate rows if there are any; or all rows of a delta net's input
    wo: Array
    w13: Array | None  # gate rows, up rows
    w2: Array | None
    attention_norm: Array  # (D,) float32
    ffn_norm: Array
    qkv_bias: Array | None = None  # (lanes, rows of wqkv) float32
    head_norms: Array | None = None  # (2, head_dim) float32: of query heads, of key heads
    out_bias: Array | None = None  # (D,) float32, where the first lane is hosted
    sinks: Array | None = None  # (lanes * heads,) float32
    router: Array | None = None  # (experts, D)
    router_bias: Array | None = None  # (experts,) float32
    shared_gate: Array | None = None  # (D,) float32: of a shared expert
    delta_taps: Array | None = None  # (lanes, channels, conv_width) float32: of a delta net's convolution
    delta_factors: Array | None = None  # (lanes, 2 * heads) float32: logarithms of rates, what is added to decays
    delta_norm: Array | None = None  # (value_dim,) float32


@dataclass(frozen=True, slots=True)
class PlainParts:
    """What a layer of a model with layers of several kinds has in 16 bit beside codes: fields of `DenseMatrices`, as they are
    there. `wqkv` and `wo`: of a delta net.
    """

    wqkv: Array | None = None
    wo: Array | None = None
    router: Array | None = None
    shared_gate: Array | None = None


class Matrices:
    """Collects the layers of a model while its tensors pass by, in any order; a layer is made as soon as it is complete.

    Layers are `DenseMatrices` where the model has one residual stream, else `LayerMatrices`.
    `take` wants the rows of the hosted lanes (all lanes of the model have the same number of rows), as floating-point values.
    `has_first_lane`: whether that one is hosted, which adds the bias of attention's output. `routers_only`: all else is
    quantised, and a layer is its router's weights, or None in a model without experts. Where layers are of several kinds it is
    `PlainParts`, with those of `plain_ops` that it has, or None.
    Memory at the peak: what is made, the tensors of layers that are not complete, and one matrix in float32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: DTypeLike,
        *,
        has_first_lane: bool = True,
        routers_only: bool = False,
        plain_ops: Sequence[Phase] = (),
    ) -> None:
        self._spec, self._dtype = spec, dtype
        by_layer = [layer_matrix_stages(spec, layer) for layer in range(spec.num_layers)]
        self._tensors = [{op: stage.tensors for op, stage in stages.items()} for stages in by_layer]
        router = router_stage(spec)
        self._router_parts = () if router is None else tuple(f"{part}.weight" for part in router.tensors)
        self._vectors = [
            {name: one for name, one in layer_vectors(spec, layer).items() if has_first_lane or name != _OF_FIRST_LANE}
            for layer in range(spec.num_layers)
        ]
        self._routers_only = routers_only
        self._plain = [
            [op for op in plain_ops if op in tensors] if Phase.DELTA_IN in tensors else list[Phase]() for tensors in self._tensors
        ]
        self._parts = [self._few_parts_of(layer) if routers_only else self._parts_of(layer) for layer in range(spec.num_layers)]
        self._names = {name: layer for layer in range(spec.num_layers) for name in self._tensor_names(layer)}
        self._waiting: dict[int, dict[str, Array]] = {layer: {} for layer in range(spec.num_layers)}
        self._made: dict[int, LayerMatrices | DenseMatrices | PlainParts | Array | None] = {}

    def wants(self, name: str) -> bool:
        """Whether a tensor belongs to a matrix."""
        return name in self._names

    def take(self, name: str, values: Array) -> None:
        """A tensor passes by. Those that are not wanted are left alone."""
        if name not in self._names:
            return
        layer = self._names[name]
        waiting = self._waiting[layer]
        waiting[name] = values
        names = self._tensor_names(layer)
        if len(waiting) == len(names):
            make = self._make_dense if self._spec.has_one_stream else self._make
            parts = {part: waiting[name] for part, name in zip(self._parts[layer], names, strict=True)}
            few = self._plain_parts if self._spec.mixed_layers else self._router
            self._made[layer] = few(layer, parts) if self._routers_only else make(layer, parts)
            waiting.clear()

    def layers(self) -> list[Any]:
        """All layers, of the model's kind, once every tensor has passed."""
        if not any(self._parts):
            return [None] * self._spec.num_layers
        missing = [layer for layer, parts in enumerate(self._parts) if parts and layer not in self._made]
        assert not missing, f"tensors of layers {missing} did not pass"
        return [self._made.get(layer) for layer in range(self._spec.num_layers)]

    def _few_parts_of(self, layer: int) -> list[str]:
        """Those that are not quantised."""
        plain = [f"{part}.weight" for op in self._plain[layer] for part in self._tensors[layer][op]]
        return [*plain, *self._router_parts]

    def _plain_parts(self, layer: int, parts: dict[str, Array]) -> PlainParts:
        plain, tensors = self._plain[layer], self._tensors[layer]
        wqkv, wo = (self._matrix(parts, tensors[op]) if op in plain else None for op in (Phase.DELTA_IN, Phase.OUT))
        return PlainParts(wqkv, wo, self._router(layer, parts), self._shared_gate(parts))

    def _parts_of(self, layer: int) -> list[str]:
        """All tensors of a layer, by their names within it."""
        matrices = [f"{part}.weight" for parts in self._tensors[layer].values() for part in parts]
        return [*_NORMS, *matrices, *self._router_parts, *(part for one in self._vectors[layer].values() for part in one.tensors)]

    def _tensor_names(self, layer: int) -> list[str]:
        prefix, spec = layer_prefix(layer), self._spec
        return [norm_name(spec, prefix + part) if part in _NORMS else prefix + part for part in self._parts[layer]]

    def _make(self, layer: int, parts: dict[str, Array]) -> LayerMatrices:
        norm = on_host(parts["attention_norm"]).reshape(-1, self._spec.hidden_size)
        scale = stream_scale(norm)
        there = library_of(parts["attention_norm"]).asarray
        tensors = self._tensors[layer]
        wo, w2 = (self._matrix(parts, tensors[op]) for op in (Phase.OUT, Phase.DOWN))
        return LayerMatrices(
            self._matrix(parts, tensors[Phase.QKV], norm / scale),
            wo,
            self._matrix(parts, tensors[Phase.GATE_UP], on_host(parts["ffn_norm"])),
            w2,
            there(scale),
            there(1 / scale),
        )

    def _make_dense(self, layer: int, parts: dict[str, Array]) -> DenseMatrices:
        tensors = self._tensors[layer]
        ops = (Phase.DELTA_IN if Phase.DELTA_IN in tensors else Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN)
        wqkv, wo, w13, w2 = (self._matrix(parts, tensors[op]) if op in tensors else None for op in ops)
        assert wqkv is not None
        assert wo is not None
        there = library_of(wqkv).asarray

        def vector(one: Vectors) -> Array:
            found = joined(one, [on_host(parts[part]) for part in one.tensors])
            values: Array = there(found if len(one.tensors) > 1 else found.reshape(-1))
            return values

        added = np.float32(self._spec.layers[0].norm.adds_one)
        attention_norm, ffn_norm = (there(on_host(parts[name]).reshape(-1) + added) for name in _NORMS)
        vectors = {name: vector(one) for name, one in self._vectors[layer].items()}
        if added and "head_norms" in vectors:
            vectors["head_norms"] = vectors["head_norms"] + added
        router, gate = self._router(layer, parts), self._shared_gate(parts)
        return DenseMatrices(wqkv, wo, w13, w2, attention_norm, ffn_norm, router=router, shared_gate=gate, **vectors)

    def _router(self, layer: int, parts: dict[str, Array]) -> Array | None:
        if not self._router_parts:
            return None
        name = self._router_parts[0]  # behind it stands the gate of a shared expert, if there is one
        router: Array = library_of(parts[name]).empty(parts[name].shape, self._dtype)
        put_scaled(router, parts[name], None)
        return router

    def _shared_gate(self, parts: dict[str, Array]) -> Array | None:
        if not self._router_parts[1:]:
            return None
        gate = parts[self._router_parts[1]]
        values: Array = library_of(gate).asarray(on_host(gate).reshape(-1))
        return values

    def _matrix(self, by_part: dict[str, Array], tensors: tuple[str, ...], norm: NDArray[np.float32] | None = None) -> Array:
        """The parts of a matrix below each other, by lane, times `norm` column by column."""
        parts = [by_part[f"{part}.weight"] for part in tensors]
        lanes, _, columns = parts[0].shape
        xp = library_of(parts[0])
        matrix: Array = xp.empty((lanes, sum(part.shape[1] for part in parts), columns), self._dtype)
        factors = None if norm is None else xp.asarray(norm.reshape(-1, 1, columns))
        row = 0
        for part in parts:
            put_scaled(matrix[:, row : row + part.shape[1]], part, factors)
            row += part.shape[1]
        return matrix


def plain_ops(coding: Coding | None) -> tuple[Phase, ...]:
    """Of delta nets, those whose matrices have 16 bit beside codes of attention."""
    if coding is None:
        return ()
    return (Phase.DELTA_IN,) * coding.plain_inputs + (Phase.OUT,) * coding.plain_outputs


def matrices_of(spec: ModelSpec, lanes: range, tensor: Callable[[str], Array], dtype: DTypeLike) -> Matrices:
    """The matrices of a model whose whole tensors can be asked for by name."""
    matrices = Matrices(spec, dtype, has_first_lane=lanes[0] == 0)
    for name, layout in tensor_layouts(spec).items():
        if matrices.wants(name):
            is_cut = len(layout.parts) > 1
            first, last = (layout.parts[lanes[0]][0], layout.parts[lanes[-1]][1]) if is_cut else layout.parts[0]
            matrices.take(name, tensor(name)[first:last])
    return matrices


def stream_scale(norm: NDArray[np.float32]) -> NDArray[np.float32]:
    """See `LayerMatrices`: at most 2, at least 2**-7 of that."""
    largest = np.maximum(np.abs(norm).max(), np.float32(2.0**-100))
    scaled = norm / np.ldexp(np.float32(1), int(np.rint(np.log2(largest))))
    return np.where(np.abs(scaled) < _LEAST_SCALE, np.float32(_LEAST_SCALE), scaled)
