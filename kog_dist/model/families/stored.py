"""How the files of a family hold the tensors that `layout.py` names: under which name, and in which order of rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from kog_dist.late_numpy import Array, np
from kog_dist.model.families.computation import Rule
from kog_dist.model.families.fields import Config
from kog_dist.model.formats.row_parts import RowPart
from kog_dist.model.formats.source import Box
from kog_dist.model.layout import TensorLayout
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class StoredTensorName:
    """Where a family's files have one of the engine's tensors.

    `is_whole`: lanes lie one behind the other in a tensor that has no dimension for them, along its rows, or with `has_columns`
    along its columns. `half_pairs`: values per head if value i of a head turns with value i + head_dim / 2, where the engine has
    2i and 2i + 1; else 0. `turned`: values of a head that turn, if not all: i then turns with i + turned / 2. `copies`:
    neighbouring lanes that have the same rows.
    """

    name: str
    is_whole: bool = False
    has_columns: bool = False
    half_pairs: int = 0
    turned: int = field(default=0, repr=False)
    copies: int = field(default=1, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether a part's values lie in the file in the engine's order."""
        return not self.has_columns and not self.half_pairs

    def shape(self, layout: TensorLayout) -> tuple[int, ...]:
        """The shape that the file's tensor must have."""
        if not self.is_whole or len(layout.shape) < 2:
            return layout.shape
        lanes, rows, *columns = layout.shape
        lanes //= self.copies
        if self.has_columns:
            return (rows, lanes * columns[0])
        return (lanes * rows, *columns)

    def box(self, layout: TensorLayout, part_idx: int) -> Box:
        """The values of a part."""
        first, last = layout.parts[part_idx]
        if not self.is_whole or len(layout.shape) < 2:
            return Box(first, last, 0, layout.values_per_row)
        rows, *columns = layout.shape[1:]
        if self.has_columns:
            return Box(0, rows, part_idx * columns[0], (part_idx + 1) * columns[0])
        place = part_idx // self.copies
        return Box(place * rows, (place + 1) * rows, 0, columns[0] if columns else 1)

    def chunks(
        self, file: SafetensorsFile, layout: TensorLayout, part_idx: int, next_buffer: Callable[[], memoryview]
    ) -> Iterator[memoryview]:
        """The bytes of a part in the engine's order, as stored, in pieces: each the used front of a `next_buffer()`.

        Raises CheckpointError as `SafetensorsFile.stored_chunks` does.
        """
        box = self.box(layout, part_idx)
        if self.is_plain:
            yield from file.stored_chunks(self.name, box.first, box.last, next_buffer)
            return
        for rows in file.box_rows(self.name, box, self.half_pairs or 1):  # whole heads
            yield from _in_buffers(np.ascontiguousarray(self.in_order(rows)), next_buffer)

    def in_order(self, rows: Array) -> Array:
        """Rows of whole heads (rows, ...) in the engine's order: rotary pairs side by side."""
        if not self.half_pairs:
            return rows
        if 0 < self.turned < self.half_pairs:
            heads = rows.reshape(-1, self.half_pairs, *rows.shape[1:])
            turned = replace(self, half_pairs=self.turned, turned=0).in_order(
                np.ascontiguousarray(heads[:, : self.turned]).reshape(-1, *rows.shape[1:])
            )
            return np.concatenate([turned.reshape(len(heads), self.turned, *rows.shape[1:]), heads[:, self.turned :]], 1).reshape(
                rows.shape
            )
        halves = rows.reshape(-1, 2, self.half_pairs // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)


def _in_buffers(values: Array, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
    rest = values.data.cast("B")
    while rest:
        buffer = next_buffer()
        used = buffer[: len(rest)]
        used[:] = rest[: len(used)]
        rest = rest[len(used) :]
        yield used


Names = Mapping[str, StoredTensorName]


@dataclass(frozen=True, slots=True)
class Family:
    """One adapter. `stored_names`: where the files of a model have the tensors of its `tensor_layouts`, by the engine's names.

    `unstack`: of files with one tensor for all experts of a layer, the files of their tensors with one for each, by names that
    `stored_names` gives; see `stacked_experts`.
    `ignored`: ends of names of further tensors that files may have and that are not read. `head`: name of the LM head; one that
    files have although config.json ties it to the embedding is not tied.
    `keys`: those of `config.json` that are read; `own` and `has_experts`: see `check_computation`.
    `parts`: tensors of `stored_names` that files may hold within others. `prepared`: a `config.json` as the rules above read it.
    `renamed`: starts of names, and what stands in their place in `stored_names`. `skipped`: starts of names of what the model has
    besides its text, which is told.
    `rounded_lanes`: lanes of a model whose weights are rounded at the start in groups of so many columns; None: its own.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Config], ModelSpec]
    stored_names: Callable[[ModelSpec, Mapping[str, TensorLayout]], Names]
    ignored: tuple[str, ...] = ()
    head: str = ""
    unstack: Callable[[Path, ModelSpec, Mapping[str, SafetensorsFile], bool], dict[str, SafetensorsFile]] | None = None
    rounded_lanes: Callable[[ModelSpec, int], int] | None = None
    keys: frozenset[str] = frozenset()
    own: Mapping[str, Rule] = field(default_factory=dict)
    has_experts: bool = False
    parts: Callable[[ModelSpec], Mapping[str, RowPart]] | None = None
    prepared: Callable[[Config], Config] | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()


def same_names(spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """Of files that hold tensors as the engine names them."""
    return {name: StoredTensorName(name) for name in layouts}
