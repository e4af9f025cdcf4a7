"""One list of products: the GPU's table and shapes are made of the list that the plan holds, and a damaged list is refused."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.shapes import named_shape
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.plan import Plan
from kog_dist.decode.plan.products import Product, RowShare
from kog_dist.decode.plan.recipes import op_numbers
from kog_dist.decode.plan.steps import LANE_OPS, NONE, Phase
from kog_dist.decode.plan.validate import validate
from kog_dist.decode.tape_packing import OpShape
from kog_dist.errors import PlanError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.test_kinds_twin import SPECS as STORED

LANEFORMER = ModelSpec(128, 4, 8, 8, 256, 100, max_context=64, num_lanes=4, delay=1)
DENSE = replace(LANEFORMER, delay=0, num_layers=3)
WITH_EXPERTS = replace(DENSE, experts=ExpertsSpec(6, 2))
INT4 = Coding("INT4", 4, "BF16")
KINDS: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "Laneformer": (LANEFORMER, {}),
    "Laneformer whose head has all lanes' columns": (replace(LANEFORMER, head_type=HeadType.LANE), {}),
    "Laneformer whose lanes have heads": (replace(LANEFORMER, head_type=HeadType.VOCAB_PARALLEL), {}),
    "dense": (DENSE, {}),
    "dense, lanes that share products": (replace(DENSE, intermediate_size=432), {"max_ctas": 16}),
    "quantised": (replace(DENSE, hidden_size=256, intermediate_size=1024), {"coding": INT4}),
    "experts": (WITH_EXPERTS, {}),
    "three experts of sixteen": (replace(WITH_EXPERTS, experts=ExpertsSpec(16, 3)), {}),
    "quantised experts": (
        replace(WITH_EXPERTS, hidden_size=256, intermediate_size=512), {"coding": replace(INT4, is_of_experts=True)},
    ),
    "delta nets": (STORED["delta nets"], {}),
    "delta nets, odd shapes": (STORED["delta nets, odd shapes"], {"max_ctas": 16}),
    "experts beside a shared one": (STORED["experts beside a shared one"], {}),
}  # fmt: skip
NUM_DAMAGED = 60  # lists of each kind and number of ranks


def shapes_of(kind: str, num_ranks: int) -> list[KernelShape]:
    spec, options = KINDS[kind]
    lanes = (spec.lanes_of_rank(rank, num_ranks) for rank in range(num_ranks))
    options = {"max_ctas": 4, **options}
    return [TrialShape(spec, own, num_ranks=num_ranks, **options) for own in lanes]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_lists_the_products_that_are_proved(kind: str, num_ranks: int) -> None:
    """Read as `Place` in layout.cuh reads it: lanes from 0, and at the end the LM head's products and the place behind them."""
    shapes = shapes_of(kind, num_ranks)
    plan = kernel_plan(shapes)
    assert validate(plan) == []
    for shape, part in zip(shapes, plan.ranks, strict=True):
        assert part.products is shape.products
        header = shape_header(shape)
        tables = {
            name: [int(number) for number in numbers.split(", ")]
            for name, numbers in re.findall(r"short (k\w+)\[\] = \{([\d, ]+)\}", header)
        }
        layers, numbers = [product for product in part.products if product.op in LANE_OPS], op_numbers(shape.spec)
        heads = [product for product in part.products if product.op is Phase.HEAD]
        *codes, end = tables["kProducts"]
        found = [(code >> 8, code & 3, part.lanes[code >> 2 & 63]) for code in codes[: len(layers)]]
        assert found == [(product.layer, numbers[product.op], product.first_lane) for product in layers]
        assert [code >> 8 for code in codes[len(layers) :]] == [shape.spec.num_layers] * len(heads)
        assert end == shape.spec.num_layers << 8
        inputs = (Phase.QKV, Phase.DELTA_IN)
        assert tables["kMixerProducts"] == [i for i, product in enumerate(layers) if product.op in inputs for _ in product.lanes]
        for product in part.products:
            form = product.rows.form
            assert form is not None
            assert f"KOG_{product.op.name}_OP {form.rows}, {form.blocks}, {form.per}, {form.steps}, " in header


