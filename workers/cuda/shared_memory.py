"""Shared memory of a thread block of the monokernel: what of it is left for the ring of tiles."""

from __future__ import annotations

from kog_dist.decode.pass_drafts import PLACES
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.cuda.geometry import Geometry
from kog_dist.workers.cuda.query_sets import QuerySets

SHARED_BYTES = 232448
# Vectors whose sums of squares are kept. A matrix warp that begins one has handed over its sums of the one before, for which the
# finaliser was done with the one two before that.
NUM_SQUARES = 3
_ATTEND_WARPS = 4
_NOTES_BYTES, _PADDING_BYTES = 32 + 2 * 48, 32  # WaitNote and both PeerNotes; of `Shared`, at most


@dataclass(frozen=True)
class SharedMemory:
    """`Shared` (phases/layout.cuh) of the build with processors.

    `tokens`: of a pass. `num_sums`: blocks of rows whose partial sums are kept. `residual_rows`, `head_rows`: of the residual and
    of the LM head in a thread block. `awaits_attention`: has a barrier for that. `looks_up`: drafts. `company`:
    tokens of a pass are of several requests. `delta`: None in a model without such nets.
    """

    spec: ModelSpec
    geometry: Geometry
    num_lanes: int
    num_streams: int
    num_ranks: int
    tokens: int
    num_sums: int
    x_steps: int
    residual_rows: int
    head_rows: int
    sets: QuerySets
    awaits_attention: bool
    looks_up: bool
    company: bool
    delta: DeltaShape | None

    @property
    def ring_bytes(self) -> int:
        """What is left for the ring: tiles and their barriers."""
        return SHARED_BYTES - self.bytes_besides

    @property
    def bytes_besides(self) -> int:
        """Bytes of all else, and at most so much padding."""
        spec, lanes, tokens, warps, sets = self.spec, self.num_lanes, self.tokens, self.geometry.matrix_warps, self.sets
        halves = 1 if tokens == _ATTEND_WARPS else 2  # kAttendedHalves in layout.cuh
        attended = halves * tokens * 4 * sets.of_warp * sets.num_heads * spec.head_dim
        scores = 2 * self.head_rows
        values = tokens * self.x_steps * warps * 32  # x
        values += tokens * warps * (self.num_sums * self.geometry.tile_rows + NUM_SQUARES * 32)  # red, squares
        values += warps * 2 * lanes * self.num_ranks  # head_squares
        values += tokens * self.residual_rows * (self.num_streams + lanes * 2 * (spec.delay + 1))  # residual, history
        values += attended + (tokens if tokens > 1 else sets.num_sets // sets.of_warp) * spec.head_dim  # ..., fresh
        values += 2 * attended // spec.head_dim  # attended_max and attended_sum
        values += self.head_rows // 32 + 2 + (1 if scores <= attended else scores)  # mask, scores
        of_pass = 3 + tokens + (tokens + 1 if self.company else 0)
        values += lanes + 11 + 2 * (-(-of_pass // 4) * 4)  # done_cycles, those by themselves, passes
        values += self._choice_values
        values += 0 if self.delta is None else 2 * self.delta.item_channels + 4  # convolved
        values += tokens * (3 * PLACES + 1) if self.looks_up else 0  # drafting
        meetings = 0 if self.delta is None or tokens == 1 else 2  # convolved_full
        barriers = meetings + 4 + halves * tokens + self.awaits_attention + 2 * self.num_sums + NUM_SQUARES + lanes
        return 4 * values + 8 * barriers + _NOTES_BYTES + _PADDING_BYTES

    @property
    def _choice_values(self) -> int:
        """Of `chosen` and `chosen_weights`; of several tokens also their union."""
        values = 2 * self.spec.num_ffns_read
        return values if self.spec.experts is None or self.tokens == 1 else 2 * values * self.tokens + 1
