"""The LM head of a rank in the monokernel: whose streams enter it, and who has which rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.tape_packing import OpShape
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass


def head_lanes(spec: ModelSpec, hosted_lanes: range, num_ranks: int) -> range:
    """Lanes whose last streams enter a rank's logits; the first hosted one where all share it."""
    if spec.has_one_stream:
        return hosted_lanes[:1]
    alone = num_ranks == 1 or spec.head_type is HeadType.VOCAB_PARALLEL
    return hosted_lanes if alone else range(spec.num_lanes)


@dataclass(frozen=True)
class HeadShape:
    """The products of the LM head on a rank: with `lane` one for each of `lanes`, which are summed, else one."""

    spec: ModelSpec
    hosted_lanes: range
    lanes: range
    products: tuple[Product, ...]

    @staticmethod
    def of(spec: ModelSpec, hosted_lanes: range, num_ranks: int, products: Sequence[Product]) -> HeadShape:
        """That of a rank with these products."""
        lanes = head_lanes(spec, hosted_lanes, num_ranks)
        return HeadShape(spec, hosted_lanes, lanes, tuple(product for product in products if product.op is Phase.HEAD))

    @property
    def num_products(self) -> int:
        """Of a token."""
        return len(self.products)

    @property
    def form(self) -> OpShape:
        """What a thread block has of one of them."""
        form = self.products[0].rows.form
        assert form is not None
        return form

    @property
    def num_ctas(self) -> int:
        """Thread blocks that share the vocabulary rows of this rank, or with `vocab_parallel` those of each hosted lane."""
        return self.products[0].rows.num_ctas

    @property
    def lane_vocab(self) -> int:
        """Vocabulary rows of one lane; the last lanes' slices may be shorter, but not with `vocab_parallel`."""
        first, last = self.spec.vocab_slice(0)
        return last - first

    @property
    def vocab_rows(self) -> tuple[int, int]:
        """First and one-past-last vocabulary row of the hosted lanes."""
        return self.spec.vocab_slice(self.hosted_lanes[0])[0], self.spec.vocab_slice(self.hosted_lanes[-1])[1]

    @property
    def norm_lanes(self) -> int:
        """Weight vectors of the final norm on this rank: those of `lanes`, or one for all."""
        return 1 if self.spec.shared_norm_scale or self.spec.pre_norm_lane_agg else len(self.lanes)
