"""The validator: accepts every plan that is made, names what is wrong in a damaged one, and knows how many slots are enough."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import replace

import pytest

from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.schedule import RankPlan
from kog_dist.decode.plan.steps import Message, Phase, PlannedMailbox, Step
from kog_dist.decode.plan.validate import check, validate
from kog_dist.errors import PlanError
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b
from tests.unit.staggered import staggered_plan

SMALL = ModelSpec(
    hidden_size=16, num_layers=4, num_heads=8, num_kv_heads=8, intermediate_size=16, vocab_size=20, num_lanes=8, delay=2
)  # fmt: skip
HEADS = {
    "replicate": (HeadType.REPLICATE, False),
    "pre_norm": (HeadType.REPLICATE, True),
    "lane": (HeadType.LANE, False),
    "vocab_parallel": (HeadType.VOCAB_PARALLEL, False),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_every_plan_that_is_made_is_accepted(head: str, delay: int) -> None:
    """All communication modes, each with some of the layer counts and world sizes."""
    rng = random.Random(f"{head} {delay}")
    head_type, pre_norm = HEADS[head]
    for early, attention, mlp, turn in itertools.product((False, True), (False, True), (False, True), (0, 1)):
        num_layers = rng.choice(((1, 2), (3, 4, 6))[turn])
        spec = replace(
            SMALL, num_layers=num_layers, delay=delay, early_comm=early, attention_comm=attention, mlp_comm=mlp,
            head_type=head_type, pre_norm_lane_agg=pre_norm, vocab_size=24,
        )  # fmt: skip
        world_size, staggered = rng.choice(((1, False), (2, False), (4, False), (8, False), (1, True), (2, True)))
        assert validate((staggered_plan if staggered else make_plan)(spec, world_size)) == [], (spec, world_size, staggered)


@pytest.mark.parametrize("head", HEADS)
def test_passes_of_several_tokens_are_accepted(head: str) -> None:
    """One and two tokens, and more; drafts that are refused among them."""
    head_type, pre_norm = HEADS[head]
    spec = replace(SMALL, head_type=head_type, pre_norm_lane_agg=pre_norm, vocab_size=24)
    for num_tokens, world_size in ((2, 1), (3, 2), (16, 2)):
        assert validate(make_plan(spec, world_size, num_tokens=num_tokens)) == []
    assert len({make_plan(spec, 2, num_tokens=num_tokens).digest() for num_tokens in (1, 2)}) == 2


@pytest.mark.parametrize(("world_size", "staggered"), [(1, False), (1, True), (2, False), (2, True), (4, True), (8, True)])
def test_plans_of_the_published_shape_are_accepted(world_size: int, staggered: bool) -> None:
    assert validate((staggered_plan if staggered else make_plan)(laneformer_2b(), world_size)) == []


# ---- what findings say ----
def with_step(plan: Plan, rank: int, phase: Phase, nth: int, **changes: object) -> Plan:
    """The plan with the nth step of a phase changed on one rank; no changes = the step is left out."""
    part = plan.ranks[rank]
    at = [k for k, step in enumerate(part.steps) if step.phase is phase][nth]
    middle: tuple[Step, ...] = (part.steps[at]._replace(**changes),) if changes else ()  # type: ignore[arg-type]
    return with_part(plan, replace(part, steps=part.steps[:at] + middle + part.steps[at + 1 :]))


def with_part(plan: Plan, part: RankPlan) -> Plan:
    return replace(plan, ranks=tuple(part if old.rank == part.rank else old for old in plan.ranks))


def with_mailbox(plan: Plan, name: str, **changes: int) -> Plan:
    return replace(
        plan,
        mailboxes=tuple(replace(box, **changes) if box.name == name else box for box in plan.mailboxes),  # type: ignore[arg-type]
    )


def swapped(plan: Plan, rank: int, first: Phase, second: Phase) -> Plan:
    """The plan with the first neighbouring pair of these phases the other way round on one rank."""
    steps = list(plan.ranks[rank].steps)
    at = next(k for k in range(len(steps)) if (steps[k].phase, steps[k + 1].phase) == (first, second))
    steps[at : at + 2] = steps[at + 1], steps[at]
    return with_part(plan, replace(plan.ranks[rank], steps=tuple(steps)))


def moved(plan: Plan, rank: int, phase: Phase, nth: int, by: int) -> Plan:
    """The plan with the nth step of a phase some places later (or earlier) on one rank."""
    steps = list(plan.ranks[rank].steps)
    at = [k for k, step in enumerate(steps) if step.phase is phase][nth]
    steps.insert(at + by, steps.pop(at))
    return with_part(plan, replace(plan.ranks[rank], steps=tuple(steps)))


PLAN = make_plan(SMALL, 4)
STAGGERED = staggered_plan(replace(SMALL, delay=1), 2)
TWO_LANES = replace(SMALL, num_lanes=2, num_heads=2, num_kv_heads=2)
TWO_RANKS = make_plan(replace(TWO_LANES, delay=0), 2)
FINDINGS = {
    "missing producer": (with_step(PLAN, 1, Phase.SUM, 0, publishes=None), "from rank 1, which never publishes it"),
    "not sent here": (
        with_step(PLAN, 1, Phase.SUM, 0, publishes=Message("attention", 0, (0, 2))),
        "waits for epoch 2 of attention from rank 1, which does not send it here",
    ),
    "total before sum": (swapped(TWO_RANKS, 0, Phase.SUM, Phase.TOTAL), "reads OWN_SUM site 0 number 0, but"),
    "read before write": (swapped(TWO_RANKS, 1, Phase.QKV, Phase.ATTEND), "its place holds nothing"),
    "value of the layer before": (with_step(PLAN, 2, Phase.GATE_UP, 2), "its place holds ACTIVATION number 0"),
    "written twice": (with_step(PLAN, 0, Phase.RESIDUAL, 1, lane=0), "its labels do not say"),
    "sum before the last lane behind": (
        moved(STAGGERED, 1, Phase.SUM, 2, -1), "SUM of attention layer 1: reads PARTIAL site 0 number 1 lane 7, but its place"
    ),
    "total after the first lane ahead": (
        moved(STAGGERED, 0, Phase.TOTAL, 2, 1), "RESIDUAL of attention layer 2 lane 0: reads TOTAL site 0 number 1, but its place"
    ),
    "slots": (with_mailbox(TWO_RANKS, "candidates", num_slots=0), "use 1 to 2"),
    "length": (with_mailbox(PLAN, "mlp", length=7), "publishes 16 values into mailbox mlp, which holds 7"),
    "lanes": (with_part(PLAN, replace(PLAN.ranks[3], lanes=(0, 1))), "rank 3 hosts lanes (0, 1), expected (6, 7)"),
    "ranks": (replace(PLAN, ranks=PLAN.ranks[::-1]), "the ranks are [3, 2, 1, 0]"),
    "no logits": (with_step(PLAN, 3, Phase.GATHER, 0), "from rank 3, which never publishes it"),
    "unread": (with_step(PLAN, 0, Phase.GATHER, 0), "to rank 0, which never reads it"),
    "a product that is missing": (
        with_part(PLAN, replace(PLAN.ranks[0], products=PLAN.ranks[0].products[1:])),
        "rank 0, QKV of layer 0, lane 1: stands where the steps have QKV of layer 0, lane 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_say_what_is_wrong(name: str) -> None:
    plan, text = FINDINGS[name]
    assert any(text in finding for finding in validate(plan)), validate(plan)
    with pytest.raises(PlanError, match="the plan cannot be run"):
        check(plan)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    """Each rank waits for the other's layer 0 before it publishes its own."""
    parts = []
    for part in TWO_RANKS.ranks:
        steps = list(part.steps)
        at = next(k for k, step in enumerate(steps) if step.phase is Phase.SUM)
        publishes = steps[at].publishes
        steps[at] = steps[at]._replace(publishes=None)
        later = next(k for k in range(at + 2, len(steps)) if steps[k].phase is Phase.SUM)
        steps[later] = steps[later]._replace(publishes=publishes)
        parts.append(replace(part, steps=tuple(steps)))
    findings = validate(replace(TWO_RANKS, ranks=tuple(parts)))
    assert any("the ranks wait for each other in a circle" in finding for finding in findings), findings


