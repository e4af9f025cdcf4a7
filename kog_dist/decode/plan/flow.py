"""Runs a plan without numbers, several passes on all ranks, and finds what would go wrong in some order of events.

Two things are followed at once. Terms: what each value is made of, of each token of a pass, compared with `definition`. Vector
clocks: which steps of the other ranks have certainly happened before a step; a slot may be rewritten only if its readers' steps
have.

The passes are one of a prompt, one that samples, three whose logits are gathered: each kind has every message matched, and the
last three in a row show a slot's reuse up to two passes later. Only messages that every pass has advance the clocks, so the
result holds for any mixture of passes. Where a pass may have several tokens, some have, and drafts that are refused among them:
keys and values of these must be overwritten before anybody reads them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import field
from typing import NamedTuple

from kog_dist.decode.plan.definition import Term, definition
from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.plan.schedule import RankPlan
from kog_dist.decode.plan.step_rules import malformed, value_name
from kog_dist.decode.plan.steps import NONE, Kind, Message, Phase, Site, Step, Value, When
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass

MAX_FINDINGS = 20
Terms = tuple[Term, ...]  # of a value: one for each token of the pass


class ProvedPass(NamedTuple):
    """A pass of the run. Its first `num_kept` tokens follow from those before; behind the first the others are drafts."""

    when: When
    num_tokens: int
    num_kept: int


PASSES = (
    ProvedPass(When.ALWAYS, 2, 2),
    ProvedPass(When.SAMPLED, 2, 1),
    ProvedPass(When.GATHERED, 4, 2),
    ProvedPass(When.GATHERED, 1, 1),
    ProvedPass(When.GATHERED, 2, 2),
)


def passes_of(num_tokens: int) -> tuple[ProvedPass, ...]:
    """Those that are run where a pass has so many tokens at most."""
    return tuple(ProvedPass(when, min(num, num_tokens), min(kept, num_tokens)) for when, num, kept in PASSES)


def sequences(passes: tuple[ProvedPass, ...]) -> list[list[tuple[Hashable, ...]]]:
    """Of each pass, for each of its tokens: the tokens up to it. What is kept has its place in the sequence as a name."""
    kept: tuple[Hashable, ...] = ()
    found = []
    for number, (_, num_tokens, num_kept) in enumerate(passes, start=1):
        right = tuple(range(len(kept) + 1, len(kept) + 1 + num_kept))
        tokens: tuple[Hashable, ...] = (*right, *(("refused", number, idx) for idx in range(num_kept, num_tokens)))
        found.append([(*kept, *tokens[: idx + 1]) for idx in range(num_tokens)])
        kept = (*kept, *right)
    return found


class Post(NamedTuple):
    """A published message: its content (terms for each lane or one sum), its readers, and the clock of its writer."""

    content: tuple[Terms, ...]
    peers: tuple[int, ...]
    clock: tuple[int, ...]
    origin: tuple[SimulatedRank, int, Step]


@dataclass
class SimulatedRank:
    """One rank of the simulated engine."""

    part: RankPlan
    events: Iterator[tuple[int, Step]]
    clock: list[int]
    memory: dict[tuple[int, ...], tuple[int, Value, Terms]] = field(default_factory=dict)  # place -> (pass, value, terms)
    rows: dict[tuple[int, ...], dict[int, Term]] = field(default_factory=dict)  # of a cache's place: what stands at a position
    written: set[tuple[int, Value]] = field(default_factory=set)
    blocked: tuple[int, Step] | None = None
    published: bool = False  # the blocked step has already published


class _Places(dict[Value, tuple[int, ...]]):
    """Where a plan keeps each value, asked for once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __missing__(self, value: Value) -> tuple[int, ...]:
        place = self[value] = self._plan.place(value)
        return place


