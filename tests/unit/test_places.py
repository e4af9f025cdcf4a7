"""A wait record of a CPU rank names the phase and the layer that its mailbox and slot stand for in the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import NONE, Phase, Site
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.runtime.abi import WaitOp, WaitRecord
from kog_dist.runtime.places import with_place

SPEC = ModelSpec(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, intermediate_size=64, vocab_size=76, max_context=32, num_lanes=4,
    delay=1,
)  # fmt: skip
SUMMED = {Site.ATTENTION: Phase.OUT, Site.MLP: Phase.DOWN}


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, delay=0), replace(SPEC, early_comm=False, head_type=HeadType.LANE)])
def test_every_wait_of_the_plan_is_named(spec: ModelSpec) -> None:
    plan = make_plan(spec, 2)
    waits = [(step, step.waits) for step in plan.ranks[1].steps if step.waits is not None]
    assert {step.phase for step, _ in waits} >= {Phase.TOTAL, Phase.SAMPLE}
    for step, message in waits:
        for token in (0, 5):
            record = WaitRecord(1, WaitOp.COLLECT, 0, plan.slot(message, token), 0, 4, 9, 8, 10**9, message.mailbox)
            found = with_place(spec, record)
            if step.phase is Phase.TOTAL and step.site in SUMMED:
                layer = step.writes[0].number
                assert (found.phase, found.layer) == (SUMMED[Site(step.site)], layer)
                assert str(found).startswith(
                    f"rank 1: the sum of {SUMMED[Site(step.site)].name} of layer {layer} waited 1.0 s for 4"
                )
            else:
                assert (found.phase, found.layer) == (step.phase if step.phase is not Phase.TOTAL else Phase.HEAD_INPUT, NONE)


def test_another_mailbox_is_left_alone() -> None:
    record = WaitRecord(0, WaitOp.BARRIER, 7, 1, 1, 1, 2, 1, 1, "barrier")
    assert with_place(SPEC, record) == record
