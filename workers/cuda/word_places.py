"""Which word of the monokernel's memory is whose: for each place of a kind, where its words lie, who writes and who reads them.

The source is the device code: `publish` in finalize_rows.cuh, finalize_normed.cuh, finalize_residual.cuh, finalize_experts.cuh,
`publish_part` in attend_merge.cuh, `mix_parts` in attend_parts.cuh, `first_item` in attend_cache.cuh, `source` in
gather_vector.cuh, sample.cuh. A test compares all of it with what the device code does on a CPU
(tests/unit/test_word_log.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from kog_dist.collectives import mailbox
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.spec import Sublayer
from kog_dist.records import dataclass
from kog_dist.workers.cuda.cache_shape import BATCH
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.word_shape import SUM_COPIES

SOMEBODY = -1


@dataclass(frozen=True, slots=True)
class Word:
    """`offset`: among the rank's words (`KernelShape.word_lists`), which are in the order of that list; or in a rank's heap.

    `is_value`: one value of 32 bits, and a tag as long; else a tag of 16 bits (collectives/device/words.cuh). `source`: None for
    the rank's own memory; in heaps the rank that writes the word. Others read it in theirs, and it too, if `is_own_too`.
    `writer`: SOMEBODY where experts decide, that the tokens of a pass have chosen.
    """

    offset: int
    writer: int  # a thread block
    readers: frozenset[int]
    is_value: bool = False
    source: int | None = None
    is_own_too: bool = True


@dataclass(frozen=True)
class WordPlaces:
    """Of one rank. `lane` counts hosted lanes, `head` KV heads of a lane."""

    shape: KernelShape

    @cached_property
    def _lists(self) -> dict[str, tuple[int, int]]:
        """By name: offset of the first copy, and words from copy to copy."""
        lists, offset = {}, 0
        for name, (words, count) in self.shape.words.lists.items():
            lists[name] = offset, words
            offset += words * count
        return lists

    def _copies(self, name: str, index: int, token: int, place: int, writer: int, *, is_value: bool = False) -> Iterator[Word]:
        """A word at `place` of a token's vector `index` of a list; copy r is for the thread blocks whose number gives r."""
        offset, stride = self._lists[name]
        replicas, tokens, num_ctas = self.shape.words.replicas, self.shape.tokens, self.shape.num_ctas
        for copy in range(replicas):
            readers = frozenset(range(copy, num_ctas, replicas))
            yield Word(offset + ((index * replicas + copy) * tokens + token) * stride + place, writer, readers, is_value)

    @property
    def _owned_rows(self) -> int:
        """Of the residual, by each thread block."""
        return self.shape.ops[Phase.OUT].cta_rows

    # ---- the finaliser's ----
    def stream(self, stream: int, token: int = 0, *, is_middle: bool = False) -> Iterator[Word]:
        """A residual stream behind the FFN, or behind attention: the owner of two rows writes their word."""
        for place in range(self.shape.spec.hidden_size // 2):
            yield from self._copies("Middle" if is_middle else "Stream", stream, token, place, 2 * place // self._owned_rows)

    @property
    def activations_move(self) -> bool:
        """Whether who writes a word of activations follows from the choices of a pass's tokens (phases/union.cuh)."""
        experts = self.shape.experts
        return experts is not None and experts.unites and self.shape.tokens > 1

    def activations(self, lane: int, token: int = 0) -> Iterator[Word]:
        """What GATE_UP makes for a lane. The k-th chosen expert has thread blocks of its own, whichever expert that is.

        In the union of several tokens' choices it has those that its place there gives it.
        """
        shape, columns = self.shape, self.shape.spec.lane_ffn
        owned = shape.ops[Phase.GATE_UP].cta_rows // 2
        for place in range(columns // 2):
            if shape.experts is None:
                column = lane % shape.lanes_of(Phase.GATE_UP) * columns + 2 * place
                yield from self._copies("Activation", lane, token, place, column // owned)
                continue
            for k in range(shape.experts.per_token):
                share = k * shape.experts.ctas + (lane * columns + 2 * place) // owned
                writer = SOMEBODY if self.activations_move else share // shape.experts.shares
                yield from self._copies("Activation", lane, token, k * (columns // 2) + place, writer)

    def shared_activations(self, lane: int, token: int = 0) -> Iterator[Word]:
        """The same of the shared expert, behind those of the chosen ones."""
        experts = self.shape.experts
        assert experts is not None
        behind, owned = experts.per_token * (self.shape.spec.lane_ffn // 2), experts.shared_gate_up().cta_rows // 2
        for place in range(experts.lane_shared // 2):
            writer = (lane * experts.lane_shared + 2 * place) // owned
            yield from self._copies("Activation", lane, token, behind + place, writer)

    def router_logits(self, token: int = 0) -> Iterator[Word]:
        """A word for each expert, and one for the shared one's gate."""
        assert self.shape.experts is not None
        for row in range(self.shape.experts.num_logits):
            yield from self._copies("RouterLogits", 0, token, row, row // self.shape.ops[Phase.ROUTE].cta_rows)

    # ---- between ranks: collectives/device/peers.cuh, kernel_boxes.py ----
    def _to_all(self, name: str, slot: int, begin: int, copies: int, copy_words: int, writers: Sequence[int]) -> Iterator[Word]:
        """Words of every rank in all heaps, in copies, from word `begin` of a row on; `writers`: of each."""
        num_ctas, ranks, boxes = self.shape.num_ctas, self.shape.num_ranks, self.shape.words.boxes
        box = next(box for box in mailbox.place(boxes.specs(), ranks) if box.spec.name == boxes.name_of(name))
        for source in range(ranks):
            first = box.first_word + (slot * ranks + source) * box.row_words + begin
            for copy in range(copies):
                readers = frozenset(range(copy, num_ctas, copies))
                for i, writer in enumerate(writers):
                    yield Word(first + copy * copy_words + i, writer, readers, name == "candidates", source)

    @property
    def _row_owners(self) -> list[int]:
        """Of each word of a stream."""
        return [2 * word // self._owned_rows for word in range(self.shape.spec.hidden_size // 2)]

    def last_stream(self, lane: int) -> Iterator[Word]:
        """The last stream of a lane of each rank, for the LM head of all."""
        copy_words, replicas = self.shape.words.boxes.stream_copy_words, self.shape.words.replicas
        yield from self._to_all("streams", 0, lane * replicas * copy_words, replicas, copy_words, self._row_owners)

    def direct_sums(self, sublayer: str) -> Iterator[Word]:
        """Sums of both ranks for all matrix warps of both."""
        yield from self._to_all(sublayer.lower(), 0, 0, SUM_COPIES, self.shape.spec.hidden_size // 2, self._row_owners)

    def sums(self, sublayer: str, layer: int, token: int = 0) -> Iterator[Word]:
        """Sums of each rank for the owners of the same rows on its peers: a word for each row."""
        slot = self.shape.words.boxes.summed_layers(Sublayer[sublayer]).index(layer)
        owners = [row // self._owned_rows for row in range(self.shape.spec.hidden_size)]
        for word in self._to_all(sublayer.lower(), slot, token * len(owners), 1, 0, owners):
            yield replace(word, readers=frozenset({word.writer}), is_value=True, is_own_too=False)

    def candidates(self, slot: int, token: int = 0) -> Iterator[Word]:
        """Two words of each thread block."""
        if self.shape.num_ranks > 1:
            writers = [word // 2 for word in range(2 * self.shape.num_ctas)]
            words, copy_words = self.shape.words, self.shape.words.boxes.candidate_copy_words
            begin, apart = token * copy_words, self.shape.tokens * copy_words
            yield from self._to_all("candidates", slot, begin, words.replicas, apart, writers)
            return
        for place in range(2 * self.shape.num_ctas):
            yield from self._copies("Candidate", 0, token, place, place // 2, is_value=True)

    def query(self, layer: int, lane: int, head: int, position: int, token: int = 0) -> Iterator[Word]:
        """The query heads of a KV head, for all its splits."""
        spec, readers = self.shape.spec, set[int]()
        for partition in range(self.num_partitions(layer, position)):
            readers |= {self.item_cta(layer, lane, head, split, partition) for split in range(self.shape.splits)}
        rows = self._group * spec.head_dim
        yield from self._qkv(lane, token, range(head * rows, (head + 1) * rows, 2), frozenset(readers))

    def new_row(self, layer: int, lane: int, head: int, position: int, token: int = 0) -> Iterator[Word]:
        """Key and value of the position, for the split that keeps them."""
        spec, partition = self.shape.spec, self.newest_partition(layer, position)
        readers = frozenset({self.item_cta(layer, lane, head, position % self.shape.splits, partition)})
        first, rows = spec.lane_heads * spec.head_dim + head * spec.head_dim, spec.lane_kv_heads * spec.head_dim
        for begin in (first, first + rows):
            yield from self._qkv(lane, token, range(begin, begin + spec.head_dim, 2), readers)

    def gates(self, layer: int, lane: int, head: int, position: int, token: int = 0) -> Iterator[Word]:
        """Of the query heads of a KV head, for who mixes what its splits have made."""
        spec, rows = self.shape.spec, self._group * self.shape.spec.head_dim
        first = (spec.lane_heads + 2 * spec.lane_kv_heads) * spec.head_dim + head * rows
        for unit in range(rows // 4):
            begin, mixer = first + 4 * unit, self._mixer(layer, lane, head, unit)
            yield from self._qkv(lane, token, range(begin, begin + 4, 2), frozenset({mixer}))

    def _qkv(self, lane: int, token: int, rows: range, readers: frozenset[int]) -> Iterator[Word]:
        offset, stride = self._lists["Qkv"]
        first = lane % self.shape.lanes_of(Phase.QKV) * self.shape.spec.lane_qkv_rows
        for row in rows:
            yield Word(
                offset + (lane * self.shape.tokens + token) * stride + row // 2,
                (first + row) // self.shape.ops[Phase.QKV].cta_rows,
                readers,
            )

    # ---- attention's ----
    def num_partitions(self, layer: int, position: int) -> int:
        """Partitions of a split that the context has reached."""
        shape = self.shape
        if shape.cache.num_partitions == 1 or layer not in shape.cache.full_layers:
            return 1
        return position // self.partition_positions + 1

    def newest_partition(self, layer: int, position: int) -> int:
        """The one that gets the position's row."""
        return self.num_partitions(layer, position) - 1

    @property
    def partition_positions(self) -> int:
        """Positions of a partition, of all splits."""
        return self.shape.cache.batches_of_partition * BATCH * self.shape.splits

    def item_cta(self, layer: int, lane: int, head: int, split: int, partition: int) -> int:
        """The thread block that has a split."""
        shape = self.shape
        items = shape.spec.lane_kv_heads * shape.splits
        first = (layer * shape.num_lanes + lane) * items + partition * (shape.num_ctas // shape.cache.num_partitions)
        return (first + head * shape.splits + split) % shape.num_ctas

    @property
    def _group(self) -> int:
        return self.shape.spec.lane_heads // self.shape.spec.lane_kv_heads

    def _mixer(self, layer: int, lane: int, head: int, unit: int) -> int:
        """The thread block that mixes four values of a KV head's query heads: number `unit` of these."""
        units = self._group * self.shape.spec.head_dim // 4
        share = unit // -(-units // self.shape.splits)
        return self.item_cta(layer, lane, head, share, 0)

    def parts(self, layer: int, lane: int, head: int, partition: int, token: int = 0) -> Iterator[Word]:
        """Outputs and log-sum-exps of a KV head's splits."""
        shape, head_units = self.shape, self.shape.spec.head_dim // 4
        (parts, parts_stride), (sums, sums_stride) = self._lists["Part"], self._lists["LogSum"]
        parts += (lane * self.shape.tokens + token) * parts_stride + partition * (
            shape.spec.lane_heads * shape.spec.head_dim * shape.splits // 2
        )
        sums += (lane * self.shape.tokens + token) * sums_stride + partition * shape.words.log_sums
        for query_head in range(self._group):
            units = range(query_head * head_units, (query_head + 1) * head_units)
            mixers = [self._mixer(layer, lane, head, unit) for unit in units]
            for split in range(shape.splits):
                writer = self.item_cta(layer, lane, head, split, partition)
                row = (head * self._group + query_head) * shape.splits + split
                for place, mixer in enumerate(mixers):
                    for word in range(2):
                        yield Word(parts + (row * head_units + place) * 2 + word, writer, frozenset({mixer}))
                yield Word(sums + row, writer, frozenset(mixers), is_value=True)

    def attended(self, layer: int, lane: int, head: int, token: int = 0) -> Iterator[Word]:
        """Mixed outputs of a KV head's query heads."""
        units, delta = self._group * self.shape.spec.head_dim // 4, self.shape.delta
        for unit in range(units):
            writer = self._mixer(layer, lane, head, unit)
            if delta is not None and layer in delta.layers:
                value_head, column = divmod(4 * (head * units + unit), delta.net.value_dim)
                writer = self._delta_cta(layer, lane, value_head, column * delta.slices // delta.net.value_dim)
            for word in range(2):
                yield from self._copies("Attended", lane, token, (head * units + unit) * 2 + word, writer)

    # ---- delta nets' ----
    def _delta_cta(self, layer: int, lane: int, head: int, slice_idx: int) -> int:
        """The thread block that has a slice of a value head."""
        shape = self.shape
        assert shape.delta is not None
        first = (layer * shape.num_lanes + lane) * shape.delta.items
        return (first + head * shape.delta.slices + slice_idx) % shape.num_ctas

    def delta_ctas(self, layer: int, lane: int) -> set[int]:
        """The thread blocks that have an item of a delta net."""
        delta = self.shape.delta
        assert delta is not None
        return {self._delta_cta(layer, lane, head, part) for head in range(delta.heads) for part in range(delta.slices)}

    def _delta_readers(self, layer: int, lane: int, row: int) -> set[int]:
        """The thread blocks whose items take a row of a lane's input."""
        delta = self.shape.delta
        assert delta is not None
        net, keys, values = delta.net, delta.key_heads * delta.net.key_dim, delta.heads * delta.net.value_dim
        heads, slices = range(0), range(delta.slices)
        if row < 2 * keys:
            together, key_head = delta.heads // delta.key_heads, row % keys // net.key_dim
            heads = range(key_head * together, (key_head + 1) * together)
        elif row < 2 * keys + 2 * values:
            head, column = divmod((row - 2 * keys) % values, net.value_dim)
            heads, slice_idx = range(head, head + 1), column * delta.slices // net.value_dim
            slices = range(slice_idx, slice_idx + 1)
        else:
            head = (row - 2 * keys - 2 * values) % delta.heads
            heads = range(head, head + 1)
        return {self._delta_cta(layer, lane, head, slice_idx) for head in heads for slice_idx in slices}

    def delta_inputs(self, layer: int, lane: int, token: int = 0) -> Iterator[Word]:
        """All that a delta net projects, for the items of its heads."""
        delta = self.shape.delta
        assert delta is not None
        offset, stride = self._lists["DeltaIn"]
        first = lane % self.shape.lanes_of(Phase.DELTA_IN) * delta.matrix_rows
        for row in range(0, delta.rows, 2):
            readers = frozenset(self._delta_readers(layer, lane, row) | self._delta_readers(layer, lane, row + 1))
            place = offset + (lane * self.shape.tokens + token) * stride + row // 2
            yield Word(place, (first + delta.matrix_row(row)) // self.shape.ops[Phase.DELTA_IN].cta_rows, readers)

    def squares(self, layer: int, lane: int, token: int = 0) -> Iterator[Word]:
        """Sums of squares of a delta net's outputs."""
        delta = self.shape.delta
        assert delta is not None
        for place in range(delta.heads * delta.square_words):
            head, of_head = divmod(place, delta.square_words)
            writer = self._delta_cta(layer, lane, head, of_head * delta.slices // delta.square_words)
            yield from self._copies("DeltaSquares", lane, token, place, writer, is_value=True)
