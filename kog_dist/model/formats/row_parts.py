"""Tensors that files hold as parts of others: some rows of each group of rows, as of a matrix for queries and gates of all heads.

`with_parts` shows each part as a tensor of its own under the name that the engine's adapters give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, np
from kog_dist.model.formats.quantised_file import QuantisedFile, QuantisedMatrix
from kog_dist.model.formats.source import Box
from kog_dist.model.formats.weight_format import CodedMatrix, below_each_other
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from kog_dist.records import dataclass

_CHUNK_BYTES: Final = 8 << 20
_WIDTH: Final = 4  # bytes of a value of a quantised matrix


class RowPart(NamedTuple):
    """The `num_rows` rows from `first` on of each `stride` rows of `tensor`, whose shape is `whole`, in `groups` of them.

    Rows are those of a matrix with the last dimension as columns; dimensions of 1 before it do not count.
    """

    tensor: str
    whole: tuple[int, ...]
    num_rows: int
    first: int = 0
    stride: int = 0
    groups: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part."""
        return self.groups * self.num_rows, self.whole[-1]

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Where rows [first, last) of the part lie in the tensor: neighbours together."""
        while first < last:
            group, row = divmod(first, self.num_rows)
            count = min(self.num_rows - row, last - first)
            start = group * self.stride + self.first + row
            yield start, start + count
            first += count


class FileOfParts(SafetensorsFile):
    """What files with parts have in common."""

    __slots__ = ()

    def chunks_of(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """See `SafetensorsFile.stored_chunks`."""
        for rows in self.box_rows(name, (first, last, 0, self.tensors[name].shape[1]), 1):
            rest = np.ascontiguousarray(rows).data.cast("B")
            while rest:
                used = next_buffer()[: len(rest)]
                used[:] = rest[: len(used)]
                rest = rest[len(used) :]
                yield used


@dataclass(frozen=True, slots=True)
class PartsFile(FileOfParts):
    """A file whose tensors have parts; `tensors` are these, by their names."""

    file: SafetensorsFile
    parts: Mapping[str, RowPart]

    def stored_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """See `SafetensorsFile`."""
        yield from self.chunks_of(name, first, last, next_buffer)

    def box_rows(self, name: str, box: tuple[int, int, int, int], step: int) -> Iterator[Array]:
        """See `SafetensorsFile`."""
        part, width = self.parts[name], DTYPES[self.tensors[name].dtype][1]
        columns = part.whole[-1]
        most = step * max(1, _CHUNK_BYTES // (step * columns * width))
        for start, stop in part.runs(box[0], box[1]):
            for at in range(start, stop, most):
                raw = self.file.raw(part.tensor, at * columns * width, min(at + most, stop) * columns * width)
                yield np.frombuffer(raw, f"<u{width}").reshape(-1, columns)[:, box[2] : box[3]]


@dataclass(frozen=True, slots=True)
class QuantisedParts(QuantisedFile):
    """The same of quantised matrices; `matrices` are those that have the parts."""

    parts: Mapping[str, RowPart]

    def coded(self, name: str, box: Box) -> CodedMatrix:
        """See `QuantisedFile`."""
        runs = self.parts[name].runs(box.first, box.last)
        return below_each_other([self.matrices[name].read(Box(*run, box.left, box.right)) for run in runs])

    def box_rows(self, name: str, box: tuple[int, int, int, int], step: int) -> Iterator[Array]:
        """See `SafetensorsFile`."""
        matrices = {self.parts[name].tensor: self.matrices[name]}
        whole = QuantisedFile(self.path, {}, self.header_sha256, self.identity, matrices)
        for start, stop in self.parts[name].runs(box[0], box[1]):
            yield from QuantisedFile.box_rows(whole, self.parts[name].tensor, (start, stop, box[2], box[3]), step)


def with_parts(folder: Path, parts: Mapping[str, RowPart], place: Mapping[str, SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """`place`, the file of every tensor, with parts in the place of the tensors that hold them.

    Parts that files have as tensors of their own stay so. Raises CheckpointError naming the tensor that is missing or not as the
    model's config says.
    """
    changed = dict(place)
    plain: dict[int, dict[str, RowPart]] = {}
    coded: dict[int, dict[str, RowPart]] = {}
    for name, part in parts.items():
        if name in place:
            continue
        if part.tensor not in place:
            raise CheckpointError(f"{folder} lacks tensor {part.tensor}, which its config.json asks for")
        file = place[part.tensor]
        tensor = file.tensors[part.tensor]
        if tensor.shape != part.whole:
            raise CheckpointError(
                f"{file.path}: tensor {part.tensor} has shape {tensor.shape}, but config.json asks for {part.whole}"
            )
        if tensor.dtype not in DTYPES:
            what = f"{file.path}: tensor {part.tensor} is {tensor.dtype}"
            raise CheckpointError(f"{what}, which config.json does not say; expected {', '.join(DTYPES)}")
        changed.pop(part.tensor, None)
        (coded if isinstance(file, QuantisedFile) else plain).setdefault(id(file), {})[name] = part
    for file in {id(file): file for file in place.values()}.values():
        common = file.path, file.header_sha256, file.identity
        if found := plain.get(id(file)):
            tensors = {name: _stored(file.tensors[part.tensor].dtype, part) for name, part in found.items()}
            changed |= dict.fromkeys(found, PartsFile(common[0], tensors, *common[1:], file, found))
        if (found := coded.get(id(file))) and isinstance(file, QuantisedFile):
            tensors = {name: _stored("F32", part) for name, part in found.items()}
            matrices: dict[str, QuantisedMatrix] = {name: file.matrices[part.tensor] for name, part in found.items()}
            changed |= dict.fromkeys(found, QuantisedParts(common[0], tensors, *common[1:], matrices, found))
    return changed


def _stored(dtype: str, part: RowPart) -> StoredTensor:
    width = DTYPES[dtype][1] if dtype in DTYPES else _WIDTH
    return StoredTensor(dtype, part.shape, 0, prod(part.shape) * width)
