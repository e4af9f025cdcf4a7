"""The LM head in integers of 8 bits (`--quantize-head int8`): with one scale for each row, of four significant bits.

An integer has seven at most, so every value has eleven and is exact in binary16. CPU ranks keep it so; GPUs keep codes. The head
is rounded from its own values, or from those of the embedding where both are one tensor; the embedding itself stays as it is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import np
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.spec import HeadType, ModelSpec

AnyArray = Any  # numpy.ndarray or cupy.ndarray
_INT8: Final = NUMBERS["INT8"]
_DROPPED: Final = (1 << 20) - 1  # of float32's 23 bits of mantissa those that a scale does not have
_LEAST_SCALE: Final = 2.0**-21  # its last bit is binary16's last one
_LARGEST_WEIGHT: Final = _INT8.largest * 512  # of the largest scale with which all values are in binary16's reach
_CHUNK: Final = 1 << 16  # values that are rounded at a time: they and what is made of them stay in a core's cache


class CodedHead(NamedTuple):
    """Rows of the LM head: the value of element (r, k) is that of its code times scales[r]."""

    codes: AnyArray  # (rows, columns), uint8
    scales: AnyArray  # (rows, 1), float32


def head_format(choice: str, spec: ModelSpec) -> WeightFormat | None:
    """What a word of the setting `quantize_head` means; None: as it is. With `lane` a row has a scale for each lane's columns."""
    columns = spec.hidden_size if spec.head_type is HeadType.LANE else 0
    return None if choice == "none" else WeightFormat("INT8", 1, columns, "F16")


def rounded_rows(values: AnyArray) -> CodedHead:
    """Rows (rows, columns) of finite float32 values; numpy arrays or cupy's, with the same bits.

    scale = largest magnitude of the row / 127, rounded up to four significant bits, at least 2^-21. code = the nearest integer to
    value / scale, ties to even, as NUMBERS has it. Raises CheckpointError for weights beyond 65,024.
    """
    largest = abs(values).max(axis=1)
    if float(largest.max()) > _LARGEST_WEIGHT:
        raise CheckpointError(
            f"the LM head has a weight beyond {_LARGEST_WEIGHT:g}, which quantize_head is not for; leave it out"
        )
    ideal = (largest / np.float32(_INT8.largest)).view(np.uint32)
    dropped = np.uint32(_DROPPED)
    scales = ((ideal + dropped) & ~dropped).view(np.float32).clip(np.float32(_LEAST_SCALE), None)[:, None]
    return CodedHead(_INT8.nearest(values / scales), scales)


def round_in_place(rows: AnyArray, columns: int) -> None:
    """Give float32 rows (rows, K) the values of their codes, each of so many columns with a scale of its own; 0: all of them."""
    width = columns or rows.shape[1]
    parts = rows.reshape(-1, width)
    step = max(_CHUNK // width, 1)
    for first in range(0, len(parts), step):
        part = parts[first : first + step]
        coded = rounded_rows(part)
        np.multiply(_INT8.values[coded.codes], coded.scales, out=part)
