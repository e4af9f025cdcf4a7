"""How a matrix is quantised, and such a matrix: codes, scales and zero points with the one definition of their values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from kog_dist.late_numpy import NDArray, np
from kog_dist.model.formats.numbers import INT4_ZERO, NUMBERS, Codes, Values
from kog_dist.records import dataclass

Indices = NDArray["np.intp"]
SCALE_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2, "E8M0": 1}
_NAMES: Final = {"E4M3": "FP8 (E4M3)", "INT4": "INT4", "INT8": "INT8", "E2M1": "FP4 (E2M1)"}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A number, and which values share a scale: blocks of `block_rows` rows and `block_columns` columns; 0: all of them.

    A block at the end of a row or column may be smaller. `number` is a key of NUMBERS, `scale` of SCALE_BYTES. With `has_zeros`
    every block has a zero point, a code. With `is_ordered` columns belong to blocks as an index of their own says (act-order).
    """

    number: str
    block_rows: int
    block_columns: int
    scale: str
    has_zeros: bool = False
    is_ordered: bool = False

    def __str__(self) -> str:
        """For people: `FP8 (E4M3) in blocks of 128 x 128, BF16 scales`."""
        if self._is_mxfp4:
            return self.without_scales
        extra = f"{' and zero points' if self.has_zeros else ''}{', act-order' if self.is_ordered else ''}"
        return f"{self.without_scales}, {self.scale} scales{extra}"

    @property
    def without_scales(self) -> str:
        """Number and blocks, for people who are told before files have said what type their scales have."""
        return f"{'MXFP4 (E2M1)' if self._is_mxfp4 else _NAMES[self.number]} {self._blocks}"

    @property
    def _is_mxfp4(self) -> bool:
        return self.number == "E2M1" and self.scale == "E8M0"

    @property
    def _blocks(self) -> str:
        if self.block_rows == 1:
            return f"in groups of {self.block_columns}" if self.block_columns else "with a scale for each row"
        if not self.block_rows and not self.block_columns:
            return "with one scale"
        return f"in blocks of {self.block_rows or 'all'} x {self.block_columns or 'all'}"

    def num_blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Of a matrix: along its rows' dimension, and along its columns'."""
        return -(-rows // (self.block_rows or rows or 1)), -(-columns // (self.block_columns or columns or 1))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Codes, scales and zero points of a matrix, without padding: what a GPU reads of it for each token."""
        down, across = self.num_blocks(rows, columns)
        bits = NUMBERS[self.number].bits
        zeros = -(-down * across * bits // 8) if self.has_zeros else 0
        return -(-rows * columns * bits // 8) + down * across * SCALE_BYTES[self.scale] + zeros

    def groups_of(self, left: int, right: int) -> tuple[int, int, Indices]:
        """The groups that columns [left, right) belong to: the first, one past the last, and of each column, counted from the
        first.
        """
        width = self.block_columns or right
        first, last = left // width, -(-right // width)
        return first, last, np.arange(left, right) // width - first

    def is_aligned(self, left: int, right: int, columns: int) -> bool:
        """Whether columns [left, right) of a matrix of `columns` are whole groups, or part of the only one."""
        width = self.block_columns or 1
        return left % width == 0 and (right % width == 0 or right == columns)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """Some rows and columns of a quantised matrix: the value of element (r, k) is the float32 product

        (value of codes[r, k], less zeros[r, groups[k]]) * scales[r, groups[k]].

    What is multiplied is exact: the value of a code, or the difference of two. `scales` and `zeros` have a row for each row,
    whatever the rows of a block; without `zeros` the code of 0 is that of the number.
    """

    form: WeightFormat
    codes: Codes  # (rows, columns), one in a byte
    scales: Values  # (rows, groups): exactly what the file has
    groups: Indices  # (columns,)
    zeros: Codes | None = None  # (rows, groups)

    @property
    def is_regular(self) -> bool:
        """Whether column k belongs to group k // block_columns: no act-order, and no part of a group at the beginning."""
        width = self.form.block_columns or max(len(self.groups), 1)
        return bool(np.array_equal(self.groups, np.arange(len(self.groups)) // width))

    def values(self) -> Values:
        """(rows, columns), as defined above."""
        numbers = NUMBERS[self.form.number].values[self.codes]
        if self.zeros is not None:
            self._apply(np.subtract, numbers, self.zeros.astype(np.float32) - INT4_ZERO)
        with np.errstate(all="ignore"):  # whether values are finite is checked where all values are
            self._apply(np.multiply, numbers, self.scales)
        return numbers

    def _apply(self, operation: Any, numbers: Values, of_groups: Values) -> None:
        """`numbers` (rows, columns) with what their groups have, in place."""
        rows, columns = numbers.shape
        width = self.form.block_columns or max(columns, 1)
        if columns and columns % width == 0 and self.is_regular:
            blocks = numbers.reshape(rows, columns // width, width)
            operation(blocks, of_groups[:, :, None], out=blocks)
        else:
            operation(numbers, of_groups[:, self.groups], out=numbers)

    def with_rows(self, rows: Indices) -> CodedMatrix:
        """The same rows in another order, or some of them."""
        zeros = None if self.zeros is None else np.ascontiguousarray(self.zeros[rows])
        codes, scales = np.ascontiguousarray(self.codes[rows]), np.ascontiguousarray(self.scales[rows])
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def packed(self) -> NDArray[np.uint8]:
        """The codes as bytes (rows, columns, or half as many): of 4-bit ones the even column's is the lower half."""
        if NUMBERS[self.form.number].bits == 8:
            return self.codes
        return np.asarray(self.codes[:, 0::2] | self.codes[:, 1::2] << 4, np.uint8)


def below_each_other(matrices: list[CodedMatrix]) -> CodedMatrix:
    """One matrix of the rows of all, which are of the same columns."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    codes, scales = (np.concatenate([getattr(one, name) for one in matrices]) for name in ("codes", "scales"))
    zeros = None if first.zeros is None else np.concatenate([one.zeros for one in matrices if one.zeros is not None])
    return replace(first, codes=codes, scales=scales, zeros=zeros)