REAL = [
    ("2b", 1), ("2b", 8), ("llama-3.1-8b", 1), ("llama-3.1-8b+int4", 2), ("qwen3-4b", 2), ("gpt-oss-120b", 2),
    ("qwen3-30b-a3b+fp8", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_ranks"), REAL)
def test_what_people_run_is_proved(name: str, num_ranks: int) -> None:
    spec, codings = named_shape(name)
    lanes = (spec.lanes_of_rank(rank, num_ranks) for rank in range(num_ranks))
    assert validate(kernel_plan([KernelShape(spec, own, num_ranks=num_ranks, **codings) for own in lanes])) == []


# ---- damaged lists ----
Products = list[Product]
Damage = Callable[[Products, random.Random], Products | None]


def replaced(products: Sequence[Product], at: int, *instead: Product) -> Products:
    return [*products[:at], *instead, *products[at + 1 :]]


def left_out(products: Products, rng: random.Random) -> Products:
    return replaced(products, rng.randrange(len(products)))


def repeated(products: Products, rng: random.Random) -> Products:
    at = rng.randrange(len(products))
    later = rng.randrange(at, len(products)) + 1
    return [*products[:later], products[at], *products[later:]]


def lane_in_another_order(products: Products, rng: random.Random) -> Products | None:
    """Two products of a lane change places."""
    first = rng.randrange(len(products))
    own = [i for i, product in enumerate(products) if set(product.lanes) & set(products[first].lanes) and i != first]
    return exchanged(products, first, rng.choice(own)) if own else None


def lanes_in_another_order(products: Products, rng: random.Random) -> Products | None:
    first = rng.randrange(len(products))
    key = products[first][:2]
    others = [i for i, product in enumerate(products) if product[:2] == key and i != first]
    return exchanged(products, first, rng.choice(others)) if others else None


def exchanged(products: Products, a: int, b: int) -> Products:
    changed = list(products)
    changed[a], changed[b] = changed[b], changed[a]
    return changed


def labelled_otherwise(products: Products, rng: random.Random) -> Products:
    at, by = rng.randrange(len(products)), rng.choice((-1, 1))
    product = products[at]
    labels = [
        product._replace(op=rng.choice([op for op in Phase if op is not product.op])),
        product._replace(layer=product.layer + by),
        product._replace(first_lane=product.first_lane + by),
        product._replace(num_lanes=product.num_lanes + by),
        product._replace(source=product.source + by),
    ]
    return replaced(products, at, rng.choice(labels))


def counted_otherwise(products: Products, rng: random.Random) -> Products:
    at, by = rng.randrange(len(products)), rng.choice((-1, 1))
    rows = products[at].rows
    counts = [
        rows._replace(num_rows=rows.num_rows + by), rows._replace(num_groups=rows.num_groups + by),
        rows._replace(num_ctas=rows.num_ctas + 100), rows._replace(num_ctas=0), rows._replace(form=None),
        rows._replace(num_shares=0),
        *besides_otherwise(rows, by),
    ]  # fmt: skip
    return replaced(products, at, products[at]._replace(rows=rng.choice(counts)))


def besides_otherwise(rows: RowShare, by: int) -> list[RowShare]:
    """What stands beside a matrix is not there, or cut short; or is there though there is none."""
    if rows.beside is None:
        return [rows._replace(beside=rows)]
    beside = rows.beside
    assert beside.form is not None
    changed = [
        beside._replace(num_rows=beside.num_rows + by), beside._replace(num_ctas=beside.num_ctas - 1), beside._replace(form=None),
        beside._replace(form=replace(beside.form, per=0, real_steps=0)),
    ]  # fmt: skip
    return [rows._replace(beside=one) for one in (None, *changed)]


def in_another_form(products: Products, rng: random.Random) -> Products:
    """All products of an op in a form that leaves rows or columns out, parts what is one owner's, or moves the residual."""
    op = rng.choice(list({product.op for product in products}))
    rows = next(product.rows for product in products if product.op is op)
    form = rows.form
    assert form is not None
    fewest = -(-rows.num_rows // rows.num_ctas)  # rows that a thread block must own
    forms = [replace(form, rows=fewest - 1, blocks=1, last_rows=0), replace(form, per=0, real_steps=0)]
    if op in (Phase.OUT, Phase.DOWN):
        forms.append(replace(form, rows=form.rows + 2))
    if op in LANE_OPS:
        forms.append(replace(form, rows=form.rows + 1))
    changed: OpShape = rng.choice(forms)
    return [one._replace(rows=rows._replace(form=changed)) if one.op is op else one for one in products]


DAMAGES: tuple[Damage, ...] = (
    left_out, repeated, lane_in_another_order, lanes_in_another_order, labelled_otherwise, counted_otherwise, in_another_form,
)  # fmt: skip


def is_refused(make: Callable[[], Plan]) -> bool:
    try:
        return validate(make()) != []
    except PlanError:
        return True


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_list_is_refused(kind: str, num_ranks: int) -> None:
    """Also when steps follow it, as they do where the list that the kernel is compiled from is damaged."""
    shapes, rng, tried = shapes_of(kind, num_ranks), random.Random(f"{kind} {num_ranks}"), Counter[str]()
    plan = kernel_plan(shapes)
    while tried.total() < NUM_DAMAGED:
        rank, damage = rng.randrange(num_ranks), rng.choice(DAMAGES)
        damaged = damage(list(shapes[rank].products), rng)
        if damaged is None or tuple(damaged) == shapes[rank].products:
            continue
        shape = replace(shapes[rank])
        vars(shape)["products"] = tuple(damaged)
        others = [*shapes[:rank], shape, *shapes[rank + 1 :]]
        assert is_refused(lambda others=others: kernel_plan(others)), (damage.__name__, damaged)  # type: ignore[misc]
        part = replace(plan.ranks[rank], products=tuple(damaged))
        parts = (*plan.ranks[:rank], part, *plan.ranks[rank + 1 :])
        assert validate(replace(plan, ranks=parts)), (damage.__name__, damaged)
        tried[damage.__name__] += 1
    assert set(tried) >= {damage.__name__ for damage in DAMAGES if damage is not lanes_in_another_order}


FINDINGS: dict[str, tuple[Damage, str]] = {
    "a product that is missing": (
        lambda products, _: products[1:], "rank 0, QKV of layer 0, lane 1: stands where the steps have QKV of layer 0, lane 0",
    ),
    "one that nobody asks for": (
        lambda products, _: [*products, products[-1]], "rank 0, HEAD, lanes 0 to 3: stands where the steps have nothing",
    ),
    "a step without one": (lambda products, _: products[:-1], "rank 0: HEAD of layer -1, lane 0 is in no product"),
    "rows without an owner": (
        lambda products, _: replaced(products, 0, products[0]._replace(rows=products[0].rows._replace(num_ctas=3))),
        "rank 0, QKV of layer 0, lane 0: rows 72 to 95 are on no thread block",
    ),
    "rows of another matrix": (
        lambda products, _: replaced(products, 0, products[0]._replace(rows=products[0].rows._replace(num_rows=90))),
        "rank 0, QKV of layer 0, lane 0: 90 rows, the matrix has 96",
    ),
    "a layer that the model has not": (lambda products, _: [products[0]._replace(layer=9), *products[1:]], "stands where"),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_say_what_is_wrong_with_a_list(name: str) -> None:
    damage, text = FINDINGS[name]
    shapes = shapes_of("Laneformer", 1)
    plan = kernel_plan(shapes)
    part = replace(plan.ranks[0], products=tuple(damage(list(shapes[0].products), random.Random(1)) or ()))
    findings = validate(replace(plan, ranks=(part,)))
    assert any(text in finding for finding in findings), findings


def test_only_lanes_with_one_input_share_a_product() -> None:
    shape = shapes_of("Laneformer", 1)[0]
    joined: list[Product] = []
    for product in shape.products:
        if product.op is not Phase.QKV:
            joined.append(product)
        elif product.first_lane % 2 == 0:
            rows = product.rows._replace(num_rows=2 * product.rows.num_rows)
            assert rows.form is not None
            form = replace(rows.form, blocks=2 * rows.form.blocks)
            joined.append(product._replace(num_lanes=2, rows=rows._replace(form=form)))
    damaged = replace(shape)
    vars(damaged)["products"] = tuple(joined)
    assert "rank 0, QKV of layer 0, lanes 0 to 1: its lanes have 2 inputs, and are multiplied with one" in validate(
        kernel_plan([damaged])
    )
    assert all(product.source == NONE for product in joined)
