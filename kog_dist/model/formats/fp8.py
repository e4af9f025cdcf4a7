"""FP8 in files: `weight` has E4M3 codes (rows, columns), `weight_scale_inv` or `weight_scale` what they are multiplied with.

`weight_scale_inv` (rows / 128, columns / 128, rounded up) is what DeepSeek, Qwen and transformers write; the name says how it was
made, not what it is for. `weight_scale` is that of compressed-tensors (`float-quantized`) and ModelOpt: one value, or one for
each row, (rows, 1), or as above.
"""

from __future__ import annotations

from collections.abc import Mapping

from kog_dist.late_numpy import np
from kog_dist.model.formats.source import FLOAT_SCALES, Box, Pieces, TensorRule, regular
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class Fp8Storage:
    """See `Storage`."""

    codes: str = "weight"

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """See `Storage`."""
        down, across = form.num_blocks(rows, columns)
        shapes: tuple[tuple[int, ...], ...] = ((down, across), (down, 1, across, 1))  # the second is ModelOpt's
        if across == 1 and not form.block_columns:
            shapes += ((down,), ())[: 2 if down == 1 else 1]
        return {
            "codes": TensorRule((self.codes,), ("F8_E4M3",), ((rows, columns),)),
            "scales": TensorRule(("weight_scale_inv", "weight_scale"), (*FLOAT_SCALES, "F8_E8M0"), shapes),
        }

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `Storage`."""
        codes = np.ascontiguousarray(pieces["codes"].rows(box.first, box.last)[:, box.left : box.right])
        rows, columns = pieces["codes"].tensor.shape
        blocks = pieces["scales"].numbers().reshape(form.num_blocks(rows, columns))
        row_blocks = np.arange(box.first, box.last) // (form.block_rows or rows)
        return regular(form, box, codes, blocks[row_blocks])
