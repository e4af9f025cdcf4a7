"""`--quantize`: what matrices are rounded to, by a slow reading of the definition; the same on any rank; nothing else changes."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.lanes import lane_codes, weight_format
from kog_dist.model.formats.mxfp4 import FORM as MXFP4
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.rounding import chosen_format, rounded
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.layout import is_layer_matrix
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weight_bytes import bytes_per_token, formats
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from tests.unit.formats.folders import made
from tests.unit.gguf_files import random_tensors as gguf_tensors
from tests.unit.gguf_files import write_gguf

Values = NDArray[np.float32]
FORMS = {
    "fp8": WeightFormat("E4M3", 16, 16, "F32"),
    "fp8, rows": WeightFormat("E4M3", 1, 0, "BF16"),
    "fp8, one scale": WeightFormat("E4M3", 0, 0, "F32"),
    "int4": WeightFormat("INT4", 1, 16, "BF16"),
    "int4, float16 scales": WeightFormat("INT4", 1, 32, "F16"),
    "int4, zero points": WeightFormat("INT4", 1, 16, "F16", has_zeros=True),
    "mxfp4": MXFP4,
}
SPEC = ModelSpec(
    hidden_size=160, num_layers=2, num_heads=8, num_kv_heads=4, intermediate_size=288, vocab_size=36, num_lanes=2, delay=1
)  # fmt: skip


def drawn(rows: int, columns: int) -> Values:
    """Rows of many sizes, with blocks of zeros and of values that are tiny."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal((rows, columns), dtype=np.float32) * np.exp2(rng.integers(-9, 5, (rows, 1))).astype(np.float32)
    values[:16, :32] = 0
    values[16:32, 32:64] *= np.float32(2.0**-100)
    return values


def to_scale(ideal: Fraction | float, dtype: str) -> float:
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return float(torch.tensor(np.float32(ideal)).to(kinds[dtype])) or 1.0


def slow(block: Values, form: WeightFormat) -> Values:
    """The values of one block, one after the other."""
    number = NUMBERS[form.number]
    largest = float(np.abs(block).max())
    if form.has_zeros:
        top, bottom = np.float32(max(float(block.max()), 0)), np.float32(min(float(block.min()), 0))
        scale = to_scale(float((top - bottom) / np.float32(15)), form.scale)
        zero = min(max(round(float(-bottom / np.float32(scale))), 0), 15)
        codes = [min(max(round(float(v / np.float32(scale))) + zero, 0), 15) for v in block.reshape(-1)]
        return np.array([np.float32(code - zero) * np.float32(scale) for code in codes], np.float32).reshape(block.shape)
    if form.scale == "E8M0":
        scale = 2.0 ** max(math.frexp(largest)[1] - 1 - 2, -127) if largest else 1.0
    else:
        scale = to_scale(float(np.float32(largest) / np.float32(number.largest)), form.scale)
    values = sorted({float(v) for v in number.values if not np.isnan(v)} - ({-8.0} if form.number == "INT4" else set()))
    found = []
    for v in block.reshape(-1):
        ratio = float(v / np.float32(scale))
        near = sorted(values, key=lambda value: abs(value - ratio))[:2]
        tie = abs(near[0] - ratio) == abs(near[1] - ratio)
        codes = [int(np.flatnonzero(number.values == value)[0]) for value in near]
        found.append(np.float32(near[1] if tie and codes[0] % 2 else near[0]) * np.float32(scale))
    return np.array(found, np.float32).reshape(block.shape)


@pytest.mark.parametrize("shape", [(48, 64), (20, 72)])
@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_the_definition(name: str, shape: tuple[int, int]) -> None:
    form, values = FORMS[name], drawn(*shape)
    coded = rounded(values, form)
    rows, columns = form.block_rows or shape[0], form.block_columns or shape[1]
    expected = np.empty_like(values)
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], columns):
            part = np.s_[top : top + rows, left : left + columns]
            expected[part] = slow(values[part], form)
    assert np.array_equal(coded.values(), expected)
    assert coded.is_regular
    assert coded.form == form
    assert coded.scales.shape == (shape[0], form.num_blocks(*shape)[1])
    assert np.isfinite(coded.values()).all()


