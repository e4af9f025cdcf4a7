"""How large the monokernel's KV cache is, and how attention divides it. Where a position lies in it: phases/attend_cache.cuh."""

from __future__ import annotations

from functools import cached_property
from math import gcd

from kog_dist.decode.plan.recipes import ByPosition, recipes
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.kv_format import position_bytes

BATCH = 16  # positions that lie together
_LEAST_PARTITION = 12  # batches of a split: 1,536 positions of eight splits


@dataclass(frozen=True)
class CacheShape:
    """The cache of one rank that hosts `num_lanes` lanes. Each KV head's positions are divided among `splits`, in batches of 16.

    `partition_batches`: 0, or what `batches_of_partition` is to be. `whole_windows`: windowed layers keep all positions.
    `max_ctas`: thread blocks of the monokernel.
    """

    spec: ModelSpec
    num_lanes: int
    kv_dtype: str
    splits: int
    max_ctas: int
    partition_batches: int = 0
    whole_windows: bool = False

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values."""
        return tuple(layer for layer, (mixer, _) in enumerate(recipes(self.spec)) if isinstance(mixer.state, ByPosition))

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Those of them that see everything."""
        return tuple(layer for layer in self.layers if self.spec.window(layer) is None)

    @cached_property
    def sharing_lanes(self) -> int:
        """Neighbouring hosted lanes that have the same KV head, whose rows are kept once: all of them write the same bits."""
        return gcd(self.num_lanes, max(self.spec.num_lanes // self.spec.num_kv_heads, 1))  # as `AttentionMixer.sharing_lanes`

    @property
    def kv_heads(self) -> int:
        """KV heads of all hosted lanes, each of which is kept once."""
        return self.num_lanes * self.spec.lane_kv_heads // self.sharing_lanes

    @property
    def window_batches(self) -> int:
        """Batches of a split that attention of a windowed layer reads: its ring."""
        window = min(self.spec.sliding_window or self.spec.max_context, self.spec.max_context)
        return -(-window // (BATCH * self.splits))

    @property
    def full_batches(self) -> int:
        """The same of a layer that sees everything, at the end of the context: all that there are."""
        return -(-self.spec.max_context // (BATCH * self.splits))

    @property
    def kept_window_batches(self) -> int:
        """Batches of a split that a windowed layer has room for."""
        return self.full_batches if self.whole_windows else self.window_batches

    @property
    def ring_positions(self) -> int:
        """Positions of which windowed layers keep the newest; 0: there are no such layers, or they keep all."""
        return BATCH * self.splits * self.window_batches if self.spec.window_layers and not self.whole_windows else 0

    @property
    def can_be_whole(self) -> bool:
        """Whether windowed layers can keep all positions.

        Rows of a batch that are behind the newest one are then read a ring further back. Rows of V lie in pairs, and of none may
        one row count here and the other there: a window is less than its ring, or sees everything.
        """
        window = self.spec.sliding_window or self.spec.max_context
        return -(-window // self.splits) < BATCH * self.window_batches or self.window_batches == self.full_batches

    @property
    def batches_of_partition(self) -> int:
        """Batches of a split that a partition has in a layer that sees everything.

        1,536 positions of eight splits, or a quarter of a longer context: in each token unread partitions are written. All
        batches where a layer's splits keep more than half of the thread blocks busy without partitions.
        """
        num_kv_heads = self.spec.num_lanes * self.spec.lane_kv_heads
        if self.spec.has_one_stream and 2 * num_kv_heads * self.splits > self.max_ctas:
            return self.partition_batches or max(self.full_batches, 1)
        return self.partition_batches or max(_LEAST_PARTITION, -(-self.full_batches // 4))

    @property
    def num_partitions(self) -> int:
        """Partitions of a layer that sees everything, at the end of the context."""
        return -(-self.full_batches // self.batches_of_partition) if self.full_layers else 1

    @property
    def batch_bytes(self) -> int:
        """Of 16 positions of a KV head, K and V."""
        return BATCH * position_bytes(self.spec.head_dim, self.kv_dtype)

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        windowed = len(self.layers) - len(self.full_layers)
        batches = windowed * self.kept_window_batches + len(self.full_layers) * self.full_batches
        return batches * self.kv_heads * self.splits * self.batch_bytes
