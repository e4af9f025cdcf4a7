"""gpt-oss's experts: files have one tensor for all experts of a layer, and gate and up rows in turns.

In 16 bit, as transformers writes them: `gate_up_proj` (experts, D, 2F), `down_proj` (experts, F, D). In MXFP4, as published:
`gate_up_proj_blocks` (experts, 2F, D / 32, 16) and `_scales` (experts, 2F, D / 32), `down_proj_blocks` (experts, D, F / 32, 16)
and `_scales` (experts, D, F / 32). Biases of both: `gate_up_proj_bias` (experts, 2F), `down_proj_bias` (experts, D).

`unstacked` shows them as one matrix (outputs, inputs) for each of an expert's gate, up and down, which is what all others read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.formats.mxfp4 import FORM, GROUP, expert
from kog_dist.model.formats.quantised_file import HasName, QuantisedFile, QuantisedMatrix
from kog_dist.model.formats.source import Box, Pieces, StoredPiece
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

Place = Mapping[str, SafetensorsFile]
_CODES: Final = ("U8",)
_SCALES: Final = ("U8", "F8_E8M0")


class Part(NamedTuple):
    """One expert's part of a stack: of its outputs every `step`-th from `first` on."""

    stack: str  # name of the tensor for all experts
    expert: int
    step: int = 1
    first: int = 0

    @property
    def name(self) -> str:
        """What the part is called: `gate_up_proj[7].gate`."""
        of_pair = ("", "") if self.step == 1 else (".gate", ".up")
        return f"{self.stack}[{self.expert}]{of_pair[self.first]}"


def gate(prefix: str, expert_idx: int, kind: str = "") -> Part:
    """Gate rows of an expert; `prefix` is the module's name, `kind` is `_bias` for its bias."""
    return Part(f"{prefix}.gate_up_proj{kind}", expert_idx, 2, 0)


def up(prefix: str, expert_idx: int, kind: str = "") -> Part:
    """The same of up."""
    return Part(f"{prefix}.gate_up_proj{kind}", expert_idx, 2, 1)


def down(prefix: str, expert_idx: int, kind: str = "") -> Part:
    """The same of down."""
    return Part(f"{prefix}.down_proj{kind}", expert_idx)


@dataclass(frozen=True, slots=True)
class StackedFile(SafetensorsFile):
    """A file with stacks in 16 bit or float32; `tensors` are their parts, by `Part.name`: (outputs, inputs), or (outputs,)."""

    file: SafetensorsFile
    parts: Mapping[str, Part]

    def stored_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """See `SafetensorsFile`."""
        shape = self.tensors[name].shape
        rest = np.ascontiguousarray(self._values(name, Box(first, last, 0, prod(shape[1:])))).data.cast("B")
        while rest:
            used = next_buffer()[: len(rest)]
            used[:] = rest[: len(used)]
            rest = rest[len(used) :]
            yield used

    def box_rows(self, name: str, box: tuple[int, int, int, int], step: int) -> Iterator[Array]:
        """See `SafetensorsFile`."""
        yield self._values(name, Box(*box))

    def _values(self, name: str, box: Box) -> Array:
        part, tensor = self.parts[name], self.tensors[name]
        width, num_outputs = DTYPES[tensor.dtype][1], part.step * tensor.shape[0]
        inputs = tensor.shape[1] if len(tensor.shape) > 1 else 1
        begin = part.expert * inputs + box.left
        row_bytes = num_outputs * width
        raw = self.file.raw(part.stack, begin * row_bytes, (begin + box.right - box.left) * row_bytes)
        rows = np.frombuffer(raw, f"<u{width}").reshape(-1, num_outputs)
        return rows[:, part.step * box.first + part.first : part.step * box.last : part.step].T


@dataclass(frozen=True, slots=True)
class StackedCodes:
    """See `BoxReader`: of MXFP4."""

    part: Part
    num_outputs: int  # of the part

    def read(self, pieces: Pieces, form: WeightFormat, box: Box) -> CodedMatrix:
        """See `BoxReader`."""
        part, codes, scales = self.part, pieces["codes"], pieces["scales"]
        first = part.step * (part.expert * self.num_outputs + box.first)
        last = first + part.step * (box.last - box.first)

        def rows(piece: StoredPiece) -> NDArray[np.uint8]:
            row_bytes = prod(piece.tensor.shape[2:])
            raw = piece.file.raw(piece.name, first * row_bytes, last * row_bytes)
            return np.frombuffer(raw, np.uint8).reshape(last - first, *piece.tensor.shape[2:])[part.first :: part.step]

        return expert(rows(codes), rows(scales), Box(0, box.last - box.first, box.left, box.right))


class Stacks(NamedTuple):
    """The tensors of a layer's experts in MXFP4, each of all experts, shaped as above."""

    gate_up: Pieces  # codes and scales
    down: Pieces
    gate_up_bias: StoredPiece
    down_bias: StoredPiece


