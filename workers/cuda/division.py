"""How a rank's matrices are divided among the thread blocks of the monokernel: what of the list of products is of a GPU.

For each op: how many lanes' matrices are one product, and which rows a thread block owns, in which form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.products import Division, Rows
from kog_dist.decode.steps import Phase
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape, owned_rows
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.workers.cuda.expert_shape import ExpertShape
from kog_dist.workers.cuda.geometry import Geometry, lanes_together


def stream_steps(coding: Coding | None, head_coding: Coding | None) -> int:
    """Steps of 32 columns that a matrix warp's part of the stream is a multiple of, in all products alike."""
    if coding is not None:
        return CODED_COLUMNS // STEP_COLUMNS
    return 1 if head_coding is None else head_coding.columns // STEP_COLUMNS


@dataclass(frozen=True)
class Divider:
    """Divides the matrices of `hosted_lanes` among `num_ctas` thread blocks. `experts`: None in a model without.

    `coding` is of FFNs, `attention_coding` of attention's matrices.
    """

    spec: ModelSpec
    hosted_lanes: range
    geometry: Geometry
    num_ctas: int
    coding: Coding | None
    attention_coding: Coding | None
    head_coding: Coding | None
    experts: ExpertShape | None

    def divisions(self) -> dict[Phase, Division]:
        """Of every op of the model."""
        return dict(self._divisions())

    def _divisions(self) -> Iterator[tuple[Phase, Division]]:
        yield Phase.QKV, self._qkv()
        yield Phase.OUT, self._residual(self.spec.lane_heads * self.spec.head_dim, self.attention_coding)
        if self.experts is None:
            yield Phase.GATE_UP, self._gate_up()
            yield Phase.DOWN, self._residual(self.spec.lane_ffn, self.coding)
        else:
            yield from self._of_experts(self.experts)
        yield Phase.HEAD, self._head()

    def _lanes_together(self, phase: Phase) -> int:
        return lanes_together(self.spec, phase, len(self.hosted_lanes), self.num_ctas)

    def _slice_steps(self, coding: Coding | None) -> int:
        """`stream_steps`, in steps of a matrix that is coded so."""
        steps = stream_steps(self.coding, self.head_coding)
        return max(steps * STEP_COLUMNS // (STEP_COLUMNS if coding is None else coding.columns), 1)

    def _of_stream(self, cta_rows: int, multiple: int, coding: Coding | None, *, has_last: bool = False) -> OpShape:
        """Of a product with a stream: a matrix warp has the same columns of it in all of them."""
        return self.geometry.op_shape(
            cta_rows, self.spec.hidden_size, multiple, has_last=has_last, coding=coding, slice_steps=self._slice_steps(coding)
        )

    def _qkv(self) -> Division:
        """Query, key and value rows, in pairs that rotate together."""
        num_lanes = self._lanes_together(Phase.QKV)
        num_rows = num_lanes * self.spec.lane_qkv_rows
        form = self._of_stream(owned_rows(num_rows, self.num_ctas, 2), 2, self.attention_coding)
        return Division(num_lanes, Rows(num_rows, self.num_ctas, form=form))

    def _residual(self, num_columns: int, coding: Coding | None) -> Division:
        """OUT or DOWN: the rows of the residual that the thread block owns."""
        hidden = self.spec.hidden_size
        form = self.geometry.op_shape(owned_rows(hidden, self.num_ctas, 2), num_columns, 2, coding=coding)
        return Division(1, Rows(hidden, self.num_ctas, form=form))

    def _gate_up(self) -> Division:
        """Gate and up rows of the same FFN columns, one after the other; two columns at least."""
        num_lanes = self._lanes_together(Phase.GATE_UP)
        columns = num_lanes * self.spec.lane_ffn
        form = self._of_stream(2 * owned_rows(columns, self.num_ctas, 2), 4, self.coding, has_last=True)
        return Division(num_lanes, Rows(2 * columns, self.num_ctas, form=form))

    def _of_experts(self, experts: ExpertShape) -> Iterator[tuple[Phase, Division]]:
        """Router, gate and up rows of all hosted lanes, of which each chosen expert has thread blocks of its own, and `down`."""
        num_lanes = len(self.hosted_lanes)
        yield Phase.ROUTE, Division(1, Rows(experts.num_experts, self.num_ctas, form=experts.route))
        gate_up = Rows(2 * num_lanes * self.spec.lane_ffn, experts.ctas, experts.per_token, experts.gate_up)
        yield Phase.GATE_UP, Division(num_lanes, gate_up)
        yield Phase.DOWN, Division(1, Rows(self.spec.hidden_size, self.num_ctas, form=experts.down))

    def _head(self) -> Division:
        """Vocabulary rows of this rank, over the columns of one stream; with `vocab_parallel` each lane has its thread blocks."""
        num_lanes, slices = len(self.hosted_lanes), [self.spec.vocab_slice(lane) for lane in self.hosted_lanes]
        num_rows, num_ctas, num_groups = slices[-1][1] - slices[0][0], self.num_ctas, 1
        if self.spec.head_type is HeadType.VOCAB_PARALLEL:
            num_rows, num_ctas, num_groups = slices[0][1] - slices[0][0], max(self.num_ctas // num_lanes, 1), num_lanes
        form = self._of_stream(owned_rows(num_rows, num_ctas, 1), 1, self.head_coding)
        return Division(num_lanes, Rows(num_rows, num_ctas, num_groups, form))
