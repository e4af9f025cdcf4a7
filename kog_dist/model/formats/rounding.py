"""A matrix rounded to a format: to nearest, from its own values alone. What `--quantize` does to each lane's matrices.

All of it is elementwise IEEE arithmetic in float32 and maxima, so that it gives the same bits wherever it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kog_dist.late_numpy import np
from kog_dist.model.formats.numbers import NUMBERS, Values, e8m0_values
from kog_dist.model.formats.weight_format import CodedMatrix, Indices, WeightFormat
from kog_dist.model.safetensors_file import narrow, widen

# Raise it with every change to a bit of `rounded`, or to the values that it is given: kept results of others are not used then.
ROUNDING_VERSION: Final = 1
ROUNDED_COLUMNS = 128  # of a group, in every format that can be chosen


def chosen_format(choice: str, dtype: str) -> WeightFormat | None:
    """What a word of the setting `quantize` means for a model whose values are of `dtype`; None: as they are."""
    forms: Mapping[str, WeightFormat] = {
        "fp8": WeightFormat("E4M3", 128, ROUNDED_COLUMNS, "F32"),
        "int4": WeightFormat("INT4", 1, ROUNDED_COLUMNS, "F16" if dtype == "float16" else "BF16"),
    }
    return forms.get(choice)


def rounded(values: Values, form: WeightFormat) -> CodedMatrix:
    """The matrix (rows, columns) of finite values in `form`.

    scale = largest magnitude of the block / largest of the number (448, 7, 6), in float32, then rounded to the scale's type: to
    nearest, for E8M0 as `_e8m0_scales` says; 1 where that is 0. code = the nearest of value / scale, in float32, ties to even.
    With zero points: scale = (largest - smallest, both with 0 among them) / 15, zero point = the nearest of -smallest / scale.
    """
    rows, columns = values.shape
    _, num_groups, groups = form.groups_of(0, columns)
    row_blocks = np.arange(rows) // (form.block_rows or max(rows, 1))
    number = NUMBERS[form.number]
    if form.has_zeros:
        top, bottom = (_by_block(values, form, reduce) for reduce in (np.maximum, np.minimum))
        top, bottom = np.maximum(top, np.float32(0)), np.minimum(bottom, np.float32(0))
        scales = _scales_of((top - bottom) / np.float32(15), form.scale)
        zeros = np.clip(np.rint(-bottom / scales), 0, 15)
        shifted = np.rint(values / _spread(scales, row_blocks, groups)) + _spread(zeros, row_blocks, groups)
        codes = np.clip(shifted, 0, 15).astype(np.uint8)
        return CodedMatrix(form, codes, scales[row_blocks], groups, zeros.astype(np.uint8)[row_blocks])
    largest = _by_block(np.abs(values), form, np.maximum)
    scales = _e8m0_scales(largest) if form.scale == "E8M0" else _scales_of(largest / np.float32(number.largest), form.scale)
    codes = number.nearest(values / _spread(scales, row_blocks, groups))
    assert scales.shape[1] == num_groups
    return CodedMatrix(form, codes, scales[row_blocks], groups)


def _by_block(values: Values, form: WeightFormat, reduce: Any) -> Values:
    """The extreme of every block."""
    rows, columns = values.shape
    across = reduce.reduceat(values, np.arange(0, columns, form.block_columns or columns), axis=1)
    down: Values = reduce.reduceat(across, np.arange(0, rows, form.block_rows or rows), axis=0)
    return down


def _spread(of_blocks: Values, row_blocks: Indices, groups: Indices) -> Values:
    """What the blocks have, for every value."""
    return of_blocks[row_blocks][:, groups]


def _scales_of(ideal: Values, dtype: str) -> Values:
    scales = np.empty(ideal.shape, np.float32)
    widen(narrow(ideal, dtype).reshape(-1), dtype, scales.reshape(-1))
    return np.where(scales == 0, np.float32(1), scales)


def _e8m0_scales(largest: Values) -> Values:
    """2 ** (exponent of the largest value - 2), as the MX specification proposes: the largest E2M1 value is 1.5 * 2 ** 2."""
    exponents = (largest.view(np.uint32) >> 23).astype(np.int32) - 127 - 2
    return np.where(largest == 0, np.float32(1), e8m0_values(np.clip(exponents + 127, 0, 254)))
