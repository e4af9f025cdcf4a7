"""A model folder as published: `config.json` and `model*.safetensors`, opened, checked and read per rank.

Every byte is verified once over the engine: `open_checkpoint` checks sizes, names, shapes and dtypes without touching a value;
`Checkpoint.rank_weights` then checks the values that a rank loads (finite; SHA-256 if there is a manifest), each part of a tensor
by the rank that hosts the part's lane. The ranks of an engine host all lanes: together they check everything, and no byte twice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.late_numpy import DTypeLike, np
from kog_dist.model.aligned import Array, aligned_empty
from kog_dist.model.families.stored import Family, Names
from kog_dist.model.formats.head import head_format
from kog_dist.model.formats.lanes import PartsCache, rounded_codes, weight_format
from kog_dist.model.formats.quantisation import IGNORED, KEY, OF_CODES, Quantisation
from kog_dist.model.formats.quantised_file import QuantisedFile, check_stacked, form_in, has_matrices, with_matrices
from kog_dist.model.formats.rounding import chosen_format
from kog_dist.model.formats.row_parts import with_parts
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.gguf.folder import gguf_of, main_format
from kog_dist.model.hub_cache import check_blob
from kog_dist.model.layout import EMBEDDING, TensorLayout, head_name, is_layer_matrix, tensor_layouts
from kog_dist.model.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_manifest,
    repair,
)
from kog_dist.model.published_config import read_config_file
from kog_dist.model.safetensors_file import (
    DTYPES,
    SafetensorsFile,
    converted,
    num_values_by_dtype,
    stored_dtype_of,
)
from kog_dist.model.shards import INDEX_NAME, open_shards, shard_names
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short
from kog_dist.records import dataclass

if TYPE_CHECKING:
    from kog_dist.model.weights import RankWeights


def open_checkpoint(
    folder: Path, *, verify: bool = True, context: int = 0, quantize: str = "none", quantize_head: str = "none"
) -> Checkpoint:
    """Open a model folder and check its metadata: config, file sizes, headers, names, shapes, dtypes, manifest. Reads no values.

    `verify` is kept for later: whether the readers of the checkpoint check the values they load. `context`: see
    `ModelSpec.with_context`. `quantize`, `quantize_head`: as in `LaunchConfig`.
    Raises CheckpointError naming the file and tensor that is wrong; ConfigError for the context, or what cannot be quantised.
    """
    published = read_config_file(folder)
    family, quantisation = published.family, published.quantisation
    spec = published.spec_to_run(context, quantize)
    manifest = Manifest.from_folder(folder) if verify else None
    files, place, stale = open_shards(folder, manifest)
    place, skipped = _of_text(family, place)
    if spec.tied_embeddings and family.head in place:
        spec = replace(spec, tied_embeddings=False)  # a copy of the embedding, or what was trained apart from it
    layouts = tensor_layouts(spec)
    names = family.stored_names(spec, layouts)
    parts = {} if family.parts is None else family.parts(spec)
    if quantisation is None:
        _refuse_codes(place)
    if family.unstack is not None:
        place = family.unstack(folder, spec, place, quantisation is not None)
    elif quantisation is not None:
        shapes = {stored.name: stored.shape(layouts[name]) for name, stored in names.items() if name != EMBEDDING}
        shapes |= {part.tensor: part.whole for part in parts.values()}
        place = with_matrices(folder, quantisation, place, shapes)
    if parts:
        place = with_parts(folder, parts, place)
    wanted_names = {stored.name for stored in names.values()}
    _check_names(folder, place, wanted_names, lambda name: name.endswith((*family.ignored, *IGNORED)))
    owner = {name: place[stored.name] for name, stored in names.items()}
    for name, layout in layouts.items():
        in_file, wanted = owner[name].tensors[names[name].name], names[name].shape(layout)
        what = f"{owner[name].path}: tensor {names[name].name}"
        if in_file.shape != wanted:
            raise CheckpointError(f"{what} has shape {in_file.shape}, but config.json asks for {wanted}")
        if in_file.dtype not in DTYPES:
            raise CheckpointError(f"{what} is {in_file.dtype}, which config.json does not say; expected {', '.join(DTYPES)}")
    plain = {name: stored.name for name, stored in names.items() if not isinstance(owner[name], QuantisedFile)}
    types = num_values_by_dtype(owner[name].tensors[stored] for name, stored in plain.items())
    dtype = max(types, key=lambda dtype: types[dtype])
    if manifest is not None:
        check_manifest(folder, manifest, files, layouts)
    check_stacked(owner, names)
    note = "; ".join(filter(None, (published.note, stale, skipped, _of_types(published.dtype, types))))
    rounding = chosen_format(quantize, DTYPES[dtype][0])
    if rounding is not None and quantisation is not None:
        raise ConfigError(f"quantize {quantize} is for 16-bit weights, and those of {folder} are {quantisation}; leave it out")
    head = head_name(spec)
    if quantize_head != "none" and (form := form_in(owner[head], names[head].name)) is not None:
        raise ConfigError(f"quantize_head {quantize_head} is for a 16-bit LM head, and that of {folder} is {form}; leave it out")
    return Checkpoint(
        folder, spec, files, DTYPES[dtype][0], verify, manifest, layouts, owner, names, quantisation, rounding,
        head_format(quantize_head, spec), note=note,
    )  # fmt: skip


def planned_checkpoint(folder: Path, *, context: int = 0, quantize: str = "none", quantize_head: str = "none") -> Checkpoint:
    """What a folder's config.json alone says, for plans; nothing can be read. Raises as `open_checkpoint` does."""
    published = read_config_file(folder)
    spec, dtype = published.spec_to_run(context, quantize), published.dtype or "bfloat16"
    layouts = tensor_layouts(spec)
    names, rounding = published.family.stored_names(spec, layouts), chosen_format(quantize, dtype)
    head = head_format(quantize_head, spec)
    return Checkpoint(
        folder, spec, (), dtype, False, None, layouts, {}, names, published.quantisation, rounding, head, note=published.note
    )


