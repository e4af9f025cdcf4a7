"""Turns the steps of a plan into calls without arguments, bound to the arrays that they read and write.

Neighbouring steps of one phase that differ only in the lane become one call, so that exactly rounded operations run over all of
them at once; what depends on the order of additions stays one call per lane (see `lane_math`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode import lane_math
from kog_dist.decode.memory import Memory
from kog_dist.decode.plan import Plan
from kog_dist.decode.sampling import NO_CANDIDATE, Candidate, Sampling, candidate, gumbel, pick
from kog_dist.decode.steps import NONE, Kind, Message, Phase, Site, Step, Value, When
from kog_dist.errors import PlanError
from kog_dist.model.rope import rope_table
from kog_dist.model.weights import RankWeights

if TYPE_CHECKING:
    from kog_dist.decode.interpreter import Exchange

Array = NDArray[Any]
Run = Callable[[], None]


class Cursor:
    """Where the engine is: the token being run, what the caller asked for, and what came out."""

    def __init__(self, plan: Plan, num_lanes: int) -> None:
        self.plan = plan
        self.token = 0  # steps of the engine so far; never restarts, since epochs grow with it
        self.num_positions = 0
        self.token_id = self.position = 0
        self.sampling: Sampling | None = None
        self.lengths = [[0] * num_lanes for _ in range(plan.spec.num_layers)]  # of the KV cache, by layer and own lane
        self.next_token, self.finite = NONE, True
        self.stopped = False  # what this rank wants while the token runs, what rank 0 wanted after it
        self.all_logits: Array | None = None

    def begin(self, token_id: int, position: int, sampling: Sampling | None, stop: bool) -> None:
        """Start the next token. Raises PlanError if the caller asks for a token or position that cannot follow."""
        spec = self.plan.spec
        if not 0 <= token_id < spec.vocab_size:
            raise PlanError(f"token id {token_id} is outside the vocabulary of {spec.vocab_size}")
        if not 0 <= position <= self.num_positions:
            raise PlanError(f"position {position} cannot follow: the KV cache holds {self.num_positions} positions")
        if position >= spec.max_context:
            raise PlanError(f"position {position} exceeds the model's context of {spec.max_context}")
        self.token += 1
        self.token_id, self.position, self.sampling = token_id, position, sampling
        self.next_token, self.finite, self.stopped, self.all_logits = NONE, True, stop, None
        for layer in self.lengths:  # shorter after a reset or a step back; longer if the last token was not finished
            layer[:] = [position] * len(layer)


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive steps that run as one call: one phase and layer, neighbouring lanes."""

    steps: tuple[Step, ...]

    @property
    def phase(self) -> Phase:
        """The phase of all steps."""
        return self.steps[0].phase

    @property
    def when(self) -> When:
        """When all steps run."""
        return self.steps[0].when


def group_steps(steps: Iterable[Step]) -> list[Group]:
    """Join neighbouring steps that differ only in the lane, which grows by one."""
    groups: list[list[Step]] = []
    for step in steps:
        last = groups[-1][-1] if groups else None
        joins = last is not None and last.lane != NONE and step.lane == last.lane + 1 and _pattern(step) == _pattern(last)
        if joins:
            groups[-1].append(step)
        else:
            groups.append([step])
    return [Group(tuple(group)) for group in groups]


def _pattern(step: Step) -> tuple[Any, ...]:
    """A step with its lane taken out of its values."""

    def without_lane(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(value._replace(lane=-2) if value.lane == step.lane else value for value in values)

    return step._replace(lane=0, reads=without_lane(step.reads), writes=without_lane(step.writes))


class _Operands(NamedTuple):
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]


