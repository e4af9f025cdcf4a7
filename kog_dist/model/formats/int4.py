"""INT4 in files: eight codes in a 32-bit word. AWQ, GPTQ and compressed-tensors pack different dimensions, in different orders.

Of all three the value is (code - zero point) * scale; a matrix without zero points has the code 8 for 0. As (rows, columns):

- AWQ: `qweight` (columns, rows / 8), `qzeros` (groups, rows / 8), both with rows in the order 0 2 4 6 1 3 5 7; `scales` (groups,
  rows).
- GPTQ: `qweight` (columns / 8, rows), `qzeros` (groups, rows / 8), each less 1; `scales` (groups, rows); `g_idx` (columns).
- compressed-tensors: `weight_packed` (rows, columns / 8), `weight_zero_point` (rows / 8, groups), `weight_scale` (rows, groups),
  `weight_shape` (2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kog_dist.late_numpy import Array, np
from kog_dist.model.formats.numbers import Codes, nibbles
from kog_dist.model.formats.source import FLOAT_SCALES, Box, Pieces, StoredPiece, TensorRule, regular
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.records import dataclass

PER_WORD: Final = 8
_IN_ORDER: Final = tuple(range(PER_WORD))
# Which four bits of a word have the code of row 8 i + j. AWQ writes row 8 i + (0, 2, 4, 6, 1, 3, 5, 7) into bits 0, 4, 8, ...
AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: Array, places: tuple[int, ...] = _IN_ORDER) -> Codes:
    """The codes (..., 8n) of 32-bit words (..., n). `places`: for each of eight codes which four bits of the word it has."""
    codes = nibbles(np.ascontiguousarray(words, "<u4").view(np.uint8))
    if places == _IN_ORDER:
        return codes
    return codes.reshape(*codes.shape[:-1], -1, PER_WORD)[..., list(places)].reshape(codes.shape)


def _check(rows: int, columns: int, form: WeightFormat) -> None:
    if rows % PER_WORD or columns % PER_WORD or columns % (form.block_columns or columns):
        raise ValueError(
            f"{rows} rows and {columns} columns, which are no whole words of {PER_WORD} codes and groups of {form.block_columns}"
        )


def _of_rows(piece: StoredPiece, box: Box, places: tuple[int, ...]) -> Codes:
    """(rows of the box, groups) of a tensor (groups, rows / 8)."""
    first, last = box.first // PER_WORD, -(-box.last // PER_WORD)
    codes = unpacked(piece.whole()[:, first:last], places)
    return np.asarray(codes[:, box.first - first * PER_WORD : box.last - first * PER_WORD].T)


@dataclass(frozen=True, slots=True)
class AwqStorage:
    """See `Storage`. What AutoAWQ calls version "gemm"."""

    codes: str = "qweight"

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """See `Storage`."""
        _check(rows, columns, form)
        groups = form.num_blocks(rows, columns)[1]
        return {
            "codes": TensorRule((self.codes,), ("I32",), ((columns, rows // PER_WORD),)),
            "zeros": TensorRule(("qzeros",), ("I32",), ((groups, rows // PER_WORD),)),
            "scales": TensorRule(("scales",), FLOAT_SCALES, ((groups, rows),)),
        }

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `Storage`."""
        first, last = box.first // PER_WORD, -(-box.last // PER_WORD)
        words = pieces["codes"].rows(box.left, box.right)[:, first:last]
        codes = unpacked(words, AWQ_PLACES)[:, box.first - first * PER_WORD : box.last - first * PER_WORD]
        scales = pieces["scales"].numbers()[:, box.first : box.last].T
        return regular(form, box, np.ascontiguousarray(codes.T), scales, _of_rows(pieces["zeros"], box, AWQ_PLACES))


@dataclass(frozen=True, slots=True)
class GptqStorage:
    """See `Storage`. `less`: by how much zero points are stored too small, 1 in AutoGPTQ's format and 0 in its successor's.

    `g_idx` (columns,) has the group of each column. With act-order they are no neighbours, and nothing else says which belong
    together; else it is column // group size, and need not be there.
    """

    less: int
    codes: str = "qweight"

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """See `Storage`."""
        _check(rows, columns, form)
        groups = form.num_blocks(rows, columns)[1]
        return {
            "codes": TensorRule((self.codes,), ("I32",), ((columns // PER_WORD, rows),)),
            "zeros": TensorRule(("qzeros",), ("I32",), ((groups, rows // PER_WORD),)),
            "scales": TensorRule(("scales",), FLOAT_SCALES, ((groups, rows),)),
            "groups": TensorRule(("g_idx",), ("I32",), ((columns,),), is_needed=form.is_ordered),
        }

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `Storage`."""
        first, last = box.left // PER_WORD, -(-box.right // PER_WORD)
        words = pieces["codes"].rows(first, last)[:, box.first : box.last]
        codes = unpacked(words.T)[:, box.left - first * PER_WORD : box.right - first * PER_WORD]
        scales = pieces["scales"].numbers()[:, box.first : box.last].T
        zeros = np.asarray(_of_rows(pieces["zeros"], box, _IN_ORDER) + np.uint8(self.less) & 15, np.uint8)
        coded = regular(form, box, np.ascontiguousarray(codes), scales, zeros)
        groups = None if "groups" not in pieces else pieces["groups"].whole()[box.left : box.right]
        if groups is None or np.array_equal(groups, coded.groups + box.left // (form.block_columns or box.right)):
            return coded
        if groups.size and int(groups.max()) >= scales.shape[1]:
            raise pieces["groups"].refusal(f"names group {groups.max()}, and there are {scales.shape[1]}")
        of_all = (np.ascontiguousarray(scales), np.ascontiguousarray(zeros))
        ordered = replace(form, is_ordered=True)
        return CodedMatrix(ordered, coded.codes, of_all[0], groups.astype(np.intp), of_all[1])


@dataclass(frozen=True, slots=True)
class PackedStorage:
    """See `Storage`. compressed-tensors' `pack-quantized`."""

    codes: str = "weight_packed"

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """See `Storage`."""
        groups = form.num_blocks(rows, columns)[1]
        if columns % (form.block_columns or columns):
            raise ValueError(f"{columns} columns, which are no whole groups of {form.block_columns}")
        zeros = (
            {"zeros": TensorRule(("weight_zero_point",), ("I32",), ((-(-rows // PER_WORD), groups),))} if form.has_zeros else {}
        )
        return {
            "codes": TensorRule((self.codes,), ("I32",), ((rows, -(-columns // PER_WORD)),)),
            "scales": TensorRule(("weight_scale",), FLOAT_SCALES, ((rows, groups),)),
            "shape": TensorRule(("weight_shape",), ("I64", "I32"), ((2,),)),
        } | zeros

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `Storage`."""
        shape = pieces["shape"].whole().tolist()
        rows, words = pieces["codes"].tensor.shape
        if shape[0] != rows or -(-shape[1] // PER_WORD) != words or box.right > shape[1]:
            raise pieces["shape"].refusal(f"says {shape}, but there are {words} words for each of {rows} rows")
        codes = unpacked(pieces["codes"].rows(box.first, box.last))[:, box.left : box.right]
        scales = pieces["scales"].numbers()[box.first : box.last]
        zeros = None
        if form.has_zeros:
            first, last = box.first // PER_WORD, -(-box.last // PER_WORD)
            of_words = unpacked(pieces["zeros"].rows(first, last).T)  # (groups, rows)
            zeros = of_words[:, box.first - first * PER_WORD : box.last - first * PER_WORD].T
        return regular(form, box, np.ascontiguousarray(codes), scales, zeros)
