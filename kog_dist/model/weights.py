"""The weights that one rank keeps: NumPy arrays, one per lane and use, so that arithmetic never depends on the world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field, fields, replace
from itertools import chain
from math import prod
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.aligned import Array, aligned_empty
from kog_dist.model.formats.head import round_in_place
from kog_dist.model.formats.lanes import CodedSource, lane_codes, weight_format
from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.mxfp4 import GROUP, kept, kept_shapes
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layers import Experts
from kog_dist.model.layout import (
    EMBEDDING,
    KINDS,
    SHARED,
    TensorLayout,
    ffn_prefixes,
    head_name,
    layer_prefix,
    mixer_tensors,
    norm_name,
)
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass

BFLOAT16 = np.dtype(np.uint16)  # of a matrix that is kept as it is stored: NumPy has no type for such values
MXFP4_CODES = np.dtype(np.uint8)  # of experts that are kept in MXFP4: codes, two in a byte
_QKV_BIASES = ("wq.bias", "wk.bias", "wv.bias")  # as ends of names within a layer's attention
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
_KEPT: Mapping[str, np.dtype[Any]] = {"BF16": BFLOAT16, "F16": np.dtype(np.float16)}  # by the name in safetensors files


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """What a layer with E experts has besides their matrices. Lanes share routers and `w2_bias`."""

    router: Array  # (E, D); with a shared expert (E + 1, D)
    router_bias: Array | None = None  # (E,)
    w13_bias: Array | None = None  # (E, 2F)
    w2_bias: Array | None = None  # (E, D)
    w13_scales: Array | None = None  # (E, 2F, groups) of experts in MXFP4: bytes, as files have them
    w2_scales: Array | None = None  # (E, D, groups)
    w2_skew: int = 0  # columns of the first group that belong to the lane before
    shared_w13: Array | None = None  # (2S, D) of a lane's S columns of the shared expert; the last row of `router` is its gate
    shared_w2: Array | None = None  # (D, S)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of one lane. Q, K, F: its query values (lane_heads * head_dim), key values and FFN columns; D: the hidden size.

    With experts w13 and w2 have those of all E of them, or their codes (`MXFP4_CODES`). None: the model has no such weights.
    Matrices that are applied to the same vector are one array, since a decode step is bounded by matrix-vector products. Matrices
    may be of 16 bit (`Checkpoint.rank_weights`). Of other mixers than attention wqkv is what their input is multiplied with, wo
    what makes their output; `own`: the other tensors of the mixer, by the end of their names in `layout`.
    """

    attention_norm: Array  # (D,)
    wqkv: Array  # (Q + 2K, D): query rows, then key rows, then value rows; gated (2Q + 2K, D), gates last
    wo: Array  # (D, Q)
    ffn_norm: Array  # (D,)
    w13: Array  # (2F, D): gate rows w1, then up rows w3; with experts (E, 2F, D)
    w2: Array  # (D, F); with experts (E, D, F)
    qkv_bias: Array | None = None  # (Q + 2K,): as wqkv
    out_bias: Array | None = None  # (D,): of wo, whose lanes share it
    q_norm: Array | None = None  # (head_dim,): of every query head
    k_norm: Array | None = None  # (head_dim,): of every key head
    sinks: Array | None = None  # (lane_heads,)
    experts: ExpertWeights | None = None
    own: Mapping[str, Array] = field(default_factory=dict)

    @property
    def wq(self) -> Array:
        """View (Q, D) of wqkv."""
        return self.wqkv[: self.wo.shape[1]]

    @property
    def wk(self) -> Array:
        """View (K, D) of wqkv."""
        return self.wqkv[self.wo.shape[1] : (self.wo.shape[1] + len(self.wqkv)) // 2]

    @property
    def wv(self) -> Array:
        """View (K, D) of wqkv."""
        return self.wqkv[(self.wo.shape[1] + len(self.wqkv)) // 2 :]

    @property
    def w1(self) -> Array:
        """View (F, D) of w13."""
        return self.w13[: self.w2.shape[1]]

    @property
    def w3(self) -> Array:
        """View (F, D) of w13."""
        return self.w13[self.w2.shape[1] :]


@dataclass(frozen=True, slots=True)
class LaneWeights:
    """All layers of one lane."""

    layers: tuple[LayerWeights, ...]


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What a rank that hosts some lanes needs to decode.

    embedding: (V, D), like matrices maybe of 16 bit. lanes: by hosted lane. heads: by lane of the vocabulary, rows
    `ModelSpec.vocab_slice(lane)` of the LM head, (rows, D) or (rows, L*D) for the `lane` head; views of the embedding if they are
    tied. norms: the final norm (D,) of every lane of the model; one and the same array
    when it is shared (as it always is with pre_norm_lane_agg).
    """

    embedding: Array
    lanes: Mapping[int, LaneWeights]
    heads: Mapping[int, Array]
    norms: Mapping[int, Array]

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays; shared ones count once."""
        heads = [head for head in self.heads.values() if not np.may_share_memory(head, self.embedding)]
        arrays = [self.embedding, *heads, *self.norms.values()]
        for lane in self.lanes.values():
            for layer in lane.layers:
                arrays += _arrays_of(layer) + ([] if layer.experts is None else _arrays_of(layer.experts))
        return sum(array.nbytes for array in {id(array): array for array in arrays}.values())


def _arrays_of(weights: LayerWeights | ExpertWeights) -> list[Array]:
    values = [getattr(weights, item.name) for item in fields(weights)]
    return [value for value in values if isinstance(value, np.ndarray)]


class WeightArena:
    """Memory for arrays that are written once and then read for every token: few mappings, in huge pages if the kernel has any.

    The matrix-vector products of one token walk through all of it once; with 4 KiB pages a tenth of the time goes to page walks.
    """

    CHUNK_BYTES = 64 << 20  # of address space; only what is written takes memory
    ALIGNMENT = 64  # so that sums never depend on where an array lies

    def __init__(self) -> None:
        self._free: NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Uninitialised C-contiguous array that starts at a multiple of 64 bytes. It keeps its mapping alive."""
        num_bytes = prod(shape) * dtype.itemsize
        padded_bytes = -(-num_bytes // self.ALIGNMENT) * self.ALIGNMENT
        if padded_bytes > len(self._free):
            mapping = mmap(-1, max(padded_bytes, self.CHUNK_BYTES), flags=MAP_PRIVATE | MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without transparent huge pages
                mapping.madvise(MADV_HUGEPAGE)
            self._free = np.frombuffer(mapping, np.uint8)
        array = self._free[:num_bytes].view(dtype).reshape(shape)
        self._free = self._free[padded_bytes:]
        return array


class TensorSource(CodedSource, Protocol):
    """What a `RankReader` asks of a checkpoint; see `Checkpoint`."""

    @property
    def spec(self) -> ModelSpec:
        """The model that the tensors belong to."""

    @property
    def head_rounding(self) -> WeightFormat | None:
        """What the LM head is rounded to."""

    def stored_dtype(self, name: str) -> str:
        """How a tensor is stored: `BF16`, `F16` or `F32`."""

    def read_part(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        """Fill `out` with the rows of one part of a tensor."""

    def read_parts(self, name: str, whole: Array, part_indices: Iterable[int], verified: Iterable[int]) -> None:
        """Fill the rows of `whole` that belong to the given parts."""


@dataclass(frozen=True)
class RankReader:
    """Reads what one rank keeps out of a checkpoint; see `Checkpoint.rank_weights`."""

    checkpoint: TensorSource
    lanes: tuple[int, ...]
    vocab_lanes: tuple[int, ...]
    dtype: np.dtype[Any]
    keeps_halves: bool = False  # matrices that are stored in 16 bit stay so
    on_share: Callable[[float], None] = lambda share: None  # told which share of all values has been read
    arena: WeightArena = field(default_factory=WeightArena)

    def read(self) -> RankWeights:
        """Allocate and fill all arrays. Raises CheckpointError naming file and tensor."""
        spec = self.checkpoint.spec
        embedding = self._embedding()
        norms = [
            self._norm(f"{layer_prefix(i)}{kind}") for i in range(spec.num_layers) for kind in ("attention_norm", "ffn_norm")
        ]
        shared = [self._shared_by_lanes(i) for i in range(spec.num_layers)]
        experts = [self._experts(i) for i in range(spec.num_layers)]
        num_read, num_values = embedding.size, embedding.size + self._num_lane_values()
        self.on_share(num_read / num_values)
        lanes: dict[int, LaneWeights] = {}
        for lane in self.lanes:
            layers: list[LayerWeights] = []
            for i in range(spec.num_layers):
                layers.append(self._layer(i, lane, (norms[2 * i][lane], norms[2 * i + 1][lane]), shared[i], experts[i]))
                matrices = (layers[-1].wqkv, layers[-1].wo, layers[-1].w13, layers[-1].w2)
                num_read += sum(matrix.size * (1 + (matrix.dtype == MXFP4_CODES)) for matrix in matrices)
                self.on_share(num_read / num_values)
            lanes[lane] = LaneWeights(tuple(layers))
        heads = {lane: self._head(lane, embedding) for lane in self.vocab_lanes}
        return RankWeights(embedding, lanes, heads, self._norm("model.norm"))

    def _num_lane_values(self) -> int:
        """Values of the matrices of all layers that the rank hosts."""
        prefixes = tuple(map(layer_prefix, range(self.checkpoint.spec.num_layers)))
        shapes = [layout.shape for name, layout in self.checkpoint.layouts.items() if name.startswith(prefixes)]
        matrices = sum(prod(shape) for shape in shapes if len(shape) == 3)  # lane first
        return matrices // self.checkpoint.spec.num_lanes * len(self.lanes)

    def _empty(self, *shape: int) -> Array:
        return self.arena.empty(shape, self.dtype)

    def _whole(self, name: str) -> Array:
        """A tensor that every rank keeps whole; each verifies the parts of its own lanes."""
        out = self._empty(*self.checkpoint.layouts[name].shape)
        self.checkpoint.read_parts(name, out, range(len(self.checkpoint.layouts[name].parts)), self.lanes)
        return out

    def _embedding(self) -> Array:
        """The table (V, D), which every rank keeps whole, as it is stored if matrices are."""
        layout = self.checkpoint.layouts[EMBEDDING]
        out = self._matrix([EMBEDDING], *layout.shape)
        for part_idx, (first, last) in enumerate(layout.parts):
            self._read_rows(EMBEDDING, part_idx, out[first:last], verify=self.checkpoint.verify and part_idx in self.lanes)
        return out

    def _norm(self, stem: str) -> dict[int, Array]:
        """A norm's weights (D,) by lane: separate arrays, or the same one if the lanes share it."""
        name = norm_name(self.checkpoint.spec, stem)
        whole = self._whole(name)
        if self.checkpoint.spec.layers[0].norm.adds_one:
            np.add(whole, 1, out=whole)
        if whole.ndim == 1:
            return dict.fromkeys(range(self.checkpoint.spec.num_lanes), whole)
        return {lane: self._copy(row) for lane, row in enumerate(whole)}

    def _copy(self, values: Array) -> Array:
        out = self._empty(*values.shape)
        out[:] = values
        return out

    def _mixer_tensors(self, layer_idx: int) -> dict[str, TensorLayout]:
        """Those that stand in neither of a mixer's two matrices, by the end of their names."""
        spec = self.checkpoint.spec
        kind = KINDS[type(spec.layers[layer_idx].mixer)]
        matrices = {f"{name}.weight" for name in (*kind.inputs, *kind.outputs)}
        prefix = f"{layer_prefix(layer_idx)}{kind.module}."
        found = {name.removeprefix(prefix): layout for name, layout in mixer_tensors(spec, layer_idx).items()}
        return {name: layout for name, layout in found.items() if name not in matrices}

    def _shared_by_lanes(self, layer_idx: int) -> dict[str, Array]:
        """Of a mixer's tensors those which all lanes share."""
        spec = self.checkpoint.spec
        layer = spec.layers[layer_idx]
        prefix = f"{layer_prefix(layer_idx)}{KINDS[type(layer.mixer)].module}."
        names = [name for name, layout in self._mixer_tensors(layer_idx).items() if not layout.has_lanes]
        found = {name: self._whole(prefix + name) for name in names}
        for name in _HEAD_NORMS:
            if name in found and layer.norm.adds_one:
                np.add(found[name], 1, out=found[name])
        return found

    def _layer(
        self, layer_idx: int, lane: int, norms: tuple[Array, Array], shared: Mapping[str, Array], experts: ExpertWeights | None
    ) -> LayerWeights:
        spec = self.checkpoint.spec
        layer, ffns = spec.layers[layer_idx], ffn_prefixes(spec, layer_idx)
        kind = KINDS[type(layer.mixer)]
        prefix = f"{layer_prefix(layer_idx)}{kind.module}."
        gate_up, down = [[f"{ffn}w1.weight", f"{ffn}w3.weight"] for ffn in ffns], [[f"{ffn}w2.weight"] for ffn in ffns]
        if experts is not None and isinstance(layer.ffn, Experts):
            experts = replace(experts, **self._of_lane(layer.ffn, ffns, lane, f"{layer_prefix(layer_idx)}{SHARED[1:]}"))
        if experts is None:
            w13, w2 = self._stacked(gate_up[0], lane), self._stacked(down[0], lane)
        elif self.keeps_halves and all(weight_format(self.checkpoint, name) == MXFP4 for name in chain(*gate_up, *down)):
            (w13, w13_scales, _), (w2, w2_scales, skew) = self._codes(gate_up, lane), self._codes(down, lane)
            experts = replace(experts, w13_scales=w13_scales, w2_scales=w2_scales, w2_skew=skew)
        else:
            w13, w2 = self._stacks(gate_up, lane), self._stacks(down, lane)
        matrices = ([f"{prefix}{name}.weight" for name in names] for names in (kind.inputs, kind.outputs))
        wqkv, wo = (self._stacked([name for name in names if name in self.checkpoint.layouts], lane) for names in matrices)
        own = {**shared, **self._small(layer_idx, lane, prefix, shared)}
        qkv_bias = [own.pop(name) for name in _QKV_BIASES if name in own]
        return LayerWeights(
            attention_norm=norms[0],
            wqkv=wqkv,
            wo=wo,
            ffn_norm=norms[1],
            w13=w13,
            w2=w2,
            qkv_bias=self._copy(np.concatenate(qkv_bias)) if qkv_bias else None,
            out_bias=own.pop("wo.bias", None),
            q_norm=own.pop("q_norm.weight", None),
            k_norm=own.pop("k_norm.weight", None),
            sinks=own.pop("sinks", None),
            experts=experts,
            own=own,
        )

    def _small(self, layer_idx: int, lane: int, prefix: str, shared: Mapping[str, Array]) -> dict[str, Array]:
        """The lane's part of what else a mixer has."""
        found = {}
        for name, layout in self._mixer_tensors(layer_idx).items():
            if name not in shared:
                found[name] = self._empty(*layout.shape[1:])
                self.checkpoint.read_part(prefix + name, lane, found[name], verify=self.checkpoint.verify)
        return found

    def _of_lane(self, ffn: Experts, ffns: list[str], lane: int, shared: str) -> dict[str, Any]:
        """What a lane has besides the matrices of its experts."""
        found: dict[str, Any] = {"w13_bias": self._expert_biases(ffns, lane)} if ffn.choice.bias else {}
        if ffn.shared_width:
            found["shared_w13"] = self._stacked([f"{shared}w1.weight", f"{shared}w3.weight"], lane)
            found["shared_w2"] = self._stacked([f"{shared}w2.weight"], lane)
        return found

    def _read_biases(self, names: list[str], lane: int, out: Array) -> None:
        """Fill `out` with the lane's biases of several lane-first tensors, one behind the other."""
        start = 0
        for name in names:
            size = self.checkpoint.layouts[name].shape[1]
            self.checkpoint.read_part(name, lane, out[start : start + size], verify=self.checkpoint.verify)
            start += size

    # ---- experts ----
    def _experts(self, layer_idx: int) -> ExpertWeights | None:
        """What all lanes share."""
        ffn = self.checkpoint.spec.layers[layer_idx].ffn
        if not isinstance(ffn, Experts):
            return None
        experts, module = ffn.choice, f"{layer_prefix(layer_idx)}feed_forward."
        prefix = f"{module}router."
        names = [f"{prefix}weight", *([f"{module}shared_gate.weight"] if ffn.shared_width else [])]
        router = self._matrix(names, ffn.num_logits, self.checkpoint.spec.hidden_size)
        for name, rows in zip(names, (router[: experts.num_experts], router[experts.num_experts :]), strict=False):
            self._read_rows(name, 0, rows, verify=self.checkpoint.verify and 0 in self.lanes)
        if not experts.bias:
            return ExpertWeights(router, self._whole(f"{prefix}bias") if experts.router_bias else None)
        w2_bias = self._empty(experts.num_experts, self.checkpoint.spec.hidden_size)
        for expert, out in zip(ffn_prefixes(self.checkpoint.spec, layer_idx), w2_bias, strict=True):
            self.checkpoint.read_parts(f"{expert}w2.bias", out, (0,), self.lanes)
        return ExpertWeights(router, self._whole(f"{prefix}bias") if experts.router_bias else None, w2_bias=w2_bias)

    def _expert_biases(self, ffns: list[str], lane: int) -> Array:
        out = self._empty(len(ffns), 2 * self.checkpoint.layouts[f"{ffns[0]}w1.bias"].shape[1])
        for ffn, row in zip(ffns, out, strict=True):
            self._read_biases([f"{ffn}w1.bias", f"{ffn}w3.bias"], lane, row)
        return out

    def _stacks(self, names: list[list[str]], lane: int) -> Array:
        """`_stacked` of every expert."""
        shapes = [self.checkpoint.layouts[name].shape for name in names[0]]
        every = [name for of_expert in names for name in of_expert]
        out = self._matrix(every, len(names), sum(rows for _, rows, _ in shapes), shapes[0][2])
        for of_expert, matrix in zip(names, out, strict=True):
            self._fill(of_expert, lane, matrix)
        return out

    def _stacked(self, names: list[str], lane: int) -> Array:
        """The lane's matrices of several lane-first tensors, one below the other; of none a matrix without rows."""
        if not names:
            return self._empty(0, self.checkpoint.spec.hidden_size)
        shapes = [self.checkpoint.layouts[name].shape for name in names]
        out = self._matrix(names, sum(rows for _, rows, _ in shapes), shapes[0][2])
        self._fill(names, lane, out)
        return out

    def _codes(self, names: list[list[str]], lane: int) -> tuple[Array, Array, int]:
        """`_stacks` in MXFP4: codes, scales, and how many columns of the first group belong to the lane before."""
        every = ([lane_codes(self.checkpoint, name, lane, may_split=True) for name in of_expert] for of_expert in names)
        shapes = [self.checkpoint.layouts[name].shape for name in names[0]]
        skew = shapes[0][2] * lane % GROUP if len(shapes) == 1 else 0  # lanes are columns of w2, and rows of the others
        num_bytes, num_groups = kept_shapes(skew, shapes[0][2])
        rows = sum(count for _, count, _ in shapes)
        codes, scales = (self.arena.empty((len(names), rows, count), MXFP4_CODES) for count in (num_bytes, num_groups))
        for idx, of_expert in enumerate(every):
            start = 0
            for coded in of_expert:
                stop = start + len(coded.codes)
                codes[idx, start:stop], scales[idx, start:stop] = kept(coded, skew)
                start = stop
        return codes, scales, skew

    def _fill(self, names: list[str], lane: int, out: Array) -> None:
        start = 0
        for name in names:
            rows = self.checkpoint.layouts[name].shape[1]
            self._read_rows(name, lane, out[start : start + rows], verify=self.checkpoint.verify)
            start += rows

    def _matrix(self, names: list[str], *shape: int) -> Array:
        """Room for a matrix, or several, that are made of these tensors."""
        stored = {self.checkpoint.stored_dtype(name) for name in names} if self.keeps_halves else set()
        kept = _KEPT.get(stored.pop()) if len(stored) == 1 else None
        return self.arena.empty(shape, kept or self.dtype)

    def _read_rows(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        """Fill rows of a `_matrix`."""
        read = out if out.dtype == self.dtype else aligned_empty(out.shape, np.dtype(np.float32))
        self.checkpoint.read_part(name, part_idx, read, verify=verify)
        if read is not out:
            _narrow(read, out)

    def _head(self, lane: int, embedding: Array) -> Array:
        spec, name = self.checkpoint.spec, head_name(self.checkpoint.spec)
        first, last = spec.vocab_slice(lane)
        if self.checkpoint.head_rounding is not None:
            return self._rounded_head(lane, embedding, self.checkpoint.head_rounding)
        if spec.tied_embeddings:
            return self._aligned(embedding[first:last])
        if spec.head_type is HeadType.VOCAB_PARALLEL:
            return self._stacked([name], lane)
        out = self._matrix([name], last - first, self.checkpoint.layouts[name].shape[1])
        self._read_rows(name, lane, out, verify=self.checkpoint.verify)
        return out

    def _aligned(self, rows: Array) -> Array:
        """Rows of an array: a view, or a copy if they begin elsewhere than all arrays do."""
        if rows.ctypes.data % self.arena.ALIGNMENT == 0:
            return rows
        out = self.arena.empty(rows.shape, rows.dtype)
        out[...] = rows
        return out

    def _rounded_head(self, lane: int, embedding: Array, form: WeightFormat) -> Array:
        """The values of its codes, in binary16 if matrices stay in 16 bit."""
        spec, name = self.checkpoint.spec, head_name(self.checkpoint.spec)
        first, last = spec.vocab_slice(lane)
        values = aligned_empty((last - first, self.checkpoint.layouts[name].shape[-1]), np.dtype(np.float32))
        if spec.tied_embeddings:
            values[...] = widened(embedding[first:last])
        else:
            self.checkpoint.read_part(name, lane, values, verify=self.checkpoint.verify)
        round_in_place(values, form.block_columns)
        out = self.arena.empty(values.shape, np.dtype(np.float16) if self.keeps_halves else self.dtype)
        out[...] = values
        return out


def widened(values: Array) -> Array:
    """The values of a matrix in float32 or wider: exact. A view of what is that wide already."""
    if values.dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def _narrow(values: Array, out: Array) -> None:
    """Write values that were widened from the type of `out`: exactly."""
    if out.dtype == BFLOAT16:
        np.right_shift(values.view(np.uint32), 16, out=out, casting="unsafe")
    else:
        np.copyto(out, values, casting="same_kind")
