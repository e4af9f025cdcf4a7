"""Writes the steps of one rank around its products, whose order has one lane's wait covered by others' work (see `order`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.recipes import Recipe, Stage, all_recipes, recipe_of, recipes, stream_lanes
from kog_dist.decode.plan.steps import NONE, Kind, Message, Phase, PlannedMailbox, Site, Step, Value, When
from kog_dist.errors import PlanError
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer
from kog_dist.records import dataclass

CANDIDATE_VALUES = 2  # a candidate travels as (value, token id)
STOP_VALUES = 1  # after a rank's candidates: whether it wants the request to end; rank 0's counts
Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """All that one rank does for a token, in order. `steps` are in the order of `products`."""

    rank: int
    lanes: tuple[int, ...]
    steps: tuple[Step, ...]
    products: tuple[Product, ...]


class Scheduler:
    """Makes the `RankPlan` of one rank, in the order of its products."""

    def __init__(self, spec: ModelSpec, rank: int, world_size: int, products: Sequence[Product], *, checks_experts: bool) -> None:
        self.spec, self.rank, self.world_size, self.products = spec, rank, world_size, tuple(products)
        self.lanes = tuple(spec.lanes_of_rank(rank, world_size))
        self.streams = stream_lanes(spec, self.lanes)  # by the lane that they belong to
        self.peers = tuple(peer for peer in range(world_size) if peer != rank)
        self.compared: dict[str, list[int]] = {}  # by mailbox: layers in which ranks compare what they made
        if checks_experts and world_size > 1:
            for layer, of_layer in enumerate(recipes(spec)):
                for stage in (stage for recipe in of_layer for stage in recipe.stages if stage.compared_in):
                    self.compared.setdefault(stage.compared_in, []).append(layer)
        self.steps: list[Step] = []
        self.written: set[Value] = set()  # what stages wrote, and totals, by the steps so far
        self.sequence: dict[tuple[int, int], int] = {}  # of the message of (site, layer)
        for sublayer in Sublayer:
            summed = [layer for layer in range(spec.num_layers) if is_summed(spec, layer, sublayer)]
            self.sequence |= {(sublayer, layer): sequence for sequence, layer in enumerate(summed)}

    def rank_plan(self) -> RankPlan:
        """All steps of a token. Raises PlanError for a product with a matrix that the model has not."""
        self.steps, self.written = [], set()
        self._per_lane(Phase.EMBED, lambda lane: ((), (self._stream(0, lane),)), self.streams)
        for (op, layer), products in groupby(self.products, key=lambda product: (product.op, product.layer)):
            lanes = list(dict.fromkeys(lane for product in products for lane in product.lanes))
            if op is Phase.HEAD and layer == NONE:
                self._add_head(lanes)
            else:
                self._add_product(op, layer, lanes)
        self._add_sampling()
        return RankPlan(self.rank, self.lanes, tuple(self.steps), self.products)

    def mailboxes(self) -> tuple[PlannedMailbox, ...]:
        """What the ranks exchange; nothing if there is only one."""
        if self.world_size == 1:
            return ()
        spec, num_lanes = self.spec, len(self.lanes)
        boxes = []
        for site in (Site.ATTENTION, Site.MLP):
            count = sum(key[0] == site for key in self.sequence)
            if count:  # one slot per layer: a slot is rewritten one token later
                boxes.append(PlannedMailbox(site.name.lower(), count, spec.hidden_size, count))
        boxes += [
            PlannedMailbox(name, len(layers), self._num_compared(name), len(layers)) for name, layers in self.compared.items()
        ]
        if spec.gathers_streams:
            lanes_in_row = num_lanes if spec.head_type is HeadType.LANE else 1
            boxes.append(PlannedMailbox("final", 1, spec.hidden_size * lanes_in_row, 1))
        boxes.append(PlannedMailbox("logits", 1, spec.vocab_slice(0)[1] * num_lanes, 1))
        # The one exchange that every token has. Two slots: nothing else keeps a fast rank from its next token's write.
        boxes.append(PlannedMailbox("candidates", 2, CANDIDATE_VALUES * num_lanes + STOP_VALUES, 1))
        return tuple(boxes)

    def _stream(self, revision: int, lane: int) -> Value:
        return stream(revision, lane if lane in self.streams else NONE)

    def _per_lane(
        self,
        phase: Phase,
        values: Callable[[int], tuple[Values, Values]],
        lanes: Iterable[int],
        layer: int = NONE,
        site: int = NONE,
        when: When = When.ALWAYS,
    ) -> None:
        """One step for each lane, or NONE; `values(lane)` is what it reads and writes."""
        for lane in lanes:
            reads, writes = values(lane)
            self.steps.append(Step(phase, layer, lane, site, reads, writes, when=when))

    def _add_product(self, op: Phase, layer: int, lanes: Sequence[int]) -> None:
        """The stage with a matrix, what runs with it, and behind a sublayer's last what becomes of its outputs."""
        recipe = recipe_of(self.spec, layer, op)
        if recipe is None or not recipe.up_to(op)[-1].num_rows:
            raise PlanError(f"rank {self.rank} cannot multiply with a matrix of {op.name} in layer {layer}: the model has none")
        for stage in recipe.up_to(op):
            self._add_stage(recipe, stage, layer, lanes if stage.is_by_lane else (NONE,))
        if recipe.stages[-1].phase is op:
            self._add_reduction(recipe.site, layer, lanes)

    def _add_stage(self, recipe: Recipe, stage: Stage, layer: int, lanes: Sequence[int]) -> None:
        """Of each lane, or once for the rank."""
        for lane in lanes:
            reads, writes = (tuple(recipe.value(kind, layer, lane) for kind in kinds) for kinds in (stage.reads, stage.writes))
            if lane == NONE and self.written.issuperset(writes):
                continue
            exchange = None
            if stage.compared_in in self.compared:
                exchange = Message(stage.compared_in, self.compared[stage.compared_in].index(layer), self.peers)
            self.steps.append(Step(stage.phase, layer, lane, NONE, reads, writes, exchange, exchange))
            self.written |= set(writes)

    def _num_compared(self, mailbox: str) -> int:
        """Values that a rank compares in a layer: the last dimension of what is written."""
        found = [
            recipe.shapes[stage.writes[0]][-1]
            for recipe in all_recipes(self.spec)
            for stage in recipe.stages
            if stage.compared_in == mailbox
        ]
        return max(found)

    def _add_reduction(self, site: Site, layer: int, lanes: Sequence[int]) -> None:
        """What follows the outputs of `lanes`: the own lanes' sum if anybody needs it and it is whole now, and the streams' next
        revision: of `lanes`, or of all lanes where the sum is blocking.
        """
        spec, sublayer, past = self.spec, Sublayer(site), layer - self.spec.delay
        mode = spec.reduce_mode(layer, sublayer)
        own = [partial(site, layer, lane) for lane in self.lanes]
        is_whole = self.written.issuperset(own)
        if is_whole and (site, layer) in self.sequence:
            self._add_sum(site, layer, own)
        if mode is ReduceMode.BLOCKING:
            if not is_whole:
                return
            lanes = self.streams
            self._add_total(site, layer)
        elif mode is ReduceMode.DELAYED and total(site, past) not in self.written:  # else: of a blocking layer, or of other lanes
            self._add_total(site, past)

        def residual(lane: int) -> tuple[Values, Values]:
            before, own = self._stream(2 * layer + site, lane), partial(site, layer, lane)
            reads: Values = (before, own)
            if mode is ReduceMode.BLOCKING:
                reads = (before, total(site, layer))
            elif mode is ReduceMode.DELAYED:
                reads = (before, own, total(site, past), partial(site, past, lane))
            return reads, (self._stream(2 * layer + site + 1, lane),)

        self._per_lane(Phase.RESIDUAL, residual, lanes, layer, site)

    def _add_sum(self, site: Site, layer: int, terms: Iterable[Value], when: When = When.ALWAYS) -> None:
        own = Value(Kind.OWN_SUM, layer, site=site)
        message = self._message(site, layer)
        self.steps.append(Step(Phase.SUM, layer, NONE, site, tuple(terms), (own,), publishes=message, when=when))

    def _add_total(self, site: Site, layer: int, when: When = When.ALWAYS) -> None:
        own, result = Value(Kind.OWN_SUM, layer, site=site), total(site, layer)
        message = self._message(site, layer)
        self.steps.append(Step(Phase.TOTAL, layer, NONE, site, (own,), (result,), waits=message, when=when))
        self.written.add(result)

    def _message(self, site: Site, layer: int) -> Message | None:
        if self.world_size == 1:
            return None
        return Message(site.name.lower(), 0 if site is Site.FINAL else self.sequence[site, layer], self.peers)

    def _add_head(self, lanes: Sequence[int]) -> None:
        """Lane aggregation, and the logits of `lanes`."""
        spec, sampled, one_stream = self.spec, When.SAMPLED, NONE in self.streams
        last = 2 * spec.num_layers
        per_lane = spec.head_type is HeadType.VOCAB_PARALLEL
        shared = Value(Kind.HEAD_INPUT)

        def normed(lane: int) -> Value:
            if one_stream:
                return shared
            return Value(Kind.HEAD_INPUT, lane=lane) if per_lane else partial(Site.FINAL, NONE, lane)

        def final_norm(lane: int) -> tuple[Values, Values]:
            return (self._stream(last, lane),), (normed(lane),)

        if not spec.pre_norm_lane_agg:
            self._per_lane(Phase.FINAL_NORM, final_norm, self.streams, when=sampled)
        terms = tuple(self._stream(last, lane) if spec.pre_norm_lane_agg else normed(lane) for lane in self.lanes)
        if one_stream:
            pass  # its norm is what the head multiplies
        elif spec.head_type is HeadType.REPLICATE:
            self._add_sum(Site.FINAL, NONE, terms, sampled)
            self._add_total(Site.FINAL, NONE, sampled)
            self.steps.append(Step(Phase.HEAD_INPUT, NONE, NONE, Site.FINAL, (total(Site.FINAL, NONE),), (shared,), when=sampled))
        elif spec.head_type is HeadType.LANE:
            exchange = self._message(Site.FINAL, NONE)
            self.steps.append(Step(Phase.HEAD_INPUT, NONE, NONE, Site.FINAL, terms, (shared,), exchange, exchange, when=sampled))

        def head_input(lane: int) -> Values:
            return (normed(lane) if per_lane else shared,)

        self._per_lane(Phase.HEAD, lambda lane: (head_input(lane), (logits(lane),)), lanes, when=sampled)

    def _add_sampling(self) -> None:
        own = tuple(logits(lane) for lane in self.lanes)
        is_root, several = self.rank == 0, self.world_size > 1
        publishes = Message("logits", 0, (0,)) if several and not is_root else None
        waits = Message("logits", 0, self.peers) if several and is_root else None
        writes = (Value(Kind.ALL_LOGITS),) if is_root else ()
        self.steps.append(Step(Phase.GATHER, NONE, NONE, NONE, own, writes, publishes, waits, When.GATHERED))
        exchange = Message("candidates", 0, self.peers) if several else None
        self.steps.append(Step(Phase.SAMPLE, NONE, NONE, NONE, own, (Value(Kind.TOKEN),), exchange, exchange))


def is_summed(spec: ModelSpec, layer: int, sublayer: Sublayer) -> bool:
    """Whether anybody needs the sum over lanes of this sublayer's outputs, now or `delay` layers later."""
    return spec.reduce_mode(layer, sublayer) is ReduceMode.BLOCKING or spec.feeds_layer(layer, sublayer) is not None


def stream(revision: int, lane: int) -> Value:
    """The residual stream of a lane, or NONE's which all share, after `revision` sublayers."""
    return Value(Kind.STREAM, revision, lane)


def partial(site: Site, layer: int, lane: int) -> Value:
    """A lane's own output of a sublayer."""
    return Value(Kind.PARTIAL, layer, lane, site)


def total(site: Site, layer: int) -> Value:
    """The sum over all lanes of a sublayer's outputs."""
    return Value(Kind.TOTAL, layer, site=site)


def logits(lane: int) -> Value:
    """The logits of a lane's slice of the vocabulary."""
    return Value(Kind.LOGITS, lane=lane)
