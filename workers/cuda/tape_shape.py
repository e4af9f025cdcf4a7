"""How long the tape of a thread block is, and what lies behind all tapes (docs/monokernel.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.steps import LANE_OPS, Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.records import dataclass
from kog_dist.workers.cuda.expert_shape import ExpertShape


@dataclass(frozen=True)
class TapeShape:
    """The tapes of `num_ctas` thread blocks with the weights of `products`, of the forms of their ops.

    `coding`, `head_coding`: of the layers and of the LM head. `experts`: None in a model without.
    """

    products: tuple[Product, ...]
    ops: Mapping[Phase, OpShape]
    num_ctas: int
    coding: Coding | None
    head_coding: Coding | None
    experts: ExpertShape | None

    def form_of(self, product: Product) -> OpShape | None:
        """What a thread block has of a product on its tape.

        None: nothing. Of experts only the shared one lies there; the others lie where the choice finds them.
        """
        if self.experts is not None and product.op in self.experts.ops:
            return self.experts.taped.get(product.op)
        return product.rows.form

    @cached_property
    def _num_taped(self) -> Counter[OpShape]:
        return Counter(form for product in self.products if (form := self.form_of(product)) is not None)

    @cached_property
    def num_values(self) -> int:
        """Weights on the tape of one thread block: 16-bit words."""
        return sum(count * form.num_values for form, count in self._num_taped.items())

    @cached_property
    def num_tiles(self) -> int:
        """Tiles on the tape of one thread block."""
        return sum(count * form.num_tiles for form, count in self._num_taped.items())

    @cached_property
    def scale_rows(self) -> int:
        """Scales of a product in a thread block that lie behind all tapes: where each row of a quantised matrix has one."""
        if self.coding is None or self.coding.scales:
            return 0
        return max(form.cta_rows for op, form in self.ops.items() if op in LANE_OPS)

    @property
    def head_scale_rows(self) -> int:
        """Scales of a product of the LM head in a thread block, which lie behind those of layers."""
        return 0 if self.head_coding is None else self.ops[Phase.HEAD].cta_rows

    @property
    def head_scales_place(self) -> int:
        """Where they begin, in 16-bit words from that of all tapes."""
        num_scaled = sum(product.op in LANE_OPS for product in self.products)
        return self.num_ctas * (self.num_values + 2 * num_scaled * self.scale_rows)

    @property
    def weight_words(self) -> int:
        """16-bit words of all tapes and of what lies behind them."""
        num_heads = sum(product.op is Phase.HEAD for product in self.products)
        return self.head_scales_place + 2 * self.head_scale_rows * num_heads * self.num_ctas

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a token reads: the tapes, and the experts that it uses."""
        return 2 * (self.num_values * self.num_ctas + (self.experts.read_values if self.experts is not None else 0))

    def pass_bytes(self, num_experts: float) -> int:
        """The same of a pass whose tokens use so many different experts in a layer, by mean."""
        assert self.experts is not None
        return 2 * self.num_values * self.num_ctas + round(2 * num_experts / self.experts.per_token * self.experts.read_values)
