"""The protocol of words in the monokernel: every kind, who writes and reads it in a token, and what they waited for before.

`TokenEvents` lists what the roles of a thread block do for a few tokens, in the order of products (decode/plan/order.py), as the
device code does it: what a product reads and writes its recipe says (`decode/plan`), `WORDS` in which words. `check_words`
proves with `decode/plan/word_check.py` that this is right for a shape, or refuses it. Which thread block has which word is in
`word_places.py`. On several ranks all do the same.

| kind           | written by                      | read by                           | tag        | in a token           |
|----------------|---------------------------------|-----------------------------------|------------|----------------------|
| stream, middle | finaliser, owner of the row     | matrix warps: QKV, head; GATE_UP  | layer      | each layer, stream   |
| qkv            | finaliser, owner of the row     | attention: items of the KV head;  | layer      | each layer, lane     |
|                |                                 | of gates who mixes                |            |                      |
| part           | attention: the item             | attention: who mixes              | layer      | each layer, lane (*) |
| attended       | attention: who mixes; of delta  | matrix warps: OUT                 | layer      | each layer, lane     |
|                | nets the item                   |                                   |            |                      |
| net's input    | finaliser, owner of the row     | attention: items of the head      | layer      | delta net's, lane    |
| net's squares  | attention: the item             | matrix warps: OUT                 | layer      | delta net's, lane    |
| activation (+) | finaliser, owner of the column  | matrix warps: DOWN                | layer      | each layer, lane     |
| shared act.    | the same                        | matrix warps: DOWN                | layer      | each layer, lane     |
| router logit   | finaliser, owner of the row     | all finalisers                    | layer      | each layer           |
| sum of a rank  | finaliser, owner of the row     | the same owner on peers           | 32 bits    | each summed layer    |
| sum for all    | finaliser, owner of the row     | matrix warps of both ranks        | layer      | each sublayer        |
| last stream    | finaliser; last_streams.cu      | matrix warps of all ranks: head   | last layer | once                 |
| candidate      | finaliser                       | all samplers                      | 32 bits    | once                 |
| choice         | sampler (processors)            | all samplers                      | 8 bits     | once or more         |

(*) Of partitions that the context has reached; empty ones of the others once in a token.
(+) Of the union of a pass's experts who writes a word follows from the tokens' choices: its owner moves.

What is skipped: the head, and so the reading of last streams, for inner tokens of a prompt; layers, where a first step is an LM
head alone; partitions that the context has not reached, and all but one in windowed layers. Nothing depends on which experts
were chosen: the k-th chosen one's activations are words of the k-th thread blocks, whichever expert that is, so all of them
come in each layer. In passes of several tokens each token has words for each of its chosen experts, so all come there, too.

A matrix warp hands over its sums only after it had all its words of the product, so the finaliser's event contains its reads.
Blocks of rows of a product count as one. Where a pass has several tokens, each has words of its own. All are written and read
in every pass, whether their token counts or not: so a pass is to words what a token is here. (Of a token that stands in for
another request's nobody reads a net's input.) Not here: reports of
log-probabilities (the processors' `aside` words), what warps of one thread block hand each other in shared memory (barriers),
and tags that come again over thousands of steps that are an LM head alone (`Monokernel._choose_epoch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.recipes import Recipe, Stage, recipe_of, recipes
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.decode.plan.word_check import Event, Read, Scope, Version, WordCheck, WordKind, Write
from kog_dist.errors import PlanError
from kog_dist.model.spec import HeadType, ReduceMode, Sublayer
from kog_dist.records import dataclass
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.word_places import Word, WordPlaces

STREAM, MIDDLE = WordKind("stream"), WordKind("middle stream")
QKV, ATTENDED = WordKind("qkv"), WordKind("attended", owner_moves=True)
DELTA_IN, SQUARES = WordKind("input of a delta net"), WordKind("squares of a delta net", owner_moves=True)
PART = WordKind("part of attention", owner_moves=True)
ACTIVATION, ROUTER_LOGIT = WordKind("activation"), WordKind("router logit")
SHARED_ACTIVATION = WordKind("activation of a shared expert")
UNITED_ACTIVATION = replace(ACTIVATION, owner_moves=True)
SUM = WordKind("sum of a rank", tag_bits=32, tags_go_on=False)  # each summed layer has a slot
DIRECT_SUM = WordKind("sum for all")
LAST_STREAM = WordKind("last stream for all ranks")
CANDIDATE = WordKind("candidate", tag_bits=32, tags_go_on=False)
CHOICE = WordKind("choice", tag_bits=8, num_slots=2, tags_go_on=False)  # numbered without gaps, whichever tokens they are of

QUERY, NEW_ROW, GATE = "query", "key and value", "gate"
# Of what a product's stages write within a sublayer. Streams are of all of them, and what is not here stays in a thread block.
WORDS = {
    Kind.QUERY: QKV,
    Kind.CACHE: QKV,
    Kind.GATE: QKV,
    Kind.DELTA_INPUT: DELTA_IN,
    Kind.MIXED: ATTENDED,
    Kind.ACTIVATION: ACTIVATION,
    Kind.SHARED_ACTIVATION: SHARED_ACTIVATION,
    Kind.ROUTER_LOGITS: ROUTER_LOGIT,
}
_NAMES = {Phase.ROUTE: "router", Phase.SELECT: "choice of experts"}  # of stages; others have those of their phases


def _inputs(recipe: Recipe, op: Phase) -> list[Kind]:
    """What comes in words to a product that is not the last one of its recipe: the stream only where none before has read it."""
    stages = recipe.up_to(op)
    made = {kind for stage in stages for kind in stage.writes}
    read = {kind for stage in recipe.in_front(op) for kind in stage.reads}
    return [kind for stage in stages for kind in stage.reads if kind not in made | read]


@dataclass(frozen=True, slots=True)
class CheckedToken:
    """`has_head`: not an inner token of a prompt. `num_exchanges`: of the build with processors; 0: the plain one.

    `is_head_alone`: its layers were computed by prefill, whose last streams another kernel has written (head.cu,
    last_streams.cu).
    """

    position: int
    has_head: bool = True
    num_exchanges: int = 0
    is_head_alone: bool = False


class TokenEvents:
    """Makes the events of tokens, one after the other.

    `heads`: KV heads of a lane that are followed. All do the same, so a proof needs one: what is known by the others is left
    out.
    """

    def __init__(self, shape: KernelShape, heads: range = range(1)) -> None:
        self.shape, self.places, self.heads = shape, WordPlaces(shape), heads
        self._everybody = Scope.ALL if shape.num_ranks > 1 else Scope.BLOCKS
        self._num_layers, self._lanes = shape.spec.num_layers, range(shape.num_lanes)
        self._last_lane = shape.num_lanes - 1
        self._epoch = self._token = self._num_exchanges = 0  # steps, those that ran layers, exchanges so far
        self._sampled: Event | None = None  # what all roles of a thread block wait for before a token
        self._final: Event | None = None  # the finaliser's last event

    def of(self, tokens: Iterable[CheckedToken]) -> Iterator[Event]:
        """The events of tokens."""
        for token in tokens:
            self._final = self._sampled
            kept_apart = None
            if token.is_head_alone:
                yield from self._launch_of_head()
            else:
                kept_apart = self._keep_apart(token)
                if kept_apart is not None:
                    yield kept_apart
                for product in self.shape.products:
                    if product.op is not Phase.HEAD:
                        yield from self._product(product, token)
            if token.has_head:
                yield from self._head(token)
            yield from self._end(token, kept_apart)
            self._epoch += 1
            self._token += not token.is_head_alone

    def words_of(self, version: Version, position: int) -> Iterator[Word]:
        """Which words a version is made of, in the pass whose first token is at `position`; none of choices."""
        layer, places, place = (version.tag - 1) % (self._num_layers + 1), self.places, version.place
        match version.kind.name:
            case STREAM.name | MIDDLE.name:
                yield from places.stream(*place, is_middle=version.kind is MIDDLE)
            case QKV.name:
                lane, head, what, token = place
                at = min(position + token, self.shape.spec.max_context - 1)  # as `position_of` in layout.cuh
                of = {QUERY: places.query, NEW_ROW: places.new_row, GATE: places.gates}
                yield from of[what](layer, lane, head, at, token)
            case PART.name:
                yield from places.parts(layer, *place)
            case ATTENDED.name:
                yield from places.attended(layer, *place)
            case DELTA_IN.name:
                yield from places.delta_inputs(layer, *place)
            case SQUARES.name:
                yield from places.squares(layer, *place)
            case ACTIVATION.name:
                yield from places.activations(*place)
            case SHARED_ACTIVATION.name:
                yield from places.shared_activations(*place)
            case ROUTER_LOGIT.name:
                yield from places.router_logits(*place)
            case CANDIDATE.name:
                yield from places.candidates(version.slot, *place)
            case SUM.name:
                yield from places.sums(*place)
            case DIRECT_SUM.name:
                yield from places.direct_sums(*place)
            case LAST_STREAM.name:
                yield from places.last_stream(place[0])

    # ---- what events are made of ----
    def _tag(self, layer: int) -> int:
        return self._epoch * (self._num_layers + 1) + layer + 1  # layer_tag in layout.cuh, before it is cut to 16 bits

    def _by_layer(self, kind: WordKind, layer: int, *place: object) -> Version:
        return Version(kind, place, self._tag(layer))

    def _of_tokens(self, kind: WordKind, layer: int, *place: object) -> list[Version]:
        """Of each token of the pass, in order."""
        return [self._by_layer(kind, layer, *place, token) for token in range(self.shape.tokens)]

    def _event(self, name: str, reads: Iterable[Read] = (), writes: Iterable[Write] = (), *after: tuple[Event, Scope]) -> Event:
        """Of a role that has waited for nothing yet but the token's start."""
        start = () if self._sampled is None else ((self._sampled, Scope.SAME),)
        return Event(name, self._token, tuple(reads), tuple(writes), (*start, *after), self._sampled)

    def _finalised(self, name: str, reads: Iterable[Read] = (), writes: Iterable[Write] = ()) -> Event:
        """The finaliser's next one; it contains what matrix warps have read."""
        before = () if self._final is None else ((self._final, Scope.SAME),)
        self._final = self._event(name, reads, writes, *before)
        return self._final

    # ---- a layer ----
    def _product(self, product: Product, token: CheckedToken) -> Iterator[Event]:
        """A product of a layer, and what attention makes of it before the next one."""
        layer, lane = product.layer, max(product.first_lane - self.shape.hosted_lanes[0], 0)
        recipe = recipe_of(self.shape.spec, layer, product.op)
        assert recipe is not None
        *before, stage = recipe.up_to(product.op)
        lanes = range(lane, lane + (product.num_lanes if stage.is_by_lane else 1))
        if Kind.PARTIAL in stage.writes:
            yield from self._residual(recipe, stage, layer, lane)
            return
        name = " and ".join(_NAMES.get(one.phase, one.phase.name) for one in (*before, stage)) + f" of layer {layer}"
        reads = [read for kind in _inputs(recipe, product.op) for read in self._input(recipe, kind, layer, lane)]
        writes = [
            Write(version, by_all=self._is_of_all(kind))
            for lane in lanes
            for kind in stage.writes
            for version in self._written(kind, layer, lane)
        ]
        yield self._finalised(f"{name}, lane {lane}" if stage.is_by_lane else name, reads, writes)
        behind = [one.phase for one in recipe.behind(product.op)]
        if Phase.DELTA in behind:
            for lane in lanes:
                yield self._delta(layer, lane)
        if Phase.ATTEND in behind:
            for lane in lanes:
                for head in self.heads:
                    yield from self._attention(layer, lane, head, token.position)

    def _input(self, recipe: Recipe, kind: Kind, layer: int, lane: int) -> list[Read]:
        """What a lane's product waits for of a kind."""
        if kind is Kind.STREAM:
            return self._stream_read(2 * layer + recipe.site, lane)
        return list(map(Read, self._written(kind, layer, lane)))

    def _written(self, kind: Kind, layer: int, lane: int) -> list[Version]:
        """The words of a kind of value: of each token, or of all."""
        words = WORDS[kind]
        if words is ROUTER_LOGIT:
            return self._of_tokens(words, layer)
        if words is ACTIVATION:
            return self._of_tokens(UNITED_ACTIVATION if self.places.activations_move else words, layer, lane)
        if words is DELTA_IN or words is SHARED_ACTIVATION:
            return self._of_tokens(words, layer, lane)
        parts = {Kind.QUERY: (QUERY,), Kind.CACHE: (NEW_ROW,), Kind.GATE: (GATE,)}.get(kind, ())
        versions = [version for head in self.heads for version in self._of_tokens(words, layer, lane, head, *parts)]
        if words is ATTENDED and layer not in self.shape.cache.layers:
            versions += self._of_tokens(SQUARES, layer, lane)
        return versions

    def _is_of_all(self, kind: Kind) -> bool:
        """Whether every thread block has words of what a stage writes of a kind: of rows it may have none."""
        return WORDS[kind] is ROUTER_LOGIT and self._all_have_router_rows

    @cached_property
    def _all_have_router_rows(self) -> bool:
        return len({word.writer for word in self.places.router_logits()}) == self.shape.num_ctas

    def _stream_read(self, number: int, lane: int) -> list[Read]:
        """The stream after so many sublayers, for the next product: the first lane's gather is for all that share it."""
        stream = self.shape.stream_of(lane)
        if number == 0 or lane > stream:  # the embedding is not made of words
            return []
        layer, sublayer = (number - 1) // 2, Sublayer((number - 1) % 2)
        if self.shape.sends_sums_directly:
            return [Read(self._by_layer(DIRECT_SUM, layer, sublayer.name), Scope.ALL)]
        kind = STREAM if sublayer is Sublayer.MLP else MIDDLE
        return [Read(version) for version in self._of_tokens(kind, layer, stream)]

    def _attention(self, layer: int, lane: int, head: int, position: int) -> Iterator[Event]:
        """Of a KV head: its splits, and then who mixes what they publish. Who mixes needs words of all of the head's splits."""
        where, parts = f"layer {layer}, lane {lane}, KV head {head}", list[Version]()
        for partition in range(self.places.num_partitions(layer, position)):
            reads = [Read(version) for version in self._of_tokens(QKV, layer, lane, head, QUERY)]
            if partition == self.places.newest_partition(layer, position):  # one split alone reads a new row
                reads += [Read(version, teaches=False) for version in self._of_tokens(QKV, layer, lane, head, NEW_ROW)]
            own = self._of_tokens(PART, layer, lane, head, partition)
            parts += own
            items = self._event(f"attention of {where}, partition {partition}", reads, map(Write, own))
            items.is_of_some = True
            yield items
        reads = list(map(Read, parts))
        if Kind.GATE in recipes(self.shape.spec)[layer][0].shapes:  # who mixes reads those of his values
            reads += [Read(version, teaches=False) for version in self._of_tokens(QKV, layer, lane, head, GATE)]
        mixing = self._event(f"mixing of {where}", reads, map(Write, self._of_tokens(ATTENDED, layer, lane, head)))
        mixing.is_of_some = True
        yield mixing

    def _delta(self, layer: int, lane: int) -> Event:
        """Of the items of a delta net: each reads what its head has of the inputs."""
        reads = [Read(version, teaches=False, of_some=True) for version in self._written(Kind.DELTA_INPUT, layer, lane)]
        items = self._event(f"delta net of layer {layer}, lane {lane}", reads, map(Write, self._written(Kind.MIXED, layer, lane)))
        items.is_of_some = True
        return items

    def _keep_apart(self, token: CheckedToken) -> Event | None:
        """Words of partitions that nobody reads yet, written empty: as the first layer without a window would."""
        shape = self.shape
        layer = min(shape.cache.full_layers, default=0)
        unread = range(self.places.num_partitions(layer, token.position), shape.cache.num_partitions)
        if not unread:
            return None
        versions = [
            version
            for partition in unread
            for lane in self._lanes
            for head in self.heads
            for version in self._of_tokens(PART, layer, lane, head, partition)
        ]
        return self._event("empty words of unread partitions", writes=[Write(version, by_all=False) for version in versions])

    def _is_busy_everywhere(self) -> bool:
        """Whether each thread block has a split or a delta net's item in each token: it writes what all wait for, behind what it
        did before.
        """
        shape = self.shape
        busy = {
            self.places.item_cta(layer, lane, head, split, 0)
            for layer in shape.cache.layers
            for lane in self._lanes
            for head in range(shape.spec.lane_kv_heads)
            for split in range(shape.splits)
        }
        if shape.delta is not None:
            busy |= {cta for layer in shape.delta.layers for lane in self._lanes for cta in self.places.delta_ctas(layer, lane)}
        return len(busy) == shape.num_ctas

    def _residual(self, recipe: Recipe, stage: Stage, layer: int, lane: int) -> Iterator[Event]:
        """The last product of a recipe, and what becomes of it: each thread block owns rows of the streams."""
        shape, spec, sublayer = self.shape, self.shape.spec, Sublayer(recipe.site)
        name, is_last = f"{stage.phase.name} of layer {layer}, lane {lane}", lane == self._last_lane
        together = shape.gathered_lanes(stage.phase)
        gathered = range(lane, lane + together) if lane % together == 0 else ()  # one gather is for so many
        kinds = [kind for kind in stage.reads if kind in WORDS]  # a choice stays in the thread block
        reads = [read for one in gathered for kind in kinds for read in self._input(recipe, kind, layer, one)]
        mode = spec.reduce_mode(layer, sublayer)
        is_summed = shape.num_ranks > 1 and is_last and layer in shape.words.boxes.summed_layers(sublayer)
        if shape.sends_sums_directly:
            own = [Write(self._by_layer(DIRECT_SUM, layer, sublayer.name))] if is_last else []
            yield self._finalised(name, reads, own)
        elif mode is ReduceMode.BLOCKING:
            sums = self._sums(sublayer, layer) if is_summed else []
            yield self._finalised(name, reads, map(Write, sums))
            if is_last:
                total = [Read(one, Scope.RANKS) for one in sums]
                streams = [one for stream in range(shape.num_streams) for one in self._stream_writes(sublayer, layer, stream)]
                yield self._finalised(f"sum over lanes behind {name}", total, streams)
        else:
            if mode is ReduceMode.DELAYED and shape.num_ranks > 1:
                reads += [Read(one, Scope.RANKS) for one in self._sums(sublayer, layer - spec.delay)]
            own = list(map(Write, self._sums(sublayer, layer))) if is_summed else []
            yield self._finalised(name, reads, [*self._stream_writes(sublayer, layer, lane), *own])

    def _sums(self, sublayer: Sublayer, layer: int) -> list[Version]:
        """Of each token of the pass."""
        layers, tokens = self.shape.words.boxes.summed_layers(sublayer), range(self.shape.tokens)
        number = (self._epoch + 1) * len(layers) + layers.index(layer)
        return [Version(SUM, (sublayer.name, layer, token), number) for token in tokens]

    def _stream_writes(self, sublayer: Sublayer, layer: int, stream: int) -> list[Write]:
        kind = STREAM if sublayer is Sublayer.MLP else MIDDLE
        if kind is STREAM and layer == self._num_layers - 1 and self.shape.gathers_streams:
            kind = LAST_STREAM
        return [Write(version) for version in self._of_tokens(kind, layer, stream)]

    # ---- the end of a token ----
    def _launch_of_head(self) -> Iterator[Event]:
        """The kernel that writes the last streams, behind the launch before; and behind it the one with the head."""
        last, kind = self._num_layers - 1, LAST_STREAM if self.shape.gathers_streams else STREAM
        writes = [Write(version) for stream in range(self.shape.num_streams) for version in self._of_tokens(kind, last, stream)]
        for name, written in (("last streams", writes), ("launch of an LM head alone", [])):
            before = () if self._sampled is None else ((self._sampled, Scope.BLOCKS),)
            self._sampled = self._final = self._event(name, (), written, *before)
            yield self._sampled

    def _head(self, token: CheckedToken) -> Iterator[Event]:
        shape, last = self.shape, self._num_layers - 1
        if shape.sends_sums_directly and not token.is_head_alone:
            yield self._finalised("LM head", self._stream_read(2 * self._num_layers, 0))
            return
        kind, scope = (LAST_STREAM, Scope.ALL) if shape.gathers_streams else (STREAM, Scope.BLOCKS)
        # With `vocab_parallel` a thread block reads one of them.
        teaches = shape.spec.head_type is not HeadType.VOCAB_PARALLEL
        versions = [version for stream in range(shape.num_streams) for version in self._of_tokens(kind, last, stream)]
        reads = [Read(version, scope, teaches) for version in versions]
        yield self._finalised("LM head", reads)

    def _end(self, token: CheckedToken, kept_apart: Event | None) -> Iterator[Event]:
        """An exchange of all with all, in every token."""
        number = self._epoch + 1
        slot = number % 2 if self.shape.num_ranks > 1 else 0
        candidates = [Version(CANDIDATE, (token,), number, slot) for token in range(self.shape.tokens)]
        end = self._finalised("end of a token", (), [] if token.num_exchanges else map(Write, candidates))
        if kept_apart is not None and self._is_busy_everywhere():
            end.after += ((kept_apart, Scope.BLOCKS),)  # by whoever waited for those thread blocks' splits
        yield end
        self._sampled = end
        for _ in range(token.num_exchanges):
            self._num_exchanges += 1
            choice = Version(CHOICE, (), self._num_exchanges, self._num_exchanges % CHOICE.num_slots)
            yield self._sampler("exchange", writes=[Write(choice)])
            yield self._sampler("choice", [Read(choice, self._everybody)])
        if not token.num_exchanges:
            yield self._sampler("choice", [Read(candidate, self._everybody) for candidate in candidates])

    def _sampler(self, name: str, reads: Sequence[Read] = (), writes: Sequence[Write] = ()) -> Event:
        assert self._sampled is not None
        before = self._sampled
        self._sampled = Event(name, self._token, tuple(reads), tuple(writes), ((before, Scope.SAME),), self._sampled)
        return self._sampled


