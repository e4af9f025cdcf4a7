"""Plans: what is published when, what is multiplied, and that a plan is a pure function of its arguments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.products import Product
from kog_dist.decode.plan.steps import LAYER_OPS, NONE, WEIGHT_PHASES, Kind, Message, Phase, Site, Step, Value, When
from kog_dist.decode.tape_packing import OpShape
from kog_dist.errors import ConfigError
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b
from tests.unit.staggered import staggered_plan

SMALL = ModelSpec(
    hidden_size=48, num_layers=5, num_heads=8, num_kv_heads=4, intermediate_size=40, vocab_size=50, num_lanes=4, delay=2
)  # fmt: skip


def steps(plan: Plan, rank: int, phase: Phase) -> list[Step]:
    return [step for step in plan.ranks[rank].steps if step.phase is phase]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_lanes_are_contiguous_and_each_lives_once(world_size: int) -> None:
    plan = make_plan(SMALL, world_size)
    assert [lane for part in plan.ranks for lane in part.lanes] == list(range(4))
    assert {len(part.lanes) for part in plan.ranks} == {4 // world_size}


def test_lanes_of_a_phase_stand_together() -> None:
    """Phase-major: one lane's wait is covered by the other lanes' work."""
    order = [(s.phase, s.layer, s.lane) for s in make_plan(SMALL, 2).ranks[1].steps if s.layer == 3 and s.lane != NONE]
    phases = (Phase.QKV, Phase.ATTEND, Phase.OUT, Phase.RESIDUAL, Phase.GATE_UP, Phase.DOWN, Phase.RESIDUAL)
    assert order == [(phase, 3, lane) for phase in phases for lane in (2, 3)]


def test_staggered_lanes_are_half_a_layer_apart_behind_the_blocking_layers() -> None:
    plan = staggered_plan(SMALL, 1)
    order = [(s.phase, s.layer, s.lane) for s in plan.ranks[0].steps if s.phase in WEIGHT_PHASES and s.layer != NONE]
    phases = (Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN)
    assert order[:32] == [(phase, layer, lane) for layer in (0, 1) for phase in phases for lane in range(4)]
    assert order[32:36] == [(Phase.QKV, 2, lane) for lane in range(4)]
    assert order[36:40] == [(phase, 2, lane) for phase in (Phase.OUT, Phase.GATE_UP) for lane in (0, 1)]
    assert order[40:44] == [(Phase.DOWN, 2, 0), (Phase.OUT, 2, 2), (Phase.DOWN, 2, 1), (Phase.OUT, 2, 3)]
    assert order[44:46] == [(Phase.QKV, 3, 0), (Phase.GATE_UP, 2, 2)]
    assert order[-4:] == [(phase, 4, lane) for phase in (Phase.GATE_UP, Phase.DOWN) for lane in (2, 3)]
    assert sorted(order) == sorted((phase, layer, lane) for phase in phases for layer in range(5) for lane in range(4))


def test_a_staggered_sum_waits_for_the_lanes_behind() -> None:
    """Published once the last own lane has its part; the total comes once, before the first lane that needs it."""
    ordered = staggered_plan(replace(SMALL, delay=1), 1).ranks[0].steps
    at = {(s.phase, s.site, s.layer, s.lane): k for k, s in enumerate(ordered)}
    for site, phase in ((Site.ATTENTION, Phase.OUT), (Site.MLP, Phase.DOWN)):
        for layer in (1, 2, 3):
            outputs = [at[phase, NONE, layer, lane] for lane in range(4)]
            assert at[Phase.RESIDUAL, site, layer, 0] < outputs[2], "lanes ahead do not wait"
            assert at[Phase.SUM, site, layer, NONE] == max(outputs) + 1
            users = [at[Phase.RESIDUAL, site, layer + 1, lane] for lane in range(4)]
            assert at[Phase.SUM, site, layer, NONE] < at[Phase.TOTAL, site, layer, NONE] == min(users) - 1
    assert sum(s.phase is Phase.TOTAL and s.site != Site.FINAL for s in ordered) == 8


def test_ranks_of_one_lane_have_one_order() -> None:
    assert staggered_plan(SMALL, 4) == make_plan(SMALL, 4)
    for ranks in (1, 2):
        assert staggered_plan(SMALL, ranks).digest() != make_plan(SMALL, ranks).digest()
    blocking = replace(SMALL, delay=0)
    assert staggered_plan(blocking, 1) == make_plan(blocking, 1)


def test_early_layers_block_later_layers_look_back_and_the_last_publish_nothing() -> None:
    plan = make_plan(SMALL, 2)
    assert [step.layer for step in steps(plan, 0, Phase.SUM) if step.site == Site.MLP] == [0, 1, 2]
    # Layers 0 and 1 wait at once, and layers 2 and 3 use the same totals again; only layer 4 waits for a delayed one.
    totals = [(step.layer, step.waits) for step in steps(plan, 0, Phase.TOTAL) if step.site == Site.ATTENTION]
    assert totals == [(layer, Message("attention", layer, (1,))) for layer in (0, 1, 2)]
    residual = [step for step in steps(plan, 0, Phase.RESIDUAL) if step.site == Site.ATTENTION and step.lane == 1]
    assert residual[1].reads == (Value(Kind.STREAM, 2, 1), Value(Kind.TOTAL, 1, site=Site.ATTENTION))
    assert residual[3].reads == (
        Value(Kind.STREAM, 6, 1), Value(Kind.PARTIAL, 3, 1, Site.ATTENTION),
        Value(Kind.TOTAL, 1, site=Site.ATTENTION), Value(Kind.PARTIAL, 1, 1, Site.ATTENTION),
    )  # fmt: skip
    assert residual[3].writes == (Value(Kind.STREAM, 7, 1),)


def test_without_early_communication_layers_still_feed_later_ones() -> None:
    plan = make_plan(replace(SMALL, early_comm=False), 2)
    first = steps(plan, 0, Phase.RESIDUAL)[0]
    assert [value.kind for value in first.reads] == [Kind.STREAM, Kind.PARTIAL]
    order = [(s.phase, s.layer) for s in plan.ranks[0].steps if s.phase in (Phase.SUM, Phase.TOTAL) and s.site == Site.MLP]
    assert order == [
        (Phase.SUM, 0), (Phase.SUM, 1), (Phase.SUM, 2), (Phase.TOTAL, 0), (Phase.TOTAL, 1), (Phase.TOTAL, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        ({"delay": 0}, 5), ({"delay": 1}, 4), ({"delay": 9}, 5), ({"delay": 9, "early_comm": False}, 0),
        ({"attention_comm": False}, 0),
    ],
)  # fmt: skip
def test_how_many_layers_publish(changes: dict[str, int], published: int) -> None:
    plan = make_plan(replace(SMALL, **changes), 4)  # type: ignore[arg-type]
    assert sum(step.site == Site.ATTENTION for step in steps(plan, 2, Phase.SUM)) == published
    assert ("attention" in plan.mailbox_by_name) == (published > 0)
    if published:
        box = plan.mailbox_by_name["attention"]
        assert (box.num_slots, box.per_token, box.length) == (published, published, SMALL.hidden_size)


def test_one_rank_has_no_mailboxes() -> None:
    plan = make_plan(SMALL, 1)
    assert plan.mailboxes == ()
    assert all(step.publishes is None and step.waits is None for step in plan.ranks[0].steps)


@pytest.mark.parametrize(
    ("head", "final"),
    [
        (replace(SMALL), 48),
        (replace(SMALL, pre_norm_lane_agg=True), 48),
        (replace(SMALL, head_type=HeadType.LANE), 96),
        (replace(SMALL, head_type=HeadType.VOCAB_PARALLEL, vocab_size=52), None),
    ],
)
def test_lane_aggregation_of_each_head(head: ModelSpec, final: int | None) -> None:
    plan = make_plan(head, 2)
    box = plan.mailbox_by_name.get("final")
    assert (box.length if box else None) == final
    assert plan.mailbox_by_name["logits"].length == 26
    assert (plan.mailbox_by_name["candidates"].length, plan.mailbox_by_name["candidates"].num_slots) == (5, 2)
    last = plan.ranks[0].steps[-1]
    assert (last.phase, last.when) == (Phase.SAMPLE, When.ALWAYS)


def test_epochs_grow_and_slots_follow_them() -> None:
    plan = make_plan(SMALL, 2)
    epochs = [
        (plan.epoch(step.publishes, token), plan.slot(step.publishes, token))
        for token in (1, 2)
        for step in steps(plan, 0, Phase.SUM)
        if step.publishes and step.publishes.mailbox == "mlp"
    ]
    assert epochs == [(3, 0), (4, 1), (5, 2), (6, 0), (7, 1), (8, 2)]
    candidates = steps(plan, 0, Phase.SAMPLE)[0].waits
    assert candidates is not None
    assert [plan.slot(candidates, token) for token in (1, 2, 3)] == [1, 0, 1]


def test_the_plan_depends_only_on_its_arguments() -> None:
    digests = {make_plan(spec, world_size).digest() for spec, world_size in VARIANTS}
    assert len(digests) == len(VARIANTS)
    assert make_plan(*VARIANTS[0]).digest() == make_plan(*VARIANTS[0]).digest()
    other_process = (
        "from kog_dist.decode.plan.plan import make_plan; from kog_dist.model.spec import laneformer_2b; "
        "print(make_plan(laneformer_2b(), 8).digest())"
    )
    found = subprocess.run([sys.executable, "-c", other_process], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == make_plan(laneformer_2b(), 8).digest()


VARIANTS = [
    (SMALL, 1), (SMALL, 2), (replace(SMALL, delay=1), 2), (replace(SMALL, norm_eps=1e-6), 2),
]  # fmt: skip


def test_every_part_of_a_plan_is_in_its_digest() -> None:
    plan = make_plan(SMALL, 2)
    part = plan.ranks[1]

    def with_form(form: OpShape) -> Product:
        return part.products[0]._replace(rows=part.products[0].rows._replace(form=form))

    changed = [
        replace(plan, mailboxes=(replace(plan.mailboxes[0], num_slots=9), *plan.mailboxes[1:])),
        replace(plan, ranks=(plan.ranks[0], replace(part, steps=part.steps[:-1]))),
        replace(plan, ranks=(plan.ranks[0], replace(part, steps=(*part.steps[:-1], part.steps[-1]._replace(when=When.SAMPLED))))),
        replace(plan, ranks=(plan.ranks[0], replace(part, products=part.products[1:]))),
        replace(plan, ranks=(plan.ranks[0], replace(part, products=(with_form(OpShape(2, 1, 1, 1, 8)), *part.products[1:])))),
        replace(plan, ranks=(plan.ranks[0], replace(part, products=(with_form(OpShape(2, 1, 1, 1, 9)), *part.products[1:])))),
        replace(plan, num_ctas=2),
        replace(plan, ranks=(plan.ranks[0], replace(part, lanes=(3, 2)))),
    ]
    assert len({plan.digest(), *(other.digest() for other in changed)}) == len(changed) + 1


def test_sizes_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 lanes cannot be spread over 3 ranks; use one of 1, 2, 4"):
        make_plan(SMALL, 3)
    with pytest.raises(ConfigError, match="vocab_size must be at most 1048576"):
        make_plan(replace(SMALL, vocab_size=(1 << 20) + 1), 1)


# ---- products ----
@pytest.mark.parametrize("plan", [make_plan(SMALL, 2), staggered_plan(SMALL, 2)], ids=["plain", "staggered"])
def test_products_are_the_steps_that_multiply(plan: Plan) -> None:
    for part in plan.ranks:
        used = [(step.phase, step.layer, step.lane) for step in part.steps if step.phase in WEIGHT_PHASES]
        assert [(product.op, product.layer, lane) for product in part.products for lane in product.lanes] == used


def test_undivided_rows_have_one_owner() -> None:
    rows = [(product.op, product.first_lane, product.rows[:3]) for product in make_plan(SMALL, 2).ranks[1].products]
    assert rows[: 2 * len(LAYER_OPS)] == [
        (op, lane, (count, 1, 1))
        for op, count in ((Phase.QKV, 24), (Phase.OUT, 48), (Phase.GATE_UP, 20), (Phase.DOWN, 48))
        for lane in (2, 3)
    ]
    assert rows[-2:] == [(Phase.HEAD, 2, (13, 1, 1)), (Phase.HEAD, 3, (11, 1, 1))]
    assert {product.rows.form for part in make_plan(SMALL, 2).ranks for product in part.products} == {None}