# ---- how many slots are enough ----
def delayed_only(delay: int, world_size: int) -> Plan:
    """A plan that exchanges nothing but the delayed sums of one block per layer, in a ring of slots that is to be chosen."""
    num_layers = 5 * delay + 8
    spec = replace(SMALL, num_lanes=world_size, delay=delay, num_layers=num_layers, mlp_comm=False, early_comm=False)
    return make_plan(spec, world_size)


def explore(world_size: int, delay: int, num_slots: int) -> bool:
    """Whether a ring of slots never loses a message: every order of events of all-to-all exchange, state by state.

    Each rank publishes step t to its peers one after another, then reads step t - delay from each. A state is each rank's
    (step, place in it) and what every slot holds.
    """
    last = 2 * delay + 2 * num_slots + 3
    peers = [[q for q in range(world_size) if q != r] for r in range(world_size)]
    start = (((1, 0),) * world_size, ((0,) * num_slots,) * world_size**2)
    seen, todo = {start}, deque([start])
    while todo:
        ranks, slots = todo.popleft()
        for rank, (step, place) in enumerate(ranks):
            if step > last:
                continue
            after_slots, after = slots, (step, place + 1)
            if place < world_size - 1:
                link = rank * world_size + peers[rank][place]
                ring = list(slots[link])
                ring[step % num_slots] = step
                after_slots = (*slots[:link], tuple(ring), *slots[link + 1 :])
            else:
                source = peers[rank][place - (world_size - 1)]
                wanted = step - delay
                found = slots[source * world_size + rank][wanted % num_slots]
                if wanted >= 1 and found > wanted:
                    return False  # overwritten before it was read
                if wanted >= 1 and found < wanted:
                    continue
                if place == 2 * (world_size - 1) - 1:
                    after = (step + 1, 0)
            state = ((*ranks[:rank], after, *ranks[rank + 1 :]), after_slots)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return True


