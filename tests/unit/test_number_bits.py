"""Values as files store them: bits widened exactly, narrowed to nearest, and put into the engine's order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kog_dist.model.families.stored import StoredTensorName
from kog_dist.model.formats.source import Box
from kog_dist.model.layout import TensorLayout
from kog_dist.model.safetensors_file import StoredTensor, converted, narrow, num_values_by_dtype, widen

ODD = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.0e-8, 6.1e-5, 65504.0, 0.1, 1 / 3, -(2.0**-24), np.inf, -np.inf, 1.00390625, 1.01171875], np.float32
)


@pytest.mark.parametrize("out_dtype", [np.float32, np.float64])
def test_widening_is_exact(out_dtype: type[Any]) -> None:
    for dtype, stored in (("F32", ODD), ("F16", ODD.astype(np.float16)), ("BF16", (ODD.view(np.uint32) >> 16).astype("<u2"))):
        out = np.full(len(ODD), 7.0, out_dtype)
        widen(stored.tobytes(), dtype, out)  # type: ignore[arg-type]
        wanted = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else stored
        assert (out == wanted.astype(out_dtype)).all(), dtype
        assert (np.signbit(out) == np.signbit(ODD)).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_number_of_sixteen_bits_comes_back(dtype: str) -> None:
    if dtype == "F32":
        assert narrow(ODD, dtype).tobytes() == ODD.tobytes()
        return
    bits = np.arange(1 << 16, dtype="<u2")
    out = np.empty(1 << 16, np.float32)
    widen(bits.tobytes(), dtype, out)  # type: ignore[arg-type]
    is_number = ~np.isnan(out)
    assert (narrow(out, dtype).view("<u2")[is_number] == bits[is_number]).all()
    again = np.empty(1 << 16, np.float32)
    widen(narrow(out, dtype).tobytes(), dtype, again)  # type: ignore[arg-type]
    assert np.isnan(again[~is_number]).all(), "no NaN becomes a number"


@pytest.mark.parametrize(
    ("bits", "narrowed"),
    [
        (0x3F808000, 0x3F80),  # halfway: to the even one
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0x3F818000, 0x3F82),
        (0x7F7FFFFF, 0x7F80),  # the largest becomes infinite
        (0x7F7F7FFF, 0x7F7F),
        (0x7F800001, 0x7FC0),  # a NaN stays one
        (0xFFFFFFFF, 0xFFFF),
        (0x80000000, 0x8000),
    ],
)
def test_bfloat16_is_the_nearest(bits: int, narrowed: int) -> None:
    assert narrow(np.array([bits], np.uint32).view(np.float32), "BF16").tolist() == [narrowed]


def test_overflow_of_float16_is_infinite() -> None:
    assert narrow(np.array([65519.0, 65520.0, -1e9], np.float32), "F16").tolist() == [65504.0, np.inf, -np.inf]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("wanted", ["BF16", "F16", "F32"])
def test_chunks_become_another_type(dtype: str, wanted: str) -> None:
    values = np.array([1.0, -2.5, 0.1, 300.0, 2.0**-10], np.float32)
    stored = bytearray(narrow(values, dtype).tobytes())
    single = np.empty(5, np.float32)
    widen(stored, dtype, single)  # type: ignore[arg-type]
    found = converted(memoryview(stored), dtype, wanted)
    assert bytes(found) == narrow(single, wanted).tobytes()
    is_in_place = len(found) <= len(stored)
    assert (bytes(stored[: len(found)]) == bytes(found)) is is_in_place


def test_values_are_counted_by_type() -> None:
    tensors = [StoredTensor("F16", (2, 3), 0, 12), StoredTensor("BF16", (4,), 0, 8), StoredTensor("F16", (), 0, 2)]
    assert num_values_by_dtype(tensors) == {"F16": 7, "BF16": 4}
    assert num_values_by_dtype([]) == {"BF16": 0}


# ---- where parts lie ----
LANES = TensorLayout((4, 6, 8), ((0, 1), (1, 2), (2, 3), (3, 4)))
BIAS = TensorLayout((4, 6), ((0, 1), (1, 2), (2, 3), (3, 4)))
WHOLE = TensorLayout((10, 8), ((0, 5), (5, 10)))


@pytest.mark.parametrize(
    ("name", "layout", "shape", "boxes"),
    [
        (StoredTensorName("a"), LANES, (4, 6, 8), [(0, 1, 0, 48), (3, 4, 0, 48)]),
        (StoredTensorName("a", is_whole=True), LANES, (24, 8), [(0, 6, 0, 8), (18, 24, 0, 8)]),
        (StoredTensorName("a", is_whole=True, has_columns=True), LANES, (6, 32), [(0, 6, 0, 8), (0, 6, 24, 32)]),
        (StoredTensorName("a", is_whole=True), BIAS, (24,), [(0, 6, 0, 1), (18, 24, 0, 1)]),
        (StoredTensorName("a"), WHOLE, (10, 8), [(0, 5, 0, 8), (5, 10, 0, 8)]),
        (StoredTensorName("a", is_whole=True), TensorLayout((9,), ((0, 9),)), (9,), [(0, 9, 0, 1), (0, 9, 0, 1)]),
    ],
)
def test_parts_of_a_files_tensor(
    name: StoredTensorName, layout: TensorLayout, shape: tuple[int, ...], boxes: list[tuple[int, ...]]
) -> None:
    assert name.shape(layout) == shape
    assert [name.box(layout, 0), name.box(layout, len(layout.parts) - 1)] == [Box(*box) for box in boxes]
    assert name.is_plain is (not name.has_columns)


def test_rotary_pairs_come_side_by_side() -> None:
    rows = np.arange(12).reshape(12, 1) * np.ones((1, 2), int)
    assert StoredTensorName("a", half_pairs=6).in_order(rows)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert StoredTensorName("a").in_order(rows) is rows
    assert not StoredTensorName("a", half_pairs=6).is_plain
