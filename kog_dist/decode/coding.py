"""How quantised matrices are coded on weight tapes (coded_packing.py), as far as shapes and the kernel's headers need it."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from kog_dist.errors import ConfigError
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.weight_format import SCALE_BYTES, WeightFormat
from kog_dist.records import dataclass

CODED_COLUMNS = 128  # of a step of the layers' matrices


class _Expanded(NamedTuple):
    """Codes as the matrix unit sees them, where it multiplies floats: values times 2 ** `exponent`. x is multiplied by
    2 ** `x_exponent`: binary16 reaches only 65504, and products with subnormal numbers of bfloat16 would be lost in float32.
    """

    dtype: str
    exponent: int
    x_exponent: int


_EXPANDED = {
    "E4M3": _Expanded("float16", 0, -4),
    "INT8": _Expanded("float16", 0, -4),
    "E2M1": _Expanded("bfloat16", -126, 100),
}
_GROUPS = (32, 64, 128)  # columns of a scale, of which a step has several or one


@dataclass(frozen=True, slots=True)
class Coding:
    """How the matrices of all layers are quantised, or the LM head, as far as tape and kernel are concerned.

    `number` and `scale` are those of `WeightFormat`. `scales`: of a row in a step, 0 if each row has one scale. `is_of_experts`:
    experts alone are quantised, and attention has 16 bit. `plain_inputs`, `plain_outputs`: what delta nets multiply first and
    last has 16 bit beside codes of the rest. `columns`: of a step.
    """

    number: str
    scales: int
    scale: str
    has_zeros: bool = False
    is_of_experts: bool = False
    columns: int = CODED_COLUMNS
    plain_inputs: bool = False
    plain_outputs: bool = False

    @classmethod
    def of(cls, form: WeightFormat, *, is_of_experts: bool = False) -> Coding:
        """Raises ConfigError for a format that the kernel does not read."""
        columns = form.block_columns
        if form.is_ordered:
            raise ConfigError(f"GPUs do not run {form}: the columns of a group are no neighbours; use --device cpu")
        if columns and columns not in _GROUPS and columns % CODED_COLUMNS:
            raise ConfigError(f"GPUs do not run {form}: groups have 32, 64 or a multiple of 128 columns; use --device cpu")
        if (form.scale == "E8M0" and columns != 32) or (form.has_zeros and not columns):
            raise ConfigError(f"GPUs do not run {form}: no kernel was made for it; use --device cpu")
        scales = -(-CODED_COLUMNS // columns) if columns else 0
        return cls(form.number, scales, form.scale, form.has_zeros, is_of_experts)

    @property
    def bits(self) -> int:
        """Of a code."""
        return NUMBERS[self.number].bits

    @property
    def row_bytes(self) -> int:
        """Codes of a row of a step."""
        return self.columns * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Scales of a row of a step."""
        return self.scales * SCALE_BYTES[self.scale]

    @property
    def zero_bytes(self) -> int:
        """Zero points of a row of a step."""
        return self.scales if self.has_zeros else 0

    def part_bytes(self, rows: int) -> int:
        """A warp's part of a tile of so many rows."""
        return rows * self.row_bytes + -(-rows * (self.scale_bytes + self.zero_bytes) // 16) * 16

    @property
    def terms(self) -> int:
        """Rows of codes that have as many bits as one row of 16-bit values, and are one together (coded_terms.py)."""
        return 16 // self.bits

    @property
    def is_integer(self) -> bool:
        """Whether the matrix unit multiplies integers, and x in digits (phases/x_digits.cuh)."""
        return self.number == "INT4"

    @property
    def expanded(self) -> str | None:
        """The 16-bit type that codes become for the matrix unit, and x with them; None of integers."""
        return None if self.is_integer else _EXPANDED[self.number].dtype

    def plain_dtype(self, weight_dtype: str) -> str:
        """Of matrices of 16 bit beside codes, which have the type of x, in a model whose weights are of `weight_dtype`."""
        return self.expanded or weight_dtype

    def plain_scale(self, weight_dtype: str) -> float:
        """What they are multiplied by there: bfloat16 numbers of 2^-18 to 4,080 are exact in binary16 then."""
        return 1.0 if self.plain_dtype(weight_dtype) == weight_dtype else 16.0

    @property
    def x_scale(self) -> float:
        """What the kernel multiplies x by, where it is of the type `expanded`."""
        return 2.0 ** _EXPANDED[self.number].x_exponent

    @property
    def factor(self) -> float:
        """What it multiplies sums of products by, so that they are those of the values of codes with x."""
        if self.is_integer:
            return 1.0
        expanded = _EXPANDED[self.number]
        return 2.0 ** -(expanded.exponent + expanded.x_exponent)


# Of the LM head in integers: tiles are as large as those of 16 bit, and their columns divide what these divide.
HEAD_CODING = Coding("INT8", 0, "F16", columns=64)


class Codings(TypedDict):
    """Those of a model, as `KernelShape` takes them; None: 16 bit."""

    coding: Coding | None
    head_coding: Coding | None
