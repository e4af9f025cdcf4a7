"""Memory that prefill of every model works in: the prompt, where a chunk stands, keys and values."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.recipes import stream_lanes
from kog_dist.errors import ConfigError
from kog_dist.model.layers import DeltaNet, Experts
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.kv_format import CODE_BITS
from kog_dist.workers.prefill.attention.attention_abi import MAX_HEAD_DIM
from kog_dist.workers.prefill.attention.wide_abi import WIDE_HEAD_DIM
from kog_dist.workers.prefill.base.arrays import Array, address, library
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.shared_abi import UNIT
from kog_dist.workers.prefill.base.staging import Staging

DELTA_UNIT, MOST_KEYS = 16, 128  # of a delta net's keys: operands of a product, and registers of a thread
_MOST_SHARED = 1024  # columns of a lane of a shared expert in codes: of each 128 a warp of expand.cu's eight


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
        self.rope: Array = xp.asarray(np.stack(rope_table(spec, spec.max_context), axis=-1))  # (max_context, rotary_dim / 2, 2)
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


def misfit(spec: ModelSpec, coding: Coding | None = None, kv_dtype: str = "") -> str:
    """What of a model, and of a KV cache of `kv_dtype`, prefill's kernels cannot take; empty if there is nothing.

    The monokernel has its own limits.
    """
    sizes = ((spec.hidden_size, "values in a stream"), (spec.lane_ffn, "FFN columns in a lane"))
    findings = [f"{size} {what} (a multiple of {UNIT})" for size, what in sizes if size % UNIT]
    if spec.experts is not None and spec.hidden_size % 32:
        findings.append(f"experts of {spec.hidden_size} values in a stream (a multiple of 32)")
    if spec.experts is not None and coding is not None and not coding.scales:
        findings.append(f"experts in {coding.number} with one scale for each row (for groups of columns)")
    if spec.mixed_layers and coding is not None and (spec.qkv_bias or spec.out_bias):
        findings.append(f"biases in layers of several kinds beside codes of {coding.number}")
    if (spec.attention_sinks or spec.out_bias) and spec.experts is None:
        findings.append("attention sinks or biases of attention's output")
    if spec.head_dim > (most := WIDE_HEAD_DIM if _is_plain(spec) else MAX_HEAD_DIM):
        findings.append(f"{spec.head_dim} values in a head (at most {most})")
    elif spec.head_dim > MAX_HEAD_DIM and spec.head_dim % 16:
        findings.append(f"{spec.head_dim} values in a head (a multiple of 16)")
    elif spec.head_dim > MAX_HEAD_DIM and coding is not None and not coding.is_of_experts and not spec.mixed_layers:
        findings.append(f"{spec.head_dim} values in a head beside quantised weights (at most {MAX_HEAD_DIM})")
    if spec.head_dim > MAX_HEAD_DIM and kv_dtype in CODE_BITS:
        findings.append(f"{kv_dtype} keys and values of heads of {spec.head_dim} (at most {MAX_HEAD_DIM})")
    if spec.qk_norm and (spec.head_dim % 4 or WIDE_HEAD_DIM // 4 % (spec.head_dim // 4)):
        findings.append(f"norms of heads of {spec.head_dim} values (4, 8, 16, 32, 64, 128 or {WIDE_HEAD_DIM})")
    if (spec.qkv_bias or spec.qk_norm) and not spec.has_one_stream:
        findings.append("biases or norms of heads in lanes with streams of their own")
    return "; ".join([*findings, *_of_layers(spec, coding)])


def _is_plain(spec: ModelSpec) -> bool:
    """Whether attention is of one stream, over all positions, without sinks: with these heads may be wide."""
    windows = any(spec.window(layer) is not None for layer in range(spec.num_layers))
    return spec.has_one_stream and not windows and not spec.attention_sinks


def _of_layers(spec: ModelSpec, coding: Coding | None) -> list[str]:
    """What of layers of several kinds they cannot take."""
    findings = []
    for net in (part for part in spec.kinds if isinstance(part, DeltaNet)):
        if net.key_dim % DELTA_UNIT or net.key_dim > MOST_KEYS:
            findings.append(f"keys of {net.key_dim} values in delta nets (a multiple of {DELTA_UNIT}, at most {MOST_KEYS})")
        if net.value_dim % DELTA_UNIT:
            findings.append(f"value heads of {net.value_dim} values in delta nets (a multiple of {DELTA_UNIT})")
    for shared in (part.shared_width // spec.num_lanes for part in spec.kinds if isinstance(part, Experts)):
        of_lane = f"a shared expert with {shared} columns in a lane"
        if shared % UNIT:
            findings.append(f"{of_lane} (a multiple of {UNIT})")
        if coding is not None and shared > _MOST_SHARED:
            findings.append(f"{of_lane} beside codes of {coding.number} (at most {_MOST_SHARED})")
    if spec.rotary_dim % 4 and spec.rotary_dim != spec.head_dim:
        findings.append(f"{spec.rotary_dim} values of a head that are rotated (a multiple of 4)")
    return findings
