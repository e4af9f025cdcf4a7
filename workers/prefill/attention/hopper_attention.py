"""Attention of a chunk of tokens by Hopper's matrix units (attention.cu), queued on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.records import dataclass
from kog_dist.workers.prefill.attention.attention_abi import (
    ATTENTION_PARAMS,
    PARTITION_KEYS,
    SHORT_PARTITIONS,
    AttentionShape,
    num_partitions,
)
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address, with_room
from kog_dist.workers.prefill.base.hopper_abi import GROUP_ROWS, GROUP_THREADS, NUM_THREADS

_MOST_PARTS_BYTES = 320 << 20  # of what units of partitions give
_LEAST_BUSY = 0.8  # of multiprocessors, where items have all partitions of their rows


@dataclass(frozen=True)
class AttentionPlan:
    """How the rows of a chunk are cut into items; a function of its size and of the window, never of its position."""

    num_groups: int  # of an item; 4 are those of a pair of thread blocks
    num_tiles: int  # of rows
    is_partitioned: bool  # whether keys are attended to in partitions; decides about bits, and nothing else here does
    num_units: int  # of partitions, that are items of their own; 0: none
    first_partitions: int  # partitions of the first unit; all others have one
    num_items: int
    num_ctas: int

    def parts_bytes(self, shape: AttentionShape) -> int:
        """Memory for what units give."""
        return 4 * sum(self.part_values(shape)) if self.num_units else 0

    def part_values(self, shape: AttentionShape) -> tuple[int, int]:
        """Float32 of sums of values, and of what belongs to them."""
        threads = self.num_items * self.num_groups * GROUP_THREADS
        return threads * shape.head_dim // 2, threads * 4


def plan(shape: AttentionShape, size: int, window: int | None, max_positions: int, num_sms: int) -> AttentionPlan:
    """The items of `size` rows, of which none stands at `max_positions` or behind.

    Pairs of thread blocks, which copy keys and values once for both, have items of many rows without a window.
    Where most multiprocessors would be left over, partitions become items of their own, and items have one group: faster alone.
    Where some would be, the long partitions do, and the short ones are the first unit.
    """
    positions, heads = GROUP_ROWS // shape.pack, shape.num_heads // shape.pack  # positions of a group
    num_whole = heads * -(-size // (2 * positions))  # items of two groups with all of their partitions
    is_partitioned = window is None or window > PARTITION_KEYS

    def cut(num_units: int, first_partitions: int = 1) -> AttentionPlan:
        num_groups = 1 if size <= positions or heads * -(-size // positions) * (num_units or 1) <= num_sms else 2
        if num_whole > num_sms and is_partitioned and -(-size // positions) % 4 == 0:
            num_groups = 4
        num_tiles = -(-size // (num_groups * positions))
        num_items = num_tiles * heads * (num_units or 1)
        num_ctas = 2 * min(num_items, num_sms // 2) if num_groups == 4 else min(num_items, num_sms)
        return AttentionPlan(num_groups, num_tiles, is_partitioned, num_units, first_partitions, num_items, num_ctas)

    is_busy = num_whole >= _LEAST_BUSY * num_sms * -(-num_whole // num_sms)
    first_partitions = 1 if 2 * num_whole <= num_sms else SHORT_PARTITIONS
    num_units = num_partitions(max_positions) - first_partitions + 1
    if is_partitioned and num_units > 1 and not is_busy:
        found = cut(num_units, first_partitions)
        if found.parts_bytes(shape) <= _MOST_PARTS_BYTES:
            return found
    return cut(0)


def most_parts_bytes(shape: AttentionShape, sizes: Iterable[int], max_context: int, num_sms: int) -> int:
    """Memory for what units give, of chunks of all these sizes."""
    plans = (plan(shape, size, None, max_context - 1 + size, num_sms) for size in sizes)
    return max(made.parts_bytes(shape) for made in plans)


def build(shape: AttentionShape) -> compiler.Cubin:
    """The cubin of attention.cu. Raises CompileError with the compiler's log."""
    return compiled.build("attention", shape.header())


def attention_on_gpu(shape: AttentionShape, max_context: int) -> Attention:
    """Attention on the current GPU. Raises CompileError or LaunchError."""
    import cupy

    cupy.zeros(1)  # makes a context, if nobody has done so
    path = build(shape).path
    shared_bytes = {"attend": shape.shared_bytes, "attend_pairs": shape.shared_bytes, "combine": 0}
    launchers = {name: partial(compiled.launch, Kernel(path, name, num_bytes)) for name, num_bytes in shared_bytes.items()}
    num_sms = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    return Attention(shape, max_context, num_sms, launchers, tensor_map)


