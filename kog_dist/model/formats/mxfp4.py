"""MXFP4 in files: E2M1 codes, two in a byte, the even column in the lower half; 32 of them share an E8M0 scale, a power of two.

compressed-tensors has `weight_packed` (rows, columns / 2) and `weight_scale` (rows, columns / 32). gpt-oss has its experts in
`..._blocks` (experts, rows, columns / 32, 16) and `..._scales` (experts, rows, columns / 32); rows are outputs in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.formats.numbers import Codes, e8m0_values, nibbles
from kog_dist.model.formats.source import Box, Pieces, TensorRule, regular
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.records import dataclass

GROUP: Final = 32
STEP: Final = 128  # columns that CPU ranks multiply at a time; rows are kept with codes of 0 up to a whole number of steps
FORM: Final = WeightFormat("E2M1", 1, GROUP, "E8M0")


@dataclass(frozen=True, slots=True)
class MxStorage:
    """See `Storage`. compressed-tensors' `mxfp4-pack-quantized`."""

    codes: str = "weight_packed"

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """See `Storage`."""
        if columns % GROUP:
            raise ValueError(f"{columns} columns, which are no whole groups of {GROUP}")
        return {
            "codes": TensorRule((self.codes,), ("U8",), ((rows, columns // 2),)),
            "scales": TensorRule(("weight_scale",), ("U8", "F8_E8M0"), ((rows, columns // GROUP),)),
        }

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `Storage`."""
        codes = nibbles(pieces["codes"].rows(box.first, box.last))[:, box.left : box.right]
        return regular(form, box, np.ascontiguousarray(codes), pieces["scales"].numbers()[box.first : box.last])


def expert(blocks: NDArray[np.uint8], scales: Array, box: Box) -> CodedMatrix:
    """Part of one expert's matrix of gpt-oss: of its blocks (rows, columns / 32, 16) and scales (rows, columns / 32)."""
    rows = blocks[box.first : box.last]
    codes = nibbles(rows).reshape(len(rows), -1)[:, box.left : box.right]
    return regular(FORM, box, np.ascontiguousarray(codes), e8m0_values(scales[box.first : box.last]))


def kept_shapes(skew: int, columns: int) -> tuple[int, int]:
    """Bytes of codes, and scales, of a row as CPU ranks keep it: `skew` columns that belong to others, then its own."""
    steps = -(-(skew + columns) // STEP)
    return steps * STEP // 2, steps * STEP // GROUP


def kept(coded: CodedMatrix, skew: int) -> tuple[Codes, Codes]:
    """A matrix as CPU ranks keep it: codes (rows, bytes), and scales (rows, groups) as files have them.

    A lane's first column may be within a group: `skew` columns before it are there, with codes of 0, so that groups are whole.
    """
    rows, columns = coded.codes.shape
    num_bytes, num_groups = kept_shapes(skew, columns)
    codes, scales = np.zeros((rows, 2 * num_bytes), np.uint8), np.zeros((rows, num_groups), np.uint8)
    codes[:, skew : skew + columns] = coded.codes
    np.right_shift(coded.scales.view(np.uint32), 23, out=scales[:, : coded.scales.shape[1]], casting="unsafe")  # exponents
    return np.asarray(codes[:, 0::2] | codes[:, 1::2] << 4, np.uint8), scales
