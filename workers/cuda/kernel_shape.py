"""What the monokernel is compiled for: every size that follows from a model, the hosted lanes and the number of thread blocks.

`KernelShape` has the products and who owns them; its members have the rest: `head`, `experts`, `delta`, `tape`, `ring`, `words`,
`cache` and `sets`. `kernel_header` writes all down for the compiler.
"""

from __future__ import annotations

from functools import cached_property

from kog_dist.decode.coded_terms import TERMED
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.order import product_order
from kog_dist.decode.plan.products import LayerOp, Product, product_list
from kog_dist.decode.plan.recipes import op_numbers, share_stream, stream_lanes
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.decode.tape_packing import OpShape, owned_rows
from kog_dist.errors import ConfigError
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.cuda.cache_shape import BATCH, CacheShape
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.cuda.division import Divider, stream_steps
from kog_dist.workers.cuda.expert_shape import CHOSEN_OF_WORD, EXPERTS_OF_WORD, ExpertShape
from kog_dist.workers.cuda.geometry import SPLITS, Geometry, choose, splits_for
from kog_dist.workers.cuda.head_shape import HeadShape, head_lanes
from kog_dist.workers.cuda.kv_format import FORMATS, kv_findings
from kog_dist.workers.cuda.model_limits import unsupported
from kog_dist.workers.cuda.query_sets import QuerySets
from kog_dist.workers.cuda.ring_shape import RingShape
from kog_dist.workers.cuda.shared_memory import SharedMemory
from kog_dist.workers.cuda.tape_shape import TapeShape
from kog_dist.workers.cuda.word_shape import WordShape

