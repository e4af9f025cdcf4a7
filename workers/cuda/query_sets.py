"""How the query heads of a KV head are divided among attention warps."""

from __future__ import annotations

from kog_dist.records import dataclass

_SMALL_HEAD = 64  # values; of two sets of such heads a warp has as many outputs as of one of twice as large ones


@dataclass(frozen=True, slots=True)
class QuerySets:
    """Sets of the `group` query heads of a KV head, of `head_dim` values each."""

    group: int
    head_dim: int

    @property
    def num_sets(self) -> int:
        """Each of at most four heads: the matrix unit's eight columns are two for each head."""
        return -(-self.group // 4)

    @property
    def num_heads(self) -> int:
        """Query heads of a set, the largest one."""
        return -(-self.group // self.num_sets)

    @property
    def of_warp(self) -> int:
        """Sets that one attention warp has: two where its registers have room for the query and the outputs of both.

        Keys and values are read once for both then, and twice as many of them are under way at a time.
        """
        return 2 if self.num_sets % 2 == 0 and self.head_dim <= _SMALL_HEAD else 1