def has_weights(folder: Path) -> bool:
    """Whether there is a file in which `open_checkpoint` would look for weights. Raises CheckpointError for two GGUF files."""
    return bool(shard_names(folder)) or os.path.exists(folder / INDEX_NAME) or gguf_of(folder) is not None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model folder. `files` are its safetensors files, `dtype` what most of their values are: bfloat16, float16 or
    float32. Tensors of another dtype become that one where weights are kept as stored. `quantisation`: of the files;
    `rounding`: what each lane's matrices of the layers are rounded to as they are read. At most one of them is not None.
    `head_rounding`: what the LM head is rounded to (formats/head.py).
    """

    folder: Path
    spec: ModelSpec
    files: tuple[SafetensorsFile, ...]
    dtype: str
    verify: bool
    manifest: Manifest | None
    layouts: Mapping[str, TensorLayout]
    owner: Mapping[str, SafetensorsFile]
    names: Names
    quantisation: Quantisation | None = None
    rounding: WeightFormat | None = None
    head_rounding: WeightFormat | None = None
    cache: PartsCache | None = None  # of what was rounded
    note: str = ""  # what a log should say: names that are left out, types that differ from what config.json says

    @property
    def stored_format(self) -> str:
        """How most values are stored: `dtype`, or of a GGUF file such as Q4_K. Raises CheckpointError."""
        form = main_format(self.folder)
        return self.dtype if form is None else DTYPES[form][0] if form in DTYPES else form

    @cached_property
    def forms(self) -> Mapping[str, WeightFormat]:
        """How those tensors are quantised that are. Plans ask again and again, and experts have tens of thousands."""
        if self.rounding is None and self.quantisation is None and not has_matrices(self.owner):
            return {}
        found = ((name, weight_format(self, name)) for name in self.layouts)
        return {name: form for name, form in found if form is not None}

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.end - tensor.begin for file in self.files for tensor in file.tensors.values())

    def tensor(self, name: str, dtype: DTypeLike = "float32") -> Array:
        """A whole tensor in its published shape, verified if the checkpoint was opened so. Raises CheckpointError."""
        if name not in self.layouts:
            raise CheckpointError(f"{self.folder} has no tensor {short(name)}")
        out = aligned_empty(self.layouts[name].shape, _float_dtype(dtype))
        self.read_parts(name, out, range(len(self.layouts[name].parts)), range(self.spec.num_lanes))
        return out

    def verify_all(self) -> None:
        """Read and check every value of every tensor, without keeping any; and the hashes that name the files in a cache.

        Raises CheckpointError naming file and tensor.
        """
        for file in self.files:
            check_blob(file.path)
        for name, layout in self.layouts.items():
            for part_idx, (first, last) in enumerate(layout.parts):
                out = aligned_empty((last - first, layout.values_per_row), np.dtype(np.float32))
                self.read_unrounded(name, part_idx, out, verify=True)

    def part_digests(self, name: str) -> list[str]:
        """Read and check every value of a tensor; the SHA-256 of each of its parts. Raises CheckpointError."""
        layout = self.layouts[name]
        digests = []
        for part_idx, (first, last) in enumerate(layout.parts):
            out = aligned_empty((last - first, layout.values_per_row), np.dtype(np.float32))
            digests.append(self._read(name, part_idx, out, verify=True))
        return digests

    def rank_weights(
        self,
        lanes: Iterable[int],
        vocab_lanes: Iterable[int] | None = None,
        dtype: DTypeLike = "float32",
        *,
        keeps_halves: bool = False,
        on_share: Callable[[float], None] = lambda share: None,
    ) -> RankWeights:
        """The weights of a rank that hosts `lanes` and computes the logits of `vocab_lanes` (by default the same).

        Only the slices that the rank needs are read. Of tensors that every rank needs whole (embedding, norms) the rank verifies
        the parts of its own lanes; the other ranks verify theirs. With `keeps_halves` matrices that are stored in 16 bit stay so
        (`weights.BFLOAT16`, float16). `on_share` is told now and then which share has been read. Raises CheckpointError naming
        file and tensor.
        """
        from kog_dist.model.weights import RankReader  # with NumPy, which those who only plan do without

        hosted = tuple(lanes)
        vocab_hosted = hosted if vocab_lanes is None else tuple(vocab_lanes)
        for lane in (*hosted, *vocab_hosted):
            if not 0 <= lane < self.spec.num_lanes:
                raise ValueError(f"lane {lane} does not exist: the model has {self.spec.num_lanes}")
        return RankReader(self, hosted, vocab_hosted, _float_dtype(dtype), keeps_halves, on_share).read()

    def stored_dtype(self, name: str) -> str:
        """What the values of a tensor need to be exact: `BF16`, `F16` or `F32`, as those of quantised matrices do."""
        return "F32" if self.is_rounded(name) else self.owner[name].tensors[self.names[name].name].dtype

    def is_rounded(self, name: str) -> bool:
        """Whether a tensor's parts are rounded to `rounding` as they are read: matrices of the layers are."""
        return self.rounding is not None and is_layer_matrix(self.layouts, name)

    def read_part(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        """Fill `out` with the rows of one part of a tensor. Raises CheckpointError."""
        if self.is_rounded(name):
            out.reshape(self.layouts[name].shape[1:])[...] = rounded_codes(self, name, part_idx, verify=verify).values()
        else:
            self.read_unrounded(name, part_idx, out, verify=verify)

    def read_unrounded(self, name: str, part_idx: int, out: Array, *, verify: bool) -> None:
        """`read_part` of what the files have."""
        digest = self._read(name, part_idx, out, verify=verify)
        if verify:
            self.check_digest(name, part_idx, digest)

    def _read(self, name: str, part_idx: int, out: Array, *, verify: bool) -> str:
        """Fill `out`; the SHA-256 of the part's bytes with `verify`, else ""."""
        stored, layout, file = self.names[name], self.layouts[name], self.owner[name]
        box = stored.box(layout, part_idx)

        def chunks(next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
            return stored.chunks(file, layout, part_idx, next_buffer)

        whole = "it" if stored.is_plain else f"lane {part_idx}'s part of it"
        not_finite = f"tensor {stored.name} has a value that is not finite (element {{}} of {whole})"
        first = box.first * box.right if stored.is_plain else 0
        return file.read_chunks(stored.name, chunks, out, verify=verify, first=first, not_finite=not_finite)

    def stored_part(
        self, name: str, part_idx: int, next_buffer: Callable[[], memoryview], *, verify: bool
    ) -> Iterator[memoryview]:
        """The bytes of one part of a tensor in the checkpoint's dtype, in pieces; see `SafetensorsFile.stored_chunks`.

        With `verify` and a manifest they are hashed on the way and compared after the last piece. Whether they are finite is left
        to the caller. Raises CheckpointError.
        """
        hasher = hashlib.sha256() if verify and self.manifest is not None else None
        dtype, wanted = self.owner[name].tensors[self.names[name].name].dtype, stored_dtype_of(self.dtype)
        for chunk in self.names[name].chunks(self.owner[name], self.layouts[name], part_idx, next_buffer):
            if hasher is not None:
                hasher.update(chunk)
            yield chunk if dtype == wanted else converted(chunk, dtype, wanted)
        if hasher is not None:
            self.check_digest(name, part_idx, hasher.hexdigest())

    def check_digest(self, name: str, part_idx: int, digest: str) -> None:
        """Raise CheckpointError if the manifest has another SHA-256 of the part's bytes."""
        if self.manifest is not None and digest != self.manifest.tensors[name][part_idx]:
            first, last = self.layouts[name].parts[part_idx]
            path = self.owner[name].path
            raise CheckpointError(
                f"{path}: tensor {name}, rows {first} to {last}, differs from its SHA-256 in {MANIFEST_NAME}: {repair(path.name)}"
            )

    def read_parts(self, name: str, whole: Array, part_indices: Iterable[int], verified: Iterable[int]) -> None:
        """Fill the rows of `whole`, an array for a whole tensor, that belong to the given parts; verify those in `verified`."""
        for part_idx in part_indices:
            first, last = self.layouts[name].parts[part_idx]
            self.read_part(name, part_idx, whole[first:last], verify=self.verify and part_idx in verified)


def _float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    chosen = np.dtype(dtype)
    if chosen not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"weights are loaded as float32 or float64, not {chosen}")
    return chosen


# ---- opening ----
def _of_text(family: Family, place: dict[str, SafetensorsFile]) -> tuple[dict[str, SafetensorsFile], str]:
    """The tensors of a model's text under the names that its family gives them; and what is left out besides, in words."""
    found, skipped = dict[str, SafetensorsFile](), list[str]()
    renamed: dict[int, SafetensorsFile] = {}
    starts = {old: new for old, new in family.renamed if any(name.startswith(old) for name in place)}

    def own(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in starts.items() if name.startswith(old)), name)

    for name, file in place.items():
        if family.skipped and name.startswith(family.skipped):
            skipped.append(name)
        else:
            if starts and id(file) not in renamed:
                renamed[id(file)] = replace(file, tensors={own(one): tensor for one, tensor in file.tensors.items()})
            found[own(name)] = renamed.get(id(file), file)
    if not skipped:
        return found, ""
    mtp = sum("mtp." in name for name in skipped)
    what = {"of images": len(skipped) - mtp, "of multi-token prediction": mtp}
    return found, f"tensors left out: {', '.join(f'{count} {text}' for text, count in what.items() if count)}"


