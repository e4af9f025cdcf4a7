"""Thousands of damaged plans: none that computes wrong tokens, loses a message or hangs may pass the validator.

A mutant is wrong by construction (a row of weights is missing), or shown wrong by `run_plan`: an engine without any checks that
executes the plan on numbers, with slots that are overwritten as in memory, in several orders of events.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.schedule import RankPlan
from kog_dist.decode.plan.steps import NONE, Kind, Message, Phase, PlannedMailbox, Site, Step, Value, When
from kog_dist.decode.plan.validate import validate
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer
from tests.unit.staggered import staggered_plan

PRIME = (1 << 61) - 1
SQRT_LANES = 12345  # stands for sqrt(L)
GARBAGE = 987654321  # what memory holds before anything was written
NUM_MUTANTS = 2300
TOKENS = (When.ALWAYS, When.GATHERED, When.SAMPLED, When.ALWAYS, When.GATHERED, When.GATHERED)


# ---- the model on numbers, straight from LANEFORMER's formula ----
def mix(*arguments: int) -> int:
    """Stands for any function of its arguments; the first says which."""
    return hash(arguments) % PRIME


def expected_tokens(spec: ModelSpec) -> list[tuple[int, int]]:
    """(choice, all logits) of each token."""
    lanes = range(spec.num_lanes)
    caches: dict[tuple[int, int], int] = {}
    results = []
    for token in range(1, len(TOKENS) + 1):
        h = [mix(Phase.EMBED, token) for _ in lanes]
        made: dict[tuple[int, int], list[int]] = {}
        for layer in range(spec.num_layers):
            for sublayer in Sublayer:
                p = []
                routed = mix(Phase.SELECT, layer, NONE, mix(Phase.ROUTE, layer, NONE, h[0]))
                chosen = () if spec.experts is None else (routed,)
                for lane in lanes:
                    if sublayer is Sublayer.ATTENTION:
                        query = mix(Phase.QKV, layer, lane, h[lane])
                        caches[layer, lane] = mix(caches.get((layer, lane), 0), query)
                        mixed = mix(Phase.ATTEND, layer, lane, query, caches[layer, lane])
                        p.append(mix(Phase.OUT, layer, lane, mixed))
                    else:
                        activation = mix(Phase.GATE_UP, layer, lane, h[lane], *chosen)
                        p.append(mix(Phase.DOWN, layer, lane, activation, *chosen))
                made[layer, sublayer] = p
                mode = spec.reduce_mode(layer, sublayer)
                if mode is ReduceMode.BLOCKING:
                    h = [(x + sum(p)) % PRIME for x in h]
                elif mode is ReduceMode.LOCAL:
                    h = [(x + SQRT_LANES * y) % PRIME for x, y in zip(h, p, strict=True)]
                else:
                    past = made[layer - spec.delay, sublayer]
                    h = [(x + y + sum(past) - z) % PRIME for x, y, z in zip(h, p, past, strict=True)]
        normed = [mix(Phase.FINAL_NORM, NONE if spec.has_one_stream else lane, h[lane]) for lane in lanes]
        if spec.has_one_stream or spec.head_type is HeadType.VOCAB_PARALLEL:
            inputs = normed
        elif spec.head_type is HeadType.LANE:
            inputs = [mix(Phase.HEAD_INPUT, *normed)] * spec.num_lanes
        else:
            inputs = [mix(Phase.HEAD_INPUT, sum(h if spec.pre_norm_lane_agg else normed) % PRIME)] * spec.num_lanes
        logits = [mix(Phase.HEAD, lane, inputs[lane]) for lane in lanes]
        results.append((mix(Phase.SAMPLE, *logits), mix(Phase.GATHER, *logits)))
    return results


# ---- an engine that trusts the plan ----
class WrongError(Exception):
    """The plan went wrong."""


Slots = dict[tuple[str, int, int, int], tuple[int, list[int]]]  # mailbox, slot, writer, reader -> epoch, content


def rank_program(plan: Plan, part: RankPlan, slots: Slots, results: dict[Any, int]) -> Iterator[bool]:
    """Runs one rank; yields True after each event that others could notice, False while it must wait."""
    memory: dict[Any, int] = {}
    for token, kind in enumerate(TOKENS, start=1):
        for step in part.steps:
            if step.when > kind:
                continue
            rows = {part.rank: [memory.get(plan.place(value), GARBAGE) for value in step.reads]}
            if step.publishes is not None:
                content = [sum(rows[part.rank]) % PRIME] if step.phase is Phase.SUM else rows[part.rank]
                epoch, slot = plan.epoch(step.publishes, token), plan.slot(step.publishes, token)
                for peer in step.publishes.peers:
                    slots[step.publishes.mailbox, slot, part.rank, peer] = (epoch, content)
                    yield True
            if step.waits is not None:
                epoch, slot = plan.epoch(step.waits, token), plan.slot(step.waits, token)
                for peer in step.waits.peers:
                    while True:
                        held, content = slots.get((step.waits.mailbox, slot, peer, part.rank), (0, []))
                        if held == epoch:
                            break
                        if held > epoch:
                            raise WrongError(f"epoch {epoch} was overwritten by {held}")
                        yield False
                    rows[peer] = content
                    yield True
            inputs = [term for rank in sorted(rows) for term in rows[rank]]
            run_step(plan, step, inputs, memory, token)
        if kind is not When.ALWAYS:
            results[part.rank, token, "choice"] = memory.get(plan.place(Value(Kind.TOKEN)), GARBAGE)
        if kind is When.GATHERED and part.rank == 0:
            results[part.rank, token, "logits"] = memory.get(plan.place(Value(Kind.ALL_LOGITS)), GARBAGE)


def run_step(plan: Plan, step: Step, inputs: list[int], memory: dict[Any, int], token: int) -> None:
    layer, lane = step.layer, step.lane
    if step.phase is Phase.QKV:
        query, cache = step.writes
        memory[plan.place(query)] = made = mix(Phase.QKV, layer, lane, inputs[0])
        memory[plan.place(cache)] = mix(memory.get(plan.place(cache), 0), made)
        return
    match step.phase:
        case Phase.EMBED:
            result = mix(Phase.EMBED, token)
        case Phase.SUM | Phase.TOTAL:
            result = sum(inputs) % PRIME
        case Phase.RESIDUAL if len(inputs) == 4:
            result = (inputs[0] + inputs[1] + inputs[2] - inputs[3]) % PRIME
        case Phase.RESIDUAL:
            blocking = step.reads[1].kind is Kind.TOTAL
            result = (inputs[0] + inputs[1] * (1 if blocking else SQRT_LANES)) % PRIME
        case Phase.FINAL_NORM | Phase.HEAD:
            result = mix(step.phase, lane, *inputs)
        case Phase.HEAD_INPUT | Phase.GATHER | Phase.SAMPLE:
            result = mix(step.phase, *inputs)
        case Phase.SELECT if len(set(inputs)) == 1:  # ranks that compare their choices have equal ones
            result = mix(step.phase, layer, lane, inputs[0])
        case _:
            result = mix(step.phase, layer, lane, *inputs)
    for value in step.writes:
        memory[plan.place(value)] = result


def run_plan(plan: Plan, choose: Callable[[list[int]], list[int]]) -> dict[Any, int]:
    """Run all ranks; `choose` puts the ranks in order, and the first that can move does. Raises WrongError, or whatever a plan
    that makes no sense leads to."""
    slots: Slots = {}
    results: dict[Any, int] = {}
    running = {part.rank: rank_program(plan, part, slots, results) for part in plan.ranks}
    while running:
        for rank in choose(list(running)):
            moved = next(running[rank], None)
            if moved is None:
                del running[rank]
            if moved is not False:
                break
        else:
            raise WrongError("all ranks wait")
    return results


def goes_wrong(plan: Plan, wanted: dict[Any, int], rng: random.Random) -> bool:
    """Whether any of several orders of events ends in other results, a lost message or a hang."""

    def shuffled(alive: list[int]) -> list[int]:
        return rng.sample(alive, len(alive))

    def fastest(rank: int) -> Callable[[list[int]], list[int]]:
        return lambda alive: sorted(alive, key=lambda other: (other != rank, other))

    for order in (*(fastest(rank) for rank in range(plan.world_size)), shuffled, shuffled):
        try:
            if run_plan(plan, order) != wanted:
                return True
        except (WrongError, LookupError, ValueError, TypeError, ArithmeticError):
            return True
    return False


def wanted_results(spec: ModelSpec, world_size: int) -> dict[Any, int]:
    wanted: dict[Any, int] = {}
    for token, (kind, (choice, logits)) in enumerate(zip(TOKENS, expected_tokens(spec), strict=True), start=1):
        if kind is not When.ALWAYS:
            wanted |= {(rank, token, "choice"): choice for rank in range(world_size)}
        if kind is When.GATHERED:
            wanted[0, token, "logits"] = logits
    return wanted


# ---- ways to damage a plan ----
Damage = Callable[[Plan, random.Random], Plan | None]
BY_CONSTRUCTION: list[Damage] = []  # always wrong
PERHAPS: list[Damage] = []  # wrong if run_plan says so


def always_wrong(damage: Damage) -> Damage:
    BY_CONSTRUCTION.append(damage)
    return damage


def perhaps_wrong(damage: Damage) -> Damage:
    PERHAPS.append(damage)
    return damage


def with_part(plan: Plan, part: RankPlan) -> Plan:
    return replace(plan, ranks=tuple(part if old.rank == part.rank else old for old in plan.ranks))


def with_steps(plan: Plan, part: RankPlan, steps: list[Step]) -> Plan:
    return with_part(plan, replace(part, steps=tuple(steps)))


def change_step(plan: Plan, rng: random.Random, change: Callable[[RankPlan, Step], Step | None]) -> Plan | None:
    """Change one random step of one random rank; None if that step cannot be changed so."""
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    at = rng.randrange(len(steps))
    changed = change(part, steps[at])
    if changed is None or changed == steps[at]:
        return None
    steps[at] = changed
    return with_steps(plan, part, steps)


@always_wrong
def drop_step(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    dropped = steps.pop(rng.randrange(len(steps)))
    idle = dropped.phase is Phase.GATHER and plan.world_size == 1 and not dropped.writes
    return None if idle else with_steps(plan, part, steps)


@always_wrong
def repeat_step(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    at = rng.randrange(len(steps))
    steps.insert(rng.randrange(at, len(steps)) + 1, steps[at])
    return with_steps(plan, part, steps)


@perhaps_wrong
def swap_neighbours(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    at = rng.randrange(len(steps) - 1)
    steps[at], steps[at + 1] = steps[at + 1], steps[at]
    return with_steps(plan, part, steps)


@perhaps_wrong
def move_step(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    step = steps.pop(rng.randrange(len(steps)))
    steps.insert(rng.randrange(len(steps) + 1), step)
    return with_steps(plan, part, steps)


@perhaps_wrong
def move_exchange(plan: Plan, rng: random.Random) -> Plan | None:
    """Move a step that publishes or waits, a little."""
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    places = [at for at, step in enumerate(steps) if step.publishes or step.waits]
    if not places:
        return None
    at = rng.choice(places)
    step = steps.pop(at)
    steps.insert(max(0, at + rng.choice((-6, -4, -3, -2, -1, 1, 2, 3, 4, 6))), step)
    return with_steps(plan, part, steps)


@always_wrong
def change_layer(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-1, 1))
    return change_step(plan, rng, lambda _part, step: step._replace(layer=step.layer + by))


@always_wrong
def change_lane(plan: Plan, rng: random.Random) -> Plan | None:
    lane = rng.randrange(-1, plan.spec.num_lanes + 1)
    return change_step(plan, rng, lambda _part, step: step._replace(lane=lane))


@always_wrong
def change_site(plan: Plan, rng: random.Random) -> Plan | None:
    site = rng.choice((NONE, *Site))
    return change_step(plan, rng, lambda _part, step: step._replace(site=site))


@always_wrong
def change_phase(plan: Plan, rng: random.Random) -> Plan | None:
    phase = rng.choice(list(Phase))
    return change_step(plan, rng, lambda _part, step: step._replace(phase=phase))


@perhaps_wrong
def change_when(plan: Plan, rng: random.Random) -> Plan | None:
    when = rng.choice(list(When))
    return change_step(plan, rng, lambda _part, step: step._replace(when=when))


def change_value(rng: random.Random, values: tuple[Value, ...], change: Callable[[Value], Value]) -> tuple[Value, ...]:
    if not values:
        return values
    at = rng.randrange(len(values))
    return (*values[:at], change(values[at]), *values[at + 1 :])


@always_wrong
def read_other_layer(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-2, -1, 1, 2))
    return change_step(
        plan, rng,
        lambda _part, step: step._replace(reads=change_value(rng, step.reads, lambda v: v._replace(number=v.number + by))),
    )  # fmt: skip


@always_wrong
def read_other_lane(plan: Plan, rng: random.Random) -> Plan | None:
    lane = rng.randrange(-1, plan.spec.num_lanes)
    return change_step(
        plan, rng, lambda _part, step: step._replace(reads=change_value(rng, step.reads, lambda v: v._replace(lane=lane)))
    )


@always_wrong
def read_other_kind(plan: Plan, rng: random.Random) -> Plan | None:
    kind, site = rng.choice(list(Kind)), rng.choice((NONE, *Site))
    return change_step(
        plan, rng,
        lambda _part, step: step._replace(reads=change_value(rng, step.reads, lambda v: v._replace(kind=kind, site=site))),
    )  # fmt: skip


@always_wrong
def drop_read(plan: Plan, rng: random.Random) -> Plan | None:
    return change_step(plan, rng, lambda _part, step: step._replace(reads=step.reads[1:]) if step.reads else None)


@always_wrong
def reverse_reads(plan: Plan, rng: random.Random) -> Plan | None:
    """Another order of a sum has other bits."""
    return change_step(plan, rng, lambda _part, step: step._replace(reads=step.reads[::-1]))


@always_wrong
def write_elsewhere(plan: Plan, rng: random.Random) -> Plan | None:
    by, lane = rng.choice((-1, 0, 1)), rng.randrange(-1, plan.spec.num_lanes)
    return change_step(
        plan, rng,
        lambda _part, step: step._replace(
            writes=change_value(rng, step.writes, lambda v: v._replace(number=v.number + by, lane=lane))
        ),
    )  # fmt: skip


@always_wrong
def drop_write(plan: Plan, rng: random.Random) -> Plan | None:
    return change_step(plan, rng, lambda _part, step: step._replace(writes=step.writes[1:]) if step.writes else None)


def change_message(
    plan: Plan, rng: random.Random, change: Callable[[RankPlan, Message], Message | None], *, waits: bool
) -> Plan | None:
    part = rng.choice(plan.ranks)
    steps = list(part.steps)
    places = [at for at, step in enumerate(steps) if (step.waits if waits else step.publishes) is not None]
    if not places:
        return None
    at = rng.choice(places)
    message = steps[at].waits if waits else steps[at].publishes
    assert message is not None
    changed = change(part, message)
    if changed == message:
        return None
    steps[at] = steps[at]._replace(waits=changed) if waits else steps[at]._replace(publishes=changed)
    return with_steps(plan, part, steps)


@always_wrong
def drop_publish(plan: Plan, rng: random.Random) -> Plan | None:
    return change_message(plan, rng, lambda _part, _message: None, waits=False)


@always_wrong
def drop_wait(plan: Plan, rng: random.Random) -> Plan | None:
    return change_message(plan, rng, lambda _part, _message: None, waits=True)


@always_wrong
def wrong_epoch_published(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-1, 1))
    return change_message(plan, rng, lambda _part, m: m._replace(sequence=m.sequence + by), waits=False)


@always_wrong
def wrong_epoch_awaited(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-1, 1))
    return change_message(plan, rng, lambda _part, m: m._replace(sequence=m.sequence + by), waits=True)


@always_wrong
def wrong_mailbox(plan: Plan, rng: random.Random) -> Plan | None:
    if not plan.mailboxes:
        return None
    name, waits = rng.choice([*plan.mailboxes, PlannedMailbox("nowhere", 1, 1, 1)]).name, rng.random() < 0.5
    return change_message(plan, rng, lambda _part, m: m._replace(mailbox=name), waits=waits)


@always_wrong
def lose_peer(plan: Plan, rng: random.Random) -> Plan | None:
    waits = rng.random() < 0.5
    return change_message(plan, rng, lambda _part, m: m._replace(peers=m.peers[1:]), waits=waits)


@always_wrong
def wrong_peer(plan: Plan, rng: random.Random) -> Plan | None:
    waits, extra = rng.random() < 0.5, rng.randrange(-1, plan.world_size + 1)

    def change(part: RankPlan, message: Message) -> Message:
        if rng.random() < 0.5:
            return message._replace(peers=(*message.peers[1:], extra) if extra not in message.peers else (part.rank,))
        return message._replace(peers=(*message.peers, rng.choice((part.rank, plan.world_size, *message.peers))))

    return change_message(plan, rng, change, waits=waits)


def change_mailbox(plan: Plan, rng: random.Random, change: Callable[[PlannedMailbox], PlannedMailbox]) -> Plan | None:
    if not plan.mailboxes:
        return None
    at = rng.randrange(len(plan.mailboxes))
    boxes = list(plan.mailboxes)
    boxes[at] = change(boxes[at])
    return None if boxes[at] == plan.mailboxes[at] else replace(plan, mailboxes=tuple(boxes))


@perhaps_wrong
def fewer_slots(plan: Plan, rng: random.Random) -> Plan | None:
    return change_mailbox(plan, rng, lambda box: replace(box, num_slots=rng.randrange(box.num_slots + 1)))


@perhaps_wrong
def other_stride(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-1, 1))
    return change_mailbox(plan, rng, lambda box: replace(box, per_token=box.per_token + by))


@always_wrong
def wrong_length(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-7, -1, 1))
    return change_mailbox(plan, rng, lambda box: replace(box, length=box.length + by))


@always_wrong
def lose_mailbox(plan: Plan, rng: random.Random) -> Plan | None:
    return replace(plan, mailboxes=plan.mailboxes[1:]) if plan.mailboxes else None


@always_wrong
def same_mailbox_names(plan: Plan, rng: random.Random) -> Plan | None:
    return change_mailbox(plan, rng, lambda box: replace(box, name=rng.choice(plan.mailboxes).name))


@always_wrong
def misplace_lanes(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    lanes = list(part.lanes)
    lanes[rng.randrange(len(lanes))] = rng.randrange(plan.spec.num_lanes + 1)
    return None if tuple(lanes) == part.lanes else with_part(plan, replace(part, lanes=tuple(lanes)))


@always_wrong
def exchange_ranks(plan: Plan, rng: random.Random) -> Plan | None:
    if plan.world_size == 1:
        return None
    a, b = rng.sample(plan.ranks, 2)
    return with_part(with_part(plan, replace(a, rank=b.rank)), replace(b, rank=a.rank))


@always_wrong
def lose_rank(plan: Plan, rng: random.Random) -> Plan | None:
    at = rng.randrange(plan.world_size)
    return replace(plan, ranks=plan.ranks[:at] + plan.ranks[at + 1 :])


def change_product(plan: Plan, rng: random.Random, change: Callable[[Product], Product]) -> Plan:
    """Change one random product of one random rank. How lists of GPUs may be damaged is in test_products.py."""
    part = rng.choice(plan.ranks)
    at = rng.randrange(len(part.products))
    return with_part(plan, replace(part, products=(*part.products[:at], change(part.products[at]), *part.products[at + 1 :])))


@always_wrong
def lose_product(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    at = rng.randrange(len(part.products))
    return with_part(plan, replace(part, products=part.products[:at] + part.products[at + 1 :]))


@always_wrong
def repeat_product(plan: Plan, rng: random.Random) -> Plan | None:
    part = rng.choice(plan.ranks)
    at, later = sorted(rng.choices(range(len(part.products)), k=2))
    return with_part(plan, replace(part, products=(*part.products[: later + 1], part.products[at], *part.products[later + 1 :])))


@always_wrong
def exchange_products(plan: Plan, rng: random.Random) -> Plan | None:
    """Weights in another order than that in which steps use them."""
    part = rng.choice(plan.ranks)
    products = list(part.products)
    a, b = rng.choices(range(len(products)), k=2)
    products[a], products[b] = products[b], products[a]
    return with_part(plan, replace(part, products=tuple(products)))


@always_wrong
def label_product_otherwise(plan: Plan, rng: random.Random) -> Plan | None:
    op, lane, by = rng.choice(list(Phase)), rng.randrange(-1, plan.spec.num_lanes + 1), rng.choice((-1, 1))
    return change_product(plan, rng, lambda product: rng.choice((
        product._replace(op=op), product._replace(layer=product.layer + by), product._replace(first_lane=lane),
        product._replace(num_lanes=product.num_lanes + by),
    )))  # fmt: skip


@always_wrong
def rows_missing_or_too_many(plan: Plan, rng: random.Random) -> Plan | None:
    by = rng.choice((-2, -1, 1, 2))
    return change_product(plan, rng, lambda product: product._replace(rows=rng.choice((
        product.rows._replace(num_rows=product.rows.num_rows + by), product.rows._replace(num_ctas=1 + by),
        product.rows._replace(num_groups=1 + by),
    ))))  # fmt: skip


@always_wrong
def wrong_delay(plan: Plan, rng: random.Random) -> Plan | None:
    """One lane adds what the others made one layer too early or too late."""
    by = rng.choice((-1, 1))

    def change(_part: RankPlan, step: Step) -> Step | None:
        if step.phase is not Phase.RESIDUAL or len(step.reads) != 4:
            return None
        return step._replace(reads=(*step.reads[:2], *(v._replace(number=v.number + by) for v in step.reads[2:])))

    tries = (change_step(plan, rng, change) for _ in range(10))  # few steps are such
    return next((mutant for mutant in tries if mutant is not None), None)


# ---- the tests ----
SMALL = ModelSpec(
    hidden_size=8, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=12, vocab_size=18, num_lanes=4, delay=1
)  # fmt: skip
EIGHT_LANES = replace(SMALL, hidden_size=16, num_heads=8, num_kv_heads=8, intermediate_size=16, num_lanes=8)
BASES = [
    (replace(SMALL, num_lanes=2), 2),
    (replace(SMALL, num_layers=4, delay=2, mlp_comm=False), 2),
    (replace(SMALL, num_lanes=2, delay=0, num_layers=2), 2),
    (replace(SMALL, delay=0, num_layers=2), 2),
    (replace(SMALL, delay=0, num_layers=2, pre_norm_lane_agg=True), 2),
    (replace(SMALL, early_comm=False, head_type=HeadType.LANE), 2),
    (replace(SMALL, pre_norm_lane_agg=True), 4),
    (replace(SMALL, num_lanes=2, num_layers=1, attention_comm=False, mlp_comm=False), 2),
    (replace(SMALL, num_lanes=2, head_type=HeadType.VOCAB_PARALLEL), 1),
    (SMALL, 1),
    (EIGHT_LANES, 2),
    (replace(SMALL, delay=0, num_layers=2, experts=ExpertsSpec(4, 2)), 2),
]  # staggered where a rank hosts two lanes or more and not every sum is awaited


@pytest.mark.parametrize(("spec", "world_size"), BASES)
def test_the_unchecked_engine_runs_good_plans(spec: ModelSpec, world_size: int) -> None:
    plan = staggered_plan(spec, world_size, checks_experts=True)
    assert (plan != make_plan(spec, world_size, checks_experts=True)) == (spec.num_lanes > world_size and spec.delay > 0)
    assert validate(plan) == []
    assert not goes_wrong(plan, wanted_results(spec, world_size), random.Random(1))


def test_no_wrong_plan_is_accepted() -> None:
    rng = random.Random(2026)
    plans = [
        (staggered_plan(spec, ranks, checks_experts=checks), wanted_results(spec, ranks))
        for spec, ranks in BASES
        for checks in ((False, True) if spec.experts is not None else (False,))
    ]
    wrong: Counter[str] = Counter()
    harmless = 0
    damages = [*((damage, True) for damage in BY_CONSTRUCTION), *((damage, False) for damage in PERHAPS)]
    while wrong.total() < NUM_MUTANTS:
        plan, wanted = rng.choice(plans)
        damage, by_construction = rng.choice(damages)
        mutant = damage(plan, rng)
        if mutant is None or mutant == plan:
            continue
        if by_construction or goes_wrong(mutant, wanted, rng):
            assert validate(mutant), f"{damage.__name__} of {plan.spec} on {plan.world_size} ranks was accepted"
            wrong[damage.__name__] += 1
        else:
            harmless += 1
    assert set(wrong) == {damage.__name__ for damage, _ in damages}, "every way to damage a plan must have been tried"
    assert min(wrong.values()) >= 5
    assert harmless < NUM_MUTANTS / 2