@pytest.mark.parametrize(
    ("name", "error"), [("fp8", 2**-4), ("int4", 0.5 / 7 * 1.01), ("int4, zero points", 0.5 / 7), ("mxfp4", 2 / 6)]
)
def test_the_error_is_at_most_half_a_step_of_the_block(name: str, error: float) -> None:
    form = FORMS[name]
    values = np.random.default_rng(1).standard_normal((64, 64), dtype=np.float32)
    rows, columns = form.block_rows, form.block_columns
    blocks = np.abs(values).reshape(64 // rows, rows, 64 // columns, columns).max(axis=(1, 3))
    largest = np.repeat(np.repeat(blocks, rows, 0), columns, 1)
    assert (np.abs(rounded(values, form).values() - values) <= error * largest).all()


def test_rounding_twice_is_rounding_once() -> None:
    for name in ("fp8", "mxfp4"):
        once = rounded(drawn(48, 64), FORMS[name]).values()
        assert np.array_equal(rounded(once, FORMS[name]).values(), once)


# ---- of a folder ----
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, SPEC, random_tensors(SPEC, seed=4), manifest=True)
    return tmp_path


def all_values(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    return {name: checkpoint.tensor(name) for name in checkpoint.layouts}


@pytest.mark.parametrize("choice", ["fp8", "int4"])
def test_each_lanes_matrices_are_rounded_by_themselves_and_nothing_else(folder: Path, choice: str) -> None:
    plain, checkpoint = open_checkpoint(folder), open_checkpoint(folder, quantize=choice)
    before, after = all_values(plain), all_values(checkpoint)
    form = chosen_format(choice, "bfloat16")
    assert form is not None
    for name, values in before.items():
        if not is_layer_matrix(checkpoint.layouts, name):
            assert weight_format(checkpoint, name) is None
            assert np.array_equal(after[name], values)
            continue
        assert weight_format(checkpoint, name) == form
        for lane in range(SPEC.num_lanes):
            expected = rounded(values[lane], form)
            assert np.array_equal(after[name][lane], expected.values())
            assert not np.array_equal(after[name][lane], values[lane])
            coded = lane_codes(checkpoint, name, lane)
            assert np.array_equal(coded.codes, expected.codes)
            assert np.array_equal(coded.scales, expected.scales)


@pytest.mark.parametrize("choice", ["fp8", "int4"])
def test_every_rank_rounds_alike(folder: Path, choice: str) -> None:
    checkpoint = open_checkpoint(folder, quantize=choice)
    whole = checkpoint.rank_weights(range(2), keeps_halves=True)
    for lane in range(2):
        alone = checkpoint.rank_weights([lane], keeps_halves=True)
        assert alone.heads[lane].dtype.itemsize == 2
        for ours, theirs in zip(alone.lanes[lane].layers, whole.lanes[lane].layers, strict=True):
            for name in ("wqkv", "wo", "w13", "w2"):
                assert getattr(ours, name).dtype == np.float32
                assert np.array_equal(getattr(ours, name), getattr(theirs, name))


def test_the_type_of_int4_scales_is_that_of_the_16_bit_weights(tmp_path: Path) -> None:
    for dtype, scale in (("bfloat16", "BF16"), ("float16", "F16"), ("float32", "BF16")):
        write_checkpoint(tmp_path, SPEC, random_tensors(SPEC, seed=4), dtype=dtype)
        checkpoint = open_checkpoint(tmp_path, quantize="int4")
        assert formats(checkpoint) == f"INT4 in groups of 128, {scale} scales, rounded at the start, the rest {dtype}"
        name = "model.layers.0.attention.wo.weight"
        assert str(weight_format(checkpoint, name)) == f"INT4 in groups of 128, {scale} scales"


def test_a_gguf_file_is_rounded_as_the_16_bit_weights_that_it_stands_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "llama", gguf_tensors("llama"), form="Q8_0")
    plain, checkpoint = (open_checkpoint(tmp_path / "model.gguf", quantize=choice) for choice in ("none", "fp8"))
    form = chosen_format("fp8", "float16")
    assert form is not None
    name = "model.layers.1.feed_forward.w2.weight"
    assert np.array_equal(checkpoint.tensor(name)[0], rounded(plain.tensor(name)[0], form).values())


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    made(tmp_path, "awq")
    with pytest.raises(ConfigError, match=r"quantize fp8 is for 16-bit weights, and those of .* are INT4 .*; leave it out"):
        open_checkpoint(tmp_path, quantize="fp8")


def test_bytes_per_token_count_every_lanes_own_blocks(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, quantize="int4")
    expected = SPEC.bytes_per_token()
    for name, layout in checkpoint.layouts.items():
        if is_layer_matrix(checkpoint.layouts, name):
            lanes, rows, columns = layout.shape
            expected += lanes * rows * (columns // 2 + 2 * -(-columns // 128) - 2 * columns)
    assert bytes_per_token(checkpoint) == expected
