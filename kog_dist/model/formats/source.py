"""What a format's module asks of files: which tensors a quantised matrix has, and rows of them as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple, Protocol

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.formats.numbers import Values, e8m0_values
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile, StoredTensor, widen
from kog_dist.records import dataclass

# By a dtype's name in a header: E8M0 stands for powers of two; scales of MX formats are also stored as plain bytes.
_ARRAYS: Final = {"F8_E4M3": "u1", "F8_E8M0": "u1", "U8": "u1", "I32": "<u4", "I64": "<i8"}
FLOAT_SCALES: Final = ("F32", "BF16", "F16")


class Box(NamedTuple):
    """Rows [first, last) of a matrix, and of each the columns [left, right)."""

    first: int
    last: int
    left: int
    right: int


class TensorRule(NamedTuple):
    """What one tensor of a quantised matrix must be like. `ends`: of its name behind that of the module, one of them."""

    ends: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One of the tensors that a quantised matrix consists of."""

    file: SafetensorsFile
    name: str

    @property
    def tensor(self) -> StoredTensor:
        """As its header says."""
        return self.file.tensors[self.name]

    def rows(self, first: int, last: int) -> Array:
        """Rows [first, last) as they are stored: bytes, or words. Raises CheckpointError."""
        shape = self.tensor.shape
        whole = self.tensor.end - self.tensor.begin
        row_bytes = whole // max(shape[0], 1) if shape else whole
        raw = self.file.raw(self.name, first * row_bytes, last * row_bytes)
        return np.frombuffer(raw, _ARRAYS[self.tensor.dtype]).reshape(last - first, *shape[1:])

    def whole(self) -> Array:
        """All of it, in its own shape."""
        return self.rows(0, self.tensor.shape[0] if self.tensor.shape else 1).reshape(self.tensor.shape)

    def numbers(self) -> Values:
        """All of it as float32, exactly: of a tensor of scales. Raises CheckpointError."""
        tensor = self.tensor
        if tensor.dtype in ("U8", "F8_E8M0"):
            return e8m0_values(self.whole())
        out = np.empty(prod(tensor.shape), np.float32)
        raw = self.file.raw(self.name, 0, tensor.end - tensor.begin)
        assert tensor.dtype in DTYPES
        widen(memoryview(raw), tensor.dtype, out)
        return out.reshape(tensor.shape)

    def refusal(self, why: str) -> CheckpointError:
        """An error that names file and tensor."""
        return CheckpointError(f"{self.file.path}: tensor {self.name} {why}")


Pieces = Mapping[str, StoredPiece]  # by what they have: codes, scales, zeros, groups, shape


class BoxReader(Protocol):
    """Reads a quantised matrix."""

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """A part of a matrix. Raises CheckpointError."""


class Storage(BoxReader, Protocol):
    """How files of one kind hold quantised matrices."""

    @property
    def codes(self) -> str:
        """End of the name of the tensor that has the codes, behind the name of the module."""

    def expected(self, form: WeightFormat, rows: int, columns: int) -> Mapping[str, TensorRule]:
        """The tensors of a matrix by what they have. Raises ValueError, with what it has, if there can be no such matrix."""


def regular(form: WeightFormat, box: Box, codes: NDArray[np.uint8], scales: Values, zeros: Any = None) -> CodedMatrix:
    """Of codes of the box, and of scales and zero points of its rows and of all groups: what the columns of the box need."""
    first, last, groups = form.groups_of(box.left, box.right)
    kept = np.ascontiguousarray(scales[:, first:last])
    return CodedMatrix(form, codes, kept, groups, None if zeros is None else np.ascontiguousarray(zeros[:, first:last]))
