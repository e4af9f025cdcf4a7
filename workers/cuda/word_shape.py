"""The words that thread blocks of one GPU exchange: how many of each kind there are, and when readers look for them first."""

from __future__ import annotations

from functools import cached_property
from itertools import takewhile
from math import prod

from kog_dist.decode.plan.recipes import all_recipes
from kog_dist.decode.plan.steps import Kind
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.runtime.abi import LINE_BYTES
from kog_dist.workers.cuda.cache_shape import CacheShape
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.cuda.kernel_boxes import KernelBoxes

SUM_COPIES = 2  # of sums that two ranks send to all thread blocks of both
_LINE_WORDS = LINE_BYTES // 8
_DELAYS = {1: (500, 3000, 200, 500), 2: (1200, 5000, 800, 1200), 4: (1000, 4000, 600, 1000)}  # by lanes; 4: and more
_DELAYS_OF_EXPERTS = {2: (600, 5000, 500, 500)}  # where one rank has a model with experts; else as above


def _lines(num_words: int) -> int:
    """As many words in whole lines."""
    return -(-num_words // _LINE_WORDS) * _LINE_WORDS


@dataclass(frozen=True)
class WordShape:
    """The words of a rank that hosts `num_lanes` lanes with `num_streams` streams, in passes of `tokens` tokens, with
    `company` of as many requests.

    `delta`: None in a model without such nets. `copies`: 0, or what `replicas` is to be.
    """

    spec: ModelSpec
    cache: CacheShape
    num_lanes: int
    num_streams: int
    num_ranks: int
    num_ctas: int
    tokens: int
    delta: DeltaShape | None = None
    copies: int = 0
    company: bool = False

    @property
    def replicas(self) -> int:
        """Copies of every vector that thread blocks exchange, so that fewer readers share a line."""
        return self.copies or (2 if self.num_lanes <= 2 or self.num_ranks > 4 else 4)

    @property
    def boxes(self) -> KernelBoxes:
        """The mailboxes through which ranks exchange sums, last streams and candidates; none for one rank."""
        return KernelBoxes(self.spec, self.num_ranks, self.num_ctas, self.replicas, self.tokens, self.company)

    @cached_property
    def lists(self) -> dict[str, tuple[int, int]]:
        """By name: words of one copy (whole lines), and number of copies. Those of a pass's tokens lie one behind the other."""
        spec, lanes, tokens = self.spec, self.num_lanes, self.tokens
        query_rows, alone = spec.lane_heads * spec.head_dim, self.num_ranks == 1  # else they lie in the heap
        copies, stream_copies = lanes * self.replicas * tokens, self.num_streams * self.replicas * tokens
        sizes_of = {kind: prod(shape) for recipe in all_recipes(spec) for kind, shape in recipe.shapes.items()}
        sizes = {
            "Stream": (spec.hidden_size // 2, stream_copies),
            "Middle": (spec.hidden_size // 2, stream_copies),
            "Activation": ((sizes_of[Kind.ACTIVATION] + sizes_of.get(Kind.SHARED_ACTIVATION, 0)) // 2, copies),
            "Qkv": (spec.lane_qkv_rows // 2, lanes * tokens),
            "Part": (self.cache.num_partitions * query_rows * self.cache.splits // 2, lanes * tokens),
            "LogSum": (self.cache.num_partitions * self.log_sums, lanes * tokens),
            "Attended": (query_rows // 2, copies),
            "Candidate": (2 * self.num_ctas, self.replicas * tokens),
            "Choice": (self.boxes.choice_words, 2 * alone),
            "RouterLogits": (sizes_of.get(Kind.ROUTER_LOGITS, 1), self.replicas * tokens * (Kind.ROUTER_LOGITS in sizes_of)),
            "Report": (self.boxes.report_words, 1 * alone),
        }
        if self.delta is not None:
            sizes["DeltaIn"] = (self.delta.rows // 2, lanes * tokens)
            sizes["DeltaSquares"] = (self.delta.heads * self.delta.square_words, copies)
            if tokens > 1 and not self.company:  # no words, but of a build, too: each thread's own
                sizes["DeltaKept"] = (self.delta.kept_values // 2, self.delta.num_items * (tokens - 1))
        return {name: (_lines(words), count) for name, (words, count) in sizes.items()}

    @property
    def log_sums(self) -> int:
        """Words of the log-sums of a partition."""
        return _lines(self.spec.lane_heads * self.cache.splits)

    def offset_of(self, name: str) -> int:
        """Words in front of a list."""
        before = takewhile(lambda one: one[0] != name, self.lists.items())
        return sum(words * count for _, (words, count) in before)

    @property
    def num_words(self) -> int:
        """Of 64 bits, of all lists."""
        return sum(words * count for words, count in self.lists.values())

    @property
    def delays(self) -> tuple[int, ...]:
        """Cycles from the end of a lane's product to the first look for the input of its next one: QKV, OUT, gate and up, down.

        Words take that long in any case, and a look that comes too early loads the memory system, also for those who write.
        Found by measurement (docs/history/monokernel.md, experts.md); OUT waits for attention.
        """
        has_choice = any(Kind.CHOICE in recipe.shapes for recipe in all_recipes(self.spec))
        by_lanes = _DELAYS | (_DELAYS_OF_EXPERTS if has_choice and self.num_ranks == 1 else {})
        return by_lanes.get(self.num_lanes, by_lanes[4])
