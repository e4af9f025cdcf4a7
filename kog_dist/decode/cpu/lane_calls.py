"""The calls of a rank that stay within its lanes: bound to the arrays that they read and write, without arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kog_dist.decode.cpu import attention, host_library, lane_math
from kog_dist.decode.cpu.cursor import Cursor
from kog_dist.decode.cpu.groups import Finder, Group
from kog_dist.decode.kv_formats import KV_FORMATS
from kog_dist.decode.plan.steps import Kind, Phase, Site
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.model.layers import AttentionMixer
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weights import RankWeights, widened

Run = Callable[[], None]


def rotation_angles(spec: ModelSpec, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """By position, cosines (positions, 1, rotary_dim / 2, 2), and sines with the signs that a turn has."""
    cos, sin = (table.astype(dtype)[:, None] for table in rope_table(spec, spec.max_context))
    return np.stack((cos, cos), axis=3), np.stack((-sin, sin), axis=3)


class LaneCalls:
    """Makes the calls of the phases that exchange nothing, for passes of `find.num_tokens` tokens.

    All arrays are allocated here, none while a pass runs.
    """

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, kv_dtype: str) -> None:
        self.find, self.memory, self.rank, self.weights = find, find.memory, find.rank, weights
        self.spec, self.cursor, self.kv_dtype = cursor.plan.spec, cursor, kv_dtype
        spec, memory = self.spec, self.memory
        self.num_tokens = find.num_tokens
        self.normed = memory.empty(len(memory.lanes), self.num_tokens, spec.hidden_size)
        self.inverse = memory.empty(len(memory.lanes), self.num_tokens, 1)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.EMBED: self._embed,
            Phase.QKV: self._qkv,
            Phase.ATTEND: self._attend,
            Phase.OUT: self._out,
            Phase.GATE_UP: self._gate_up,
            Phase.DOWN: self._down,
            Phase.RESIDUAL: self._residual,
            Phase.FINAL_NORM: self._final_norm,
            Phase.HEAD: self._head,
        }

    def _norm_weight(self, arrays: Sequence[Array]) -> Array:
        """(D,) if all lanes share the weight, else (n, 1, D)."""
        shared = all(array is arrays[0] for array in arrays)
        return arrays[0] if shared else np.stack(arrays)[:, None]

    def lane_weights(self, group: Group, name: str) -> list[Array]:
        """What each lane of a group has under a name of `LayerWeights`."""
        return [getattr(self.weights.lanes[step.lane].layers[step.layer], name) for step in group.steps]

    def _embed(self, group: Group) -> Run:
        (streams,) = self.find.of(group, (), (Kind.STREAM,)).writes
        table, cursor = self.weights.embedding, self.cursor

        def run() -> None:
            streams[...] = widened(table[cursor.token_ids])

        return run

    def _normed_product(self, group: Group, streams: Array, norm: str, matrix: str, products: Array) -> Run:
        """Norm of the streams (n, m, D), or of the one that the lanes share (m, D), then one product per lane."""
        weight, eps = self._norm_weight(self.lane_weights(group, norm)), self.spec.norm_eps
        inverse, normed = self._scratch(group, streams)
        inputs = normed if streams.ndim > 2 else [normed] * len(group.steps)
        multiply = self._products(self.lane_weights(group, matrix), inputs, products)

        def run() -> None:
            lane_math.rms_norm(streams, weight, eps, inverse, normed)
            multiply()

        return run

    def _products(self, matrices: Sequence[Array], vectors: Sequence[Array] | Array, results: Sequence[Array] | Array) -> Run:
        return lane_math.products(list(zip(matrices, vectors, results, strict=True)), self.memory.scratch)

    def _scratch(self, group: Group, streams: Array) -> tuple[Array, Array]:
        """`inverse` and `normed` for a norm of the streams of a group, or of the one that all lanes share."""
        own = self.find.own(group) if streams.ndim > 2 else 0
        return self.inverse[own], self.normed[own]

    def _qkv(self, group: Group) -> Run:
        mixer, cursor = self._mixer(group), self.cursor
        gates = (Kind.GATE,) if mixer.gated else ()
        operands = self.find.of(group, (Kind.STREAM,), (Kind.QUERY, Kind.CACHE, *gates))
        n, m, dim, kv = len(group.steps), self.num_tokens, mixer.head_dim, mixer.lane_kv_heads(self.spec.num_lanes)
        heads, turned = mixer.num_heads // self.spec.num_lanes, mixer.rotary_dim or dim
        turned_heads = heads + kv
        projected = self.memory.empty(n, m, turned_heads + kv + (heads if gates else 0), dim)
        product = self._normed_product(group, operands.reads[0], "attention_norm", "wqkv", projected.reshape(n, m, -1))
        bias, norm_heads = self._qkv_bias(group, projected), self._qk_norm(group, projected[:, :, :turned_heads])
        in_pairs = n, m, turned_heads, turned // 2, 2
        pairs = projected[:, :, :turned_heads, :turned].reshape(in_pairs)
        whole = self.memory.empty(n, m, turned_heads, dim)
        rotated, scratch = whole[..., :turned].reshape(in_pairs), self.memory.empty(*in_pairs)
        unturned = projected[:, :, :turned_heads, turned:], whole[..., turned:]
        new_query, new_key = whole[:, :, :heads], whole[:, :, heads:]
        new_value, new_gate = projected[:, :, turned_heads : turned_heads + kv], projected[:, :, turned_heads + kv :]
        assert all(np.shares_memory(a, b) for a, b in ((pairs, projected), (rotated, whole)))
        queries, *own_gates = operands.writes
        scale = self.memory.dtype.type(dim**-0.5)
        append = self._append(group, new_key, new_value)

        def run() -> None:
            product()
            if bias is not None:
                np.add(projected, bias, out=projected)
            if norm_heads is not None:
                norm_heads()
            lane_math.rotate_pairs(pairs, cursor.cos, cursor.sin, scratch, rotated)
            if turned < dim:
                np.copyto(unturned[1], unturned[0])
            np.multiply(new_query, scale, out=queries)
            for gate in own_gates:
                lane_math.sigmoid(new_gate, gate)
            append()

        return run

    def _append(self, group: Group, new_key: Array, new_value: Array) -> Run:
        """The call that puts new keys and values (n, m, kv_heads, head_dim) into the KV cache, as its type keeps them."""
        layer, cursor, own, rank = group.steps[0].layer, self.cursor, self.find.own(group), self.rank
        keys, values = ([cache[own] for cache in caches[layer]] for caches in (self.memory.keys, self.memory.values))
        form = KV_FORMATS.get(self.kv_dtype)
        plain = partial(lane_math.round_to, storage=self.kv_dtype)
        enter_keys, enter_values = form or (plain, plain)
        rounds = self.kv_dtype != str(self.memory.dtype)
        rounded = self.memory.empty(2, *new_key.shape)
        key, value = (rounded[0], rounded[1]) if rounds else (new_key, new_value)
        appended, by_head = cursor.appended[layer], (key.swapaxes(1, 2), value.swapaxes(1, 2))

        def run() -> None:
            if rounds:
                rounded[0], rounded[1] = new_key, new_value
                enter_keys(key)
                enter_values(value)
            for lane in range(own.start, own.stop):
                if appended[lane] == cursor.token:
                    raise PlanError(
                        f"rank {rank}: the cache of layer {layer} is appended to twice at position {cursor.spans[0].position}"
                    )
                appended[lane] = cursor.token
            for cache, position, first, count in cursor.spans:
                stop, tokens = position + count, slice(first, first + count)
                keys[cache][:, :, position:stop] = by_head[0][:, :, tokens]
                values[cache][:, :, position:stop] = by_head[1][:, :, tokens]

        return run

    def _qkv_bias(self, group: Group, projected: Array) -> Array | None:
        """What is added to the lanes' projected heads (n, m, heads, head_dim); None in a model without."""
        if not self._mixer(group).qkv_bias:
            return None
        return np.stack(self.lane_weights(group, "qkv_bias")).reshape(len(projected), 1, *projected.shape[2:])

    def _qk_norm(self, group: Group, heads: Array) -> Run | None:
        """The call that norms the lanes' query and key heads (n, m, heads, head_dim) in place; None in a model without."""
        mixer, lanes = self._mixer(group), self.spec.num_lanes
        if not mixer.qk_norm:
            return None
        q_norm, k_norm = (self.lane_weights(group, name)[0] for name in ("q_norm", "k_norm"))
        weight = np.stack([q_norm] * (mixer.num_heads // lanes) + [k_norm] * mixer.lane_kv_heads(lanes))
        inverse, eps = self.memory.empty(*heads.shape[:3], 1), self.spec.norm_eps
        return lambda: lane_math.rms_norm(heads, weight, eps, inverse, heads)

    def _attend(self, group: Group) -> Run:
        mixer = self._mixer(group)
        if not mixer.gated:
            (queries,), (mixed,) = self.find.of(group, (Kind.QUERY, Kind.CACHE), (Kind.MIXED,))
            return self._attend_plainly(group, mixer, queries, mixed)
        (queries, gates), (mixed,) = self.find.of(group, (Kind.QUERY, Kind.CACHE, Kind.GATE), (Kind.MIXED,))
        attend = self._attend_plainly(group, mixer, queries, mixed)

        def run() -> None:
            attend()
            np.multiply(mixed, gates, out=mixed)

        return run

    def _mixer(self, group: Group) -> AttentionMixer:
        """What the attention of a group's layer is."""
        mixer = self.spec.layers[group.steps[0].layer].mixer
        if not isinstance(mixer, AttentionMixer):
            raise PlanError(f"rank {self.rank}: step {group.steps[0]} is attention's, which layer {group.steps[0].layer} has not")
        return mixer

    def _attend_plainly(self, group: Group, mixer: AttentionMixer, queries: Array, mixed: Array) -> Run:
        """Without gates."""
        spec, layer, cursor, own = self.spec, group.steps[0].layer, self.cursor, self.find.own(group)
        cached = group.steps[0].reads[1]
        if (cached.number, cached.lane) != (layer, group.steps[0].lane):
            raise PlanError(f"rank {self.rank}: step {group.steps[0]} attends to the cache of another layer or lane")
        keys, values = ([cache[own] for cache in caches[layer]] for caches in (self.memory.keys, self.memory.values))
        window = min(mixer.window or spec.max_context, spec.max_context)
        sinks = np.stack(self.lane_weights(group, "sinks")) if mixer.sinks else None
        if self.memory.dtype == np.float32 and host_library.library() is not None:
            operands = attention.AttentionOperands(queries, keys, values, sinks, mixed)
            call = attention.bound(operands, window, self.memory.scratch)

            def run_in_c() -> None:
                for cache, position, first, count in cursor.spans:
                    call(cache, position, first, count)

            return run_in_c
        kv_heads, m = mixer.lane_kv_heads(spec.num_lanes), self.num_tokens
        heads = len(group.steps), kv_heads, mixer.num_heads // spec.num_lanes // kv_heads
        queries, mixed = (array.reshape(heads[0], m, *heads[1:], mixer.head_dim).swapaxes(0, 1) for array in (queries, mixed))
        scores, peaks, sums = (self.memory.empty(*heads, width) for width in (window, 1, 1))
        sinks = None if sinks is None else sinks.reshape(sums.shape)
        ones = self.memory.empty(window)
        ones[:] = 1

        def run() -> None:
            for cache, position, first, count in cursor.spans:
                for idx in range(count):
                    stop = position + idx + 1
                    start = max(0, stop - window)
                    seen, n, query, out = slice(start, stop), stop - start, queries[first + idx], mixed[first + idx]
                    seen_keys, seen_values = keys[cache][:, :, seen], values[cache][:, :, seen]
                    lane_math.attend(query, seen_keys, seen_values, scores[..., :n], ones[:n], peaks, sums, out, sinks)

        return run

    def _out(self, group: Group) -> Run:
        (mixed,), (partials,) = self.find.of(group, (Kind.MIXED,), (Kind.PARTIAL,))
        return self._products(self.lane_weights(group, "wo"), mixed.reshape(*mixed.shape[:2], -1), partials)

    def _gate_up(self, group: Group) -> Run:
        (streams,), (activations,) = self.find.of(group, (Kind.STREAM,), (Kind.ACTIVATION,))
        width = activations.shape[2]
        gate_up = self.memory.empty(len(group.steps), self.num_tokens, 2 * width)
        product = self._normed_product(group, streams, "ffn_norm", "w13", gate_up)
        activate = lane_math.activation(gate_up.reshape(-1, 2 * width), activations.reshape(-1, width))

        def run() -> None:
            product()
            activate()

        return run

    def _down(self, group: Group) -> Run:
        (activations,), (partials,) = self.find.of(group, (Kind.ACTIVATION,), (Kind.PARTIAL,))
        return self._products(self.lane_weights(group, "w2"), activations, partials)

    def _residual(self, group: Group) -> Run:
        kinds = tuple(value.kind for value in group.steps[0].reads)
        operands = self.find.of(group, kinds, (Kind.STREAM,))
        streams = operands.reads[0]
        if kinds == (Kind.STREAM, Kind.TOTAL):
            total, step = operands.reads[1], group.steps[0]
            bias = self.weights.lanes[self.memory.lanes[0]].layers[step.layer].out_bias
            if bias is not None and step.site == Site.ATTENTION:
                return lambda: _add_in_place(streams, total, bias)
            return lambda: _add_in_place(streams, total)
        scratch = self.normed[self.find.own(group)]
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
        (streams,), (normed,) = self.find.of(group, (Kind.STREAM,), (target,))
        lanes = self.memory.lanes if streams.ndim == 2 else [step.lane for step in group.steps]
        weight, eps = self._norm_weight([self.weights.norms[lane] for lane in lanes]), self.spec.norm_eps
        inverse, _ = self._scratch(group, streams)
        return lambda: lane_math.rms_norm(streams, weight, eps, inverse, normed)

    def _head(self, group: Group) -> Run:
        inputs, targets = [], []
        for step in group.steps:
            if [v.kind for v in (*step.reads, *step.writes)] != [Kind.HEAD_INPUT, Kind.LOGITS]:
                raise PlanError(f"rank {self.rank}: step {step} does not make logits of a head input")
            inputs.append(self.memory.of_lane(step.reads[0], self.num_tokens))
            first, last = self.spec.vocab_slice(step.lane)
            targets.append(self.memory.of_lane(step.writes[0], self.num_tokens)[:, : last - first])
        heads = [self.weights.heads[step.lane] for step in group.steps]
        triples = [triple for triple in zip(heads, inputs, targets, strict=True) if len(triple[0])]
        return lane_math.products(triples, self.memory.scratch)


def _add_in_place(streams: Array, *terms: Array) -> None:
    for term in terms:
        np.add(streams, term, out=streams)
