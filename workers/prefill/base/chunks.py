"""Which positions of a prompt are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from kog_dist.model.layers import AttentionMixer, Experts
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

# Rows of a chunk. The smallest takes about as long as reading the weights; larger ones use the matrix units better. Few rows are
# what an agent's conversation goes on with, so small sizes lie close together.
CHUNK_SIZES = (128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 3072, 4096)
# A prompt that is no longer goes through one chunk of so many rows. Its values are kept as sums of two, so products see twice as
# many rows: in short prompts little averages roundings out, and weights are waited for anyway.
EXACT_SIZE = 64
# Chunks of at most so many rows keep streams as such sums, too, and multiply both for queries, keys and values alone.
SPLIT_SIZE = 128
# FLOP of what is queued at a time, whole chunks or parts of one: a stop waits for it. 35 to 40 ms of one H200.
MOST_FLOP = 24e12
# Experts in the FLOP of dense products that take as long: those of a row count so many times, and each weight, which every chunk
# reads, for so many. Of older products in 16 bit on an H100; those of 4 bit take 1.4 to 1.9 and 45 to 75 on H200 (docs/moe.md):
# their parts are shorter than need be.
EXPERT_FACTOR, EXPERT_WEIGHT_FLOP = 1.9, 430
# Parts of a chunk that are queued at a time where it has more: the next one starts without the host.
_PARTS_QUEUED = 2


@dataclass(frozen=True)
class Work:
    """FLOP of a chunk on all ranks together: the same chunks on any number of them. The default is none, so without a limit."""

    row_flop: float = 0.0  # of a row, whatever it sees
    key_flop: float = 0.0  # of a row, for each position that it sees
    most_parts: int = 1  # that a chunk may be cut into: layers
    max_context: int = 0
    chunk_flop: float = 0.0  # of a chunk, however few rows it has
    has_rings: bool = False  # layers keep a ring of positions: a chunk of which some parts were run leaves nothing in the cache

    def of(self, start: int, size: int) -> float:
        """Of `size` rows from position `start` on."""
        return self.chunk_flop + size * (self.row_flop + self.key_flop * (start + size / 2))

    def parts(self, size: int) -> int:
        """Parts, layers by layers, of a chunk of so many rows that has more than MOST_FLOP; 1: none is cut.

        So many that at the end of the context, too, a stop waits for little. All chunks of a size have the same ones.
        """
        most = self.of(max(0, self.max_context - size), size)
        return 1 if most <= MOST_FLOP else min(self.most_parts, ceil(_PARTS_QUEUED * most / MOST_FLOP))

    def has_room_for(self, start: int, size: int) -> bool:
        """Whether a chunk, or each of its parts, has at most MOST_FLOP."""
        flop = self.of(start, size)
        return flop <= MOST_FLOP or flop <= MOST_FLOP * self.parts(size)


NO_LIMIT = Work()


def work_of(spec: ModelSpec, *, has_rings: bool = False) -> Work:
    """Products of the layers, and attention of those that see everything; of experts what takes as long.

    Chunks of one stream can be cut into parts. Where layers keep a ring of positions (`has_rings`) a chunk that is given up
    behind some of them has overwritten what others still need, and the cache holds nothing then. So of models with windowed
    layers only those with experts are cut, which read all of them in every chunk, and would be slow in small ones. Chunks are
    the same without rings. Of delta nets only products count: the rule takes a few percent of their time.
    """
    attention, experts = spec.num_heads * spec.head_dim, spec.experts
    ffn = spec.intermediate_size * (1 if experts is None else EXPERT_FACTOR * experts.per_token)
    ffn += next((part.shared_width for part in spec.kinds if isinstance(part, Experts)), 0)
    values = spec.hidden_size * (2 * attention + 2 * spec.num_kv_heads * spec.head_dim + 3 * ffn)
    num_full = spec.num_layers - len(spec.window_layers)
    if spec.mixed_layers:
        mixers = [layer.mixer for layer in spec.layers]
        num_full = sum(isinstance(mixer, AttentionMixer) for mixer in mixers)
        values = sum(mixer.num_values(spec.hidden_size) for mixer in mixers) // spec.num_layers + spec.hidden_size * 3 * ffn
    weights = 0 if experts is None else 3 * spec.num_layers * experts.num_experts * spec.hidden_size * spec.intermediate_size
    return Work(
        2 * spec.num_layers * values,
        4 * attention * num_full,
        spec.num_layers if spec.has_one_stream and (experts is not None or not spec.window_layers) else 1,
        spec.max_context,
        EXPERT_WEIGHT_FLOP * weights,
        has_rings,
    )


def sizes_within(spec: ModelSpec, sizes: Sequence[int] = CHUNK_SIZES) -> tuple[int, ...]:
    """Those of `sizes`, which ascend, that `chunks` uses for prompts of this model. Where chunks have no parts a large one would
    keep a stop waiting.
    """
    work = work_of(spec)
    fitting = [size for size in sizes if size == sizes[0] or work.of(0, size) <= MOST_FLOP or work.most_parts > 1]
    return tuple(size for size in fitting if size == sizes[0] or size - spec.max_context < sizes[0])


class Chunk(NamedTuple):
    """Neighbouring positions. Rows behind `num_tokens` are padding, whose results nobody reads."""

    start: int
    size: int
    num_tokens: int
    num_parts: int = 1  # that it is queued in, some layers each

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.num_tokens


def chunks(start: int, end: int, sizes: Sequence[int] = CHUNK_SIZES, exact_size: int = 0, work: Work = NO_LIMIT) -> list[Chunk]:
    """The chunks of positions `start` to `end` - 1; `sizes` ascend, and `exact_size` (0: there is none) is not among them. None
    but of the smallest size has more than MOST_FLOP in a part.

    A function of its arguments alone, so that results depend neither on when a request was stopped nor on how fast chunks were
    queued. Largest chunks come first: where a prompt was left at the end of one, going on there gives the chunks that the whole
    prompt has. A rest is padded if that wastes less than the smallest chunk, which takes as long as reading the weights, however
    few rows it has; else cut again.
    """
    if start < end <= exact_size:
        return [Chunk(start, exact_size, end - start)]
    found = []
    while start < end:
        rest = end - start
        allowed = [size for size in sizes if size == sizes[0] or work.has_room_for(start, size)]
        holding = next((size for size in allowed if size >= rest), None)
        if holding is None or holding - rest >= sizes[0]:
            holding = max(size for size in allowed if size <= rest)
        num_parts = 1 if work.of(start, holding) <= MOST_FLOP else work.parts(holding)
        found.append(Chunk(start, holding, min(holding, rest), num_parts))
        start += holding
    return found
