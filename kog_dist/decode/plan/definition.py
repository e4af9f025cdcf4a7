"""What every value of a token must be, written straight from the model's formula, without ranks, steps or messages.

The validator compares a plan with this. Values are terms: an operation and the terms that it was applied to, numbered so that
equal terms have equal numbers. Sums over lanes are binary trees of adjacent pairs, whatever the world size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache

from kog_dist.decode.plan.steps import NONE, Kind, Site, Value
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer

Term = int
Known = dict[Value, Term]


class Definition:
    """The terms of the last token of any sequence. One instance per spec; see `definition`."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._numbers: dict[tuple[Hashable, ...], Term] = {}
        self._known: dict[tuple[Hashable, ...], dict[Value, Term]] = {}

    def term(self, *operation: Hashable) -> Term:
        """The number of a term: (name, arguments)."""
        return self._numbers.setdefault(operation, len(self._numbers))

    def tree(self, terms: Sequence[Term]) -> Term:
        """Binary tree of adjacent pairs; the number of terms is a power of two."""
        level = list(terms)
        while len(level) > 1:
            level = [self.term("+", a, b) for a, b in zip(level[0::2], level[1::2], strict=True)]
        return level[0]

    def empty_cache(self, layer: int, lane: int) -> Term:
        """The KV cache before the first token."""
        return self.term("empty cache", layer, lane)

    def empty_state(self, layer: int, lane: int) -> Term:
        """A delta net's before the first token."""
        return self.term("empty state", layer, lane)

    def values(self, tokens: tuple[Hashable, ...]) -> dict[Value, Term]:
        """All values of the last of these tokens, behind the others."""
        if tokens not in self._known:
            self._known[tokens] = self._values(tokens[-1], self.values(tokens[:-1]) if len(tokens) > 1 else {})
        return self._known[tokens]

    def _values(self, token: Hashable, before: dict[Value, Term]) -> dict[Value, Term]:
        spec = self.spec
        lanes = range(spec.num_lanes)
        known: dict[Value, Term] = {}
        h = [self.term("embedding", token) for _ in lanes]
        self._know_streams(known, 0, h)
        partials: dict[tuple[int, int], list[Term]] = {}
        for layer in range(spec.num_layers):
            parts = spec.layers[layer].mixer, spec.layers[layer].ffn
            for sublayer in Sublayer:
                partials[sublayer, layer] = SUBLAYERS[type(parts[sublayer])](self, known, before, layer, h)
                h = self._reduce(known, partials, layer, sublayer, h)
        self._head(known, h)
        return known

    def attention(self, known: Known, before: Known, layer: int, h: list[Term]) -> list[Term]:
        """Each lane's output of softmax attention."""
        term, outputs, mixer = self.term, [], self.spec.layers[layer].mixer
        assert isinstance(mixer, AttentionMixer)
        for lane, stream in enumerate(h):
            cache = Value(Kind.CACHE, layer, lane)
            old = before[cache] if before else self.empty_cache(layer, lane)
            known[Value(Kind.QUERY, layer, lane)] = query = term("query", layer, lane, stream)
            known[cache] = appended = term("append", layer, lane, old, stream)
            gates = []
            if mixer.gated:
                known[Value(Kind.GATE, layer, lane)] = gate = term("gate", layer, lane, stream)
                gates = [gate]
            known[Value(Kind.MIXED, layer, lane)] = mixed = term("attend", layer, lane, query, appended, *gates)
            outputs.append(self._out(known, layer, lane, mixed))
        return outputs

    def delta(self, known: Known, before: Known, layer: int, h: list[Term]) -> list[Term]:
        """Of a delta net: a state made of the one before and of what this token projects, and read with the same."""
        term, outputs = self.term, []
        for lane, stream in enumerate(h):
            state = Value(Kind.STATE, layer, lane)
            old = before[state] if before else self.empty_state(layer, lane)
            known[Value(Kind.DELTA_INPUT, layer, lane)] = projected = term("delta_in", layer, lane, stream)
            known[state] = changed = term("state", layer, lane, old, projected)
            known[Value(Kind.MIXED, layer, lane)] = mixed = term("delta", layer, lane, changed, projected)
            outputs.append(self._out(known, layer, lane, mixed))
        return outputs

    def _out(self, known: Known, layer: int, lane: int, mixed: Term) -> Term:
        known[Value(Kind.PARTIAL, layer, lane, Site.ATTENTION)] = partial = self.term("out", layer, lane, mixed)
        return partial

    def ffn(self, known: Known, before: Known, layer: int, h: list[Term]) -> list[Term]:
        """Each lane's output of an FFN."""
        return [self._mlp(known, layer, lane, stream) for lane, stream in enumerate(h)]

    def experts(self, known: Known, before: Known, layer: int, h: list[Term]) -> list[Term]:
        """Of experts, which are chosen by the one stream, so that all ranks choose from the same term."""
        (shared,) = set(h)
        known[Value(Kind.ROUTER_LOGITS, layer)] = logits = self.term("route", layer, shared)
        known[Value(Kind.CHOICE, layer)] = choice = self.term("select", layer, logits)
        return [self._mlp(known, layer, lane, stream, choice) for lane, stream in enumerate(h)]

    def _mlp(self, known: Known, layer: int, lane: int, h: Term, *chosen: Term) -> Term:
        ffn, term = self.spec.layers[layer].ffn, self.term
        known[Value(Kind.ACTIVATION, layer, lane)] = activation = term("gate_up", layer, lane, h, *chosen)
        activations = [activation]
        if isinstance(ffn, Experts) and ffn.shared_width:
            known[Value(Kind.SHARED_ACTIVATION, layer, lane)] = shared = term("shared gate_up", layer, lane, h, *chosen)
            activations.append(shared)
        known[Value(Kind.PARTIAL, layer, lane, Site.MLP)] = partial = term("down", layer, lane, *activations, *chosen)
        return partial

    def _reduce(
        self, known: dict[Value, Term], partials: dict[tuple[int, int], list[Term]], layer: int, sublayer: Sublayer, h: list[Term]
    ) -> list[Term]:
        """The streams after one sublayer (LANEFORMER's three cases)."""
        spec, term = self.spec, self.term
        mode, own = spec.reduce_mode(layer, sublayer), partials[sublayer, layer]
        if mode is ReduceMode.BLOCKING:
            total = self._total(known, partials, layer, sublayer)
            after = [term("h + total", h[lane], total) for lane in range(spec.num_lanes)]
        elif mode is ReduceMode.LOCAL:
            after = [term("h + sqrt(L) p", h[lane], own[lane]) for lane in range(spec.num_lanes)]
        else:
            past = partials[sublayer, layer - spec.delay]
            total = self._total(known, partials, layer - spec.delay, sublayer)
            after = [term("h + (p + (total - past p))", h[lane], own[lane], total, past[lane]) for lane in range(spec.num_lanes)]
        self._know_streams(known, 2 * layer + sublayer + 1, after)
        return after

    def _know_streams(self, known: dict[Value, Term], revision: int, h: list[Term]) -> None:
        """Of every lane, or the one that all share: then the lanes' terms are equal."""
        if self.spec.has_one_stream:
            (known[Value(Kind.STREAM, revision)],) = set(h)
        else:
            known.update({Value(Kind.STREAM, revision, lane): term for lane, term in enumerate(h)})

    def _total(self, known: dict[Value, Term], partials: dict[tuple[int, int], list[Term]], layer: int, site: Sublayer) -> Term:
        total = self.tree(partials[site, layer])
        known[Value(Kind.TOTAL, layer, NONE, site)] = total
        return total

    def _head(self, known: dict[Value, Term], h: list[Term]) -> None:
        spec, term = self.spec, self.term
        lanes = range(spec.num_lanes)
        normed = [term("final norm", NONE if spec.has_one_stream else lane, h[lane]) for lane in lanes]
        shared = Value(Kind.HEAD_INPUT)
        if spec.has_one_stream:
            known[shared], inputs = normed[0], normed
        elif spec.head_type is HeadType.VOCAB_PARALLEL:
            known.update({Value(Kind.HEAD_INPUT, lane=lane): normed[lane] for lane in lanes})
            inputs = normed
        else:
            if not spec.pre_norm_lane_agg:
                known.update({Value(Kind.PARTIAL, NONE, lane, Site.FINAL): normed[lane] for lane in lanes})
            if spec.head_type is HeadType.LANE:
                known[shared] = term("concatenation", *normed)
            else:
                total = self.tree(h if spec.pre_norm_lane_agg else normed)
                known[Value(Kind.TOTAL, NONE, NONE, Site.FINAL)] = total
                known[shared] = term("norm of total" if spec.pre_norm_lane_agg else "mean", total)
            inputs = [known[shared]] * spec.num_lanes
        logits = [term("head", lane, inputs[lane]) for lane in lanes]
        known.update({Value(Kind.LOGITS, lane=lane): logits[lane] for lane in lanes})
        known[Value(Kind.ALL_LOGITS)] = term("all logits", *logits)
        known[Value(Kind.TOKEN)] = term("choice", *logits)


# Of each kind of mixer and FFN: what its values are, given the streams; the terms of the lanes' outputs.
SUBLAYERS: dict[type, Callable[[Definition, Known, Known, int, list[Term]], list[Term]]] = {
    AttentionMixer: Definition.attention,
    DeltaNet: Definition.delta,
    Ffn: Definition.ffn,
    Experts: Definition.experts,
}


@lru_cache(maxsize=64)
def definition(spec: ModelSpec) -> Definition:
    """The definition of a spec, shared by all who ask for it."""
    return Definition(spec)
