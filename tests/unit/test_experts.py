"""Experts by themselves: the choice and its ties, the activation, products with late addresses, and plans that route wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.decode.cpu import host_library, lane_math, matrix_products
from kog_dist.decode.cpu.matrix_products import ExpertOperands
from kog_dist.decode.plan.plan import Plan, make_plan
from kog_dist.decode.plan.steps import Kind, Message, Phase, PlannedMailbox, Value
from kog_dist.decode.plan.validate import validate
from kog_dist.errors import ConfigError
from kog_dist.model.aligned import aligned_empty
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.mxfp4 import kept
from kog_dist.model.formats.numbers import e8m0_values
from kog_dist.model.formats.weight_format import CodedMatrix
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.weights import BFLOAT16
from kog_dist.runtime.abi import WaitOp, WaitRecord
from kog_dist.runtime.places import with_place
from tests.unit.staggered import staggered_plan
from tests.unit.test_validate import moved, swapped, with_part, with_step

SPEC = ModelSpec(
    hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=16, vocab_size=20, num_lanes=4, delay=0,
    experts=ExpertsSpec(6, 2),
)  # fmt: skip


# ---- the choice ----
def chosen(logits: list[float], num: int, *, is_normalised: bool = True) -> tuple[list[int], list[float]]:
    choice = np.empty((2, num))
    lane_math.select(np.array(logits), np.empty(len(logits)), is_normalised, choice)
    return choice[0].astype(int).tolist(), choice[1].tolist()


@pytest.mark.parametrize(
    ("logits", "num", "ids"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([0.0, 1.0, 0.0, 1.0, 1.0], 2, [1, 3]),
        ([-0.0, 0.0, -1.0], 1, [0]),
        ([-np.inf, 2.0, -np.inf], 2, [0, 1]),
        ([2.0, 1.0], 2, [0, 1]),
    ],
)
def test_the_largest_are_chosen_and_of_equal_ones_the_smaller_numbers(logits: list[float], num: int, ids: list[int]) -> None:
    assert chosen(logits, num)[0] == ids


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=24), st.data())
def test_weights_are_those_of_a_softmax(logits: list[float], data: st.DataObject) -> None:
    num = data.draw(st.integers(1, len(logits)))
    exact = np.exp(np.array(logits) - max(logits))
    for is_normalised in (True, False):
        ids, weights = chosen(logits, num, is_normalised=is_normalised)
        assert ids == sorted(sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))[:num])
        total = exact[ids].sum() if is_normalised else exact.sum()
        assert weights == pytest.approx((exact[ids] / total).tolist())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_show_in_every_weight(value: float) -> None:
    with np.errstate(all="ignore"):
        assert all(np.isnan(chosen([1.0, 2.0, value, 0.0], 3)[1]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 2e-5)])
def test_activations(dtype: Any, tolerance: float) -> None:
    """Of every size, and with what is not finite as IEEE has it. float32 rounds exponents, of which 100 count as 1e-5."""
    rng = np.random.default_rng(2)
    gate, up = (rng.standard_normal((3, 41)).astype(dtype) * scale for scale in (40, 9))
    gate[0, :6] = -90, -88.6, 88.6, 95, 0, -1e30
    gate[1, :2] = np.nan, np.inf
    for clamp in (None, ClampedSwiglu(1.702, 7.0)):
        out = np.empty_like(gate)
        with np.errstate(over="ignore"):
            lane_math.activation(np.concatenate((gate, up), axis=1), out, clamp)()
            g, u, alpha = gate.astype(np.float64), up.astype(np.float64), 1.0
            if clamp is not None:
                g, u, alpha = np.minimum(g, clamp.limit), np.clip(u, -clamp.limit, clamp.limit) + 1, clamp.alpha
            wanted = u * g / (1 + np.exp(-alpha * g))
        assert np.allclose(out, wanted, rtol=tolerance, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)])
def test_products_take_the_matrices_of_the_chosen_experts(dtype: np.dtype[Any], is_shared: bool) -> None:
    if dtype.itemsize == 2 and host_library.library() is None:
        pytest.skip("needs a C compiler")
    rng = np.random.default_rng(5)
    kind = np.float64 if dtype == np.float64 else np.float32
    for choices in (((0, 2, 4),), ((1, 2, 3), (0, 1, 2)), tuple((token % 3, 3, 4) for token in range(20))):
        operands, exacts = list[ExpertOperands](), list[NDArray[Any]]()
        for _ in range(2):  # lanes
            matrices = aligned_empty((5, 7, 33), dtype)
            exact = rng.integers(-4, 5, matrices.shape).astype(np.float32)
            matrices[...] = (exact.view(np.uint32) >> 16).astype(np.uint16) if dtype == BFLOAT16 else exact.astype(dtype)
            exacts.append(exact)
            slots = 3 * len(choices)
            vectors = rng.integers(-3, 4, (len(choices) if is_shared else slots, 33)).astype(kind)
            operands.append(ExpertOperands(matrices, vectors, np.full((slots, 7), np.nan, kind)))
        multiply = lane_math.chosen_products(operands)
        for ids in (np.array(choices), np.array(choices[::-1])):
            multiply(ids)
            for one, exact in zip(operands, exacts, strict=True):
                vectors = np.repeat(one.vectors, 3, axis=0) if is_shared else one.vectors
                wanted = [exact[expert] @ vector for expert, vector in zip(ids.reshape(-1), vectors, strict=True)]
                assert np.array_equal(one.products, np.stack(wanted))


@pytest.mark.parametrize(("columns", "skew"), [(32, 0), (64, 0), (16, 0), (16, 16), (48, 0), (48, 16), (32, 16), (80, 16)])
def test_products_of_codes_are_those_of_their_values(columns: int, skew: int) -> None:
    """All codes and the ends of scales, in every place of a group; sums of few terms are exact."""
    if host_library.library() is None:
        pytest.skip("needs a C compiler")
    rng = np.random.default_rng(7)
    experts, rows, groups = 4, 32, -(-(columns + skew) // 32)
    codes = rng.integers(0, 16, (experts, rows, columns), dtype=np.uint8)
    scales = rng.integers(122, 128, (experts, rows, groups), dtype=np.uint8)
    group_of = (np.arange(columns) + skew) // 32
    coded = [CodedMatrix(MXFP4, codes[idx], e8m0_values(scales[idx]), group_of) for idx in range(experts)]
    values = [matrix.values() for matrix in coded]
    kept_codes, kept_scales = (np.stack(parts) for parts in zip(*(kept(matrix, skew) for matrix in coded), strict=True))
    for choices in ([[0, 3]], [[1, 2]], [[2, 2]], [[0, 1], [1, 3], [1, 2], [1, 3], [0, 1]]):
        vectors = rng.integers(-8, 9, (2 * len(choices), columns)).astype(np.float32)
        out = np.empty((len(vectors), rows), np.float32)
        matrix_products.bound_to_experts([ExpertOperands(kept_codes, vectors, out, kept_scales, skew)])(np.array(choices))
        wanted = [values[expert] @ vector for expert, vector in zip(np.array(choices).reshape(-1), vectors, strict=True)]
        assert np.array_equal(out, np.stack(wanted))


def test_scales_at_their_ends() -> None:
    if host_library.library() is None:
        pytest.skip("needs a C compiler")
    scales = np.array([1, 2, 126, 254], np.uint8).reshape(4, 1)
    coded = CodedMatrix(MXFP4, np.full((4, 32), 2, np.uint8), e8m0_values(scales), np.zeros(32, np.intp))  # codes of 1.0
    codes, kept_scales = kept(coded, 0)
    out = np.empty((1, 4), np.float32)
    operands = ExpertOperands(codes[None], np.eye(1, 32, dtype=np.float32), out, kept_scales[None])
    matrix_products.bound_to_experts([operands])(np.zeros((1, 1), np.intp))
    assert np.array_equal(out[0], e8m0_values(scales[:, 0]))


# ---- what can be said ----
ONE_KEY = {"num_experts": 4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"delay": 1}, "experts go only with one residual stream"),
        ({"head_type": HeadType.LANE}, "experts go only with one residual stream"),
        ({"shared_norm_scale": False}, "experts go only with one residual stream"),
        ({"num_layers": 2049, "experts": ExpertsSpec(16, 1)}, "2049 times 16 experts must be at most 32768"),
    ],
)
def test_models_that_cannot_have_experts(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ([], "experts must be an object with num_experts, per_token"),
        (ONE_KEY, "experts must be an object with"),
        ({"num_experts": 4.5}, "experts.num_experts must be int"),
        ({"bias": 1}, "experts.bias must be bool"),
        ({"clamp": {"alpha": 1.0}}, "must be null or an object with alpha and limit"),
        ({"clamp": {"alpha": 1.0, "limit": "7"}}, "must have two numbers"),
        ({"clamp": {"alpha": 1.0, "limit": 0}}, "swiglu_limit must be between 0.01 and 10000, got 0"),
        ({"per_token": 0}, "must be between 1 and the 6 experts, got 0"),
    ],
)
def test_configs_of_experts_are_read_strictly(raw: Any, named: str) -> None:
    config = raw if isinstance(raw, list) or raw == ONE_KEY else ExpertsSpec(6, 2).to_config() | raw
    with pytest.raises(ConfigError, match=named):
        ExpertsSpec.from_config(config)


def test_configs_of_experts_come_back() -> None:
    for experts in (ExpertsSpec(6, 2), ExpertsSpec(9, 9, False, True, True, ClampedSwiglu(1.702, 7.0))):
        assert ExpertsSpec.from_config(experts.to_config()) == experts
    assert ExpertsSpec.from_config(None) is None


# ---- plans ----
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("checks_experts", [False, True])
@pytest.mark.parametrize("staggered", [False, True])
def test_plans_with_experts_are_accepted(world_size: int, checks_experts: bool, staggered: bool) -> None:
    plan = (staggered_plan if staggered else make_plan)(SPEC, world_size, checks_experts=checks_experts)
    assert validate(plan) == []
    for part in plan.ranks:
        phases = [step.phase for step in part.steps]
        assert phases.count(Phase.ROUTE) == phases.count(Phase.SELECT) == SPEC.num_layers
    boxes = [box for box in plan.mailboxes if box.name == "experts"]
    assert boxes == ([PlannedMailbox("experts", 3, 2, 3)] if checks_experts and world_size > 1 else [])


def test_the_check_changes_the_plan_and_nothing_of_models_without() -> None:
    assert make_plan(SPEC, 2).digest() != make_plan(SPEC, 2, checks_experts=True).digest()
    dense = replace(SPEC, experts=None)
    assert make_plan(dense, 2).digest() == make_plan(dense, 2, checks_experts=True).digest()


PLAN = make_plan(SPEC, 2)
CHECKED = make_plan(SPEC, 4, checks_experts=True)
ALL_BUT_2 = Message("experts", 1, (0, 1))
WRONG: dict[str, tuple[Plan, str]] = {
    "the stream before attention": (
        with_step(PLAN, 1, Phase.ROUTE, 1, reads=(Value(Kind.STREAM, 2),)),
        "reads STREAM number 2, but its place holds STREAM",
    ),
    "a choice from logits of another layer": (
        with_step(PLAN, 1, Phase.SELECT, 1, reads=(Value(Kind.ROUTER_LOGITS, 0),)),
        "CHOICE number 1 is not made of what",
    ),
    "experts of another layer's choice": (
        with_step(PLAN, 0, Phase.GATE_UP, 2, reads=(Value(Kind.STREAM, 3), Value(Kind.CHOICE, 0))),
        "is not made of what",
    ),
    "gate and down of different choices": (
        with_step(PLAN, 0, Phase.DOWN, 3, reads=(Value(Kind.ACTIVATION, 1, 1), Value(Kind.CHOICE, 0))),
        "is not made of what",
    ),
    "no choice": (with_step(PLAN, 0, Phase.GATE_UP, 0, reads=(Value(Kind.STREAM, 1),)), "which the phase cannot use"),
    "chosen before routed": (
        swapped(PLAN, 1, Phase.ROUTE, Phase.SELECT),
        "reads ROUTER_LOGITS number 0, but its place",
    ),
    "routed before attention": (moved(PLAN, 0, Phase.ROUTE, 0, -1), "reads STREAM number 1, but its place holds STREAM number 0"),
    "left out": (with_step(PLAN, 1, Phase.SELECT, 2), "reads CHOICE number 2, but its place holds nothing"),
    "one rank compares with nobody": (
        with_step(CHECKED, 2, Phase.SELECT, 1, publishes=None),
        "from rank 2, which never publishes it",
    ),
    "one rank is not compared": (with_step(CHECKED, 3, Phase.SELECT, 1, waits=ALL_BUT_2), "to rank 3, which never reads it"),
    "of a lane": (with_step(PLAN, 0, Phase.ROUTE, 0, lane=0), "lane 0 does not fit the phase"),
}


@pytest.mark.parametrize("name", WRONG)
def test_plans_that_route_wrongly_are_refused(name: str) -> None:
    plan, named = WRONG[name]
    findings = validate(plan)
    assert findings
    assert any(named in finding for finding in findings), findings


def test_the_mailbox_must_hold_a_choice() -> None:
    boxes = tuple(replace(box, length=3) if box.name == "experts" else box for box in CHECKED.mailboxes)
    assert "publishes 2 values into mailbox experts, which holds 3" in validate(replace(CHECKED, mailboxes=boxes))[0]


def test_models_without_experts_route_nothing() -> None:
    dense = make_plan(replace(SPEC, experts=None), 2)
    route = next(step for step in PLAN.ranks[0].steps if step.phase is Phase.ROUTE)
    part = dense.ranks[0]
    assert "the model has no layer with ROUTE" in validate(with_part(dense, replace(part, steps=(*part.steps, route))))[0]


def test_a_wait_for_choices_names_the_layer() -> None:
    plan = make_plan(SPEC, 2, checks_experts=True)
    for step in plan.ranks[0].steps:
        if step.phase is Phase.SELECT:
            assert step.waits is not None
            record = WaitRecord(1, WaitOp.COLLECT, 0, plan.slot(step.waits, 6), 0, 4, 9, 8, 10**9, "experts")
            found = with_place(SPEC, record)
            assert (found.phase, found.layer) == (Phase.SELECT, step.layer)
