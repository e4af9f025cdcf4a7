"""Quantised matrices of a checkpoint lane by lane, as codes and scales: what a GPU keeps that multiplies them as they are.

`weight_format` says how a matrix is quantised, `lane_codes` gives a lane's part of it, in the engine's order of rows; both are
the same for published folders and for `--quantize`. As values, the same parts are what `Checkpoint.read_part` reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, np
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.formats.quantisation import Quantisation
from kog_dist.model.formats.quantised_file import QuantisedFile, form_in
from kog_dist.model.formats.rounding import rounded
from kog_dist.model.formats.source import Box
from kog_dist.model.formats.weight_format import CodedMatrix, WeightFormat
from kog_dist.model.layout import EXPERTS, TensorLayout, is_layer_matrix
from kog_dist.model.safetensors_file import SafetensorsFile


class CodedSource(Protocol):
    """What is asked of a checkpoint; see `Checkpoint`."""

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        """Every tensor by name."""

    @property
    def owner(self) -> Mapping[str, SafetensorsFile]:
        """The file of every tensor."""

    @property
    def names(self) -> Mapping[str, StoredBox]:
        """What every tensor is called there, and where lanes lie."""

    @property
    def quantisation(self) -> Quantisation | None:
        """Of the files."""

    @property
    def rounding(self) -> WeightFormat | None:
        """What matrices are rounded to."""

    @property
    def cache(self) -> PartsCache | None:
        """Where what was rounded is kept, or None."""

    @property
    def manifest(self) -> object:
        """Hashes, or None."""

    @property
    def verify(self) -> bool:
        """Whether values are checked as they are read."""

    def is_rounded(self, name: str) -> bool:
        """Whether a tensor's parts are rounded."""

    def read_unrounded(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        """Fill `out` with a part of a tensor."""

    def check_digest(self, name: str, part_idx: int, digest: str) -> None:
        """Compare a part's hash with the manifest."""


class PartsCache(Protocol):
    """See `RoundedCache`."""

    def read(self, name: str, lane: int) -> CodedMatrix | None:
        """What a lane's part of a tensor was rounded to, if it is known."""

    def keep(self, name: str, lane: int, coded: CodedMatrix) -> None:
        """Have it known at the next start."""


class StoredBox(Protocol):
    """See `StoredTensorName`."""

    @property
    def name(self) -> str:
        """Of the tensor in its file."""

    @property
    def half_pairs(self) -> int:
        """Values per head, if rotary pairs lie half a head apart."""

    def box(self, layout: TensorLayout, part_idx: int) -> Box:
        """The values of a part."""

    def in_order(self, rows: Array) -> Array:
        """Rows in the engine's order."""


def weight_format(checkpoint: CodedSource, name: str) -> WeightFormat | None:
    """How the tensor that the engine calls `name` is quantised; None if its values are stored.

    Without files it is what config.json says, of all matrices of the layers that it does not exclude by their names.
    """
    if checkpoint.is_rounded(name):
        return checkpoint.rounding
    if name in checkpoint.owner:
        return form_in(checkpoint.owner[name], checkpoint.names[name].name)
    said = checkpoint.quantisation
    if said is None or not is_layer_matrix(checkpoint.layouts, name) or (said.is_of_experts and EXPERTS not in name):
        return None
    module = checkpoint.names[name].name.partition("[")[0].removesuffix(".weight")
    return None if said.leaves_out(module) else said.form


def lane_codes(checkpoint: CodedSource, name: str, lane: int, *, may_split: bool = False) -> CodedMatrix:
    """A lane's part of a quantised matrix (`weight_format` is not None), rows as everywhere in the engine.

    Its columns are whole groups: column k belongs to group k // block_columns; with `may_split` to the one that `groups` says.
    With `checkpoint.verify` codes and scales are those of finite values, and of the manifest if there is one. Raises
    CheckpointError naming file and tensor, also for a lane that begins or ends within a group, unless it `may_split`, and for
    act-order, where the columns of a group are no neighbours.
    """
    if checkpoint.is_rounded(name):
        return rounded_codes(checkpoint, name, lane, verify=checkpoint.verify)
    file, stored = checkpoint.owner[name], checkpoint.names[name]
    assert isinstance(file, QuantisedFile), f"{name} is not quantised"
    box, columns = stored.box(checkpoint.layouts[name], lane), file.tensors[stored.name].shape[1]
    matrix = file.matrices[stored.name]
    what = f"{file.path}: tensor {stored.name}, {matrix.form}"
    if not may_split and not matrix.form.is_aligned(box.left, box.right, columns):
        raise CheckpointError(
            f"{what}: lane {lane} has columns {box.left} to {box.right} of {columns}, which are no whole groups of "
            f"{matrix.form.block_columns}; use --device cpu"
        )
    coded = file.coded(stored.name, box)
    if coded.form.is_ordered:
        raise CheckpointError(
            f"{what}: it was quantised in an order of columns of its own (desc_act), so that its groups are no neighbours; "
            "use --device cpu, or a checkpoint without"
        )
    if stored.half_pairs:
        coded = coded.with_rows(stored.in_order(np.arange(len(coded.codes))))
    if checkpoint.verify:
        _verify(checkpoint, name, lane, coded)
    return coded


def rounded_codes(checkpoint: CodedSource, name: str, lane: int, *, verify: bool) -> CodedMatrix:
    """`lane_codes` of a matrix that is rounded: from the cache, or rounded now. Raises CheckpointError naming file and tensor."""
    assert checkpoint.rounding is not None
    cache = checkpoint.cache if verify == checkpoint.verify else None  # it is of values that were checked as all others are
    known = cache.read(name, lane) if cache is not None else None
    if known is not None:
        return known
    values = np.empty(checkpoint.layouts[name].shape[1:], np.float32)
    checkpoint.read_unrounded(name, lane, values, verify=verify)
    coded = rounded(values, checkpoint.rounding)
    if cache is not None:
        cache.keep(name, lane, coded)
    return coded


def _verify(checkpoint: CodedSource, name: str, lane: int, coded: CodedMatrix) -> None:
    number = NUMBERS[coded.form.number]
    largest = 15.0 if coded.zeros is not None else float(np.nanmax(np.abs(number.values)))
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.abs(coded.scales) * np.float32(largest)).all())
    if not is_finite or any((coded.codes == code).any() for code in np.flatnonzero(np.isnan(number.values))):
        path, stored = checkpoint.owner[name].path, checkpoint.names[name].name
        raise CheckpointError(f"{path}: tensor {stored} has a code or scale of a value that is not finite")
    if checkpoint.manifest is not None:
        checkpoint.check_digest(name, lane, hashlib.sha256(coded.values().tobytes()).hexdigest())
