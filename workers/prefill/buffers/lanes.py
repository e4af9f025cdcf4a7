"""What chunks of a Laneformer work in: activations by lane."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.records import dataclass
from kog_dist.workers.prefill.base.arrays import Array, repeated
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import SPLIT_SIZE
from kog_dist.workers.prefill.buffers.prompt import PromptBuffers


@dataclass(frozen=True)
class Rows:
    """Views for a chunk of `size` tokens. L: hosted lanes, D: hidden size, F: FFN columns of a lane, T: the products' type.

    `partials[sublayer][slot]` is p of layer i at slot i % (delay + 1), and so are `own_sums`, its sum over the hosted lanes.

    An exact chunk has P = 2 planes (else 1): what is multiplied is a sum of two values of T, `size` rows apart, and what comes of
    it a sum of two float32 values. R: T, but float32 in an exact chunk. S: planes of the streams and of what QKV gives; 2 in an
    exact chunk and in a small one.
    """

    size: int
    stream: Array  # (L, S * size, D) T; of `shared` rows all lanes are the first one
    inverse_rms: Array  # (L, size) float32
    qkv: Array  # (L, S * size, rows) float32, so that keys and values are rounded once: rows of wqkv, without 1 / rms
    query: Array  # (size, L * heads, head_dim) T
    gate_up: Array  # (L, P * size, 2F) R, without 1 / rms
    activation: Array  # (L, P * size, F) T
    partials: tuple[tuple[Array, ...], ...]  # (L, P * size, D) R; attention's outputs have one plane, so their second is ever 0
    own_sums: tuple[tuple[Array, ...], ...]  # (size, D) float32
    place: Array  # int32: first position of the chunk; 0; one past its last row

    @property
    def is_split(self) -> bool:
        """Whether S is 2."""
        return bool(self.stream.shape[1] > self.size)

    @property
    def is_exact(self) -> bool:
        """Whether P is 2."""
        return bool(self.activation.shape[1] > self.size)

    @property
    def shared(self) -> Rows:
        """The same while the streams are the same in all lanes: kept once, where those of the first lane are."""
        return replace(self, stream=repeated(self.stream[:1], len(self.stream)))

    @property
    def kept_stream(self) -> Array:
        """`stream` without lanes that are others."""
        return self.stream if self.stream.strides[0] else self.stream[:1]

    @property
    def gated(self) -> Array:
        """The planes of the streams that gates and ups are made of, (L, P * size, D) T."""
        return self.stream[:, : self.gate_up.shape[1]]


class Buffers(PromptBuffers):
    """Those of a Laneformer, whose keys and values are kept in all layers. Chunks of different sizes share the memory.

    Chunks of up to `split_size` rows have split streams.
    """

    def __init__(
        self, layout: CacheLayout, dtype: DTypeLike, max_size: int, device: str, *, split_size: int = SPLIT_SIZE
    ) -> None:
        super().__init__(layout, dtype, max_size, device, kept_layers=layout.spec.num_layers)
        self._split_size = split_size

    def rows(self, size: int, *, is_exact: bool = False) -> Rows:
        """The views of a chunk of `size` tokens. Exact chunks share nothing with chunks of other sizes."""
        assert size <= self.max_size
        max_size, planes, results = (size, 2, np.dtype(np.float32)) if is_exact else (self.max_size, 1, self.dtype)
        stream_rows, most_rows = (2 * size, 2 * size) if is_exact else stream_rows_of(size, max_size, self._split_size)
        spec, lanes = self.spec, self.layout.num_lanes
        d, dim = spec.hidden_size, spec.head_dim
        heads = lanes * spec.lane_heads
        slots = range(spec.delay + 1)

        def view(name: str, *shape: int, dtype: DTypeLike = self.dtype, part: int = size, largest: int = max_size) -> Array:
            """Made for the largest chunk: `part` of it is `largest` there."""
            return self._front(f"{name} exact {size}" if is_exact else name, shape, dtype, prod(shape) // part * largest)

        def by_slot(name: str, *shape: int, dtype: DTypeLike = self.dtype) -> tuple[tuple[Array, ...], ...]:
            return tuple(tuple(view(f"{name} {sublayer} {slot}", *shape, dtype=dtype) for slot in slots) for sublayer in range(2))

        return Rows(
            size=size,
            stream=view("stream", lanes, stream_rows, d, part=stream_rows, largest=most_rows),
            inverse_rms=view("inverse rms", lanes, size, dtype=np.float32),
            qkv=view(
                "qkv",
                lanes,
                stream_rows,
                spec.lane_qkv_rows,
                dtype=np.float32,
                part=stream_rows,
                largest=most_rows,
            ),
            query=view("query", size, heads, dim),
            gate_up=view("gate up", lanes, planes * size, 2 * spec.lane_ffn, dtype=results),
            activation=view("activation", lanes, planes * size, spec.lane_ffn),
            partials=by_slot("partial", lanes, planes * size, d, dtype=results),
            own_sums=by_slot("own sum", size, d, dtype=np.float32),
            place=self._library.zeros(3, np.int32),
        )

    def last_rows(self) -> Rows:
        """Those of the prompt's last token, which goes on beside a chunk."""
        return self.rows(1, is_exact=True)


def stream_rows_of(size: int, max_size: int, split_size: int) -> tuple[int, int]:
    """Rows of a lane's stream in a chunk of `size` tokens that is not exact, and the most of any chunk of up to `max_size`."""
    return (2 * size if size <= split_size else size), max(max_size, 2 * min(max_size, split_size))
