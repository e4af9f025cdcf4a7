"""How a rank's matrices are divided among the thread blocks of the monokernel: what of the list of products is of a GPU.

For each op: how many lanes' matrices are one product, and which rows a thread block owns, in which form.
"""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.plan.products import Division, LayerOp, RowShare
from kog_dist.decode.plan.recipes import Recipe, Recurrent, Stage, all_recipes, recipes
from kog_dist.decode.plan.steps import Kind, Phase, Site
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape, owned_rows
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.expert_shape import ExpertShape
from kog_dist.workers.cuda.geometry import GATE_AND_UP, Geometry, lanes_together


def stream_steps(coding: Coding | None, head_coding: Coding | None) -> int:
    """Steps of 32 columns that a matrix warp's part of the stream is a multiple of, in all products alike."""
    if coding is not None:
        return CODED_COLUMNS // STEP_COLUMNS
    return 1 if head_coding is None else head_coding.columns // STEP_COLUMNS


@dataclass(frozen=True)
class Divider:
    """Divides the matrices of `hosted_lanes` among `num_ctas` thread blocks. `experts`: None in a model without.

    `coding` is of FFNs, `attention_coding` of attention's matrices, and of those of delta nets that are not plain.
    """

    spec: ModelSpec
    hosted_lanes: range
    geometry: Geometry
    num_ctas: int
    coding: Coding | None
    attention_coding: Coding | None
    head_coding: Coding | None
    experts: ExpertShape | None

    def divisions(self) -> dict[Phase | LayerOp, Division]:
        """Of every op of the model, and of a layer's where it has another form than that."""
        found: dict[Phase | LayerOp, Division] = {Phase.HEAD: self._head()}
        recurrent_last = sorted(all_recipes(self.spec), key=lambda recipe: isinstance(recipe.state, Recurrent))
        for recipe in recurrent_last:
            layers = [layer for layer, of_layer in enumerate(recipes(self.spec)) if recipe in of_layer]
            for phase, division in self._of_recipe(recipe):
                if found.setdefault(phase, division) != division:
                    found |= {(phase, layer): division for layer in layers}
        return found

    def _of_recipe(self, recipe: Recipe) -> Iterator[tuple[Phase, Division]]:
        if recipe.site is Site.MLP and self.experts is not None:
            yield from self._of_experts(self.experts, recipe)
            return
        for stage in recipe.stages:
            if stage.num_rows:
                divide = self._of_residual if Kind.PARTIAL in stage.writes else self._of_stream
                yield stage.phase, divide(stage, self._coding(recipe, stage))

    def _coding(self, recipe: Recipe, stage: Stage) -> Coding | None:
        """Of a matrix of a mixer or an FFN."""
        if recipe.site is Site.MLP:
            return self.coding
        coding = self.attention_coding
        if coding is None or not isinstance(recipe.state, Recurrent):
            return coding
        is_plain = coding.plain_outputs if Kind.PARTIAL in stage.writes else coding.plain_inputs
        return None if is_plain else coding

    def _slice_steps(self, coding: Coding | None) -> int:
        """`stream_steps`, in steps of a matrix that is coded so."""
        steps = stream_steps(self.coding, self.head_coding)
        return max(steps * STEP_COLUMNS // (STEP_COLUMNS if coding is None else coding.columns), 1)

    def _form(self, cta_rows: int, multiple: int, coding: Coding | None, *, has_last: bool = False) -> OpShape:
        """Of a product with a stream: a matrix warp has the same columns of it in all of them."""
        return self.geometry.op_shape(
            cta_rows, self.spec.hidden_size, multiple, has_last=has_last, coding=coding, slice_steps=self._slice_steps(coding)
        )

    def _of_stream(self, stage: Stage, coding: Coding | None) -> Division:
        """What is multiplied with a stream: of several lanes, where all have one input."""
        terms = 1 if coding is None else coding.terms
        num_lanes = lanes_together(self.spec, stage, len(self.hosted_lanes), self.num_ctas, terms=terms)
        num_rows, together = num_lanes * stage.coded_rows(terms), stage.coded_together(terms)
        owned = owned_rows(num_rows, self.num_ctas, together)
        has_last = stage.together == GATE_AND_UP or (stage.kept_rows > 0 and self.attention_coding is not None)
        form = self._form(owned, together, coding, has_last=has_last)
        return Division(num_lanes, RowShare(num_rows, self.num_ctas, form=form))

    def _of_residual(self, stage: Stage, coding: Coding | None) -> Division:
        """What goes to the residual: the rows of it that the thread block owns."""
        owned = owned_rows(stage.num_rows, self.num_ctas, stage.together)
        slice_steps = self._slice_steps(None) if coding is None and self.attention_coding is not None else 1
        form = self.geometry.op_shape(owned, stage.num_columns, stage.together, coding=coding, slice_steps=slice_steps)
        return Division(1, RowShare(stage.num_rows, self.num_ctas, form=form))

    def _of_experts(self, experts: ExpertShape, recipe: Recipe) -> Iterator[tuple[Phase, Division]]:
        """Router, gate and up rows of all hosted lanes, of which each chosen expert has thread blocks of its own, and `down`.

        Of a shared expert's gate and up all thread blocks have some.
        """
        rows, beside = {stage.phase: stage.num_rows for stage in recipe.stages}, None
        yield Phase.ROUTE, Division(1, RowShare(rows[Phase.ROUTE], self.num_ctas, form=experts.route))
        num_lanes = len(self.hosted_lanes)
        of_chosen = num_lanes * (rows[Phase.GATE_UP] - 2 * experts.lane_shared)
        if experts.lane_shared:
            beside = RowShare(num_lanes * 2 * experts.lane_shared, self.num_ctas, form=experts.shared_gate_up())
        shares = RowShare(of_chosen, experts.ctas, experts.per_token, experts.gate_up, experts.shares, beside)
        yield Phase.GATE_UP, Division(num_lanes, shares)
        yield Phase.DOWN, Division(1, RowShare(rows[Phase.DOWN], self.num_ctas, form=experts.down))

    def _head(self) -> Division:
        """Vocabulary rows of this rank, over the columns of one stream; with `vocab_parallel` each lane has its thread blocks."""
        num_lanes, slices = len(self.hosted_lanes), [self.spec.vocab_slice(lane) for lane in self.hosted_lanes]
        num_rows, num_ctas, num_groups = slices[-1][1] - slices[0][0], self.num_ctas, 1
        if self.spec.head_type is HeadType.VOCAB_PARALLEL:
            num_rows, num_ctas, num_groups = slices[0][1] - slices[0][0], max(self.num_ctas // num_lanes, 1), num_lanes
        form = self._form(owned_rows(num_rows, num_ctas, 1), 1, self.head_coding)
        return Division(num_lanes, RowShare(num_rows, num_ctas, num_groups, form))
