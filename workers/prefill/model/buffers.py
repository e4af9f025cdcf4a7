"""Memory that prefill works in: activations of one chunk, keys and values of the whole context, and where the chunk stands."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.recipes import stream_lanes
from kog_dist.errors import ConfigError
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.prefill.arrays import Array, address, library, repeated
from kog_dist.workers.prefill.attention.attention_abi import MAX_HEAD_DIM
from kog_dist.workers.prefill.model.cache_layout import CacheLayout
from kog_dist.workers.prefill.model.chunks import SPLIT_SIZE
from kog_dist.workers.prefill.model.staging import Staging

UNIT = 8  # neighbouring values that a thread of the fused kernels takes at once


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


class PromptBuffers:
    """What prefill of every model needs on `device` for chunks of at most `max_size` tokens: the prompt and where it stands, and
    `keys` and `values`, (`kept_layers`, positions, KV heads, head_dim), rounded to the cache's type, as values of T. Positions
    are those of the context, and a chunk's padding behind it. Raises ConfigError for shapes that the fused kernels cannot take.
    """

    def __init__(self, layout: CacheLayout, dtype: DTypeLike, max_size: int, device: str, *, kept_layers: int) -> None:
        spec, xp = layout.spec, library(device)
        if finding := misfit(spec):
            raise ConfigError(f"prefill cannot run this model: it has {finding}")
        self.layout, self.spec, self.dtype, self.max_size, self._library = layout, spec, np.dtype(dtype), max_size, xp
        self._memory: dict[str, Array] = {}
        self.rope: Array = xp.asarray(np.stack(rope_table(spec, spec.max_context), axis=-1))  # (max_context, head_dim / 2, 2)
        num_rows = spec.max_context + max_size
        self.staging = Staging(num_rows, device)
        self.prompt, self.flags = self.staging.prompt, self.staging.flags
        shape = (kept_layers, num_rows, layout.heads, spec.head_dim)
        self.keys, self.values = (xp.zeros(shape, dtype) for _ in range(2))
        self.next_start, self.overflow = self.flags[:1], self.flags[1:2]  # where the next chunk begins; 1: a value was not finite
        self.last_position, self.cache_number = self.flags[2:3], self.flags[3:]  # of the prompt; of the KV cache that it goes to
        num_streams = len(stream_lanes(spec, tuple(range(layout.num_lanes))))
        self.last_streams: Array = xp.zeros((num_streams, spec.hidden_size), np.float32)  # of it, behind the last layer

    @property
    def streams(self) -> LastStreams:
        """The address of `last_streams`; they are invalid if a value was not finite."""
        return LastStreams(address(self.last_streams), address(self.overflow))

    def own_cache(self, caches: Array) -> Array:
        """Of KV caches that lie one behind the other the one that the prompt goes to."""
        num_values = self.layout.num_values
        first = int(self.cache_number[0]) * num_values
        return caches[first : first + num_values]

    def forget(self) -> None:
        """Plain keys and values, after a value was not finite: masked NaN spreads, too."""
        self.keys.fill(0)
        self.values.fill(0)

    @property
    def num_bytes(self) -> int:
        """Memory of all of it on the device."""
        held = (self.rope, self.prompt, self.keys, self.values, self.flags, self.last_streams)
        return sum(array.nbytes for array in (*held, *self._memory.values()))

    def _front(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, count: int) -> Array:
        """The front of the memory `name`, which is made for `count` values."""
        if name not in self._memory:
            self._memory[name] = self._library.zeros(count, dtype)
        return self._memory[name][: prod(shape)].reshape(shape)


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


def misfit(spec: ModelSpec, coding: Coding | None = None) -> str:
    """What of a model prefill's kernels cannot take; empty if there is nothing. The monokernel has its own limits."""
    sizes = ((spec.hidden_size, "values in a stream"), (spec.lane_ffn, "FFN columns in a lane"))
    findings = [f"{size} {what} (a multiple of {UNIT})" for size, what in sizes if size % UNIT]
    if spec.experts is not None and spec.hidden_size % 32:
        findings.append(f"experts of {spec.hidden_size} values in a stream (a multiple of 32)")
    if spec.experts is not None and coding is not None and not coding.scales:
        findings.append(f"experts in {coding.number} with one scale for each row (for groups of columns)")
    if (spec.attention_sinks or spec.out_bias) and spec.experts is None:
        findings.append("attention sinks or biases of attention's output")
    if spec.head_dim > MAX_HEAD_DIM:
        findings.append(f"{spec.head_dim} values in a head (at most {MAX_HEAD_DIM})")
    if spec.qk_norm and (spec.head_dim % 4 or 32 % (spec.head_dim // 4)):
        findings.append(f"norms of heads of {spec.head_dim} values (4, 8, 16, 32, 64 or 128)")
    if (spec.qkv_bias or spec.qk_norm) and not spec.has_one_stream:
        findings.append("biases or norms of heads in lanes with streams of their own")
    return "; ".join(findings)
