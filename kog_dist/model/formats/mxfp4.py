"""MXFP4 in files: E2M1 codes, two in a byte, the even column in the lower half; 32 of them share an E8M0 scale, a power of two.

compressed-tensors has `weight_packed` (rows, columns / 2) and `weight_scale` (rows, columns / 32). gpt-oss has its experts in
`..._blocks` (experts, rows, columns / 32, 16) and `..._scales` (experts, rows, columns / 32); rows are outputs in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.formats.numbers import e8m0_values, nibbles
from kog_dist.model.formats.source import Box, Pieces, TensorRule, regular
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat

GROUP: Final = 32
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


def expert(blocks: NDArray[np.uint8], scales: NDArray[Any], box: Box) -> CodedMatrix:
    """Part of one expert's matrix of gpt-oss: of its blocks (rows, columns / 32, 16) and scales (rows, columns / 32)."""
    rows = blocks[box.first : box.last]
    codes = nibbles(rows).reshape(len(rows), -1)[:, box.left : box.right]
    return regular(FORM, box, np.ascontiguousarray(codes), e8m0_values(scales[box.first : box.last]))