class Attention:
    """Attention with the heads of one rank. Outputs of all chunks share their memory, which is made as chunks ask for more:
    one of each size runs before the first is captured in a graph.

    `launchers`: by kernel; called with thread blocks, threads of each, parameters, and whether it may begin early.
    `make_map`: as `tensor_map`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_context: int,
        num_sms: int,
        launchers: Mapping[str, Callable[[int, int, bytes, bool], None]],
        make_map: Callable[[int, Sequence[int], Sequence[int], Sequence[int]], NDArray[np.uint64]],
    ) -> None:
        self.shape, self.max_context, self.num_sms = shape, max_context, num_sms
        self._launchers, self._make_map = launchers, make_map
        self._outputs: Array | None = None
        self._parts: Array | None = None

    def run(
        self,
        query: Array,
        keys: Array,
        values: Array,
        place: Array,
        window: int | None,
        sinks: Array | None = None,
        *,
        is_ordered: bool = False,
    ) -> Array:
        """Outputs (lanes, size, heads of a lane * head_dim) of `query` (size, heads, head_dim), binary16,
        until it is called again.

        Its rows stand at the positions from `place[0]` (int32, read on the device) on; `keys` and `values` (positions, KV heads,
        head_dim) of these positions and all that they see are there. A token sees itself and the `window` - 1 before it, or all.
        `sinks`: float32 (heads,), one more logit of each. `is_ordered`: outputs are in the order of products (tape/weights.cuh).
        """
        shape, size = self.shape, len(query)
        made = plan(shape, size, window, self.max_context - 1 + size, self.num_sms)
        lanes = shape.num_heads // shape.lane_heads
        self._outputs = with_room(self._outputs, query.size, query)
        out = self._outputs[: query.size].reshape(lanes, size, shape.lane_heads * shape.head_dim)
        params = np.zeros((), ATTENTION_PARAMS.dtype)
        params["query_map"] = self._query_map(query)
        is_pair = made.num_groups == 4
        params["keys_map"], params["values_map"] = (self._key_map(part, is_pair=is_pair) for part in (keys, values))
        params["place_ptr"], params["out_ptr"] = address(place), address(out)
        params["sinks_ptr"] = 0 if sinks is None else address(sinks)
        params["size"], params["window"], params["is_partitioned"] = size, window or 0, made.is_partitioned
        params["is_ordered"] = is_ordered
        for name in ("num_groups", "num_tiles", "num_units", "first_partitions", "num_items"):
            params[name] = getattr(made, name)
        if made.num_units:
            num_values, num_sums = made.part_values(shape)
            self._parts = with_room(self._parts, num_values + num_sums, query, np.float32)
            params["parts_ptr"], params["part_sums_ptr"] = address(self._parts), address(self._parts[num_values:])
        self._launchers["attend_pairs" if is_pair else "attend"](made.num_ctas, NUM_THREADS, params.tobytes(), True)
        if made.num_units:
            self._launchers["combine"](made.num_items // made.num_units * made.num_groups, GROUP_THREADS, params.tobytes(), True)
        return out

    def _query_map(self, query: Array) -> NDArray[np.uint64]:
        shape, panel, pack = self.shape, self.shape.panel, self.shape.pack
        head_bytes = 2 * shape.head_dim
        sizes = (panel, pack, len(query), shape.head_dim // panel, shape.num_heads // pack)
        strides = (head_bytes, shape.num_heads * head_bytes, 2 * panel, pack * head_bytes)
        return self._map(query, sizes, strides, (panel, pack, GROUP_ROWS // pack, sizes[3], 1))

    def _key_map(self, keys: Array, *, is_pair: bool) -> NDArray[np.uint64]:
        shape, panel = self.shape, self.shape.panel
        head_bytes = 2 * shape.head_dim
        sizes = (panel, len(keys), shape.head_dim // panel, shape.num_kv_heads)
        strides = (shape.num_kv_heads * head_bytes, 2 * panel, head_bytes)
        box = (panel, shape.keys // 2, 1, 1) if is_pair else (panel, shape.keys, sizes[2], 1)
        return self._map(keys, sizes, strides, box)

    def _map(self, array: Array, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> NDArray[np.uint64]:
        assert array.dtype == np.float16
        assert array.flags.c_contiguous
        return self._make_map(address(array), sizes, strides, box)
