"""The physical form of quantised matrices on weight tapes: what lies in a tile. Rows and columns are as in tape_packing.py.

A step has 128 columns. A warp's part of a tile is its codes, [64 bytes][row] (two times 64 of 8-bit codes), then its scales,
[row][scale], then its zero points, [row][zero], and zeros up to a multiple of 16 bytes. Of a row's 64 bytes each of four threads
has 16: whole operands of the matrix unit, 32 columns each, of which a thread has eight neighbouring ones. How bits lie in a
32-bit word makes expanding them cheap (`expand` in phases/coded.cuh); `_words` is the definition.

Where each row of a matrix has one scale, the tape holds none; these lie behind all tapes, by product, thread
block and row.

The functions take numpy or cupy arrays and return the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.tape_packing import AnyArray, OpShape, interleave
from kog_dist.model.formats.weight_format import CodedMatrix

_PAIRS = ((0, 1), (4, 5), (2, 3), (6, 7))  # columns of the four registers of an operand, of a thread's eight


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of quantised matrices on the GPU: the fields of `CodedMatrix` that a tape is made of."""

    codes: AnyArray  # (rows, columns), uint8
    scales: AnyArray  # (rows, groups), float32; groups of at most 128 columns, or one of all
    zeros: AnyArray | None = None  # (rows, groups), uint8

    @classmethod
    def of(cls, matrix: CodedMatrix, put: Callable[[Any], AnyArray]) -> Codes:
        """The arrays as `put` gives them, which takes numpy arrays."""
        times = max(matrix.form.block_columns // CODED_COLUMNS, 1)
        columns = -(-matrix.codes.shape[1] // CODED_COLUMNS)
        parts: list[Any] = [matrix.scales] if matrix.zeros is None else [matrix.scales, matrix.zeros]
        if times > 1:
            parts = [np.repeat(part, times, axis=1)[:, :columns] for part in parts]
        return cls(put(matrix.codes), *map(put, parts))

    def parts(self) -> tuple[AnyArray, ...]:
        """All arrays."""
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)


def below_each_other(matrices: list[Codes]) -> Codes:
    """One matrix of the rows of all."""
    return Codes(*(np.concatenate(parts) for parts in zip(*(one.parts() for one in matrices), strict=True)))


def in_turn(gate: Codes, up: Codes) -> Codes:
    """`tape_packing.interleave`."""
    return Codes(*(interleave(*parts) for parts in zip(gate.parts(), up.parts(), strict=True)))


def put_codes(tape: AnyArray, position: int, shape: OpShape, num_ctas: int, matrix: Codes) -> None:
    """Write a product's tiles to the tapes (uint16 words) of all thread blocks; `position` as in `put_on_tape`."""
    first = position * num_ctas
    for tile in coded_tiles(shape, num_ctas, matrix):
        words = tile.copy().view(np.uint16).reshape(-1)
        tape[first : first + words.size] = words
        first += words.size


def put_row_scales(table: AnyArray, shape: OpShape, scales: AnyArray) -> None:
    """Write a product's scales (rows, 1) to its part (num_ctas, rows of a thread block or more) of what lies behind all tapes."""
    padded = np.zeros_like(scales, shape=len(table) * shape.cta_rows)
    padded[: len(scales)] = scales[:, 0]
    table[:, : shape.cta_rows] = padded.reshape(len(table), shape.cta_rows)


def coded_tiles(shape: OpShape, num_ctas: int, matrix: Codes) -> Iterator[AnyArray]:
    """The bytes (num_ctas, warps, part_bytes) of each tile."""
    coding = shape.coding
    assert coding is not None
    if matrix.codes.shape[0] > num_ctas * shape.cta_rows or matrix.codes.shape[1] > shape.num_columns:
        raise ValueError(f"a matrix of {matrix.codes.shape} codes does not fit {num_ctas} thread blocks of {shape}")
    codes = _bytes(_words(_by_step(matrix.codes, shape, num_ctas, CODED_COLUMNS), coding))  # ..., bytes of a row
    sections = [_scale_bytes(_by_step(matrix.scales, shape, num_ctas, coding.scales), coding)] if coding.scales else []
    if coding.zero_bytes:
        assert matrix.zeros is not None
        sections.append(_by_step(matrix.zeros, shape, num_ctas, coding.scales))
    for block in range(shape.blocks):
        rows = slice(block * shape.rows, block * shape.rows + shape.rows_of(block))
        num_rows = shape.rows_of(block)
        for step in range(shape.tiles):
            warps = shape.warps_of(step)
            tile = np.zeros_like(codes, shape=(num_ctas, warps, coding.part_bytes(num_rows)))
            own = codes[:, rows, :warps, step].reshape(num_ctas, num_rows, warps, -1, 64).transpose(0, 2, 3, 1, 4)
            end = num_rows * coding.row_bytes
            tile[:, :, :end] = own.reshape(num_ctas, warps, end)
            for section in sections:
                part = section[:, rows, :warps, step].transpose(0, 2, 1, 3).reshape(num_ctas, warps, -1)
                tile[:, :, end : end + part.shape[2]] = part
                end += part.shape[2]
            yield tile


def _by_step(values: AnyArray, shape: OpShape, num_ctas: int, width: int) -> AnyArray:
    """View (num_ctas, rows, warps, steps, width) of a matrix, filled with zeros."""
    rows, columns = values.shape
    padded = np.zeros_like(values, shape=(num_ctas * shape.cta_rows, shape.warps * shape.per * width))
    padded[:rows, :columns] = values
    return padded.reshape(num_ctas, shape.cta_rows, shape.warps, shape.per, width)


def _scale_bytes(scales: AnyArray, coding: Coding) -> AnyArray:
    if coding.scale == "F32":
        return _bytes(scales)
    if coding.scale == "F16":
        return _bytes(scales.astype(np.float16))
    exponents = scales.view(np.uint32) >> 16
    return _bytes((exponents >> 7).astype(np.uint8) if coding.scale == "E8M0" else exponents.astype(np.uint16))


def _bytes(values: AnyArray) -> AnyArray:
    return values.copy().view(np.uint8)


def _words(codes: AnyArray, coding: Coding) -> AnyArray:
    """The 32-bit words (..., bytes of a row / 4) of a step's codes (..., 128)."""
    threads = codes.astype(np.uint32).reshape(*codes.shape[:-1], 4, 4, 8)  # operand, thread, column
    pairs = [(threads[..., low], threads[..., high]) for low, high in _PAIRS]
    if coding.bits == 8:  # a word for two registers, 16 bytes of a thread for two operands
        halves = np.stack([_word_of_four(pairs[0], pairs[1]), _word_of_four(pairs[2], pairs[3])], axis=-1)
        halves = halves.reshape(*codes.shape[:-1], 2, 2, 4, 2)  # 64 bytes, operand, thread, word
        words = np.moveaxis(halves, -2, -3)
    else:
        words = _word_of_eight_floats(pairs) if not coding.is_integer else _word_of_eight_integers(threads)
        words = np.moveaxis(words, -1, -2)  # thread, operand
    return words.copy().reshape(*codes.shape[:-1], coding.row_bytes // 4)


def _word_of_four(first: tuple[Any, Any], second: tuple[Any, Any]) -> AnyArray:
    """Codes of 8 bits, the first column's lowest."""
    return first[0] | first[1] << 8 | second[0] << 16 | second[1] << 24


def _word_of_eight_integers(columns: AnyArray) -> AnyArray:
    """Integers of 4 bits (..., 8), the first column's lowest."""
    word = 0
    for k in range(8):
        word = word | columns[..., k] << 4 * k
    return word


def _word_of_eight_floats(pairs: list[tuple[Any, Any]]) -> AnyArray:
    """Floats of 4 bits: signs and magnitudes of three pairs at the same distances, those of the last one in what is left."""
    word = 0
    for shift, (low, high) in zip((0, 3, 6), pairs[:3], strict=True):
        placed = low | high << 16
        word = word | (placed & 0x70007) << (6 - shift) | (placed & 0x80008) << (12 - shift)
    placed = pairs[3][0] | pairs[3][1] << 16
    return word | (placed & 0x30003) << 10 | (placed & 0x40004) << 11 | (placed & 0x80008) << 11