def tokens_to_check(shape: KernelShape) -> list[CheckedToken]:
    """A partition that is reached, left by a new request and reached again; all kinds of steps."""
    reach = WordPlaces(shape).partition_positions if shape.cache.num_partitions > 1 else 1
    return [
        CheckedToken(reach - 1, has_head=False),
        CheckedToken(reach),
        CheckedToken(1, is_head_alone=True),
        CheckedToken(2),
        CheckedToken(0, has_head=False, num_exchanges=1),
        CheckedToken(reach, num_exchanges=3),
    ]


@lru_cache(maxsize=16)
def word_findings(shape: KernelShape) -> tuple[str, ...]:
    """What is wrong with the words of a shape, in words; none accepts it."""
    findings, owned = [], shape.ops[Phase.OUT].cta_rows
    if not (shape.num_ctas - 1) * owned < shape.spec.hidden_size <= shape.num_ctas * owned:
        findings.append(
            f"not every one of {shape.num_ctas} thread blocks owns rows of the residual, on which the reuse of words rests"
        )
    return (*findings, *WordCheck().run(TokenEvents(shape).of(tokens_to_check(shape))))


def check_words(shape: KernelShape) -> None:
    """Raise PlanError if words of this shape could be lost or mistaken."""
    if findings := word_findings(shape):
        more = f" (and {len(findings) - 1} more findings)" if len(findings) > 1 else ""
        remedy = "use fewer GPUs, or --device cpu" if shape.num_ranks > 1 else "use --device cpu"
        raise PlanError(f"the monokernel's words cannot be used again as this model needs it: {findings[0]}{more}; {remedy}")
