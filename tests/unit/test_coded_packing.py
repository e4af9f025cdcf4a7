"""Tapes of codes: what a warp of the kernel would read of them, expanded as it does, are the values of the matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coded_packing import Codes, _word, code_tables, code_words, put_codes, put_row_scales
from kog_dist.decode.coding import Coding
from kog_dist.decode.tape_packing import OpShape
from kog_dist.errors import ConfigError
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.rounding import rounded
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.workers.cuda.geometry import EIGHT_WARPS

FORMS = {
    "FP8, blocks": WeightFormat("E4M3", 128, 128, "F32"),
    "FP8, blocks, 16-bit scales": WeightFormat("E4M3", 128, 128, "BF16"),
    "FP8, a scale for each row": WeightFormat("E4M3", 1, 0, "F32"),
    "FP8, groups of 256": WeightFormat("E4M3", 1, 256, "F32"),
    "INT4": WeightFormat("INT4", 1, 128, "BF16"),
    "INT4, a scale for each row": WeightFormat("INT4", 1, 0, "BF16"),
    "INT4, zero points": WeightFormat("INT4", 1, 128, "F16", has_zeros=True),
    "INT4, groups of 32 with zero points": WeightFormat("INT4", 1, 32, "F16", has_zeros=True),
    "INT4, groups of 64": WeightFormat("INT4", 1, 64, "BF16"),
    "MXFP4": WeightFormat("E2M1", 1, 32, "E8M0"),
}
CTAS = 3
# Rows of a thread block, columns, what rows are a multiple of, whether the last block of rows may be smaller.
SIZES = ((6, 160, 2, False), (44, 1408, 4, True), (28, 8 * 128, 2, False), (2, 128, 2, False))


def expanded(words: Any, coding: Coding) -> Any:
    """The values (..., 8) of a thread's columns, from the words of one operand as phases/coded.cuh takes them apart."""
    if coding.number == "E4M3":
        return NUMBERS["E4M3"].values[words.copy().view(np.uint8)][..., [0, 1, 4, 5, 2, 3, 6, 7]]
    q = words[..., 0]
    if coding.number == "INT4":
        lower, upper = (q & 0x0F0F0F0F).copy().view(np.uint8), (q >> 4 & 0x0F0F0F0F).copy().view(np.uint8)
        return np.stack([lower, upper], axis=-1).reshape(*q.shape, 8).astype(np.float32)
    pairs = [q & 0x81C081C0, q << 4 & 0x81C081C0, (q << 10 | q >> 22) & 0x81C081C0]
    pairs += [(q << 6 & 0x80C080C0) | (q >> 2 & 0x01000100)]
    columns = [(part & 0xFFFF, part >> 16) for part in (pairs[0], pairs[2], pairs[1], pairs[3])]
    halves = np.stack([half for pair in columns for half in pair], axis=-1).astype(np.uint32)
    values = (halves << 16).view(np.float32)
    return values * np.float32(2.0**100) * np.float32(2.0**26)