def stacks(owner: Mapping[str, SafetensorsFile], names: Mapping[str, HasName], expert_prefix: str) -> Stacks | None:
    """Those of the layer of an expert; None if a checkpoint (see `Checkpoint`) has no such.

    `expert_prefix`: start of the engine's names of the expert's tensors.
    """

    def pieces(name: str) -> Pieces | None:
        file = owner[f"{expert_prefix}{name}.weight"]
        if not isinstance(file, QuantisedFile):
            return None
        matrix = file.matrices[names[f"{expert_prefix}{name}.weight"].name]
        return matrix.pieces if isinstance(matrix.storage, StackedCodes) else None

    def bias(name: str) -> StoredPiece:
        file = owner[f"{expert_prefix}{name}.bias"]
        assert isinstance(file, StackedFile)
        return StoredPiece(file.file, file.parts[names[f"{expert_prefix}{name}.bias"].name].stack)

    gate_up, of_down = pieces("w1"), pieces("w2")
    return None if gate_up is None or of_down is None else Stacks(gate_up, of_down, bias("w1"), bias("w2"))


def unstacked(folder: Path, spec: ModelSpec, place: Place, prefixes: list[str], *, is_coded: bool) -> dict[str, SafetensorsFile]:
    """`place`, the file of every tensor, with parts in the place of the stacks of all layers (`prefixes`: of their names).

    Raises CheckpointError naming the file and the stack that is missing or not as the model's config says.
    """
    assert spec.experts is not None
    num_experts, d, ffn = spec.experts.num_experts, spec.hidden_size, spec.intermediate_size
    if is_coded and (d % GROUP or ffn % GROUP):
        raise CheckpointError(
            f"{folder}: MXFP4 needs hidden and intermediate sizes that are multiples of {GROUP}, not {d} and {ffn}"
        )
    changed = dict(place)
    plain: dict[int, dict[str, tuple[Part, StoredTensor]]] = {}
    coded: dict[int, dict[str, QuantisedMatrix]] = {}
    for prefix in prefixes:
        for stack, outputs, inputs, makers in (("gate_up_proj", 2 * ffn, d, (gate, up)), ("down_proj", d, ffn, (down,))):
            name, rows = f"{prefix}.{stack}", outputs // len(makers)
            if is_coded:
                pieces = {
                    "codes": _taken(
                        changed, folder, f"{name}_blocks", (num_experts, outputs, inputs // GROUP, GROUP // 2), _CODES
                    ),
                    "scales": _taken(changed, folder, f"{name}_scales", (num_experts, outputs, inputs // GROUP), _SCALES),
                }
                found = coded.setdefault(id(pieces["codes"].file), {})
                for part in (make(prefix, idx) for idx in range(num_experts) for make in makers):
                    found[part.name] = QuantisedMatrix(FORM, StackedCodes(part, rows), pieces)
            shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {"_bias": ((num_experts, outputs), (rows,))}
            if not is_coded:
                shapes[""] = ((num_experts, inputs, outputs), (rows, inputs))
            for kind, (whole, shape) in shapes.items():
                piece = _taken(changed, folder, f"{name}{kind}", whole, tuple(DTYPES))
                tensor = StoredTensor(piece.tensor.dtype, shape, 0, prod(shape) * DTYPES[piece.tensor.dtype][1])
                parts = plain.setdefault(id(piece.file), {})
                for part in (make(prefix, idx, kind) for idx in range(num_experts) for make in makers):
                    parts[part.name] = (part, tensor)
    return changed | _files(spec, place, plain, coded)


def _files(
    spec: ModelSpec,
    place: Place,
    plain: Mapping[int, Mapping[str, tuple[Part, StoredTensor]]],
    coded: Mapping[int, Mapping[str, QuantisedMatrix]],
) -> dict[str, SafetensorsFile]:
    """The file of every part, in files by the identity of that which holds the stacks."""
    found: dict[str, SafetensorsFile] = {}
    for file in {id(file): file for file in place.values()}.values():
        common = file.path, file.header_sha256, file.identity
        if parts := plain.get(id(file)):
            tensors = {name: tensor for name, (_, tensor) in parts.items()}
            stacked = StackedFile(common[0], tensors, *common[1:], file, {name: part for name, (part, _) in parts.items()})
            found |= dict.fromkeys(parts, stacked)
        if matrices := coded.get(id(file)):
            shapes = {name: _shape(spec, matrix) for name, matrix in matrices.items()}
            tensors = {name: StoredTensor("F32", shape, 0, 4 * prod(shape)) for name, shape in shapes.items()}
            found |= dict.fromkeys(matrices, QuantisedFile(common[0], tensors, *common[1:], matrices))
    return found


def _shape(spec: ModelSpec, matrix: QuantisedMatrix) -> tuple[int, int]:
    assert isinstance(matrix.storage, StackedCodes)
    is_down = matrix.storage.part.step == 1
    return (spec.hidden_size, spec.intermediate_size) if is_down else (spec.intermediate_size, spec.hidden_size)


def _taken(
    place: dict[str, SafetensorsFile], folder: Path, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> StoredPiece:
    """A stack as the config wants it, taken out of `place`."""
    if name not in place:
        raise CheckpointError(f"{folder} lacks tensor {name}, which its config.json asks for")
    piece = StoredPiece(place.pop(name), name)
    if piece.tensor.shape != shape:
        raise piece.refusal(f"has shape {piece.tensor.shape}, but config.json asks for {shape}")
    if piece.tensor.dtype not in dtypes:
        raise piece.refusal(f"is {piece.tensor.dtype}, which config.json does not say; expected {', '.join(dtypes)}")
    return piece
