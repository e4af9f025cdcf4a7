"""How the experts that a token uses are divided among thread blocks and matrix warps, and where all of them lie (docs/moe.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.plan.recipes import all_recipes
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.decode.tape_packing import MAX_PIECES, STEP_COLUMNS, OpShape, owned_rows
from kog_dist.model.layers import Experts
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.geometry import GATE_AND_UP, Geometry

EXPERTS_OF_WORD, CHOSEN_OF_WORD = 256, 8  # of a choice that is kept in one word, for hosts that compare choices
_SKEWED_GROUP = 32  # columns of a group that two lanes may share: so gpt-oss's are


@dataclass(frozen=True)
class ExpertShape:
    """The products of K chosen experts: GATE_UP gives each of them `ctas` thread blocks, DOWN each `warps` matrix warps of all.

    Where K does not divide these, thread blocks have several `shares` of experts, and warps take columns in turn. A shared
    expert is the last slot of `down`; its gate and up rows, which need no choice, all thread blocks have.
    `coding`: None if the experts have 16 bit. `num_ctas`: all thread blocks, of which each has `residual_rows` rows of DOWN.
    `weight_dtype`: of the model's 16-bit weights.
    """

    spec: ModelSpec
    geometry: Geometry
    num_lanes: int  # hosted
    num_ctas: int
    residual_rows: int
    coding: Coding | None
    weight_dtype: str = "bfloat16"
    least_steps: int = 1  # of `stream_steps`

    @property
    def per_token(self) -> int:
        """K."""
        assert self.spec.experts is not None
        return self.spec.experts.per_token

    @property
    def num_experts(self) -> int:
        """Of a layer."""
        assert self.spec.experts is not None
        return self.spec.experts.num_experts

    @property
    def fits_a_word(self) -> bool:
        """Whether a choice does: eight bits for each expert."""
        return self.num_experts <= EXPERTS_OF_WORD and self.per_token <= CHOSEN_OF_WORD

    @property
    def num_logits(self) -> int:
        """Of a layer's router, and of the shared expert's gate behind them."""
        return self._kind.num_logits

    @property
    def _kind(self) -> Experts:
        return next(part for part in self.spec.kinds if isinstance(part, Experts))

    @property
    def lane_shared(self) -> int:
        """Columns of the shared expert in a lane; 0: there is none."""
        return self._kind.shared_width // self.spec.num_lanes

    @cached_property
    def ops(self) -> tuple[Phase, ...]:
        """What is multiplied with matrices of the chosen ones, which lie where the choice finds them."""
        stages = (stage for recipe in all_recipes(self.spec) for stage in recipe.stages)
        return tuple(stage.phase for stage in stages if stage.num_rows and Kind.CHOICE in stage.reads)

    @property
    def ctas(self) -> int:
        """Thread blocks that share the gate and up rows of a chosen expert; or its shares, where a thread block has some."""
        if not self._share_rows:
            return self.num_ctas // self.per_token
        return -(-self._num_rows // self._share_rows)

    @property
    def shares(self) -> int:
        """Of chosen experts that a thread block has: neighbouring ones."""
        return -(-self.per_token * self.ctas // self.num_ctas)

    @property
    def _num_rows(self) -> int:
        """Gate and up rows of an expert."""
        return 2 * self.num_lanes * self.spec.lane_ffn

    @cached_property
    def _share_rows(self) -> int:
        """Of a share: so many that no thread block has more than it must, and shares are few. 0: experts divide thread blocks."""
        if self.num_ctas % self.per_token == 0:
            return 0

        def most_rows(rows: int) -> int:
            return -(-self.per_token * -(-self._num_rows // rows) // self.num_ctas) * rows

        return min(range(self.geometry.tile_rows, 0, -GATE_AND_UP), key=most_rows)

    @property
    def warps(self) -> int:
        """Matrix warps that share the columns of `down` of a chosen expert; those of one that has some where they take turns."""
        return max(self.geometry.matrix_warps // self.per_token, 1)

    @property
    def takes_turns(self) -> bool:
        """Whether matrix warps take columns of `down` in turn, of one expert behind the other."""
        return self.lane_shared > 0 or self.geometry.matrix_warps % self.per_token != 0

    @property
    def findings(self) -> list[str]:
        """What no build of the kernel can divide."""
        found = []
        if self.lane_shared % 4:
            found.append(f"a shared expert with {self.lane_shared} columns in a lane (a multiple of 4)")
        if self.takes_turns and any(map(self.skew, range(self.spec.num_lanes))):
            limit = f"whole groups of {self.group_columns}"
            found.append(f"lanes with {self.spec.lane_ffn} columns of an expert that warps take in turn ({limit})")
        if self.lane_shared and self.coding is not None and self.coding.is_of_experts:
            found.append("a shared expert in 16 bit beside quantised ones (in the same codes)")
        if self.lane_shared % self.group_columns:
            found.append(f"a shared expert with {self.lane_shared} columns in a lane (whole groups of {self.group_columns})")
        if self.coding is not None and not self.coding.scales:
            found.append("quantised experts with one scale for each row (for groups of columns)")
        if self.group_columns != _SKEWED_GROUP and any(map(self.skew, range(self.spec.num_lanes))):
            found.append(f"lanes with {self.spec.lane_ffn} columns of an expert (whole groups of {self.group_columns})")
        if self.router_dtype != self.weight_dtype == "float16":
            found.append(f"experts in {self.coding.number if self.coding else 16} beside a router in float16 (bfloat16)")
        return found

    @property
    def unites(self) -> bool:
        """Whether a pass of several tokens reads each expert once for all that chose it; else one token's behind another's."""
        return not self.takes_turns

    @property
    def against_passes(self) -> dict[str, bool]:
        """What passes of several tokens cannot divide, and whether it is so."""
        limit = f"with a number that divides {self.num_ctas} thread blocks"
        return {f"{self.per_token} experts for each token in shares ({limit})": self.unites and self.shares > 1}

    @property
    def group_columns(self) -> int:
        """Columns of quantised experts that share a scale, in a step at most; 1 of others."""
        return 1 if self.coding is None or not self.coding.scales else CODED_COLUMNS // self.coding.scales

    @property
    def router_dtype(self) -> str:
        """Of the router's weights in the kernel: the type of their input, which experts in FP8 and FP4 have, too."""
        return self.weight_dtype if self.coding is None else self.coding.plain_dtype(self.weight_dtype)

    @property
    def router_scale(self) -> float:
        """What the router's weights are multiplied by there."""
        return 1.0 if self.coding is None else self.coding.plain_scale(self.weight_dtype)

    @property
    def stream_steps(self) -> int:
        """Steps of 32 columns that a matrix warp's part of the stream is a multiple of, in all products alike."""
        return self.least_steps if self.coding is None else CODED_COLUMNS // STEP_COLUMNS

    @cached_property
    def route(self) -> OpShape:
        """Rows of the router."""
        rows = owned_rows(self.num_logits, self.num_ctas, 1)
        return self.geometry.op_shape(rows, self.spec.hidden_size, 1, slice_steps=self.stream_steps)

    @cached_property
    def gate_up(self) -> OpShape:
        """Gate and up rows of FFN columns of all hosted lanes, of one expert: a thread block's, or a share."""
        rows = self._share_rows or 2 * owned_rows(self.num_lanes * self.spec.lane_ffn, self.ctas, 2)
        return self._of_stream(rows)

    @cached_property
    def down(self) -> OpShape:
        """Rows of the residual, over a lane's columns of all chosen experts, one behind the other."""
        if self.takes_turns:
            return self._down_in_turn
        step = self.stream_steps * STEP_COLUMNS * self.warps
        columns = -(-(self.spec.lane_ffn + max(map(self.skew, range(self.spec.num_lanes)))) // step) * step
        return self.geometry.op_shape(self.residual_rows, self.per_token * columns, 2, coding=self.coding)

    @cached_property
    def _down_in_turn(self) -> OpShape:
        form = self.geometry.op_shape(self.residual_rows, self._step_columns, 2, coding=self.coding)
        most = max(1, min(self.geometry.tile_rows // form.rows, MAX_PIECES // -(-form.rows // 8))) if self.coding is None else 1
        steps = max(n for n in range(1, most + 1) if self._slot_steps % n == self._shared_steps % n == 0)
        num_parts = (self.per_token * self._slot_steps + self._shared_steps) // steps
        per = -(-num_parts // form.warps) * steps
        return replace(form, per=per, steps=steps, real_steps=num_parts * steps, in_turn=True)

    @property
    def _step_columns(self) -> int:
        return STEP_COLUMNS if self.coding is None else self.coding.columns

    @property
    def _slot_steps(self) -> int:
        """Steps of columns of an expert in `down` of a lane."""
        return -(-self.spec.lane_ffn // self._step_columns)

    @property
    def _shared_steps(self) -> int:
        """The same of the shared expert."""
        return -(-self.lane_shared // self._step_columns)

    @property
    def slot_parts(self) -> int:
        """Parts of an expert's columns in `down` that warps take in turn."""
        return self._slot_steps // self.down.steps

    @property
    def shared_parts(self) -> int:
        """The same of the shared expert."""
        return self._shared_steps // self.down.steps

    @cached_property
    def down_of_one(self) -> OpShape:
        """What one expert has of `down`."""
        return self._down_of_slot(self.slot_parts) if self.takes_turns else replace(self.down, warps=self.warps)

    def _down_of_slot(self, num_parts: int) -> OpShape:
        """What a slot has of `down` where warps take parts in turn: these lie one behind the other, as those of warps do."""
        return replace(self.down, per=self.down.steps, warps=num_parts, real_steps=0, in_turn=False)

    def shared_gate_up(self) -> OpShape:
        """Gate and up rows of the shared expert's columns of all hosted lanes, on the tape behind the router, if there is one."""
        return self._of_stream(2 * owned_rows(self.num_lanes * self.lane_shared, self.num_ctas, 2))

    def _of_stream(self, rows: int) -> OpShape:
        """Gate and up rows of a thread block."""
        steps = 1 if self.coding is not None else self.stream_steps
        return self.geometry.op_shape(
            rows, self.spec.hidden_size, GATE_AND_UP, has_last=True, coding=self.coding, slice_steps=steps
        )

    @cached_property
    def taped(self) -> dict[Phase, OpShape]:
        """What lies on the tape of `ops`, since a token reads it whatever is chosen: the shared expert."""
        if not self.lane_shared:
            return {}
        return {Phase.GATE_UP: self.shared_gate_up(), Phase.DOWN: self._down_of_slot(self.shared_parts)}

    def skew(self, lane: int) -> int:
        """Columns in front of a lane's own in `down`, of a group that the lane before it in the model has, too."""
        return lane * self.spec.lane_ffn % self.group_columns

    @property
    def gate_up_values(self) -> int:
        """16-bit words of an expert's gate and up."""
        return self.ctas * self.gate_up.num_values

    @property
    def down_values(self) -> int:
        """16-bit words of a lane's part of an expert's `down`."""
        return self.num_ctas * self.down_of_one.num_values

    @property
    def num_values(self) -> int:
        """16-bit words of an expert: [gate and up tile][thread block of the expert], [lane][down tile][thread block]."""
        return self.gate_up_values + self.num_lanes * self.down_values

    @property
    def num_bytes(self) -> int:
        """GPU memory of the experts of all layers, their biases included."""
        experts = self.spec.experts
        assert experts is not None
        biases = 2 * self.num_lanes * self.spec.lane_ffn + self.spec.hidden_size if experts.bias else 0
        return 2 * self.spec.num_layers * self.num_experts * (self.num_values + biases)

    @property
    def read_values(self) -> int:
        """16-bit words of the chosen experts of all layers that a token reads."""
        return self.spec.num_layers * self.per_token * self.num_values

    def header(self) -> list[str]:
        """Lines of `shape.cuh`."""
        experts = self.spec.experts
        assert experts is not None
        numbers = {
            "kNumExperts": experts.num_experts,
            "kChosen": experts.per_token,
            "kExpertCtas": self.ctas,
            "kExpertShares": self.shares,
            "kExpertWarps": self.warps,
            "kExpertSkew": self.skew(1 % self.spec.num_lanes),
        }
        flags = {
            "kChoiceIsNormalised": experts.is_normalised,
            "kRouterBias": experts.router_bias,
            "kExpertBias": experts.bias,
            "kClamps": experts.clamp is not None,
        }
        clamp = experts.clamp
        floats = {"kClampAlpha": clamp.alpha if clamp else 1.0, "kClampLimit": clamp.limit if clamp else 1.0}
        floats |= {"kRouterScale": self.router_scale}
        numbers |= {"kSlotParts": self.slot_parts} if self.takes_turns else {}
        numbers |= {"kSharedFfn": self.lane_shared, "kSharedParts": self.shared_parts} if self.lane_shared else {}
        return [
            "#define KOG_EXPERTS 1",
            *(["#define KOG_SLOTS_IN_TURN"] if self.takes_turns else []),
            *(["#define KOG_SHARED_EXPERT"] if self.lane_shared else []),
            "namespace kog {",
            *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
            *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
            *(f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()),
            f"constexpr u64 kExpertBytes = {2 * self.num_values}ull, kExpertGateUpBytes = {2 * self.gate_up_values}ull;",
            "}  // namespace kog",
        ]
