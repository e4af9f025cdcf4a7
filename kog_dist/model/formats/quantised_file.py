"""The quantised matrices of safetensors files, as codes, or as if they were float32 tensors: `SafetensorsFile` for them.

CPU ranks and everything that asks for values get them dequantised by the definition (`CodedMatrix.values`), in float32: a product
of a code and a scale fits no 16-bit type, but float32 in all formats but two, and then it is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final, Protocol

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, np
from kog_dist.model.formats.quantisation import Quantisation
from kog_dist.model.formats.source import FLOAT_SCALES, Box, BoxReader, Pieces, StoredPiece
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.safetensors_file import SafetensorsFile, StoredTensor
from kog_dist.records import dataclass

_VALUES: Final = 4 * 2**20  # that are dequantised at a time
_WIDTH: Final = 4  # bytes of one


class HasName(Protocol):
    """See `StoredTensorName`."""

    @property
    def name(self) -> str:
        """Of the tensor in its file."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """One matrix: its format, with the type of scales that the file has, and the tensors that hold it.

    `bias`: one that the model does not have, and that must be 0; AutoGPTQ wrote such.
    """

    form: WeightFormat
    storage: BoxReader
    pieces: Pieces
    bias: StoredPiece | None = None

    def read(self, box: Box) -> CodedMatrix:
        """A part of it. Raises CheckpointError."""
        if self.bias is not None and self.bias.numbers().any():
            raise self.bias.refusal("is not 0, but the model has no such bias")
        return self.storage.read(self.pieces, self.form, box)


@dataclass(frozen=True, slots=True)
class QuantisedFile(SafetensorsFile):
    """The file that has the codes. `tensors` are the matrices as they are read, by the names of what they stand for."""

    matrices: Mapping[str, QuantisedMatrix]

    def stored_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """See `SafetensorsFile`."""
        buffer, used = memoryview(b""), 0
        box = (first, last, 0, self.tensors[name].shape[1])
        for rows in self.box_rows(name, box, 1):
            rest = rows.data.cast("B")
            while rest:
                if used == len(buffer):
                    buffer, used = next_buffer(), 0
                count = min(len(rest), len(buffer) - used)
                buffer[used : used + count] = rest[:count]
                rest, used = rest[count:], used + count
                if used == len(buffer):
                    yield buffer
        if 0 < used < len(buffer):
            yield buffer[:used]

    def coded(self, name: str, box: Box) -> CodedMatrix:
        """A part of a matrix. Raises CheckpointError."""
        return self.matrices[name].read(box)

    def box_rows(self, name: str, box: tuple[int, int, int, int], step: int) -> Iterator[Array]:
        """See `SafetensorsFile`."""
        first, last, left, right = box
        step *= max(1, _VALUES // max(step * (right - left), 1))
        for at in range(first, last, step):
            values = self.matrices[name].read(Box(at, min(at + step, last), left, right)).values()
            yield values.view("<u4")


def with_matrices(
    folder: Path, quantisation: Quantisation, place: Mapping[str, SafetensorsFile], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, SafetensorsFile]:
    """`place`, the file of every tensor, with quantised matrices in the place of the tensors that make them up.

    `shapes`: of the tensors that a model has, by the names that their unquantised files have. The files decide which matrices are
    quantised. Raises CheckpointError naming the file and the tensor that is missing or not as its format is.
    """
    found: dict[str, QuantisedMatrix] = {}
    changed = dict(place)
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        codes = f"{module}.{quantisation.storage.codes}"
        if module == name or len(shape) != 2 or codes not in place or not _has_codes(quantisation, place[codes].tensors[codes]):
            continue
        found[name] = _matrix(quantisation, module, shape, place)
        bias = f"{module}.bias"
        if bias in place and bias not in shapes and place[bias].tensors[bias].dtype in FLOAT_SCALES:
            found[name] = replace(found[name], bias=StoredPiece(place[bias], bias))
            changed.pop(bias)
        for piece in found[name].pieces.values():
            changed.pop(piece.name, None)
    if not found:
        what = f"a tensor .{quantisation.storage.codes} with its codes"
        raise CheckpointError(f"{folder}: config.json says {quantisation}, but no file has {what}")
    for file in {id(file): file for file in place.values()}.values():
        matrices = {name: one for name, one in found.items() if one.pieces["codes"].file is file}
        tensors = {name: StoredTensor("F32", shapes[name], 0, prod(shapes[name]) * _WIDTH) for name in matrices}
        quantised = QuantisedFile(file.path, tensors, file.header_sha256, file.identity, matrices)
        changed |= dict.fromkeys(matrices, quantised)
    return changed


def _has_codes(quantisation: Quantisation, tensor: StoredTensor) -> bool:
    """Whether a tensor has codes: where its name is that of plain weights, by its type."""
    return quantisation.storage.codes != "weight" or tensor.dtype not in FLOAT_SCALES


def _matrix(
    quantisation: Quantisation, module: str, shape: tuple[int, ...], place: Mapping[str, SafetensorsFile]
) -> QuantisedMatrix:
    """The tensors of a module, found as its format wants them."""
    storage, form = quantisation.storage, _form_of(quantisation, module, shape, place)
    file = place[f"{module}.{storage.codes}"]
    try:
        expected = storage.expected(form, *shape)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: {module} in {quantisation.method}: it has {error}") from None
    pieces = {}
    for what, wanted in expected.items():
        names = [f"{module}.{end}" for end in wanted.ends]
        name = next((name for name in names if name in place), None)
        if name is None:
            if wanted.is_needed:
                raise CheckpointError(f"{file.path}: tensor {module}.{storage.codes} is quantised, but no file has {names[0]}")
            continue
        piece = pieces[what] = StoredPiece(place[name], name)
        if piece.tensor.dtype not in wanted.dtypes:
            raise piece.refusal(f"is {piece.tensor.dtype}, but {quantisation} has {' or '.join(wanted.dtypes)}")
        if piece.tensor.shape not in wanted.shapes:
            asked = f"{wanted.shapes[0]} for a matrix of {shape[0]} rows and {shape[1]} columns"
            raise piece.refusal(f"has shape {piece.tensor.shape}, but {quantisation} asks for {asked}")
    scale = pieces["scales"].tensor.dtype
    found = replace(form, scale=scale if scale in FLOAT_SCALES else "E8M0", is_ordered=_is_ordered(form, pieces, shape[1]))
    return QuantisedMatrix(found, storage, pieces)


def _form_of(
    quantisation: Quantisation, module: str, shape: tuple[int, ...], place: Mapping[str, SafetensorsFile]
) -> WeightFormat:
    """Of several the one whose scales the file has; else the first, to be refused if it is not as that says."""
    for form in (quantisation.form, *quantisation.others) if quantisation.others else ():
        try:
            wanted = quantisation.storage.expected(form, *shape)["scales"]
        except ValueError:
            continue
        if any((name := f"{module}.{end}") in place and place[name].tensors[name].shape in wanted.shapes for end in wanted.ends):
            return form
    return quantisation.form


def _is_ordered(form: WeightFormat, pieces: Pieces, columns: int) -> bool:
    """Whether columns of a group are no neighbours: of those that may be so the files say to which group each column belongs."""
    may_be = form.is_ordered and "groups" in pieces
    return may_be and not np.array_equal(pieces["groups"].whole(), form.groups_of(0, columns)[2])


# Matrices that read the same vector, which engines multiply as one: by the ends of their names.
_STACKED: Final[tuple[tuple[str, ...], ...]] = (
    ("attention.wq.weight", "attention.wk.weight", "attention.wv.weight"),
    (".w1.weight", ".w3.weight"),
)


def check_stacked(owner: Mapping[str, SafetensorsFile], names: Mapping[str, HasName]) -> None:
    """Raise CheckpointError if of matrices that engines multiply as one some are quantised and some are not, or in another way.

    `owner` and `names`: by the engine's names, the file, and the name in it.
    """
    for first in owner:
        ends: tuple[str, ...] = next((ends for ends in _STACKED if first.endswith(ends[0])), ())
        prefix = first.removesuffix(ends[0]) if ends else ""
        forms = {end: form_in(owner[prefix + end], names[prefix + end].name) for end in ends}
        for end, form in forms.items():
            if form != forms[ends[0]]:
                one, other = names[first].name, names[prefix + end].name
                raise CheckpointError(
                    f"{owner[prefix + end].path}: tensor {other} is {form or 'not quantised'}, but {one} is "
                    f"{forms[ends[0]] or 'not quantised'}; matrices that are multiplied as one must be alike"
                )


def has_matrices(owner: Mapping[str, SafetensorsFile]) -> bool:
    """Whether any of these files has quantised ones."""
    return any(isinstance(file, QuantisedFile) for file in {id(file): file for file in owner.values()}.values())


def form_in(file: SafetensorsFile, name: str) -> WeightFormat | None:
    """The format of a tensor; None if it is not quantised."""
    return file.matrices[name].form if isinstance(file, QuantisedFile) else None