class CallBuilder:
    """Makes the calls of one rank. All arrays are allocated here, none while a token runs."""

    def __init__(
        self, plan: Plan, rank: int, weights: RankWeights, comm: Exchange | None, memory: Memory, cursor: Cursor, kv_dtype: str
    ) -> None:
        self.plan, self.spec, self.rank, self.weights, self.comm = plan, plan.spec, rank, weights, comm
        self.memory, self.cursor, self.kv_dtype = memory, cursor, kv_dtype
        lanes, spec, empty = memory.lanes, plan.spec, memory.empty
        self.normed = empty(len(lanes), spec.hidden_size)
        self.inverse = empty(len(lanes), 1)
        self.eps = np.asarray(spec.norm_eps, memory.dtype)
        self.cos, self.sin = (table.astype(memory.dtype) for table in rope_table(spec, spec.max_context))
        self.tree = empty(max(1, spec.num_lanes // 2), spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.EMBED: self._embed, Phase.QKV: self._qkv, Phase.ATTEND: self._attend, Phase.OUT: self._out,
            Phase.GATE_UP: self._gate_up, Phase.DOWN: self._down, Phase.SUM: self._sum, Phase.TOTAL: self._total,
            Phase.RESIDUAL: self._residual, Phase.FINAL_NORM: self._final_norm, Phase.HEAD_INPUT: self._head_input,
            Phase.HEAD: self._head, Phase.GATHER: self._gather, Phase.SAMPLE: self._sample,
        }  # fmt: skip

    def build(self, group: Group) -> Run:
        """The call of a group."""
        return self.makers[group.phase](group)

    # ---- operands ----
    def _own(self, group: Group) -> slice:
        """Own lanes of a group as rows of the arrays in memory."""
        first = self.memory.local(group.steps[0].lane)
        return slice(first, first + len(group.steps))

    def _operands(self, group: Group, reads: Sequence[Kind], writes: Sequence[Kind]) -> _Operands:
        """Arrays of a group's values: rows of its lanes, or whole for values without a lane. Checks their kinds."""
        step = group.steps[0]
        if [v.kind for v in step.reads] != list(reads) or [v.kind for v in step.writes] != list(writes):
            raise PlanError(f"rank {self.rank}: step {step} does not read {list(reads)} and write {list(writes)}")

        def array(value: Value) -> Array:
            if value.lane == NONE:
                return self.memory.rows(value)
            if value.lane != step.lane:
                raise PlanError(f"rank {self.rank}: step {step} of lane {step.lane} uses {value} of another lane")
            return self.memory.rows(value)[self._own(group)]

        return _Operands(
            tuple(array(v) for v in step.reads if v.kind is not Kind.CACHE),
            tuple(array(v) for v in step.writes if v.kind not in (Kind.CACHE, Kind.TOKEN)),
        )

    def _own_rows(self, step: Step, kind: Kind) -> Array:
        """The array of a kind that has a row for each own lane, all of which the step must read, in order."""
        if [(v.kind, v.lane) for v in step.reads] != [(kind, lane) for lane in self.memory.lanes]:
            raise PlanError(f"rank {self.rank}: step {step} does not read {kind.name} of each lane of {self.memory.lanes}")
        return self.memory.rows(step.reads[0])

    def _norm_weight(self, arrays: Sequence[Array]) -> Array:
        """(D,) if all lanes share the weight, else (n, D)."""
        shared = all(array is arrays[0] for array in arrays)
        return arrays[0] if shared else np.stack(arrays)

    def _lane_weights(self, group: Group, name: str) -> list[Array]:
        return [getattr(self.weights.lanes[step.lane].layers[step.layer], name) for step in group.steps]

    # ---- phases ----
    def _embed(self, group: Group) -> Run:
        (streams,) = self._operands(group, (), (Kind.STREAM,)).writes
        table, cursor = self.weights.embedding, self.cursor

        def run() -> None:
            streams[...] = table[cursor.token_id]

        return run

    def _normed_product(self, group: Group, streams: Array, norm: str, matrix: str, products: Array) -> Run:
        """Norm of the streams, then one product per lane."""
        own = self._own(group)
        weight, eps = self._norm_weight(self._lane_weights(group, norm)), self.eps
        inverse, normed = self.inverse[own], self.normed[own]
        triples = list(zip(self._lane_weights(group, matrix), normed, products, strict=True))

        def run() -> None:
            lane_math.rms_norm(streams, weight, eps, inverse, normed)
            lane_math.matrix_vector(triples)

        return run

    def _qkv(self, group: Group) -> Run:
        operands = self._operands(group, (Kind.STREAM,), (Kind.QUERY, Kind.CACHE))
        spec, layer, cursor, own = self.spec, group.steps[0].layer, self.cursor, self._own(group)
        n, dim, kv = len(group.steps), spec.head_dim, spec.lane_kv_heads
        turned_heads = spec.lane_heads + kv
        projected = self.memory.empty(n, turned_heads + kv, dim)
        product = self._normed_product(group, operands.reads[0], "attention_norm", "wqkv", projected.reshape(n, -1))
        pairs = projected[:, :turned_heads].reshape(n, turned_heads, dim // 2, 2)
        rotated = self.memory.empty(n, turned_heads, dim // 2, 2)
        scratch = self.memory.empty(n, turned_heads, dim // 2)
        new_query, new_key = (part.reshape(n, -1, dim) for part in (rotated[:, : spec.lane_heads], rotated[:, spec.lane_heads :]))
        new_value = projected[:, turned_heads:]
        assert all(np.shares_memory(a, b) for a, b in ((pairs, projected), (new_query, rotated), (new_key, rotated)))
        queries, keys, values = operands.writes[0], self.memory.keys[layer][own], self.memory.values[layer][own]
        scale, cos, sin = self.memory.dtype.type(dim**-0.5), self.cos, self.sin
        rounds, storage = self.kv_dtype != str(self.memory.dtype), self.kv_dtype
        lengths, rank = cursor.lengths[layer], self.rank

        def run() -> None:
            position = cursor.position
            product()
            lane_math.rotate_pairs(pairs, cos[position], sin[position], scratch, rotated)
            np.multiply(new_query, scale, out=queries)
            if rounds:
                lane_math.round_to(new_key, storage)
                lane_math.round_to(new_value, storage)
            for lane in range(own.start, own.stop):
                if lengths[lane] != position:
                    raise PlanError(f"rank {rank}: the cache of layer {layer} is appended to twice at position {position}")
                lengths[lane] = position + 1
            keys[:, :, position] = new_key
            values[:, :, position] = new_value

        return run

    def _attend(self, group: Group) -> Run:
        operands = self._operands(group, (Kind.QUERY, Kind.CACHE), (Kind.MIXED,))
        (queries,), (mixed,) = operands
        spec, layer, cursor, own = self.spec, group.steps[0].layer, self.cursor, self._own(group)
        cached = group.steps[0].reads[1]
        if (cached.number, cached.lane) != (layer, group.steps[0].lane):
            raise PlanError(f"rank {self.rank}: step {group.steps[0]} attends to the cache of another layer or lane")
        keys, values = self.memory.keys[layer][own], self.memory.values[layer][own]
        n = len(group.steps)
        window = spec.window(layer) or spec.max_context
        scores = self.memory.empty(n, spec.lane_heads, min(window, spec.max_context))
        peaks, sums = self.memory.empty(n, spec.lane_heads, 1), self.memory.empty(n, spec.lane_heads, 1)

        def run() -> None:
            stop = cursor.position + 1
            start = max(0, stop - window)
            seen = slice(start, stop)
            lane_math.attend(queries, keys[:, :, seen], values[:, :, seen], scores[:, :, : stop - start], peaks, sums, mixed)

        return run

    def _out(self, group: Group) -> Run:
        (mixed,), (partials,) = self._operands(group, (Kind.MIXED,), (Kind.PARTIAL,))
        flat = mixed.reshape(len(mixed), -1)
        triples = list(zip(self._lane_weights(group, "wo"), flat, partials, strict=True))
        return lambda: lane_math.matrix_vector(triples)

    def _gate_up(self, group: Group) -> Run:
        (streams,), (activations,) = self._operands(group, (Kind.STREAM,), (Kind.ACTIVATION,))
        gate_up = self.memory.empty(len(group.steps), 2 * self.spec.lane_ffn)
        product = self._normed_product(group, streams, "ffn_norm", "w13", gate_up)

        def run() -> None:
            product()
            lane_math.swiglu(gate_up, activations)

        return run

    def _down(self, group: Group) -> Run:
        (activations,), (partials,) = self._operands(group, (Kind.ACTIVATION,), (Kind.PARTIAL,))
        triples = list(zip(self._lane_weights(group, "w2"), activations, partials, strict=True))
        return lambda: lane_math.matrix_vector(triples)

    def _sum(self, group: Group) -> Run:
        step = group.steps[0]
        terms = self._own_rows(step, Kind.STREAM if self.spec.pre_norm_lane_agg and step.site == Site.FINAL else Kind.PARTIAL)
        own_sum, scratch = self.memory.rows(step.writes[0]), self.tree
        publish = self._publisher(step.publishes)

        def run() -> None:
            lane_math.tree_sum(terms, scratch, own_sum)
            publish(own_sum)

        return run

    def _total(self, group: Group) -> Run:
        (own_sum,), (total,) = self._operands(group, (Kind.OWN_SUM,), (Kind.TOTAL,))
        message, comm = group.steps[0].waits, self.comm
        if message is None or comm is None:
            return lambda: np.copyto(total, own_sum)
        address = self._address(message)

        def run() -> None:
            slot, epoch = address()
            np.copyto(total, comm.delayed_reduce(message.mailbox, slot, epoch, own_sum))

        return run

    def _residual(self, group: Group) -> Run:
        kinds = tuple(value.kind for value in group.steps[0].reads)
        operands = self._operands(group, kinds, (Kind.STREAM,))
        streams = operands.reads[0]
        if kinds == (Kind.STREAM, Kind.TOTAL):
            total = operands.reads[1]
            return lambda: _add_in_place(streams, total)
        scratch = self.normed[self._own(group)]
        partials = operands.reads[1]
        if kinds == (Kind.STREAM, Kind.PARTIAL):
            factor = self.memory.dtype.type(math.sqrt(self.spec.num_lanes))

            def run_local() -> None:
                np.multiply(partials, factor, out=scratch)
                np.add(streams, scratch, out=streams)

            return run_local
        if kinds != (Kind.STREAM, Kind.PARTIAL, Kind.TOTAL, Kind.PARTIAL):
            raise PlanError(f"rank {self.rank}: step {group.steps[0]} reads values that no reduction has")
        past_total, past = operands.reads[2:]

        def run_delayed() -> None:
            np.subtract(past_total, past, out=scratch)
            np.add(partials, scratch, out=scratch)
            np.add(streams, scratch, out=streams)

        return run_delayed

    def _final_norm(self, group: Group) -> Run:
        target = group.steps[0].writes[0].kind
        (streams,), (normed,) = self._operands(group, (Kind.STREAM,), (target,))
        weight = self._norm_weight([self.weights.norms[step.lane] for step in group.steps])
        inverse, eps = self.inverse[self._own(group)], self.eps
        return lambda: lane_math.rms_norm(streams, weight, eps, inverse, normed)

    def _head_input(self, group: Group) -> Run:
        step = group.steps[0]
        if step.reads and step.reads[0].kind is Kind.TOTAL:
            (total,), (target,) = self._operands(group, (Kind.TOTAL,), (Kind.HEAD_INPUT,))
            if self.spec.pre_norm_lane_agg:
                weight, eps, inverse = self.weights.norms[0], self.eps, self.memory.empty(1, 1)
                return lambda: lane_math.rms_norm(total[None], weight, eps, inverse, target[None])
            share = self.memory.dtype.type(1.0 / self.spec.num_lanes)  # exact: a power of two
            return lambda: _scale_into(total, share, target)
        own = self._own_rows(step, Kind.PARTIAL).reshape(-1)
        target = self.memory.rows(step.writes[0])
        publish, collect = self._publisher(step.publishes), self._collector(step.waits)

        def run() -> None:
            publish(own)
            np.copyto(target, collect(own).reshape(-1))

        return run

    def _head(self, group: Group) -> Run:
        inputs, targets = [], []
        for step in group.steps:
            if [v.kind for v in (*step.reads, *step.writes)] != [Kind.HEAD_INPUT, Kind.LOGITS]:
                raise PlanError(f"rank {self.rank}: step {step} does not make logits of a head input")
            inputs.append(self.memory.row(step.reads[0]))
            first, last = self.spec.vocab_slice(step.lane)
            targets.append(self.memory.row(step.writes[0])[: last - first])
        heads = [self.weights.heads[step.lane] for step in group.steps]
        triples = [triple for triple in zip(heads, inputs, targets, strict=True) if len(triple[0])]
        return lambda: lane_math.matrix_vector(triples)

    def _gather(self, group: Group) -> Run:
        step, spec, cursor = group.steps[0], self.spec, self.cursor
        own = self._own_rows(step, Kind.LOGITS)
        publish, collect, is_root = self._publisher(step.publishes), self._collector(step.waits), bool(step.writes)
        slices = [spec.vocab_slice(lane) for lane in range(spec.num_lanes)]

        def run() -> None:
            publish(own.reshape(-1))
            if is_root:
                rows = collect(own.reshape(-1)).reshape(spec.num_lanes, -1)
                cursor.all_logits = np.concatenate([row[: last - first] for row, (first, last) in zip(rows, slices, strict=True)])

        return run

    def _sample(self, group: Group) -> Run:
        step, cursor = group.steps[0], self.cursor
        rows = self._own_rows(step, Kind.LOGITS)
        publish, collect = self._publisher(step.publishes), self._collector(step.waits)
        bounds = [self.spec.vocab_slice(lane) for lane in self.memory.lanes]
        slices = [row[: last - first] for row, (first, last) in zip(rows, bounds, strict=True)]
        own = np.zeros(2 * len(slices) + 1, np.float32)
        single = step.waits is None

        def run() -> None:
            sampling = cursor.sampling
            found = [NO_CANDIDATE] * len(slices) if sampling is None else own_candidates(sampling, cursor.position)
            if not single:
                own[0:-1:2], own[1:-1:2] = zip(*found, strict=True)
                own[-1] = cursor.stopped
                publish(own)
                gathered = collect(own)
                cursor.stopped = bool(gathered[0, -1])
                found = [Candidate(float(value), int(token_id)) for value, token_id in gathered[:, :-1].reshape(-1, 2)]
            if sampling is not None:
                best = pick(found)
                cursor.finite, cursor.next_token = not math.isnan(best.value), best.token_id

        def own_candidates(sampling: Sampling, position: int) -> list[Candidate]:
            noise = None
            if sampling.temperature > 0:  # of all own slices at once: they are neighbours
                noise = gumbel(sampling.seed, position, bounds[0][0], bounds[-1][1] - bounds[0][0])
            found = []
            for logits, (first, last) in zip(slices, bounds, strict=True):
                own_noise = None if noise is None else noise[first - bounds[0][0] : last - bounds[0][0]]
                found.append(candidate(logits, first, position, sampling, own_noise))
            return found

        return run

    # ---- messages ----
    def _address(self, message: Message) -> Callable[[], tuple[int, int]]:
        """Slot and epoch of a message of the current token."""
        box, cursor = self.plan.mailbox_by_name[message.mailbox], self.cursor
        per_token, num_slots, sequence = box.per_token, box.num_slots, message.sequence

        def address() -> tuple[int, int]:
            epoch = cursor.token * per_token + sequence
            return epoch % num_slots, epoch

        return address

    def _publisher(self, message: Message | None) -> Callable[[Array], None]:
        comm = self.comm
        if message is None or comm is None:
            return lambda values: None
        address = self._address(message)

        def publish(values: Array) -> None:
            slot, epoch = address()
            comm.publish(message.mailbox, slot, epoch, values)

        return publish

    def _collector(self, message: Message | None) -> Callable[[Array], Array]:
        comm = self.comm
        if message is None or comm is None:
            return lambda own: own
        address = self._address(message)

        def collect(own: Array) -> Array:
            slot, epoch = address()
            return comm.collect(message.mailbox, slot, epoch, own)

        return collect


def _add_in_place(streams: Array, total: Array) -> None:
    np.add(streams, total, out=streams)


def _scale_into(total: Array, share: Any, target: Array) -> None:
    np.multiply(total, share, out=target)