def part_values(part: Any, rows: int, coding: Coding) -> Any:
    """The values (rows, 128) that a warp's part of a tile stands for, without scales of rows."""
    words = part[: rows * coding.row_bytes].view(np.uint32).reshape(-1, rows, 4, 4)  # 64 bytes of the row, row, thread, word
    of_operand = coding.bits // 4
    operands = words.reshape(*words.shape[:3], -1, of_operand)
    values = expanded(operands, coding).transpose(1, 0, 3, 2, 4).reshape(rows, 128)  # row, (64 bytes, operand), thread, column
    if not coding.scales:
        return values if coding.number != "INT4" else values - np.float32(8)
    end = rows * (coding.row_bytes + coding.scale_bytes)
    raw = part[rows * coding.row_bytes : end]
    if coding.scale == "F32":
        scales = raw.view(np.float32)
    elif coding.scale == "F16":
        scales = raw.view(np.float16).astype(np.float32)
    elif coding.scale == "BF16":
        scales = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        scales = (raw.astype(np.uint32) << 23).view(np.float32)
    zeros = part[end : end + rows * coding.zero_bytes].astype(np.float32) if coding.has_zeros else np.float32(8)
    if coding.number == "INT4":
        values = values - (np.repeat(zeros.reshape(rows, -1), 128 // coding.scales, axis=1) if coding.has_zeros else zeros)
    return values * np.repeat(scales.reshape(rows, -1), 128 // coding.scales, axis=1)


def matrix_of(tape: Any, position: int, shape: OpShape, coding: Coding) -> Any:
    """The matrix of a product, padding included."""
    found = np.zeros((CTAS, shape.cta_rows, shape.num_columns), np.float32)
    data, at = tape.view(np.uint8), 2 * position * CTAS
    for block in range(shape.blocks):
        rows = shape.rows_of(block)
        size = coding.part_bytes(rows)
        for step in range(shape.tiles):
            for cta in range(CTAS):
                for warp in range(shape.warps_of(step)):
                    first = (warp * shape.per + step) * 128
                    values = part_values(data[at : at + size], rows, coding)
                    found[cta, block * shape.rows : block * shape.rows + rows, first : first + 128] = values
                    at += size
    assert at == 2 * CTAS * (position + shape.num_values)
    return found.reshape(CTAS * shape.cta_rows, -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_a_tape_of_codes_has_the_values_of_the_matrix(name: str, size: tuple[int, int, int, bool]) -> None:
    form, (cta_rows, columns, multiple, has_last) = FORMS[name], size
    coding = Coding.of(form)
    shape = EIGHT_WARPS.op_shape(cta_rows, columns, multiple, has_last=has_last, coding=coding)
    assert shape.steps == 1
    rows = CTAS * shape.cta_rows - 5
    matrix = rounded(np.random.default_rng(4).standard_normal((rows, columns), np.float32), form)
    tape = np.full(CTAS * (8 + shape.num_values), 0xFFFF, np.uint16)
    put_codes(tape, 8, shape, CTAS, Codes.of(matrix, np.asarray))
    found = matrix_of(tape, 8, shape, coding)[:rows, :columns]
    if not coding.scales:
        table = np.zeros((CTAS, shape.cta_rows + 3), np.float32)
        put_row_scales(table, shape, matrix.scales)
        found = found * table[:, : shape.cta_rows].reshape(-1, 1)[:rows]
    assert np.array_equal(found, matrix.values())
    assert (tape[: 8 * CTAS] == 0xFFFF).all()


def test_rows_have_the_bytes_that_their_codes_and_scales_need() -> None:
    sizes = {name: Coding.of(form).part_bytes(28) for name, form in FORMS.items()}
    assert sizes["INT4"] == 28 * 64 + 64  # 56 bytes of scales
    assert sizes["FP8, a scale for each row"] == 28 * 128
    assert sizes["INT4, groups of 32 with zero points"] == 28 * (64 + 8 + 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_columns": 16}, "groups have 32, 64 or a multiple of 128 columns"),
        ({"block_columns": 96}, "groups have 32, 64 or a multiple of 128 columns"),
        ({"is_ordered": True}, "the columns of a group are no neighbours"),
        ({"block_columns": 0, "has_zeros": True}, "no kernel was made for it"),
        ({"scale": "E8M0"}, "no kernel was made for it"),
    ],
)
def test_formats_that_the_kernel_does_not_read_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"GPUs do not run INT4.*{reason}.*use --device cpu"):
        Coding.of(replace(FORMS["INT4"], **change))


@pytest.mark.parametrize("name", ["INT4", "MXFP4"])
def test_words_of_four_bit_codes_do_not_depend_on_how_they_are_looked_up(name: str) -> None:
    """In a table by four of them, or one by one; matrices stay matrices."""
    coding = Coding.of(FORMS[name])
    codes = np.random.default_rng(3).integers(16, size=(3, 2, 24)).astype(np.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    found = code_words(packed, code_tables(coding))
    assert (found.shape, found.dtype) == ((3, 2, 3), np.uint32)
    wanted = _word(codes.astype(np.uint32).reshape(3, 2, 3, 8), coding)
    assert np.array_equal(found, wanted)
