"""Builds of the monokernel with other numbers than those that are chosen: what `kog-bench scaling --builds` compares."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property

from kog_dist.records import dataclass
from kog_dist.workers.cuda.geometry import EIGHT_WARPS, TWELVE_WARPS, Geometry
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.ring_shape import MOST_SLOTS, RingShape
from kog_dist.workers.cuda.word_shape import WordShape


@dataclass(frozen=True)
class TrialShape(KernelShape):
    """A shape of which some numbers are tried; 0: as it is chosen."""

    copies: int = 0  # `WordShape.replicas`
    pieces: int = 0  # `RingShape.num_pieces`
    pieces_in_flight: int = 0  # `RingShape.in_flight`
    max_slots: int = MOST_SLOTS  # `RingShape.most_slots`
    matrix_warps: int = 0  # of the geometry, of weights with 16 bit

    @staticmethod
    def of(shape: KernelShape, **tried: object) -> TrialShape:
        """A shape with other numbers."""
        return TrialShape(**{field.name: getattr(shape, field.name) for field in fields(shape)} | tried)

    @cached_property
    def geometry(self) -> Geometry:
        """How products are divided."""
        chosen = super().geometry
        if self.matrix_warps == 0 or self.coding is not None or self.spec.experts is not None:
            return chosen
        return EIGHT_WARPS if self.matrix_warps == EIGHT_WARPS.matrix_warps else TWELVE_WARPS

    @cached_property
    def ring(self) -> RingShape:
        """With the tried pieces and slots."""
        return replace(super().ring, most_slots=self.max_slots, pieces=self.pieces, pieces_in_flight=self.pieces_in_flight)

    @cached_property
    def words(self) -> WordShape:
        """With the tried copies."""
        return replace(super().words, copies=self.copies)
