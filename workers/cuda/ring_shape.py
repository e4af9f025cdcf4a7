"""The ring of tiles in shared memory, through which a thread block's weights go: its size, and how much is under way to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from kog_dist.decode.plan.steps import LANE_OPS, Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.records import dataclass
from kog_dist.workers.cuda.geometry import Geometry
from kog_dist.workers.cuda.tape_shape import TapeShape

MOST_SLOTS = 16  # tiles of the largest size
NEAR_CONTEXT = 1536  # further on attention reads so much that it is held up less by fewer copies of weights
_PACKED_TILE_BYTES, _MOST_TILES = 2 * 8 + 4, 32  # barriers and place of a tile in a packed ring; tiles in it
_HALVES_IN_FLIGHT = {1: (4, 4), 2: (5, 4)}  # by lanes: of tiles, before position NEAR_CONTEXT and from there on; as measured
_MOST_UNEVEN = 1.7  # what is under way may be if all of it is the largest tiles, of what it should be


@dataclass(frozen=True)
class RingShape:
    """The ring of a rank that hosts `num_lanes` lanes, in `free_bytes` of shared memory.

    `may_be_packed`: of a model that is faster so, see `is_packed`. `others`: forms besides those of `ops`. `pieces`,
    `pieces_in_flight`: 0, or what `num_pieces` and `in_flight` are to be.
    """

    geometry: Geometry
    ops: Mapping[Phase, OpShape]
    tape: TapeShape
    num_lanes: int
    free_bytes: int
    may_be_packed: bool
    others: tuple[OpShape, ...] = ()
    most_slots: int = MOST_SLOTS
    pieces: int = 0
    pieces_in_flight: int = 0

    @property
    def num_pieces(self) -> int:
        """Pieces of a tile: what is copied, and given back, by itself. With few lanes halves: what is under way can then lie
        between two tiles and three.
        """
        return self.pieces or (2 if self.num_lanes <= 2 and not self.geometry.in_flight_bytes else 1)

    @property
    def is_packed(self) -> bool:
        """Whether tiles lie one behind the other instead of each in a slot of the largest one's size.

        Models of one lane, which are so small that their chain of waits decides, are faster with slots; not with quantised
        weights, whose slots would have to be as large as the largest tile.
        """
        return self.may_be_packed and self.geometry.in_flight_bytes > 0 and self.num_pieces == 1

    @property
    def _most_bytes(self) -> int:
        return self.most_slots * self.geometry.slot_bytes

    @cached_property
    def num_slots(self) -> int:
        """Tiles that it has barriers for: its slots, as many as fit; or if it is packed, as many of the smallest tile."""
        if self.is_packed:
            smallest = 2 * min(min(op.tile_sizes) for op in (*self.ops.values(), *self.others))
            return min(min(self._most_bytes, self.free_bytes) // (smallest + _PACKED_TILE_BYTES), _MOST_TILES)
        slot_bytes = self.geometry.slot_bytes + 2 * 8 * self.num_pieces  # pieces have barriers of their own
        return min(self.most_slots, self.free_bytes // slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Of tiles, without barriers."""
        if self.is_packed:
            return min(self._most_bytes, self.free_bytes - self.num_slots * _PACKED_TILE_BYTES) // 512 * 512
        return self.num_slots * self.geometry.slot_bytes

    @property
    def num_tiles(self) -> int:
        """Tiles of mean size that it holds."""
        return self.num_bytes * self.tape.num_tiles // (2 * self.tape.num_values) if self.is_packed else self.num_slots

    @property
    def in_flight(self) -> int:
        """Pieces that may be under way from memory: three tiles; with one or two lanes halves or two tiles."""
        return self._in_flight[0]

    @property
    def far_in_flight(self) -> int:
        """The same for tokens at NEAR_CONTEXT and further on."""
        return self._in_flight[1]

    @property
    def _in_flight(self) -> tuple[int, int]:
        if self.pieces_in_flight:
            return (self.pieces_in_flight,) * 2
        if self.geometry.in_flight_bytes:
            ops = [*(form for op, form in self.ops.items() if op in LANE_OPS), *self.others]
            mean_bytes = 2 * sum(op.num_values for op in ops) / sum(op.num_tiles for op in ops) / self.num_pieces
            most = self.num_pieces * self.num_slots - 2  # with a full ring nothing would tell which copy has landed
            most = min(most, int(_MOST_UNEVEN * self.geometry.in_flight_bytes / max(2 * op.tile_values for op in ops)))
            return (max(2, min(round(self.geometry.in_flight_bytes / mean_bytes), most)),) * 2
        if self.num_lanes <= 2 and self.num_pieces == 2:
            return _HALVES_IN_FLIGHT[self.num_lanes]
        return ((2 if self.num_lanes <= 2 else 3) * self.num_pieces,) * 2

    @property
    def findings(self) -> list[str]:
        """What no build of the kernel can have."""
        found = []
        if self.geometry.matrix_warps % self.num_pieces:
            found.append(f"ring tiles in {self.num_pieces} pieces (a number that divides {self.geometry.matrix_warps})")
        if self.num_pieces * self.num_slots <= self.in_flight + 1:
            found.append(f"shapes that leave {self.num_slots} ring slots in shared memory")
        return found