MAX_CTAS = 128
HASH_TOKENS, NUM_HASHES = 64, 1 << 13  # a running hash is kept of every 64th token, of so many in turn
CHOICE_POSITIONS = 8  # whose choices of experts are kept, in turn: a rendezvous has room for those of MAX_LAYERS layers
PASS_TOKENS = PASS_RANKS = 1, 2, 4
_MOST_HEAD_ROWS = 4094  # of a thread block
_OUTPUTS = {Phase.OUT: (Phase.QKV, Phase.DELTA_IN), Phase.DOWN: (Phase.GATE_UP,)}  # with the products that their inputs come of
_FEW_STEPS = 2  # of each matrix warp in a lane's product


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
    tokens: int = 1  # of a pass of the weights; see `_of_tokens` for what has more than one
    drafts: bool = False  # passes of one token that look for drafts, and end where another build is to verify them
    company: bool = False  # each token of a pass is of another request
    num_ranks: int = 1  # that exchange sums; one rank that hosts some of the lanes sums over these alone
    traced_step: int = -1  # of a launch: the kernel keeps time stamps of it
    coding: Coding | None = None  # of the matrices of all layers, or of experts alone; router and others have 16 bit
    head_coding: Coding | None = None  # of the LM head
    whole_windows: bool = False  # windowed layers keep all positions, not a ring of the newest; the same bits, see `CacheShape`
    keeps_hashes: bool = False  # of tokens and scores, so that ranks can be compared over long runs; greedy and temperature only
    checks_experts: bool = False  # each thread block keeps its choices of experts, so that hosts can compare them

    def __post_init__(self) -> None:
        _refuse_layers(self)
        object.__setattr__(self, "splits", self.splits or splits_for(self.spec, self.num_ctas))
        _refuse(self)

    # ---- products ----
    @property
    def num_lanes(self) -> int:
        """Hosted lanes."""
        return len(self.hosted_lanes)

    @cached_property
    def geometry(self) -> Geometry:
        """How products are divided. Chosen for the model as one rank has it: bits must not depend on the number of ranks."""
        return choose(self.spec, self.max_ctas, is_coded=self.coding is not None)

    @property
    def num_threads(self) -> int:
        """Threads of a thread block: `kNumThreads`."""
        return self.geometry.num_threads

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
            self.spec,
            self.hosted_lanes,
            self.geometry,
            self.num_ctas,
            self.coding,
            self.attention_coding,
            self.head_coding,
            self.experts,
        )
        lanes = head_lanes(self.spec, self.hosted_lanes, self.num_ranks)
        sources = lanes if self.spec.head_type is HeadType.LANE else (NONE,)
        turns = product_order(self.spec, self.hosted_lanes)
        return product_list(self.spec, turns, self.hosted_lanes, divider.divisions(), sources)

    @cached_property
    def layer_products(self) -> tuple[Product, ...]:
        """Those that the kernel's table lists before the LM head's: without routers, whose input is that of gate and up."""
        ops = op_numbers(self.spec)
        return tuple(product for product in self.products if product.op in ops)

    @property
    def num_products(self) -> int:
        """Products of a token, those of the LM head included: `kTokenVectors`."""
        return len(self.layer_products) + self.head.num_products

    @cached_property
    def _of_op(self) -> dict[Phase, Product]:
        """A product of each op, which is divided alike wherever it stands, but for OUT of delta nets with 16 bit beside codes."""
        layers = self.delta.layers if self.delta is not None and self.has_plain_outputs else ()
        return {one.op: one for one in reversed(self.products) if one.op is not Phase.OUT or one.layer not in layers}

    def lanes_of(self, op: Phase) -> int:
        """Hosted lanes whose rows one product has: several where they share its input and have few rows each."""
        return self._of_op[op].num_lanes

    @cached_property
    def ops(self) -> dict[Phase, OpShape]:
        """What a thread block has of each op."""
        return {op: product.rows.form for op, product in self._of_op.items() if product.rows.form is not None}

    @cached_property
    def forms(self) -> dict[LayerOp, OpShape]:
        """The same of each layer's."""
        return {(one.op, one.layer): one.rows.form for one in self.products if one.rows.form is not None}

    def net_out(self) -> OpShape:
        """Of OUT in layers with a delta net, of a model that has any."""
        assert self.delta is not None
        return self.forms[Phase.OUT, self.delta.layers[0]]

    @property
    def has_plain_inputs(self) -> bool:
        """Whether what delta nets multiply first has 16 bit beside codes of attention."""
        return self.delta is not None and self.attention_coding is not None and self.attention_coding.plain_inputs

    @property
    def has_plain_outputs(self) -> bool:
        """The same of what they multiply last."""
        return self.delta is not None and self.attention_coding is not None and self.attention_coding.plain_outputs

    @property
    def attention_coding(self) -> Coding | None:
        """Of the matrices of attention: none where those of experts alone are quantised."""
        return None if self.coding is None or self.coding.is_of_experts else self.coding

    # ---- what it is made of ----
    @cached_property
    def head(self) -> HeadShape:
        """The LM head."""
        return HeadShape.of(self.spec, self.hosted_lanes, self.num_ranks, self.products)

    @cached_property
    def experts(self) -> ExpertShape | None:
        """The products of experts; None in a model without."""
        if self.spec.experts is None:
            return None
        return ExpertShape(
            self.spec,
            self.geometry,
            self.num_lanes,
            self.num_ctas,
            owned_rows(self.spec.hidden_size, self.num_ctas, 2),
            self.coding,
            self.weight_dtype,
            stream_steps(self.coding, self.head_coding),
        )

    @cached_property
    def delta(self) -> DeltaShape | None:
        """The gated delta nets; None in a model without."""
        coding = self.attention_coding
        terms = 1 if coding is None or coding.plain_inputs else coding.terms
        return DeltaShape.of(self.spec, self.num_lanes, self.num_ctas, terms)

    @cached_property
    def tape(self) -> TapeShape:
        """The weights of thread blocks."""
        return TapeShape(self.products, self.ops, self.num_ctas, self.coding, self.head_coding, self.experts)

    @cached_property
    def shared(self) -> SharedMemory:
        """What a thread block keeps besides the ring."""
        return SharedMemory(
            self.spec, self.geometry, self.num_lanes, self.num_streams, self.num_ranks, self.tokens, self.num_sums, self.x_steps,
            self.ops[Phase.OUT].cta_rows, self.head.form.cta_rows, self.sets, self.awaits_attention, self.looks_up, self.company,
            self.delta,
        )  # fmt: skip

    @cached_property
    def ring(self) -> RingShape:
        """What they go through."""
        may_be_packed = self.spec.num_lanes > 1 or self.coding is not None or self.experts is not None
        forms = [self.net_out()] if self.has_plain_outputs else []
        return RingShape(self.geometry, self.ops, self.tape, self.num_lanes, self.shared.ring_bytes, may_be_packed, tuple(forms))

    @cached_property
    def words(self) -> WordShape:
        """What thread blocks exchange."""
        return WordShape(
            self.spec,
            self.cache,
            self.num_lanes,
            self.num_streams,
            self.num_ranks,
            self.num_ctas,
            self.tokens,
            self.delta,
            company=self.company,
        )

    @cached_property
    def cache(self) -> CacheShape:
        """The KV cache."""
        return CacheShape(
            self.spec, self.num_lanes, self.kv_dtype, self.splits, self.max_ctas, self.partition_batches, self.whole_windows
        )

    @property
    def sets(self) -> QuerySets:
        """Query heads of an attention warp."""
        return QuerySets(self.spec.lane_heads // self.spec.lane_kv_heads, self.spec.head_dim)

    # ---- drafts, streams and sums ----
    @property
    def looks_up(self) -> bool:
        """Whether the kernel looks for drafts."""
        return self.drafts or (self.tokens > 1 and not self.company)

    @property
    def num_streams(self) -> int:
        """Residual streams of this rank: one of each hosted lane, or one that all share."""
        return len(stream_lanes(self.spec, tuple(self.hosted_lanes)))

    def stream_of(self, lane: int) -> int:
        """The stream of a hosted lane, among those of this rank."""
        return min(lane, self.num_streams - 1)

    @property
    def num_sums(self) -> int:
        """Blocks of rows whose partial sums are kept for the finaliser.

        More than two only where all vectors that are normed are one stream, which the finaliser completes before the next one:
        NUM_SQUARES rests on that.
        """
        return 4 if share_stream(self.spec) else 2

    @property
    def sends_sums_directly(self) -> bool:
        """Whether both of two ranks send their sums to all who gather the stream, instead of to the owners of its rows.

        Not those of several tokens, whose streams matrix warps have no registers to keep.
        """
        return share_stream(self.spec) and self.num_ranks == 2 and self.tokens == 1

    @property
    def gathers_streams(self) -> bool:
        """Whether the LM head reads other ranks' last streams."""
        return self.num_ranks > 1 and self.spec.gathers_streams

    @property
    def awaits_attention(self) -> bool:
        """Whether matrix warps look for attention's output only when their thread block's attention warps are done.

        Far into a context, with a cache of INT4: there attention is bound by instructions. With others it costs up to 2.4 %.
        """
        return self.kv_dtype == "int4"

    @property
    def x_steps(self) -> int:
        """Steps of 32 columns of each matrix warp that `Shared` has room for: the longest input, of all lanes of a gather."""
        inputs = [op for ops in _OUTPUTS.values() for op in ops if op in self.ops]
        streams = [self.ops[op].x_steps for op in (Phase.HEAD, *inputs)]
        if self.experts is not None and self.coding is not None and self.coding.is_integer:
            streams[-1] *= 2  # digits, and what the router takes
        return max(*streams, *(self.gathered_lanes(phase) * self.ops[phase].x_steps for phase in _OUTPUTS))

    def gathered_lanes(self, phase: Phase) -> int:
        """Hosted lanes whose inputs of OUT or DOWN are gathered at a time.

        One, which hides its way behind others' products, except where these are so small that they cannot: then those whose
        inputs come of one product.
        """
        if self.experts is not None and phase in self.experts.ops:
            return 1
        few = _FEW_STEPS if self.attention_coding is None else 1
        inputs = [self.lanes_of(op) for op in _OUTPUTS[phase] if op in self.ops]
        return min(inputs) if self.ops[phase].per <= few else 1


def _refuse_layers(shape: KernelShape) -> None:
    """Raise ConfigError for a model of whose layers sizes cannot even be asked."""
    spec = shape.spec
    if spec.mixed_layers and (findings := unsupported(spec)):
        raise ConfigError(f"the CUDA kernel cannot run this model: it has {'; '.join(findings)}; use --device cpu")


def _refuse(shape: KernelShape) -> None:
    """Raise ConfigError that says all that stands against a shape, if anything does."""
    of_the_cache, of_tokens = kv_findings(shape.spec, shape.kv_dtype), _of_tokens(shape)
    findings = [*_of_model(shape), *of_the_cache, *_of_build(shape), *of_tokens]
    if not findings:
        return
    if findings == of_tokens:
        raise ConfigError(
            f"the CUDA kernel cannot run this model with {shape.tokens} tokens in a pass: it has {'; '.join(findings)}; use "
            f"passes of one token"
        )
    remedy = "use another --kv-dtype, or --device cpu" if findings == of_the_cache else "use --device cpu"
    raise ConfigError(f"the CUDA kernel cannot run this model: it has {'; '.join(findings)}; {remedy}")


def _of_model(shape: KernelShape) -> list[str]:
    findings = []
    if shape.spec.head_type is HeadType.VOCAB_PARALLEL and shape.num_ctas < shape.num_lanes:
        findings.append(f"vocabulary slices of {shape.num_lanes} lanes, but only {shape.num_ctas} thread blocks")
    findings += [] if shape.spec.mixed_layers else unsupported(shape.spec)
    findings += shape.experts.findings if shape.experts is not None else []
    findings += shape.delta.findings if shape.delta is not None else []
    if shape.weight_dtype not in FORMATS:
        findings.append(f"{shape.weight_dtype} weights ({' or '.join(FORMATS)})")
    return findings


def _of_build(shape: KernelShape) -> list[str]:
    spec, findings = shape.spec, []
    if shape.whole_windows and not shape.cache.can_be_whole:
        findings.append(f"windows of {spec.sliding_window} positions, which fill whole batches (rings of them)")
    kept = {"hashes": shape.keeps_hashes, "a trace": shape.traced_step >= 0, "choices of experts": shape.checks_experts}
    if shape.company and (shape.tokens == 1 or shape.drafts):
        findings.append(f"passes of {shape.tokens} tokens{' that look for drafts' * shape.drafts} to share (2 or 4 without)")
    if shape.company and shape.checks_experts:
        findings.append("choices of experts to keep, of tokens of several requests (of those of one)")
    if sum(kept.values()) > 1:
        findings.append(f"{' and '.join(name for name, is_kept in kept.items() if is_kept)} to keep (one of them)")
    coding = shape.attention_coding
    if shape.delta is not None and coding is not None:
        if not coding.plain_inputs and coding.number not in TERMED:
            findings.append(f"{coding.number} weights of delta nets ({', '.join(TERMED)} or 16 bit)")
        is_plain = coding.plain_inputs or coding.plain_outputs
        if is_plain and coding.plain_dtype(shape.weight_dtype) != shape.weight_dtype == "float16":
            findings.append(f"{coding.number} weights beside delta nets in float16 (bfloat16)")
    if shape.checks_experts and shape.experts is not None and not shape.experts.fits_a_word:
        of_all = f"{shape.experts.per_token} of {shape.experts.num_experts}"
        findings.append(f"choices of experts to keep, of {of_all} (at most {CHOSEN_OF_WORD} of {EXPERTS_OF_WORD})")
    if shape.checks_experts and shape.experts is None:
        findings.append("choices of experts to keep, and no experts (none of them)")
    if shape.partition_batches < 0:
        findings.append(f"partitions of {shape.partition_batches} batches (1 or more, or 0)")
    if shape.splits not in SPLITS:
        findings.append(f"{shape.splits} splits of the positions ({', '.join(map(str, SPLITS[:-1]))} or {SPLITS[-1]})")
    if shape.head.form.cta_rows > _MOST_HEAD_ROWS:
        findings.append(f"{shape.head.form.cta_rows} vocabulary rows in a thread block (at most {_MOST_HEAD_ROWS})")
    findings += shape.ring.findings if shape.tokens == 1 else []
    if shape.num_ranks > 1 and shape.num_lanes * shape.num_ranks != spec.num_lanes:
        findings.append(f"{spec.num_lanes} lanes, of which {shape.num_ranks} ranks would host {shape.num_lanes} each")
    return findings


def _of_tokens(shape: KernelShape) -> list[str]:
    """What stands against as many tokens in a pass as there are."""
    if shape.tokens == 1 and not shape.drafts:
        return []
    spec = shape.spec
    against = {
        "experts of several requests in turn": shape.company and shape.experts is not None and not shape.experts.unites,
        f"passes of {shape.tokens} tokens (1, 2 or 4)": shape.tokens not in PASS_TOKENS,
        "a stream of each lane": not share_stream(spec),
        **({} if shape.experts is None else shape.experts.against_passes),
        "a cache of int4": shape.kv_dtype == "int4",
        f"windows of {spec.sliding_window} positions, whose rings have no room for another token": not _rings_have_room(shape),
        "positions in partitions": shape.cache.num_partitions > 1,
        f"{shape.num_ranks} ranks (1, 2 or 4)": shape.num_ranks not in PASS_RANKS,
    }
    return [name for name, is_so in against.items() if is_so] + (shape.ring.findings if shape.tokens > 1 else [])


def _rings_have_room(shape: KernelShape) -> bool:
    """Whether a pass's new rows take the places of none that one of its tokens sees."""
    spec = shape.spec
    if not spec.window_layers:
        return True
    return shape.cache.window_batches * BATCH * shape.splits >= (spec.sliding_window or 0) + shape.tokens - 1
