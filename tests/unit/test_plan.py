"""Plans and tapes: what is published when, where rows go, and that a plan is a pure function of its arguments."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.decode.plan import Plan, make_plan
from kog_dist.decode.steps import NONE, WEIGHT_PHASES, Kind, Message, Phase, Site, Step, Value, When
from kog_dist.decode.tape import segment_weights, tape, tape_values
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint, random_tensors, write_checkpoint
from kog_dist.model.spec import HeadType, ModelSpec, laneformer_2b

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
    plan = make_plan(SMALL, 1, staggered=True)
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
    ordered = make_plan(replace(SMALL, delay=1), 1, staggered=True).ranks[0].steps
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
    assert make_plan(SMALL, 4, staggered=True) == make_plan(SMALL, 4)
    for ranks in (1, 2):
        assert make_plan(SMALL, ranks, staggered=True).digest() != make_plan(SMALL, ranks).digest()
    blocking = replace(SMALL, delay=0)
    assert make_plan(blocking, 1, staggered=True) == make_plan(blocking, 1)


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
    digests = {make_plan(spec, world_size, ctas).digest() for spec, world_size, ctas in VARIANTS}
    assert len(digests) == len(VARIANTS)
    assert make_plan(*VARIANTS[0]).digest() == make_plan(*VARIANTS[0]).digest()
    other_process = (
        "from kog_dist.decode.plan import make_plan; from kog_dist.model.spec import laneformer_2b; "
        "print(make_plan(laneformer_2b(), 8).digest())"
    )
    found = subprocess.run([sys.executable, "-c", other_process], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == make_plan(laneformer_2b(), 8).digest()


VARIANTS = [
    (SMALL, 1, 8), (SMALL, 2, 8), (SMALL, 2, 9), (replace(SMALL, delay=1), 2, 8), (replace(SMALL, norm_eps=1e-6), 2, 8),
]  # fmt: skip


def test_every_part_of_a_plan_is_in_its_digest() -> None:
    plan = make_plan(SMALL, 2, 4)
    part = plan.ranks[1]
    changed = [
        replace(plan, mailboxes=(replace(plan.mailboxes[0], num_slots=9), *plan.mailboxes[1:])),
        replace(plan, ranks=(plan.ranks[0], replace(part, steps=part.steps[:-1]))),
        replace(plan, ranks=(plan.ranks[0], replace(part, steps=(*part.steps[:-1], part.steps[-1]._replace(when=When.SAMPLED))))),
        replace(plan, ranks=(plan.ranks[0], replace(part, splits=part.splits[1:]))),
        replace(plan, ranks=(plan.ranks[0], replace(part, lanes=(3, 2)))),
    ]
    assert len({plan.digest(), *(other.digest() for other in changed)}) == len(changed) + 1


def test_sizes_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 lanes cannot be spread over 3 ranks; use one of 1, 2, 4"):
        make_plan(SMALL, 3)
    with pytest.raises(ConfigError, match="num_ctas must be at least 1"):
        make_plan(SMALL, 1, 0)
    with pytest.raises(ConfigError, match="vocab_size must be at most 1048576"):
        make_plan(replace(SMALL, vocab_size=(1 << 20) + 1), 1)


# ---- tapes ----
@pytest.mark.parametrize("num_ctas", [1, 3, 128])
@pytest.mark.parametrize("head_type", [HeadType.REPLICATE, HeadType.LANE])
def test_every_weight_is_on_exactly_one_tape(num_ctas: int, head_type: HeadType, tmp_path: Path) -> None:
    """Weights are numbered; the tapes of all CTAs of all ranks together must hold every number once."""
    spec = replace(SMALL, head_type=head_type)
    write_checkpoint(tmp_path, spec, random_tensors(spec, 1), dtype="float32")
    found: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
    plan = make_plan(spec, 2, num_ctas)
    expected = 0
    for part in plan.ranks:
        weights = open_checkpoint(tmp_path).rank_weights(part.lanes)
        matrices = [
            m for lane in part.lanes for layer in weights.lanes[lane].layers for m in (layer.wqkv, layer.wo, layer.w13, layer.w2)
        ]
        for matrix in (*matrices, *(weights.heads[lane] for lane in part.lanes)):
            matrix.ravel()[:] = np.arange(expected, expected + matrix.size)
            expected += matrix.size
        for cta in range(num_ctas):
            segments = list(tape(plan, part.rank, cta))
            found += [rows.ravel().copy() for segment in segments for rows in segment_weights(segment, weights)]
            assert tape_values(plan, part.rank, cta, weights) == sum(
                rows.size for segment in segments for rows in segment_weights(segment, weights)
            )
    assert expected < 1 << 24, "float32 must count exactly"
    assert (np.sort(np.concatenate(found)) == np.arange(expected)).all()


def test_a_tape_follows_the_order_of_use() -> None:
    plan = make_plan(SMALL, 2, num_ctas=4)
    used = [
        (s.phase, s.layer, s.lane)
        for s in plan.ranks[1].steps
        if s.phase in (Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN, Phase.HEAD)
    ]
    assert [segment[:3] for segment in tape(plan, 1, 0)] == used


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_published_shape_divides_evenly_over_128_ctas(world_size: int) -> None:
    """D = 128 x 24, FFN of a lane = 128 x 12, QKV of a lane = 128 x 6; only the vocabulary's rows do not divide."""
    plan = make_plan(laneformer_2b(), world_size, 128)
    for cta in range(128):
        rows = {segment.phase: segment.num_rows for segment in tape(plan, 0, cta)}
        assert (rows[Phase.QKV], rows[Phase.OUT], rows[Phase.GATE_UP], rows[Phase.DOWN]) == (6, 24, 12, 24)
    head_rows = [sum(s.num_rows for s in tape(plan, 0, cta) if s.phase is Phase.HEAD) for cta in range(128)]
    assert max(head_rows) - min(head_rows) <= 1
    assert sum(head_rows) == 32000 // world_size


def test_rows_of_the_residual_have_one_owner_and_pairs_stay_together() -> None:
    spec = replace(SMALL, hidden_size=72, num_heads=4, num_kv_heads=4, intermediate_size=44)
    for part in make_plan(spec, 2, num_ctas=5).ranks:
        owners = {split.rows for split in part.splits if split.phase in (Phase.OUT, Phase.DOWN)}
        assert len(owners) == 1
        for split in part.splits:
            counts = [count for _, count in split.rows]
            assert max(counts) - min(counts) <= (2 if split.phase is Phase.QKV else 1)
            if split.phase is Phase.QKV:
                assert all(first % 2 == 0 and count % 2 == 0 for first, count in split.rows)