def _of_types(announced: str | None, types: Mapping[str, int]) -> str:
    """What is worth a line about the types of tensors; how many values have each."""
    names = [DTYPES[dtype][0] for dtype in sorted(types, key=lambda dtype: -types[dtype])]
    notes = []
    if announced not in (None, names[0]):
        notes.append(f"config.json says {announced}, but most weights are {names[0]}: they are taken as they are stored")
    if {"BF16", "F16"} <= set(types):
        notes.append(
            f"some weights are {' and '.join(names[1:])}: CPU ranks take them as they are, GPUs round them to {names[0]}"
        )
    return "; ".join(notes)


def _refuse_codes(place: Mapping[str, SafetensorsFile]) -> None:
    """Of a folder whose config says nothing of quantised weights."""
    for name in sorted(place):
        if name.endswith(OF_CODES):
            raise CheckpointError(
                f"{place[name].path}: tensor {short(name)} belongs to quantised weights, but config.json has no {KEY} that says "
                "how they are quantised; take config.json from where the weights are from"
            )


def _check_names(folder: Path, place: Mapping[str, SafetensorsFile], wanted: set[str], is_ignored: Callable[[str], bool]) -> None:
    missing, unexpected = sorted(wanted - set(place)), sorted(set(place) - wanted)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder} lacks tensor {missing[0]}{more}, which its config.json asks for")
    for name in unexpected:
        if not is_ignored(name):
            raise CheckpointError(f"{place[name].path} has a tensor {short(name)} that a model of this config.json does not have")
