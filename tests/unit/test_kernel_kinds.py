"""Shapes of the monokernel for models whose layers are stored one by one: sums over kinds of layers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.kernel.latency import kv_bytes_read
from kog_dist.bench.shapes import named_shape
from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.plan.validate import validate
from kog_dist.decode.plan.word_check import WordCheck
from kog_dist.errors import ConfigError
from kog_dist.model.layers import DeltaNet, Ffn
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import TokenEvents, tokens_to_check, word_findings
from kog_dist.workers.cuda.word_places import WordPlaces
from kog_dist.workers.prefill.buffers.prompt import misfit
from tests.unit.delta_configs import CONFIGS

FLAT = ModelSpec(
    hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=128, vocab_size=76, max_context=64, num_lanes=4,
    delay=0, qk_norm=True, own_head_dim=32,
)  # fmt: skip


def stored(spec: ModelSpec, **others: Any) -> ModelSpec:
    """The same model, with its layers one by one."""
    fields = ("hidden_size", "vocab_size", "max_context", "num_lanes", "norm_eps")
    return ModelSpec.of_layers(spec.layers, **{name: getattr(spec, name) for name in fields} | others)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stored_layers_of_one_kind_are_the_same_build(num_ranks: int) -> None:
    of_flat, of_stored = (
        KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, max_ctas=4) for spec in (FLAT, stored(FLAT))
    )
    assert shape_header(of_stored) == shape_header(of_flat)
    assert of_stored.cache.num_bytes == of_flat.cache.num_bytes
    assert of_stored.words.lists == of_flat.words.lists


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("number", ["E4M3", "INT4"])
@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-9B", "Qwen3.5-2B", "Qwen3.5-35B-A3B"])
def test_quantised_delta_nets_are_proved(name: str, number: str, num_ranks: int) -> None:
    """Two rows of a head, decay and beta, keep 16 bit: in a product they are as many bits of codes."""
    coding, quantised = Coding(number, 1, "BF16"), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec = read_config({**CONFIGS[name], "quantization_config": quantised}).with_context(4096)
    shapes = [
        KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks, coding=coding) for rank in range(num_ranks)
    ]
    assert validate(kernel_plan(shapes)) == []
    shape, text = shapes[0], CONFIGS[name]["text_config"]
    assert word_findings(shape) == ()
    heads, keys = text["linear_num_value_heads"], 128 * text["linear_num_key_heads"]
    rows = (2 * keys + 2 * 128 * heads + 2 * heads * 16 // coding.bits) // spec.num_lanes
    inputs = [product for product in shape.products if product.op is Phase.DELTA_IN]
    assert {product.rows.num_rows for product in inputs} == {rows * shape.lanes_of(Phase.DELTA_IN)}
    assert sum(product.num_lanes for product in inputs) == spec.num_layers // 4 * 3 * shape.num_lanes
    form, whole = shape.ops[Phase.DELTA_IN], 2 * 16 // coding.bits  # rows of a word
    assert form.cta_rows == -(-inputs[0].rows.num_rows // (shape.num_ctas * whole)) * whole, "no block of padding"

    def damaged(**fields: Any) -> list[str]:
        products = [product._replace(rows=product.rows._replace(**fields)) for product in inputs]
        by_layer = {(product.layer, product.first_lane): product for product in products}
        others = [by_layer.get((one.layer, one.first_lane), one) if one.op is Phase.DELTA_IN else one for one in shape.products]
        return validate(make_plan(spec, num_ranks, [others, *(one.products for one in shapes[1:])], num_ctas=shape.num_ctas))

    without_terms = inputs[0].rows.num_rows - shape.lanes_of(Phase.DELTA_IN) * 2 * heads // spec.num_lanes
    assert any(f"{without_terms} rows, the matrix has" in one for one in damaged(num_rows=without_terms))
    assert any("that belong together have two owners" in one for one in damaged(form=replace(form, rows=form.rows - 2)))


def test_benchmarks_take_folders_with_codes_and_such_that_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As engines would: lanes have whole groups."""
    for name, said in {"plain": {}, "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIGS["Qwen3.5-27B"], "quantization_config": said or None}))
    monkeypatch.chdir(tmp_path)
    found = {
        name: named_shape(name)
        for name in ("./plain/@9216", "plain+fp8@9216", "plain+int4:2", "fp8/config.json@9216", "fp8+head8")
    }
    assert {name: (spec.num_lanes, spec.max_context, codings["coding"]) for name, (spec, codings) in found.items()} == {
        "./plain/@9216": (8, 9216, None),
        "plain+fp8@9216": (4, 9216, Coding("E4M3", 1, "F32")),
        "plain+int4:2": (2, 4096, Coding("INT4", 1, "BF16")),
        "fp8/config.json@9216": (4, 9216, Coding("E4M3", 1, "BF16")),
        "fp8+head8": (4, 4096, Coding("E4M3", 1, "BF16")),
    }
    assert [codings["head_coding"] is not None for _, codings in found.values()] == [False] * 4 + [True]
    with pytest.raises(ConfigError, match=r"fp8 has FP8 .* already; leave out \+int4"):
        named_shape("fp8+int4")
    with pytest.raises(ConfigError, match="plain is rounded to fp8 or int4, not to 'mxfp4'"):
        named_shape("plain+mxfp4")


def test_items_of_delta_nets_keep_every_thread_block_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few heads of attention have positions in partitions; empty words of those that nobody reads are then behind all."""
    spec = read_config(CONFIGS["Qwen3.5-0.8B"]).with_context(40_000)
    shape = KernelShape(spec, range(spec.num_lanes))
    assert shape.cache.num_partitions > 1
    assert word_findings(shape) == ()
    monkeypatch.setattr(WordPlaces, "delta_ctas", lambda *_: set(range(1, shape.num_ctas)))
    found = WordCheck().run(TokenEvents(shape).of(tokens_to_check(shape)))
    assert any("may be written later" in one for one in found), "one thread block has nothing that others wait for"


PUBLISHED = ("Qwen3.5-27B", "Qwen3.5-9B", "Qwen3.5-4B", "Qwen3.5-2B", "Qwen3.5-0.8B")  # dense ones


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_of_published_delta_nets_are_sums_over_their_layers(name: str, num_ranks: int) -> None:
    """Their plan and their words are proved; what a rank keeps is counted by hand."""
    spec = read_config(CONFIGS[name]).with_context(4096)
    if spec.num_lanes < num_ranks:
        pytest.skip("one lane")
    shapes = [KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks) for rank in range(num_ranks)]
    assert validate(kernel_plan(shapes)) == []
    shape, text = shapes[0], CONFIGS[name]["text_config"]
    assert word_findings(shape) == ()
    layers, lanes = spec.num_layers, spec.num_lanes
    assert Counter(product.op for product in shape.layer_products) == {
        Phase.DELTA_IN: layers // 4 * 3 * shape.num_lanes // shape.lanes_of(Phase.DELTA_IN),
        Phase.QKV: layers // 4 * shape.num_lanes // shape.lanes_of(Phase.QKV),
        Phase.OUT: layers * shape.num_lanes,
        Phase.GATE_UP: layers * shape.num_lanes // shape.lanes_of(Phase.GATE_UP),
        Phase.DOWN: layers * shape.num_lanes,
    }
    assert shape.delta is not None
    inputs, rows = shape.ops[Phase.DELTA_IN], shape.lanes_of(Phase.DELTA_IN) * shape.delta.rows
    assert inputs.rows * inputs.blocks * shape.num_ctas <= 1.1 * rows or shape.lanes_of(Phase.DELTA_IN) == shape.num_lanes
    kv_heads = max(text["num_key_value_heads"] // num_ranks, 1)
    assert (shape.cache.kv_heads, lanes // num_ranks % shape.cache.sharing_lanes) == (kv_heads, 0)
    assert shape.cache.layers == tuple(range(3, layers, 4))
    assert shape.cache.num_bytes == layers // 4 * kv_heads * 4096 * 2 * 256 * 2
    heads, items = text["linear_num_value_heads"] // num_ranks, shape.delta.items * shape.num_lanes
    assert items == heads * shape.delta.slices <= shape.num_ctas
    of_inputs = items * 4 * (256 + 128 // shape.delta.slices)  # each item has the last four of its channels
    assert shape.delta.num_bytes == 4 * layers // 4 * 3 * (heads * 128 * 128 + of_inputs)
    weights = sum(product.rows.num_rows * matrix_columns(spec, product.op) for product in shape.products)
    assert weights <= shape.num_ctas * shape.tape.num_values <= 1.06 * weights


@pytest.mark.parametrize(
    ("name", "num_ranks", "tokens"), [("Qwen3.5-27B", 2, 4), ("Qwen3.5-9B", 1, 2), ("Qwen3.5-4B", 1, 4), ("Qwen3.5-4B", 4, 4)]
)
def test_words_of_passes_of_several_tokens_are_proved(name: str, num_ranks: int, tokens: int) -> None:
    """And they have room in shared memory; what items keep of tokens that may not count is no memory of a sequence."""
    spec = read_config(CONFIGS[name]).with_context(4096)
    shape = KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, tokens=tokens)
    assert word_findings(shape) == ()
    assert shape.delta is not None
    assert shape.delta == replace(shape, tokens=1).delta
    words, count = shape.words.lists["DeltaKept"]
    assert count == (tokens - 1) * shape.delta.num_items
    assert shape.delta.kept_values <= 2 * words < shape.delta.kept_values + 32


MIXTURES = ("Qwen3.5-35B-A3B", "Qwen3-Coder-Next", "Qwen3.5-122B-A10B", "Qwen3.5-397B-A17B")


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_shapes_of_published_experts_beside_delta_nets(name: str, num_ranks: int) -> None:
    """Their plan and their words are proved; experts have no padding, and a token reads little more than it must."""
    spec = read_config(CONFIGS[name]).with_context(4096)
    shapes = [KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks) for rank in range(num_ranks)]
    assert validate(kernel_plan(shapes)) == []
    shape, text = shapes[0], CONFIGS[name].get("text_config", CONFIGS[name])
    assert word_findings(shape) == ()
    layers, experts = spec.num_layers, shape.experts
    assert experts is not None
    counts = Counter(product.op for product in shape.products)
    assert counts[Phase.ROUTE] == counts[Phase.GATE_UP] == layers
    assert counts[Phase.DOWN] == counts[Phase.OUT] == layers * shape.num_lanes
    of_expert = 3 * text["moe_intermediate_size"] // num_ranks * text["hidden_size"]
    assert experts.num_values == of_expert
    assert experts.num_bytes == 2 * layers * text["num_experts"] * of_expert
    assert experts.read_values == layers * text["num_experts_per_tok"] * of_expert
    shared = [experts.taped[op].num_values * shape.num_ctas * counts[op] for op in (Phase.GATE_UP, Phase.DOWN)]
    # As wide as the others, and on the tape. On four ranks 256 rows are two of a thread block, and gate and up of two are four.
    assert sum(shared) == layers * of_expert if num_ranks < 4 else sum(shared) <= 2 * layers * of_expert
    of_position = layers // 4 * max(2 // num_ranks, 1) * 2 * 256 * 2  # keys and values of two heads, or one on each rank
    assert kv_bytes_read(shape, 100) == 100 * of_position
    most = 1.06 if num_ranks < 4 else 1.12
    assert spec.bytes_per_token() <= num_ranks * shape.tape.read_bytes <= most * spec.bytes_per_token()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("number", ["E4M3", "INT4"])
@pytest.mark.parametrize("name", MIXTURES[:2])
def test_published_experts_in_codes_are_proved(name: str, number: str, num_ranks: int) -> None:
    """A lane has one group of 128 columns of an expert, and of the shared one."""
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    spec, coding = read_config({**CONFIGS[name], "quantization_config": quantised}).with_context(4096), Coding(number, 1, "BF16")
    shapes = [
        KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks, coding=coding) for rank in range(num_ranks)
    ]
    assert validate(kernel_plan(shapes)) == []
    assert word_findings(shapes[0]) == ()
    experts = shapes[0].experts
    assert experts is not None
    assert (experts.slot_parts, experts.shared_parts) == (1, 1)


def matrix_columns(spec: ModelSpec, op: Phase) -> int:
    """Those of a product's matrix."""
    of_lane = {Phase.OUT: spec.lane_heads * spec.head_dim, Phase.DOWN: spec.lane_ffn}
    return of_lane.get(op, spec.hidden_size)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"key_dim": 48}, r"keys of 48 values in delta nets \(a multiple of 32\)"),
        ({"value_dim": 48}, r"value heads of 48 values in delta nets \(a power of two from 16 on\)"),
        ({"num_value_heads": 4}, r"delta nets whose lanes give 32 values, beside attention's 64 \(as many\)"),
    ],
)
def test_delta_nets_of_other_sizes_are_refused(change: dict[str, int], finding: str) -> None:
    layer = stored(FLAT).layers[0]
    net = replace(layer, mixer=replace(DeltaNet(4, 8, 32, 32, 4), **change))
    spec = ModelSpec.of_layers((net, layer), hidden_size=64, vocab_size=76, max_context=64, num_lanes=4)
    with pytest.raises(ConfigError, match=finding):
        KernelShape(spec, range(4), max_ctas=4)


def test_prefill_takes_no_codes_of_wide_heads() -> None:
    """A row of keys is of two warps there, and each would have a scale of its own."""
    spec = read_config(CONFIGS["Qwen3.5-27B"])
    assert misfit(spec, None, "bfloat16") == misfit(spec, None) == ""
    assert misfit(spec, None, "fp8") == "fp8 keys and values of heads of 256 (at most 128)"
    assert "fp8" not in misfit(FLAT, None, "fp8")


def test_layers_that_no_device_code_has_are_refused() -> None:
    spec = stored(FLAT)
    layers = [*spec.layers[:2], replace(spec.layers[0], ffn=Ffn(256))]
    with pytest.raises(ConfigError, match=r"it has FFNs of several kinds \(1\); use --device cpu"):
        KernelShape(replace(spec, mixed_layers=tuple(layers)), range(4), max_ctas=4)
