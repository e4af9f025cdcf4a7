"""The physical form of quantised matrices on weight tapes: what lies in a tile. Rows and columns are as in tape_packing.py.

A step has 128 columns, one of the LM head 64. A warp's part of a tile is its codes, [64 bytes][row] (two times 64 of 128 codes of
8 bits), then its scales, [row][scale], then its zero points, [row][zero], and zeros up to a multiple of 16 bytes. Of a row's 64
bytes each of four threads has 16: whole operands of the matrix unit, 32 columns each, of which a thread has eight neighbouring
ones. How bits lie in a 32-bit word makes expanding them cheap (`expand` in phases/coded.cuh); `_words` is the definition.
`CodeWords` are such words of what files have, of many matrices at once.

Where each row of a matrix has one scale, the tape holds none; these lie behind all tapes, by product, thread
block and row. Behind them are those of the LM head.

The functions take numpy or cupy arrays and return the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.tape_packing import AnyArray, OpShape, interleave
from kog_dist.model.formats.weight_format import CodedMatrix
from kog_dist.records import dataclass

WORD_COLUMNS = 8  # of a row of 4-bit codes, which are one word
_UNIT_WORDS = 16  # of the 64 bytes of a row that lie together
_PAIRS = ((0, 1), (4, 5), (2, 3), (6, 7))  # columns of the four registers of an operand, of a thread's eight


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of quantised matrices on the GPU: the fields of `CodedMatrix` that a tape is made of."""

    codes: AnyArray  # (rows, columns), uint8
    scales: AnyArray  # (rows, groups), float32; groups of at most 128 columns, or one of all
    zeros: AnyArray | None = None  # (rows, groups), uint8

    @classmethod
    def of(cls, matrix: CodedMatrix, put: Callable[[Any], AnyArray], coding: Coding | None = None) -> Codes:
        """The arrays as `put` gives them, which takes numpy arrays. `coding`: its groups may be smaller than the matrix's; None:
        they are not.
        """
        width = CODED_COLUMNS // coding.scales if coding is not None and coding.scales else CODED_COLUMNS
        times = max(matrix.form.block_columns // width, 1)
        columns = -(-matrix.codes.shape[1] // width)
        parts: list[Any] = [matrix.scales] if matrix.zeros is None else [matrix.scales, matrix.zeros]
        if times > 1:
            parts = [np.repeat(part, times, axis=1)[:, :columns] for part in parts]
        return cls(put(matrix.codes), *map(put, parts))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    def parts(self) -> tuple[AnyArray, ...]:
        """All arrays."""
        return (self.codes, self.scales) if self.zeros is None else (self.codes, self.scales, self.zeros)


@dataclass(frozen=True, slots=True)
class CodeWords:
    """Rows of matrices of 4-bit codes with E8M0 scales: `code_words` of them. Axes in front: several matrices."""

    words: AnyArray  # (..., rows, columns / 8), uint32
    scales: AnyArray  # (..., rows, groups), uint8, as files have them

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of each."""
        rows, words = self.words.shape[-2:]
        return rows, words * WORD_COLUMNS


def code_tables(coding: Coding) -> NDArray[np.uint32]:
    """(2, 65536): of four 4-bit codes, the first one lowest, their bits in the word of eight: as its first, and as its last."""
    codes = np.zeros((2, 1 << 16, WORD_COLUMNS), np.uint32)
    for column in range(4):
        codes[0, :, column] = codes[1, :, 4 + column] = np.arange(1 << 16) >> 4 * column & 15
    return np.asarray(_word(codes, coding), np.uint32)


def code_words(packed: AnyArray, tables: AnyArray) -> AnyArray:
    """The words (..., columns / 8), uint32, of bytes (..., columns / 2) of 4-bit codes, the even column's in the lower half.

    `tables`: of `code_tables`, on the GPU if `packed` is.
    """
    fours = packed.reshape(-1).view(np.uint16).reshape(-1, 2)
    words = tables[0][fours[:, 0]]
    words |= tables[1][fours[:, 1]]
    return words.reshape(*packed.shape[:-1], packed.shape[-1] // 4)


def below_each_other(matrices: list[Codes]) -> Codes:
    """One matrix of the rows of all."""
    return Codes(*(np.concatenate(parts) for parts in zip(*(one.parts() for one in matrices), strict=True)))


def in_turn(gate: Codes, up: Codes) -> Codes:
    """`tape_packing.interleave`."""
    return Codes(*(interleave(*parts) for parts in zip(gate.parts(), up.parts(), strict=True)))


def put_codes(tape: AnyArray, position: int, shape: OpShape, num_ctas: int, matrix: Codes | CodeWords) -> None:
    """Write a product's tiles to the tapes (uint16 words) of all thread blocks; `position` as in `put_on_tape`.

    Axes of several matrices are also the first ones of `tape`. Raises ValueError for matrices that are too large.
    """
    coding = shape.coding
    assert coding is not None
    codes, sections = _sections(matrix, shape, num_ctas)
    others, first = codes.shape[:-5], position * num_ctas
    for block in range(shape.blocks):
        rows, num_rows = slice(block * shape.rows, block * shape.rows + shape.rows_of(block)), shape.rows_of(block)
        for step in range(shape.tiles):
            warps, end = shape.warps_of(step), num_rows * coding.row_bytes
            tile = np.zeros_like(codes, shape=(*others, num_ctas, warps, coding.part_bytes(num_rows) // 4))
            own = codes[..., rows, :warps, step, :].reshape(*others, num_ctas, num_rows, warps, -1, _UNIT_WORDS)
            tile[..., : end // 4] = np.moveaxis(own, -4, -2).reshape(*others, num_ctas, warps, end // 4)
            in_bytes = tile.view(np.uint8)
            for section in sections:
                part = np.moveaxis(section[..., rows, :warps, step, :], -3, -2).reshape(*others, num_ctas, warps, -1)
                in_bytes[..., end : end + part.shape[-1]] = part
                end += part.shape[-1]
            words = tile.view(np.uint16).reshape(*others, -1)
            tape[..., first : first + words.shape[-1]] = words
            first += words.shape[-1]


def put_row_scales(table: AnyArray, shape: OpShape, scales: AnyArray) -> None:
    """Write a product's scales (rows, 1) to its part (num_ctas, rows of a thread block or more) of what lies behind all tapes."""
    padded = np.zeros_like(scales, shape=len(table) * shape.cta_rows)
    padded[: len(scales)] = scales[:, 0]
    table[:, : shape.cta_rows] = padded.reshape(len(table), shape.cta_rows)


def _sections(matrix: Codes | CodeWords, shape: OpShape, num_ctas: int) -> tuple[AnyArray, list[AnyArray]]:
    """Codes as words (..., num_ctas, rows, warps, steps, words of a row), and bytes like them of what follows codes."""
    coding = shape.coding
    assert coding is not None
    rows, columns = matrix.shape
    if rows > num_ctas * shape.cta_rows or columns > shape.num_columns:
        raise ValueError(f"a matrix of {rows} x {columns} codes does not fit {num_ctas} thread blocks of {shape}")

    def by_step(values: AnyArray, width: int) -> AnyArray:
        return _by_step(values, shape, num_ctas, width)

    if isinstance(matrix, CodeWords):
        words = by_step(matrix.words, CODED_COLUMNS // WORD_COLUMNS)
        return _in_order(words.reshape(*words.shape[:-1], 4, 4)), [by_step(matrix.scales, coding.scales)]
    sections = [_scale_bytes(by_step(matrix.scales, coding.scales), coding)] if coding.scales else []
    if coding.zero_bytes:
        assert matrix.zeros is not None
        sections.append(by_step(matrix.zeros, coding.scales))
    return _words(by_step(matrix.codes, coding.columns), coding), sections


def _by_step(values: AnyArray, shape: OpShape, num_ctas: int, width: int) -> AnyArray:
    """View (..., num_ctas, rows, warps, steps, width) of a matrix (..., rows, columns), filled with zeros."""
    *others, rows, columns = values.shape
    padded = np.zeros_like(values, shape=(*others, num_ctas * shape.cta_rows, shape.warps * shape.per * width))
    padded[..., :rows, :columns] = values
    return padded.reshape(*others, num_ctas, shape.cta_rows, shape.warps, shape.per, width)


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
    """The 32-bit words (..., bytes of a row / 4) of a step's codes (..., columns)."""
    threads = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 4, WORD_COLUMNS)  # operand, thread, column
    if coding.bits == 4:
        return _in_order(_word(threads, coding))
    pairs = _pairs(threads)  # a word for two registers, 16 bytes of a thread for two operands
    halves = np.stack([_word_of_four(pairs[0], pairs[1]), _word_of_four(pairs[2], pairs[3])], axis=-1)
    halves = halves.reshape(*codes.shape[:-1], -1, 2, 4, 2)  # 64 bytes, operand, thread, word
    return np.moveaxis(halves, -2, -3).copy().reshape(*codes.shape[:-1], coding.row_bytes // 4)


def _in_order(words: AnyArray) -> AnyArray:
    """Words (..., operand, thread) of a step's 4-bit codes as a row (..., 16) has them: those of a thread together."""
    return np.moveaxis(words, -1, -2).copy().reshape(*words.shape[:-2], _UNIT_WORDS)


def _pairs(threads: AnyArray) -> list[tuple[AnyArray, AnyArray]]:
    return [(threads[..., low], threads[..., high]) for low, high in _PAIRS]


def _word(threads: AnyArray, coding: Coding) -> AnyArray:
    """The words (...) of eight 4-bit codes (..., 8), uint32."""
    return _word_of_eight_integers(threads) if coding.is_integer else _word_of_eight_floats(_pairs(threads))


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
    """Floats of 4 bits: three pairs as `e2m1_pair` (number_bits.cuh) takes them, the last one in what these leave."""
    placed = [low | high << 16 for low, high in pairs]
    first, second, third = ((pair & 0x70007) << 6 | (pair & 0x80008) << 12 for pair in placed[:3])
    last = placed[3] & 0x30003 | (placed[3] & 0x40004) << 8 | (placed[3] & 0x80008) << 6
    return first | second >> 4 | third >> 10 | third << 22 | last