class Flow:
    """One run of a plan; `findings` says what is wrong, in words."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.definition = definition(plan.spec)
        self.passes = passes_of(plan.num_tokens)
        self.sequences = sequences(self.passes)
        # Of each pass, for each of its tokens: what the model defines.
        self._defined = [[self.definition.values(tokens) for tokens in of_pass] for of_pass in self.sequences]
        self._silent = {number for number, one in enumerate(self.passes, start=1) if one.when is When.ALWAYS}
        self.findings: list[str] = []
        self._places = _Places(plan)
        self._lasting = [_lasting(layer.mixer) for layer in plan.spec.layers]
        self.posts: dict[tuple[str, int, int], Post] = {}  # by mailbox, epoch and writer
        self.reads: dict[tuple[str, int, int], dict[int, int]] = {}  # reader -> its clock at its last read
        self.ranks = [SimulatedRank(part, self._events(part), [0] * plan.world_size) for part in plan.ranks]

    def run(self) -> list[str]:
        """Run all passes on all ranks; the findings."""
        for state in self.ranks:
            for step in state.part.steps:
                for complaint in malformed(self.spec, state.part, step):
                    self._find(f"{self._where(state, 0, step)}: {complaint}")
        moved = True
        while moved and not self.findings:
            moved = sum(self._advance(state) for state in self.ranks) > 0  # all of them, then the next round
        if not self.findings:
            self._report_stuck()
        if not self.findings:
            self._check_unread()
            self._check_slots()
            self._check_results()
        return self.findings

    def _find(self, text: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)

    # ---- one rank ----
    def _advance(self, state: SimulatedRank) -> bool:
        """Run steps of one rank until it must wait; whether it got any further."""
        moved = False
        while not self.findings:
            if state.blocked is None:
                state.blocked = next(state.events, None)
                state.published = False
            if state.blocked is None:
                return moved
            number, step = state.blocked
            if not state.published:
                self._start(state, number, step)
                state.published = True
                moved = True
            if step.waits is not None and not self._arrived(state, number, step.waits):
                return moved
            self._finish(state, number, step)
            state.blocked = None
            moved = True
        return moved

    def _where(self, state: SimulatedRank, number: int, step: Step) -> str:
        names = [f"layer {step.layer}" if step.layer != NONE else "", f"lane {step.lane}" if step.lane != NONE else ""]
        site = Site(step.site).name.lower() if step.site in tuple(Site) else ""
        detail = " ".join(name for name in (site, *names) if name)
        at = f", pass {number}" if number else ""
        return f"rank {state.part.rank}{at}, {step.phase.name}{' of ' + detail if detail else ''}"

    def _start(self, state: SimulatedRank, number: int, step: Step) -> None:
        rank = state.part.rank
        state.clock[rank] += 1
        if step.publishes is None:
            return
        message = step.publishes
        content = self._inputs(state, number, step)
        if content is None:
            return
        if step.phase is Phase.SUM:
            content = (tuple(map(self.definition.tree, zip(*content, strict=True))),)
        key = (message.mailbox, self.plan.epoch(message, number), rank)
        if key in self.posts:
            first = self._where(*self.posts[key].origin)
            where = self._where(state, number, step)
            self._find(f"{where}: publishes epoch {key[1]} of {message.mailbox} a second time (first: {first})")
        self._check_length(state, number, step, message)
        self.posts[key] = Post(content, message.peers, tuple(state.clock), (state, number, step))

    def _check_length(self, state: SimulatedRank, number: int, step: Step, message: Message) -> None:
        spec, lanes = self.spec, self.spec.num_lanes // self.plan.world_size
        length = {
            Phase.SUM: spec.hidden_size,
            Phase.HEAD_INPUT: lanes * spec.hidden_size,
            Phase.GATHER: lanes * spec.vocab_slice(0)[1],
            Phase.SAMPLE: 2 * lanes + 1,  # value and id per lane; the stop bit
            Phase.SELECT: 0 if step.phase is not Phase.SELECT else _num_chosen(spec, step.layer),
        }[step.phase]
        room = self.plan.mailbox_by_name[message.mailbox].length
        if room != length:
            where = self._where(state, number, step)
            self._find(f"{where}: publishes {length} values into mailbox {message.mailbox}, which holds {room}")

    def _arrived(self, state: SimulatedRank, number: int, message: Message) -> bool:
        epoch, rank = self.plan.epoch(message, number), state.part.rank
        return all(
            (post := self.posts.get((message.mailbox, epoch, peer))) is not None and rank in post.peers for peer in message.peers
        )

    def _is_silent(self, number: int, step: Step) -> bool:
        """Whether the step exchanges empty candidates, once in the pass."""
        return step.phase is Phase.SAMPLE and number in self._silent

    def _inputs(self, state: SimulatedRank, number: int, step: Step) -> tuple[Terms, ...] | None:
        """Terms of what a step reads; None (and a finding) if a place does not hold what the plan says."""
        if self._is_silent(number, step):
            return ((self.definition.term("no candidates"),),) * len(step.reads)
        terms = []
        for value in step.reads:
            held = state.memory.get(self._places[value])
            if held is None or held[:2] != (number, value):
                found = f"{value_name(held[1])} of pass {held[0]}" if held else "nothing"
                self._find(f"{self._where(state, number, step)}: reads {value_name(value)}, but its place holds {found}")
                return None
            terms.append(held[2])
        return tuple(terms)

    def _finish(self, state: SimulatedRank, number: int, step: Step) -> None:
        inputs = self._inputs(state, number, step)
        if inputs is None:
            return
        rows = self._receive(state, number, step, inputs)
        for value in step.writes:
            self._write(state, number, step, value, self._made(state, number, step, value, rows))

    def _made(self, state: SimulatedRank, number: int, step: Step, value: Value, rows: tuple[Terms, ...]) -> Terms:
        """The terms of one of the values that a step writes, in the order in which it writes them."""
        layer, lane, term = step.layer, step.lane, self.definition.term
        tokens = [*zip(*rows, strict=True)] if step.reads else [()] * self.passes[number - 1].num_tokens
        match value.kind:
            case Kind.QUERY | Kind.GATE:
                return tuple(term(value.kind.name.lower(), layer, lane, *of_token) for of_token in tokens)
            case Kind.CACHE:
                return self._append(state, number, value, "append", self.definition.empty_cache(layer, lane), rows[0])
            case Kind.STATE:  # refused tokens are left out, as if those that are kept were replayed
                return self._append(state, number, value, "state", self.definition.empty_state(layer, lane), rows[0])
            case Kind.MIXED if step.phase is Phase.DELTA:  # read from the state that it has just written
                changed = state.memory[self._places[Value(Kind.STATE, layer, lane)]][2]
                return tuple(term("delta", layer, lane, own, *of_token) for own, of_token in zip(changed, tokens, strict=True))
            case Kind.SHARED_ACTIVATION:
                return tuple(term("shared gate_up", layer, lane, *of_token) for of_token in tokens)
            case _:
                return tuple(self._result(number, step, idx, of_token) for idx, of_token in enumerate(tokens))

    def _append(self, state: SimulatedRank, number: int, value: Value, name: str, empty: Term, inputs: Terms) -> Terms:
        """Put a row of each token into a cache or state, over what stands there; what it is up to each of them."""
        rows = state.rows.setdefault(self._places[value], {})
        first = len(self.sequences[number - 1][0]) - 1
        rows.update(enumerate(inputs, start=first))
        held, caches = empty, []
        for position in range(first + len(inputs)):
            held = self.definition.term(name, value.number, value.lane, held, rows.get(position))
            caches.append(held)
        return tuple(caches[first:])

    def _receive(self, state: SimulatedRank, number: int, step: Step, inputs: tuple[Terms, ...]) -> tuple[Terms, ...]:
        """What a step works on: its inputs; with a wait, every rank's content in the order of ranks, its own included."""
        message, rank = step.waits, state.part.rank
        if message is None:
            return inputs
        epoch = self.plan.epoch(message, number)
        state.clock[rank] += 1  # reading comes after publishing, also in a step that does both
        rows: list[Terms] = []
        for source in range(self.plan.world_size):
            if source == rank:
                rows += inputs
            elif source in message.peers:
                key = (message.mailbox, epoch, source)
                post = self.posts[key]
                rows += post.content
                self.reads.setdefault(key, {})[rank] = state.clock[rank]
                if step.when is When.ALWAYS:
                    state.clock[:] = map(max, state.clock, post.clock)
        return tuple(rows)

    def _result(self, number: int, step: Step, idx: int, inputs: tuple[Term, ...]) -> Term:
        """The term that a step makes of its inputs, of one token of the pass, as the engines do it."""
        term, layer, lane = self.definition.term, step.layer, step.lane
        match step.phase:
            case Phase.EMBED:
                return term("embedding", self.sequences[number - 1][idx][-1])
            case Phase.ATTEND:
                return term("attend", layer, lane, *inputs)
            case Phase.ROUTE:
                return term("route", layer, *inputs)
            case Phase.SELECT:  # where ranks compare their choices, of the logits of all of them
                return term("select", layer, *inputs[:1]) if len(set(inputs)) == 1 else term("differing choices", *inputs)
            case Phase.OUT | Phase.GATE_UP | Phase.DOWN | Phase.DELTA_IN:
                return term(step.phase.name.lower(), layer, lane, *inputs)
            case Phase.SUM | Phase.TOTAL:
                return self.definition.tree(inputs) if _is_power_of_two(len(inputs)) else term("uneven sum", *inputs)
            case Phase.RESIDUAL:
                forms = {2: "h + total" if step.reads[1].kind is Kind.TOTAL else "h + sqrt(L) p", 4: "h + (p + (total - past p))"}
                return term(forms[len(inputs)], *inputs)
            case Phase.FINAL_NORM:
                return term("final norm", lane, *inputs)
            case Phase.HEAD_INPUT:
                if self.spec.head_type is HeadType.LANE:
                    return term("concatenation", *inputs)
                return term("norm of total" if self.spec.pre_norm_lane_agg else "mean", *inputs)
            case Phase.HEAD:
                return term("head", lane, *inputs)
            case Phase.GATHER:
                return term("all logits", *inputs)
            case _:
                return term("choice", *inputs)

    def _write(self, state: SimulatedRank, number: int, step: Step, value: Value, terms: Terms) -> None:
        if (number, value) in state.written:
            self._find(f"{self._where(state, number, step)}: writes {value_name(value)} a second time")
        state.written.add((number, value))
        if not self._is_silent(number, step) and value.kind is not Kind.OWN_SUM:
            expected = tuple([defined.get(value) for defined in self._defined[number - 1]])
            if terms != expected:
                self._find(f"{self._where(state, number, step)}: {value_name(value)} is not made of what the model defines")
        state.memory[self._places[value]] = (number, value, terms)

    # ---- the end ----
    def _report_stuck(self) -> None:
        for state in self.ranks:
            if state.blocked is None:
                continue
            number, step = state.blocked
            assert step.waits is not None
            epoch = self.plan.epoch(step.waits, number)
            for peer in step.waits.peers:
                post = self.posts.get((step.waits.mailbox, epoch, peer))
                if post is not None and state.part.rank in post.peers:
                    continue
                wanted = f"epoch {epoch} of {step.waits.mailbox} from rank {peer}"
                why = "does not send it here" if post else "never publishes it"
                if post is None and self._will_publish(peer, step.waits.mailbox, epoch):
                    why = "itself waits: the ranks wait for each other in a circle"
                self._find(f"{self._where(state, number, step)}: waits for {wanted}, which {why}")

    def _will_publish(self, rank: int, mailbox: str, epoch: int) -> bool:
        return rank < len(self.ranks) and any(
            step.publishes is not None and step.publishes.mailbox == mailbox and self.plan.epoch(step.publishes, number) == epoch
            for number, step in self.ranks[rank].events
        )

    def _check_unread(self) -> None:
        for key, post in self.posts.items():
            for peer in post.peers:
                if peer not in self.reads.get(key, {}):
                    self._find(
                        f"{self._where(*post.origin)}: publishes epoch {key[1]} of {key[0]} to rank {peer}, which never reads it"
                    )

    def _check_slots(self) -> None:
        """A slot may be rewritten only when all reads of what it held have certainly happened."""
        held: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        for key, post in self.posts.items():  # in the order in which each writer published
            mailbox, epoch, writer = key
            slot = (mailbox, epoch % self.plan.mailbox_by_name[mailbox].num_slots, writer)
            old = held.get(slot)
            held[slot] = key
            if old is None:
                continue
            if old[1] >= epoch:
                self._find(f"{self._where(*post.origin)}: epoch {epoch} of {mailbox} follows epoch {old[1]} in slot {slot[1]}")
            for reader, clock in self.reads.get(old, {}).items():
                if post.clock[reader] < clock:
                    unread = f"rank {reader} may not have read epoch {old[1]} yet"
                    self._find(
                        f"{self._where(*post.origin)}: rewrites slot {slot[1]} of {mailbox} with epoch {epoch}, and {unread}"
                    )

    def _check_results(self) -> None:
        """Every pass leaves its keys and values, and a choice; rank 0 the logits that were asked for."""
        for state in self.ranks:
            for number, (when, _, _) in enumerate(self.passes, start=1):
                needed = [
                    Value(kind, layer, lane)
                    for layer, kinds in enumerate(self._lasting)
                    for kind in kinds
                    for lane in state.part.lanes
                ]
                needed.append(Value(Kind.TOKEN))
                if when is When.GATHERED and state.part.rank == 0:
                    needed.append(Value(Kind.ALL_LOGITS))
                for value in needed:
                    if (number, value) not in state.written:
                        self._find(f"rank {state.part.rank}, pass {number} ({when.name}): {value_name(value)} is never written")

    def _events(self, part: RankPlan) -> Iterator[tuple[int, Step]]:
        for number, (when, _, _) in enumerate(self.passes, start=1):
            for step in part.steps:
                if step.when <= when:
                    yield number, step


def _lasting(mixer: object) -> tuple[Kind, ...]:
    """What every token must leave of a layer."""
    of_kinds = {AttentionMixer: (Kind.CACHE,), DeltaNet: (Kind.STATE,)}
    return of_kinds.get(type(mixer), ())


def _num_chosen(spec: ModelSpec, layer: int) -> int:
    """Experts of a token, the shared one among them."""
    ffn = spec.layers[layer].ffn
    return ffn.choice.per_token + (1 if ffn.shared_width else 0) if isinstance(ffn, Experts) else 0


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
