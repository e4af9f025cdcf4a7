"""What the monokernel is compiled for: every size that follows from a model, the hosted lanes and the number of thread blocks.

`kernel_header` writes it down for the compiler.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod

from kog_dist.decode.coding import Coding
from kog_dist.decode.order import product_order
from kog_dist.decode.pass_drafts import PLACES
from kog_dist.decode.products import Product, product_list
from kog_dist.decode.recipes import all_recipes
from kog_dist.decode.steps import LAYER_OPS, NONE, Kind, Phase
from kog_dist.decode.tape_packing import OpShape, owned_rows
from kog_dist.errors import ConfigError
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.cache_shape import BATCH, CacheShape
from kog_dist.workers.cuda.division import Divider, stream_steps
from kog_dist.workers.cuda.expert_shape import ExpertShape
from kog_dist.workers.cuda.geometry import EIGHT_WARPS, SPLITS, TWELVE_WARPS, Geometry, choose, splits_for
from kog_dist.workers.cuda.kernel_boxes import KernelBoxes
from kog_dist.workers.cuda.kv_format import FORMATS, kv_findings
from kog_dist.workers.cuda.model_limits import unsupported

MAX_CTAS = 128
SHARED_BYTES = 232448
# Vectors whose sums of squares are kept. A matrix warp that begins one has handed over its sums of the one before, for which the
# finaliser was done with the one two before that.
NUM_SQUARES = 3
PASS_TOKENS = 1, 2, 4  # of a pass
HASH_TOKENS, NUM_HASHES = 64, 1 << 13  # a running hash is kept of every 64th token, of so many in turn
CHOICE_POSITIONS = 8  # whose choices of experts are kept, in turn: a rendezvous has room for those of MAX_LAYERS layers
_PACKED_TILE_BYTES, _MOST_TILES = 2 * 8 + 4, 32  # barriers and place of a tile in a packed ring; tiles in it
_NOTES_BYTES, _PADDING_BYTES = 32 + 2 * 48, 32  # WaitNote and both PeerNotes; of `Shared`, at most
_HALVES_IN_FLIGHT = {1: (4, 4), 2: (5, 4)}  # by lanes: of tiles, before position NEAR_CONTEXT and from there on; as measured
NEAR_CONTEXT = 1536  # further on attention reads so much that it is held up less by fewer copies of weights
_POLL_DELAYS = {1: (500, 3000, 200, 500), 2: (1200, 5000, 800, 1200), 4: (1000, 4000, 600, 1000)}  # by lanes; 4: and more
_EXPERT_POLL_DELAYS = {2: (600, 5000, 500, 500)}  # where one rank has a model with experts; else as above
_OUTPUTS = {Phase.OUT: Phase.QKV, Phase.DOWN: Phase.GATE_UP}  # with the products that their inputs come of
_MOST_UNEVEN = 1.7  # what is under way may be if all of it is the largest tiles, of what it should be
_FEW_STEPS = 2  # of each matrix warp in a lane's product
_ATTEND_WARPS = 4
_SMALL_HEAD = 64  # values; of two sets of such heads a warp has as many outputs as of one of twice as large ones


@dataclass(frozen=True)
class KernelShape:
    """Everything static about one build of the monokernel. Raises ConfigError for a model that it cannot run.

    `hosted_lanes` of the model's lanes run in this kernel. `splits`: parts of the positions that attention items share, of
    `geometry.SPLITS`; 0: chosen for the model. In layers without a window an item has `partition_batches`
    batches of 16 of them, and the next ones are another item's.
    """

    spec: ModelSpec
    hosted_lanes: range
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    max_ctas: int = MAX_CTAS
    splits: int = 0
    partition_batches: int = 0  # 0: see `CacheShape.batches_of_partition`
    tokens: int = 1  # of a pass of the weights, of PASS_TOKENS; see `_of_tokens` for what has more than one
    drafts: bool = False  # passes of one token that look for drafts, and end where another build is to verify them
    num_ranks: int = 1  # that exchange sums; one rank that hosts some of the lanes sums over these alone
    copies: int = 0  # of every exchanged vector, so that fewer readers share a line; 0: 2 for one or two lanes, 4 for more
    pieces: int = 0  # of a ring tile: what is copied, and given back, by itself; 0: 2 for one or two lanes, 1 for more
    pieces_in_flight: int = 0  # 0: see `in_flight`
    max_slots: int = 16
    direct_sums: bool = True  # see `sends_sums_directly`
    matrix_warps: int = 0  # 0: chosen by `geometry`
    poll_delays: tuple[int, ...] = ()  # see `delays`; empty: chosen by the number of lanes
    traced_step: int = -1  # of a launch: the kernel keeps time stamps of it
    coding: Coding | None = None  # of the matrices of all layers, or of experts alone; router and others have 16 bit
    head_coding: Coding | None = None  # of the LM head
    whole_windows: bool = False  # windowed layers keep all positions, not a ring of the newest; the same bits, see `CacheShape`
    keeps_hashes: bool = False  # of tokens and scores, so that ranks can be compared over long runs; greedy and temperature only
    checks_experts: bool = False  # each thread block keeps its choices of experts, so that hosts can compare them

    def __post_init__(self) -> None:
        spec = self.spec
        if spec.mixed_layers:
            raise ConfigError(f"the CUDA kernel cannot run this model: it has {'; '.join(unsupported(spec))}; use --device cpu")
        object.__setattr__(self, "splits", self.splits or splits_for(spec, self.num_ctas))
        findings = []
        if spec.head_type is HeadType.VOCAB_PARALLEL and self.num_ctas < self.num_lanes:
            findings.append(f"vocabulary slices of {self.num_lanes} lanes, but only {self.num_ctas} thread blocks")
        findings += unsupported(spec)
        findings += self.experts.findings if self.experts is not None else []
        if self.weight_dtype not in FORMATS:
            findings.append(f"{self.weight_dtype} weights ({' or '.join(FORMATS)})")
        findings += (of_the_cache := kv_findings(spec, self.kv_dtype))
        if self.whole_windows and not self.cache.can_be_whole:
            findings.append(f"windows of {spec.sliding_window} positions, which fill whole batches (rings of them)")
        kept = {"hashes": self.keeps_hashes, "a trace": self.traced_step >= 0, "choices of experts": self.checks_experts}
        if sum(kept.values()) > 1:
            findings.append(f"{' and '.join(name for name, is_kept in kept.items() if is_kept)} to keep (one of them)")
        if self.checks_experts and spec.experts is None:
            findings.append("choices of experts to keep, and no experts (none of them)")
        if self.partition_batches < 0:
            findings.append(f"partitions of {self.partition_batches} batches (1 or more, or 0)")
        if self.splits not in SPLITS:
            findings.append(f"{self.splits} splits of the positions ({', '.join(map(str, SPLITS[:-1]))} or {SPLITS[-1]})")
        if self.head.cta_rows >= 4095:
            findings.append(f"{self.head.cta_rows} vocabulary rows in a thread block (at most 4094)")
        if self.geometry.matrix_warps % self.num_pieces:
            findings.append(f"ring tiles in {self.num_pieces} pieces (a number that divides {self.geometry.matrix_warps})")
        if self.num_pieces * self.num_slots <= self.in_flight + 1:
            findings.append(f"shapes that leave {self.num_slots} ring slots in shared memory")
        if self.num_ranks > 1 and self.num_lanes * self.num_ranks != spec.num_lanes:
            findings.append(f"{spec.num_lanes} lanes, of which {self.num_ranks} ranks would host {self.num_lanes} each")
        findings += (of_tokens := self._of_tokens())
        if findings:
            if findings == of_tokens:
                raise ConfigError(
                    f"the CUDA kernel cannot run this model with {self.tokens} tokens in a pass: it has "
                    f"{'; '.join(findings)}; use passes of one token"
                )
            remedy = "use another --kv-dtype, or --device cpu" if findings == of_the_cache else "use --device cpu"
            raise ConfigError(f"the CUDA kernel cannot run this model: it has {'; '.join(findings)}; {remedy}")

    def _of_tokens(self) -> list[str]:
        """What stands against as many tokens in a pass as there are."""
        if not self.looks_up:
            return []
        spec = self.spec
        against = {
            f"passes of {self.tokens} tokens (1, 2 or 4)": self.tokens not in PASS_TOKENS,
            "a stream of each lane": not spec.has_one_stream,
            "experts": spec.experts is not None,
            "quantised weights": self.coding is not None or self.head_coding is not None,
            "a cache of int4": self.kv_dtype == "int4",
            f"windows of {spec.sliding_window} positions, whose rings have no room for another token": not self._rings_have_room,
            "positions in partitions": self.cache.num_partitions > 1,
            f"{self.num_ranks} ranks": self.num_ranks > 1,
            "choices of experts to keep": self.checks_experts,
        }
        return [name for name, is_so in against.items() if is_so]

    @property
    def looks_up(self) -> bool:
        """Whether the kernel looks for drafts."""
        return self.drafts or self.tokens > 1

    @property
    def _rings_have_room(self) -> bool:
        """Whether a pass's new rows take the places of none that one of its tokens sees."""
        if not self.spec.window_layers:
            return True
        return self.cache.window_batches * BATCH * self.splits >= (self.spec.sliding_window or 0) + self.tokens - 1

    # ---- work of a thread block ----
    @cached_property
    def geometry(self) -> Geometry:
        """How products are divided. Chosen for the model as one rank has it: bits must not depend on the number of ranks."""
        if self.coding is not None or self.spec.experts is not None:
            return EIGHT_WARPS
        if self.matrix_warps:
            return EIGHT_WARPS if self.matrix_warps == 8 else TWELVE_WARPS
        return choose(self.spec, self.max_ctas)

    @cached_property
    def num_ctas(self) -> int:
        """Thread blocks that own rows. Each owns at least one row of the residual: the reuse of words rests on that."""
        owned = self.geometry.op_shape(owned_rows(self.spec.hidden_size, self.max_ctas, 2), self.spec.hidden_size, 2).cta_rows
        return -(-self.spec.hidden_size // owned)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The products of a token in the order of the tape, those of the plan (`kernel_plan`).

        All that is compiled or packed of products is made of this list.
        """
        divider = Divider(
            self.spec, self.hosted_lanes, self.geometry, self.num_ctas, self.coding, self.attention_coding, self.head_coding,
            self.experts,
        )  # fmt: skip
        sources = self.head_lanes if self.spec.head_type is HeadType.LANE else (NONE,)
        turns = product_order(self.spec, self.hosted_lanes)
        return product_list(self.spec, turns, self.hosted_lanes, divider.divisions(), sources)

    @cached_property
    def layer_products(self) -> tuple[Product, ...]:
        """Those that the kernel's table lists before the LM head's: without routers, whose input is GATE_UP's."""
        return tuple(product for product in self.products if product.op in LAYER_OPS)

    @cached_property
    def _of_op(self) -> dict[Phase, Product]:
        """A product of each op: an op is divided alike wherever it stands."""
        return {product.op: product for product in reversed(self.products)}

    def lanes_of(self, op: Phase) -> int:
        """Hosted lanes whose rows one product has: several where they share its input and have few rows each."""
        return self._of_op[op].num_lanes

    @cached_property
    def ops(self) -> dict[Phase, OpShape]:
        """What a thread block has of each op."""
        return {op: product.rows.form for op, product in self._of_op.items() if product.rows.form is not None}

    @cached_property
    def layer_ops(self) -> dict[Phase, OpShape]:
        """The same of those of `layer_products`."""
        return {op: self.ops[op] for op in LAYER_OPS}

    @property
    def head(self) -> OpShape:
        """The same of the LM head: one of `num_head_products`."""
        return self.ops[Phase.HEAD]

    @cached_property
    def experts(self) -> ExpertShape | None:
        """The products of experts; None in a model without."""
        if self.spec.experts is None:
            return None
        return ExpertShape(
            self.spec, self.geometry, self.num_lanes, self.num_ctas, self._residual_rows, self.coding, self.weight_dtype,
            stream_steps(self.coding, self.head_coding),
        )  # fmt: skip

    @property
    def attention_coding(self) -> Coding | None:
        """Of the matrices of attention: none where those of experts alone are quantised."""
        return None if self.coding is None or self.coding.is_of_experts else self.coding

    @property
    def head_ctas(self) -> int:
        """Thread blocks that share the vocabulary rows of this rank, or with `vocab_parallel` those of each hosted lane."""
        return self._of_op[Phase.HEAD].rows.num_ctas

    @property
    def num_sums(self) -> int:
        """Blocks of rows whose partial sums are kept for the finaliser.

        More than two only where all vectors that are normed are one stream, which the finaliser completes before the next one:
        NUM_SQUARES rests on that.
        """
        return 4 if self.spec.has_one_stream else 2

    @property
    def num_streams(self) -> int:
        """Residual streams of this rank: one of each hosted lane, or one that all share."""
        return 1 if self.spec.has_one_stream else self.num_lanes

    @property
    def sends_sums_directly(self) -> bool:
        """Whether both of two ranks send their sums to all who gather the stream, instead of to the owners of its rows."""
        return self.direct_sums and self.spec.has_one_stream and self.num_ranks == 2

    @property
    def awaits_attention(self) -> bool:
        """Whether matrix warps look for attention's output only when their thread block's attention warps are done.

        Far into a context, with a cache of INT4: there attention is bound by instructions. With others it costs up to 2.4 %.
        """
        return self.kv_dtype == "int4"

    @property
    def gathers_streams(self) -> bool:
        """Whether the LM head reads other ranks' last streams."""
        return self.num_ranks > 1 and self.spec.gathers_streams

    @property
    def head_lanes(self) -> range:
        """Lanes whose last streams enter this rank's logits; the first hosted one where all share it."""
        if self.spec.has_one_stream:
            return self.hosted_lanes[:1]
        alone = self.num_ranks == 1 or self.spec.head_type is HeadType.VOCAB_PARALLEL
        return self.hosted_lanes if alone else range(self.spec.num_lanes)

    @property
    def num_head_products(self) -> int:
        """Products of the LM head: with `lane` one for each stream, which are summed, else one."""
        return sum(product.op is Phase.HEAD for product in self.products)

    @property
    def lane_vocab(self) -> int:
        """Vocabulary rows of one lane; the last lanes' slices may be shorter, but not with `vocab_parallel`."""
        first, last = self.spec.vocab_slice(0)
        return last - first

    @property
    def final_norm_lanes(self) -> int:
        """Weight vectors of the final norm on this rank: those of `head_lanes`, or one for all."""
        return 1 if self.spec.shared_norm_scale or self.spec.pre_norm_lane_agg else len(self.head_lanes)

    @cached_property
    def _residual_rows(self) -> int:
        return owned_rows(self.spec.hidden_size, self.num_ctas, 2)

    @property
    def vocab_rows(self) -> tuple[int, int]:
        """First and one-past-last vocabulary row of the hosted lanes."""
        return self.spec.vocab_slice(self.hosted_lanes[0])[0], self.spec.vocab_slice(self.hosted_lanes[-1])[1]

    @property
    def num_lanes(self) -> int:
        """Hosted lanes."""
        return len(self.hosted_lanes)

    @property
    def tape_values(self) -> int:
        """Weights on the tape of one thread block: 16-bit words."""
        return sum(count * self.ops[op].num_values for op, count in self._num_taped.items())

    @property
    def scale_rows(self) -> int:
        """Scales of a product in a thread block that lie behind all tapes: where each row of a quantised matrix has one."""
        if self.coding is None or self.coding.scales:
            return 0
        return max(op.cta_rows for op in self.layer_ops.values())

    @property
    def weight_words(self) -> int:
        """16-bit words of all tapes and of what lies behind them."""
        return self.head_scales_place + 2 * self.head_scale_rows * self.num_head_products * self.num_ctas

    @property
    def head_scale_rows(self) -> int:
        """Scales of a product of the LM head in a thread block, which lie behind those of layers."""
        return 0 if self.head_coding is None else self.head.cta_rows

    @property
    def head_scales_place(self) -> int:
        """Where they begin, in 16-bit words from that of all tapes."""
        return self.num_ctas * (self.tape_values + 2 * len(self.layer_products) * self.scale_rows)

    @property
    def tape_tiles(self) -> int:
        """Tiles on the tape of one thread block."""
        return sum(count * self.ops[op].num_tiles for op, count in self._num_taped.items())

    @cached_property
    def taped_products(self) -> tuple[Product, ...]:
        """Those whose weights lie on the tape: all but experts', which lie where the choice finds them."""
        apart = () if self.experts is None else (Phase.GATE_UP, Phase.DOWN)
        return tuple(product for product in self.products if product.op not in apart)

    @cached_property
    def _num_taped(self) -> Counter[Phase]:
        return Counter(product.op for product in self.taped_products)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a token reads: the tapes, and the experts that it uses."""
        return 2 * (self.tape_values * self.num_ctas + (self.experts.read_values if self.experts is not None else 0))

    @property
    def num_products(self) -> int:
        """Products of a token, those of the LM head included: `kTokenVectors`."""
        return len(self.layer_products) + self.num_head_products

    @property
    def num_pieces(self) -> int:
        """Pieces of a ring tile. With few lanes halves: what is under way can then lie between two tiles and three."""
        return self.pieces or (2 if self.num_lanes <= 2 and not self.geometry.in_flight_bytes else 1)

    @property
    def in_flight(self) -> int:
        """Pieces of ring tiles that may be under way from memory: three tiles; with one or two lanes halves or two tiles."""
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
            ops = self.layer_ops.values()
            mean_bytes = 2 * sum(op.num_values for op in ops) / sum(op.num_tiles for op in ops) / self.num_pieces
            most = self.num_pieces * self.num_slots - 2  # with a full ring nothing would tell which copy has landed
            most = min(most, int(_MOST_UNEVEN * self.geometry.in_flight_bytes / max(2 * op.tile_values for op in ops)))
            return (max(2, min(round(self.geometry.in_flight_bytes / mean_bytes), most)),) * 2
        if self.num_lanes <= 2 and self.num_pieces == 2:
            return _HALVES_IN_FLIGHT[self.num_lanes]
        return ((2 if self.num_lanes <= 2 else 3) * self.num_pieces,) * 2

    @property
    def replicas(self) -> int:
        """Copies of every vector that thread blocks exchange."""
        return self.copies or (2 if self.num_lanes <= 2 or self.num_ranks > 4 else 4)

    @property
    def delays(self) -> tuple[int, ...]:
        """Cycles from the end of a lane's product to the first look for the input of its next one: QKV, OUT, GATE_UP, DOWN.

        Words take that long in any case, and a look that comes too early loads the memory system, also for those who write.
        Found by measurement (docs/history/monokernel.md, experts.md); OUT waits for attention.
        """
        by_lanes = _POLL_DELAYS | (_EXPERT_POLL_DELAYS if self.experts is not None and self.num_ranks == 1 else {})
        return self.poll_delays or by_lanes.get(self.num_lanes, by_lanes[4])

    @property
    def boxes(self) -> KernelBoxes:
        """The mailboxes through which ranks exchange sums, last streams and candidates; none for one rank."""
        return KernelBoxes(self.spec, self.num_ranks, self.num_ctas, self.replicas)

    @property
    def num_threads(self) -> int:
        """Threads of a thread block: `kNumThreads`."""
        return self.geometry.num_threads

    # ---- attention ----
    @cached_property
    def cache(self) -> CacheShape:
        """The KV cache."""
        return CacheShape(
            self.spec, self.num_lanes, self.kv_dtype, self.splits, self.max_ctas, self.partition_batches, self.whole_windows
        )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that see everything."""
        return tuple(layer for layer in range(self.spec.num_layers) if self.spec.window(layer) is None)

    @property
    def num_sets(self) -> int:
        """Sets of the query heads of a KV head, each of at most four: the matrix unit's eight columns are two for each head."""
        return -(-self.spec.lane_heads // self.spec.lane_kv_heads // 4)

    @property
    def set_heads(self) -> int:
        """Query heads of a set, the largest one."""
        return -(-self.spec.lane_heads // self.spec.lane_kv_heads // self.num_sets)

    @property
    def warp_sets(self) -> int:
        """Sets that one attention warp has: two where its registers have room for the query and the outputs of both.

        Keys and values are read once for both then, and twice as many of them are under way at a time.
        """
        return 2 if self.num_sets % 2 == 0 and self.spec.head_dim <= _SMALL_HEAD else 1

    # ---- words ----
    @cached_property
    def word_lists(self) -> dict[str, tuple[int, int]]:
        """By name: words of one copy (whole lines), and number of copies."""
        spec, lanes = self.spec, self.num_lanes
        query_rows = spec.lane_heads * spec.head_dim
        tokens = self.tokens  # one behind the other
        copies, stream_copies = lanes * self.replicas * tokens, self.num_streams * self.replicas * tokens
        sizes_of = {kind: prod(shape) for recipe in all_recipes(spec) for kind, shape in recipe.shapes.items()}
        sizes = {
            "Stream": (spec.hidden_size // 2, stream_copies),
            "Middle": (spec.hidden_size // 2, stream_copies),
            "Activation": (sizes_of[Kind.ACTIVATION] // 2, copies),
            "Qkv": (spec.lane_qkv_rows // 2, lanes * tokens),
            "Part": (self.cache.num_partitions * query_rows * self.splits // 2, lanes * tokens),
            "LogSum": (self.cache.num_partitions * self.log_sum_words, lanes * tokens),
            "Attended": (query_rows // 2, copies),
            "Candidate": (2 * self.num_ctas, self.replicas * tokens),
            "Choice": (self.boxes.choice_words, 2 if self.num_ranks == 1 else 0),  # else they lie in the heap
            "RouterLogits": (sizes_of.get(Kind.ROUTER_LOGITS, 1), self.replicas if Kind.ROUTER_LOGITS in sizes_of else 0),
            "Report": (self.boxes.report_words, 1 if self.num_ranks == 1 else 0),
        }
        return {name: (-(-words // 16) * 16, count) for name, (words, count) in sizes.items()}

    @property
    def log_sum_words(self) -> int:
        """Words of the log-sums of a partition."""
        return -(-self.spec.lane_heads * self.splits // 16) * 16

    @property
    def num_words(self) -> int:
        """64-bit words that the thread blocks exchange."""
        return sum(words * count for words, count in self.word_lists.values())

    # ---- shared memory ----
    @property
    def is_packed(self) -> bool:
        """Whether tiles lie in the ring one behind the other instead of each in a slot of the largest one's size.

        Models of one lane, which are so small that their chain of waits decides, are faster with slots; not with quantised
        weights, whose slots would have to be as large as the largest tile.
        """
        is_chosen = self.spec.num_lanes > 1 or self.coding is not None or self.spec.experts is not None
        return self.geometry.in_flight_bytes > 0 and self.num_pieces == 1 and is_chosen

    @cached_property
    def num_slots(self) -> int:
        """Tiles that the ring has barriers for: its slots, as many as fit beside everything else in `Shared`; or if it is packed,
        as many of the smallest tile."""
        free = SHARED_BYTES - self.shared_bytes_besides
        if self.is_packed:
            smallest = 2 * min(min(op.tile_sizes) for op in self.ops.values())
            return min(min(self.max_slots * self.geometry.slot_bytes, free) // (smallest + _PACKED_TILE_BYTES), _MOST_TILES)
        slot_bytes = self.geometry.slot_bytes + 2 * 8 * self.num_pieces  # pieces have barriers of their own
        return min(self.max_slots, free // slot_bytes)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring of tiles in `Shared`."""
        if self.is_packed:
            free = SHARED_BYTES - self.shared_bytes_besides - self.num_slots * _PACKED_TILE_BYTES
            return min(self.max_slots * self.geometry.slot_bytes, free) // 512 * 512
        return self.num_slots * self.geometry.slot_bytes

    @property
    def ring_tiles(self) -> int:
        """Tiles of mean size that the ring holds."""
        return self.ring_bytes * self.tape_tiles // (2 * self.tape_values) if self.is_packed else self.num_slots

    @property
    def x_steps(self) -> int:
        """Steps of 32 columns of each matrix warp that `Shared` has room for: the longest input, of all lanes of a gather."""
        streams = [self.ops[op].x_steps for op in (Phase.HEAD, Phase.QKV, Phase.GATE_UP)]
        if self.experts is not None and self.coding is not None and self.coding.is_integer:
            streams[-1] *= 2  # digits, and what the router takes
        return max(*streams, *(self.gathered_lanes(phase) * self.ops[phase].x_steps for phase in _OUTPUTS))

    def gathered_lanes(self, phase: Phase) -> int:
        """Hosted lanes whose inputs of OUT or DOWN are gathered at a time.

        One, which hides its way behind others' products, except where these are so small that they cannot: then those whose
        inputs come of one product.
        """
        if phase is Phase.DOWN and self.experts is not None:
            return 1
        few = _FEW_STEPS if self.attention_coding is None else 1
        return self.lanes_of(_OUTPUTS[phase]) if self.ops[phase].per <= few else 1

    @property
    def shared_bytes_besides(self) -> int:
        """Bytes of `Shared` (phases/layout.cuh) of the build with processors, but for ring slots, and at most so much padding."""
        spec, lanes, rows, warps = self.spec, self.num_lanes, self.ops[Phase.OUT].cta_rows, self.geometry.matrix_warps
        max_per, tokens = self.x_steps, self.tokens
        halves = 1 if tokens == _ATTEND_WARPS else 2  # kAttendedHalves in layout.cuh
        attended = halves * tokens * 4 * self.warp_sets * self.set_heads * spec.head_dim
        scores = 2 * self.head.cta_rows
        values = tokens * max_per * warps * 32  # x
        values += tokens * warps * (self.num_sums * self.geometry.tile_rows + NUM_SQUARES * 32)  # red, squares
        values += warps * 2 * lanes * self.num_ranks  # head_squares
        values += tokens * rows * (self.num_streams + lanes * 2 * (spec.delay + 1))  # residual, history
        values += attended + (tokens if tokens > 1 else self.num_sets // self.warp_sets) * spec.head_dim  # ..., fresh
        values += 2 * attended // spec.head_dim  # attended_max and attended_sum
        values += self.head.cta_rows // 32 + 2 + (1 if scores <= attended else scores)  # mask, scores
        values += lanes + 11 + 2 * (-(-(3 + tokens) // 4) * 4)  # done_cycles, those by themselves, passes
        values += 2 * spec.num_ffns_read  # chosen, chosen_weights
        values += tokens * (3 * PLACES + 1) if self.looks_up else 0  # drafting
        barriers = 4 + halves * tokens + self.awaits_attention + 2 * self.num_sums + NUM_SQUARES + lanes
        return 4 * values + 8 * barriers + _NOTES_BYTES + _PADDING_BYTES
