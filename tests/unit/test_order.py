"""The order of products: what the kernel relies on beside the plan, which the validator proves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kog_dist.decode.plan.order import LaneTurn, product_order
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer

SMALL = ModelSpec(
    hidden_size=16, num_layers=7, num_heads=8, num_kv_heads=8, intermediate_size=16, vocab_size=24, num_lanes=8, delay=2
)  # fmt: skip
SUBLAYERS = {Phase.OUT: Sublayer.ATTENTION, Phase.DOWN: Sublayer.MLP}
CHAIN = (Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN)
VARIANTS = [
    replace(SMALL, num_layers=num_layers, delay=delay, early_comm=early, attention_comm=attention, mlp_comm=mlp)
    for num_layers, delay, early, (attention, mlp) in itertools.product(
        (1, 4, 7), (0, 1, 2, 3), (False, True), ((True, True), (True, False), (False, True), (False, False))
    )
]
LANES = [range(8), range(4, 8), range(2, 4), range(7, 8)]


@pytest.mark.parametrize("lanes", LANES, ids=str)
def test_each_lane_computes_its_own_in_order(lanes: range) -> None:
    for spec in VARIANTS:
        order = product_order(spec, lanes)
        for lane in lanes:
            wanted = [LaneTurn(layer, phase, lane) for layer in range(spec.num_layers) for phase in CHAIN]
            assert [product for product in order if product.lane == lane] == wanted, spec
        assert len(order) == 4 * spec.num_layers * len(lanes)


@pytest.mark.parametrize("lanes", LANES, ids=str)
def test_the_finaliser_finds_the_partials_that_it_adds(lanes: range) -> None:
    """A row's owner keeps the partials of `delay` + 1 layers (`history` in finalize_residual.cuh). When the last lane's
    is there, all are: then the sum goes to the peers. A blocking one is added then, too, and no lane may go on before
    it."""
    for spec in VARIANTS:
        history: dict[tuple[Sublayer, int, int], int] = {}  # sublayer, layer modulo delay + 1, lane -> layer
        streams = dict.fromkeys(lanes, 0)  # sublayers that have been added
        for product in product_order(spec, lanes):
            layer, lane = product.layer, product.lane
            assert streams[lane] == 2 * layer + (product.phase in (Phase.GATE_UP, Phase.DOWN)), (spec, product)
            if product.phase not in SUBLAYERS:
                continue
            sublayer = SUBLAYERS[product.phase]
            mode = spec.reduce_mode(layer, sublayer)
            if mode is ReduceMode.DELAYED:
                past = layer - spec.delay
                found = [history[sublayer, past % (spec.delay + 1), other] for other in lanes]
                assert found == [past] * len(lanes), (spec, product)
            history[sublayer, layer % (spec.delay + 1), lane] = layer
            if lane == lanes[-1]:
                assert [history[sublayer, layer % (spec.delay + 1), other] for other in lanes] == [layer] * len(lanes), (
                    spec,
                    product,
                )
            if mode is not ReduceMode.BLOCKING:
                streams[lane] += 1
            elif lane == lanes[-1]:
                streams = {other: done + 1 for other, done in streams.items()}


@pytest.mark.parametrize("lanes", [range(8), range(4), range(2)], ids=str)
def test_the_mlp_of_half_of_the_lanes_covers_the_attention_of_the_others(lanes: range) -> None:
    """The reason for the order: between QKV and OUT of a lane stand a GATE_UP and a DOWN of another one."""
    order, half = product_order(SMALL, lanes), len(lanes) // 2
    inner = order[4 * len(lanes) * SMALL.delay + 3 * half : -4 * half]  # without the ends, where half of the lanes are alone
    for number, product in enumerate(inner):
        if product.phase is Phase.OUT and (queries := LaneTurn(product.layer, Phase.QKV, product.lane)) in inner:
            between = inner[inner.index(queries) + 1 : number]
            others = {other.phase for other in between if (other.lane in lanes[:half]) != (product.lane in lanes[:half])}
            assert others >= {Phase.GATE_UP, Phase.DOWN}, product


@pytest.mark.parametrize("lanes", [range(8), range(4), range(2)], ids=str)
def test_at_most_two_small_products_stand_side_by_side_behind_the_blocking_layers(lanes: range) -> None:
    order, half = product_order(SMALL, lanes), len(lanes) // 2
    inner = order[4 * len(lanes) * SMALL.delay + 3 * half : -4 * half]
    small = "".join("s" if product.phase in (Phase.QKV, Phase.OUT) else "L" for product in inner)
    assert small
    assert "sss" not in small


@pytest.mark.parametrize("lanes", [range(8), range(4), range(2), range(4, 7)], ids=str)
@pytest.mark.parametrize("num_layers", [3, 7], ids="{} layers".format)  # 3: one layer is the first and the last
def test_at_the_ends_others_cover_attention_and_the_way_to_gate_up(lanes: range, num_layers: int) -> None:
    spec, half = replace(SMALL, num_layers=num_layers), len(lanes) // 2
    order, (ahead, behind) = product_order(spec, lanes), (lanes[:half], lanes[half:])

    def between(first: LaneTurn, last: LaneTurn) -> list[LaneTurn]:
        return order[order.index(first) + 1 : order.index(last)]

    first_free, last = spec.delay, num_layers - 1
    for lane in ahead:
        covering = between(LaneTurn(first_free, Phase.QKV, lane), LaneTurn(first_free, Phase.OUT, lane))
        assert {product for product in covering if product.phase is Phase.QKV} >= {
            LaneTurn(first_free, Phase.QKV, other) for other in behind
        }
    for lane in behind:
        covering = between(LaneTurn(last, Phase.OUT, lane), LaneTurn(last, Phase.GATE_UP, lane))
        assert set(covering) >= {LaneTurn(last, Phase.DOWN, other) for other in ahead}


def test_the_whole_order_of_four_lanes() -> None:
    order = product_order(replace(SMALL, num_layers=4), range(4))
    names = {Phase.QKV: "Q", Phase.OUT: "O", Phase.GATE_UP: "G", Phase.DOWN: "D"}
    assert " ".join(f"{names[product.phase]}{product.layer}{product.lane}" for product in order) == (
        "Q00 Q01 Q02 Q03 O00 O01 O02 O03 G00 G01 G02 G03 D00 D01 D02 D03 "
        "Q10 Q11 Q12 Q13 O10 O11 O12 O13 G10 G11 G12 G13 D10 D11 D12 D13 "
        "Q20 Q21 Q22 Q23 O20 O21 G20 G21 D20 O22 D21 O23 "
        "Q30 G22 Q31 G23 D22 O30 D23 O31 Q32 G30 Q33 G31 O32 O33 D30 D31 "
        "G32 G33 D32 D33"
    )
