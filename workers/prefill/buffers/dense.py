"""What chunks of a model with one residual stream work in."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.plan.recipes import layer_matrix_stages
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.records import dataclass
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.delta_blocks import BLOCK, num_blocks
from kog_dist.workers.prefill.base.staging import NUM_FLAGS
from kog_dist.workers.prefill.buffers.delta import DeltaRows, delta_row_bytes, delta_rows
from kog_dist.workers.prefill.buffers.experts import ExpertRows, expert_row_bytes, expert_rows
from kog_dist.workers.prefill.buffers.prompt import PromptBuffers


@dataclass(frozen=True)
class DenseRows:
    """Views for a chunk of `size` tokens. L: hosted lanes, D: hidden size, F: FFN columns of a lane, T: the products' type.

    With experts x is a plane of theirs, and F is the shared one's, or 0.
    """

    size: int
    stream: Array  # (size, D) float32
    x: Array  # (size, D) T: the stream's norm, times the weights of the norm that comes next
    qkv: Array  # (size, L * rows of attention's wqkv) float32, so that keys and values are rounded once
    query: Array  # (size, L * heads, head_dim) T
    gate_up: Array  # (size, L * 2F) T: gates of a lane, its ups, those of the next lane
    activation: Array  # (L, size, F) T, a view of (size, L, F): times ACTIVATION_SCALE
    partial: Array  # (L, size, D) T: what a sublayer adds to the stream, by lane
    own_sums: tuple[Array, ...]  # by sublayer, (size, D) float32: sums over the hosted lanes, for other ranks
    place: Array  # int32: first position of the chunk; 0; one past its last row
    experts: ExpertRows | None = None
    mixed: Array | None = None  # (L, size, heads * value_dim) T, a view of (size, L, ...): what comes of a delta net
    nets: DeltaRows | None = None  # `projected` stands where `qkv` does


class DenseBuffers(PromptBuffers):
    """Those of a model with one residual stream. Chunks of different sizes share the memory.

    `keys` and `values` are those of one layer at a time: what came before a chunk is taken from the monokernel's cache, layer by
    layer. `delta`: the delta nets of the rank; what a chunk makes of their states stands in `states` (as in `StateLayout`) until
    all layers have run.
    """

    def __init__(
        self, layout: CacheLayout, dtype: DTypeLike, max_size: int, device: str, delta: DeltaShape | None = None
    ) -> None:  # fmt: skip
        super().__init__(layout, dtype, max_size, device, kept_layers=1)
        assert (delta is not None) == layout.spec.is_recurrent
        self.delta = delta
        self.states: Array | None = None if delta is None else self._library.zeros(delta.num_bytes // 4, np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory of all of it on the device."""
        return super().num_bytes + (0 if self.states is None else self.states.nbytes)

    def rows(self, size: int) -> DenseRows:
        """The views of a chunk of `size` tokens."""
        assert size <= self.max_size
        rows = self._rows(size, "", self.max_size)
        if self.delta is None:
            return rows
        projected = self._input("qkv", size, self.delta.matrix_rows, self.max_size)
        return replace(rows, nets=delta_rows(self.delta, size, self.max_size, projected, self.dtype, self._front))

    def last_rows(self) -> DenseRows:
        """Those of the prompt's last token, which goes on beside a chunk."""
        return self._rows(1, " of the last", 1)

    def _rows(self, size: int, suffix: str, largest: int) -> DenseRows:
        spec, lanes, half = self.spec, self.layout.num_lanes, self.dtype

        def view(name: str, *shape: int, dtype: DTypeLike) -> Array:
            return self._front(name + suffix, shape, dtype, prod(shape) // size * largest)

        d, f32, ffn, net = spec.hidden_size, np.float32, ffn_columns(spec), self.delta
        experts = expert_rows(spec, lanes, size, half, view)
        return DenseRows(
            size=size,
            stream=view("stream", size, d, dtype=f32),
            x=view("x", size, d, dtype=half) if experts is None else experts.planes[0],
            qkv=self._input("qkv" + suffix, size, spec.lane_qkv_rows, largest),
            query=view("query", size, lanes * spec.lane_heads, spec.head_dim, dtype=half),
            gate_up=view("gate up", size, lanes * 2 * ffn, dtype=half),
            activation=view("activation", size, lanes, ffn, dtype=half).swapaxes(0, 1),
            partial=view("partial", lanes, size, d, dtype=half),
            own_sums=tuple(view(f"own sum {sublayer}", size, d, dtype=f32) for sublayer in Sublayer),
            place=self._library.zeros(3, np.int32),
            experts=experts,
            mixed=None if net is None else view("mixed", size, lanes, _values(net), dtype=half).swapaxes(0, 1),
        )

    def _input(self, name: str, size: int, num_rows: int, largest: int) -> Array:
        """Of a mixer of either kind, (size, L * rows) float32, for the largest chunk."""
        lanes = self.layout.num_lanes
        return self._front(name, (size, lanes * num_rows), np.float32, largest * lanes * _input_rows(self.spec, self.delta))


def ffn_columns(spec: ModelSpec) -> int:
    """Of a lane, of an FFN that all tokens have: the shared expert's, where there are experts."""
    down = layer_matrix_stages(spec, 0).get(Phase.DOWN)
    return 0 if down is None else down.num_columns


def _input_rows(spec: ModelSpec, delta: DeltaShape | None) -> int:
    """Of a lane, the most of any mixer."""
    return max(spec.lane_qkv_rows, 0 if delta is None else delta.matrix_rows)


def _values(delta: DeltaShape) -> int:
    """Of a lane's value heads."""
    return delta.heads * delta.net.value_dim


def dense_buffer_bytes(layout: CacheLayout, max_size: int, delta: DeltaShape | None = None) -> int:
    """Of `DenseBuffers` with the rows of chunks of up to so many tokens, and of one token."""
    spec, lanes = layout.spec, layout.num_lanes
    num_rows = spec.max_context + max_size
    kept = 2 * 2 * num_rows * layout.heads * spec.head_dim
    rope, prompt, flags = 4 * spec.max_context * spec.rotary_dim, 4 * num_rows, 4 * NUM_FLAGS
    ffn = ffn_columns(spec)
    of_lane = 4 * _input_rows(spec, delta) + 2 * spec.lane_heads * spec.head_dim + 2 * 3 * ffn + 2 * spec.hidden_size
    of_nets = 0
    if delta is not None:
        of_lane += 2 * _values(delta)
        of_nets = num_blocks(max_size) * BLOCK * delta_row_bytes(delta) + delta.num_bytes
    row = (4 + 2 + 2 * 4) * spec.hidden_size + lanes * of_lane + expert_row_bytes(spec, lanes)
    return kept + rope + prompt + flags + (max_size + 1) * row + 4 * spec.hidden_size + of_nets