@pytest.mark.parametrize(("delay", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 2), (1, 4)])
def test_a_ring_needs_two_delays_and_two_slots(delay: int, world_size: int) -> None:
    plan = delayed_only(delay, world_size)
    for num_slots in range(1, 2 * delay + 4):
        findings = validate(with_mailbox(plan, "attention", num_slots=num_slots))
        assert (findings == []) == (num_slots >= 2 * delay + 2), (num_slots, findings)
        if findings:
            assert any("may not have read epoch" in finding for finding in findings), findings


@pytest.mark.parametrize(("delay", "world_size"), [(0, 2), (1, 2), (2, 2), (0, 3)])
def test_the_rule_agrees_with_every_order_of_events(delay: int, world_size: int) -> None:
    assert not explore(world_size, delay, 2 * delay + 1)
    assert explore(world_size, delay, 2 * delay + 2)


def test_the_hand_off_needs_two_slots() -> None:
    """Without any other exchange that every token has, a fast rank would write the next token's candidates too early."""
    spec = replace(SMALL, attention_comm=False, mlp_comm=False)
    plan = make_plan(spec, 2)
    assert next(box for box in plan.mailboxes if box.name == "candidates").num_slots == 2
    assert any("slot 0 of candidates" in finding for finding in validate(with_mailbox(plan, "candidates", num_slots=1)))


def test_without_the_hand_off_of_prompt_tokens_slots_are_not_safe() -> None:
    """The exchange after a prompt token looks useless; it is what keeps a fast rank from the next token's slots."""
    spec = replace(SMALL, early_comm=False)
    plan = make_plan(spec, 2)
    parts = []
    for part in plan.ranks:
        steps = tuple(s._replace(when=1) if s.phase is Phase.SAMPLE else s for s in part.steps)  # type: ignore[arg-type]
        parts.append(replace(part, steps=steps))
    findings = validate(replace(plan, ranks=tuple(parts)))
    assert any("rewrites slot" in finding for finding in findings), findings


def test_mailbox_of_an_unknown_name() -> None:
    plan = replace(PLAN, mailboxes=(*PLAN.mailboxes[1:], PlannedMailbox("spare", 1, 1, 1)))
    assert any("uses mailbox 'attention', which is not declared" in finding for finding in validate(plan))
