"""The tensors of a GGUF file under Hugging Face's names, in 16 bit: what `SafetensorsFile` is for safetensors."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from kog_dist.errors import CheckpointError, install
from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.exact_file import file_identity, opened, read_exactly
from kog_dist.model.gguf import delta_nets
from kog_dist.model.gguf.config import ROPE_FACTORS
from kog_dist.model.gguf.delta_nets import Change, FileRows
from kog_dist.model.gguf.header import PLAIN, GgufHeader, GgufTensor
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile, StoredTensor, narrow, widen
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

_READ_BYTES = 2**20  # of the file, or one row or head where that is more
_LAYER: Final = re.compile(r"blk\.([0-9]{1,5})\.([a-z0-9_.]+)")
_MODULE: Final = re.compile(r"([a-z0-9_]+)\.(weight|bias)")
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_MODULES: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_NETS: Final = {name: theirs for name, theirs in _MODULES.items() if name != "ffn_norm"} | delta_nets.MODULES
_PERMUTED: Final = ("attn_q", "attn_k")  # of the llama architecture


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor as it lies in the file. `pairs`: values per head if rotary pairs lie side by side there, else 0. `rows`: which of
    the file's rows it has; `change`: what the converter did to its values.
    """

    tensor: GgufTensor
    pairs: int = 0
    rows: FileRows = FileRows()
    change: Change = field(default_factory=Change)


@dataclass(frozen=True, slots=True)
class GgufFile(SafetensorsFile):
    """A file whose header was found consistent. `tensors` are as they are read; their `begin` is 0."""

    sources: Mapping[str, _Source]

    @classmethod
    def from_header(cls, header: GgufHeader, architecture: object, head_dim: int, spec: ModelSpec | None = None) -> GgufFile:
        """Of a file, or a part, of a model of that architecture; `spec`: of one with gated delta nets. Raises CheckpointError if
        a tensor cannot be read here.
        """
        kinds = {tensor.format.name for tensor in header.tensors.values()}
        if not kinds <= set(PLAIN) and importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"{header.path} has quantised weights; to read them, {install('gguf')}")
        is_permuted = architecture == "llama"
        sources: dict[str, _Source] = {}
        for name, tensor in header.tensors.items():
            if name == ROPE_FACTORS:
                continue  # part of the config
            theirs, module = _published_name(name, spec)
            pairs = head_dim if is_permuted and module in _PERMUTED else 0
            if pairs and (pairs % 2 or tensor.shape[0] % pairs):
                raise CheckpointError(f"{header.path}: tensor {name} has {tensor.shape[0]} rows, which are no heads of {pairs}")
            sources[theirs] = _Source(tensor, pairs)
        if spec is not None:
            sources = _undone(header.path, str(architecture), spec, sources)
        tensors = {}
        for theirs, source in sources.items():
            dtype = source.tensor.format.name if source.tensor.format.name in PLAIN else "F16"
            dtype = "F32" if source.change.undone is not None else dtype
            shape = source.tensor.shape if source.rows.part is None else source.rows.part.shape
            tensors[theirs] = StoredTensor(dtype, shape, 0, math.prod(shape) * DTYPES[dtype][1])
        return cls(header.path, tensors, header.sha256, header.identity, sources)

    def stored_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """Rows [first, last) of a tensor in its dtype, in pieces: each a `next_buffer()`, all but the last one full.

        Raises CheckpointError if the file ends early or has changed since `open`.
        """
        wanted = self.tensors[name].dtype
        buffer, used = memoryview(b""), 0
        for values in self._rows(name, first, last):
            rest = narrow(values, wanted).view(np.uint8).reshape(-1).data
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

    def _rows(self, name: str, first: int, last: int) -> Iterator[NDArray[np.float32]]:
        """The rows in float32, some at a time."""
        source = self.sources[name]
        form, shape, rule = source.tensor.format, self.tensors[name].shape, source.change
        values_per_row = math.prod(shape[1:]) if len(shape) > 1 else 1
        if len(source.tensor.shape) == 1 and form.block_values > 1:
            raise CheckpointError(f"{self.path}: tensor {name} of one dimension is quantised, which is not supported")
        row_bytes = values_per_row // form.block_values * form.block_bytes
        unit = source.pairs or 1  # rows that must be read together
        step = max(1, _READ_BYTES // (row_bytes * unit)) * unit
        begin, end = first // unit * unit, -(-last // unit) * unit
        with opened(self.path) as fd:
            if file_identity(fd) != self.identity:
                raise CheckpointError(f"{self.path} was changed or replaced while it was being read; load the model again")
            for at in range(begin, end, step):
                rows, used = min(step, end - at), 0
                raw = bytearray(rows * row_bytes)
                for start, stop in source.rows.of(at, at + rows):
                    room = memoryview(raw)[used : used + (stop - start) * row_bytes]
                    read_exactly(self.path, fd, room, source.tensor.begin + start * row_bytes, f"tensor {name}")
                    used += len(room)
                    room.release()
                values = dequantised(raw, form.name).reshape(rows, values_per_row)
                if source.pairs:
                    values = _in_halves(values, source.pairs)
                if rule.columns is not None:
                    values = values[:, rule.columns]
                if rule.undone is not None:
                    values = rule.undone(values)
                yield values[max(first - at, 0) : min(last - at, rows)]


def read_plain(header: GgufHeader, name: str) -> NDArray[np.float32]:
    """A small tensor of one dimension under its own name. Raises ValueError if it is none."""
    tensor = header.tensors[name]
    if len(tensor.shape) != 1 or tensor.format.name not in PLAIN or tensor.end - tensor.begin > _READ_BYTES:
        raise ValueError(f"tensor {name} has the shape {tensor.shape} of {tensor.format.name}; expected a short vector")
    raw = bytearray(tensor.end - tensor.begin)
    with opened(header.path) as fd:
        read_exactly(header.path, fd, memoryview(raw), tensor.begin, f"tensor {name}")
    return dequantised(raw, tensor.format.name)


def dequantised(raw: bytearray, form: str) -> NDArray[np.float32]:
    """The values of whole blocks in float32, as llama.cpp has them."""
    if form in PLAIN:
        values = np.empty(len(raw) // DTYPES[form][1], np.float32)
        widen(memoryview(raw), form, values)
        return values
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # whether they are finite is checked where all values are
        single: NDArray[np.float32] = dequantize(np.frombuffer(raw, np.uint8), GGMLQuantizationType[form])
    return single


def _in_halves(rows: Array, head_dim: int) -> Array:
    """Undo what llama.cpp's converter does to queries and keys: pairs (2i, 2i + 1) of a head become (i, i + head_dim / 2)."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _published_name(name: str, spec: ModelSpec | None) -> tuple[str, str]:
    """A tensor's name for Hugging Face, and its module in the file; what has none keeps its own, to be refused as unexpected.

    `spec`: of a model with gated delta nets; what it has behind its last layer is for multi-token prediction.
    """
    if name in _OUTER:
        return _OUTER[name], ""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, ""
    prefix, inner = f"model.layers.{int(match[1])}", match[2]
    if spec is not None and int(match[1]) >= spec.num_layers:
        return f"mtp.{name}", ""
    if spec is not None and inner in delta_nets.ENDS:
        return f"{prefix}.{delta_nets.ENDS[inner]}", ""
    module = _MODULE.fullmatch(inner)
    theirs = None if module is None else (_MODULES if spec is None else _OF_NETS).get(module[1])
    if module is None or theirs is None:
        return name, ""
    return f"{prefix}.{theirs}.{module[2]}", module[1]


def _undone(path: Path, architecture: str, spec: ModelSpec, sources: Mapping[str, _Source]) -> dict[str, _Source]:
    """The same with parts in the place of tensors that hold them, and without what the converter did.

    Raises CheckpointError naming a tensor that is not as the config says.
    """
    found: dict[str, _Source] = {}
    holders: dict[str, tuple[Array | None, Change]] = {}
    for name, part in delta_nets.all_parts(architecture, spec):
        if (source := sources.get(part.tensor)) is None:
            continue
        if _without_ones(source.tensor.shape) != _without_ones(part.whole):
            said = (
                f"{path}: tensor {part.tensor} has shape {source.tensor.shape}, but the header's metadata asks for {part.whole}"
            )
            raise CheckpointError(said)
        if name in found:
            raise CheckpointError(f"{path}: tensor {part.tensor} holds what another tensor has, too")
        if part.tensor not in holders:
            holders[part.tensor] = delta_nets.change_of(architecture, spec, part.tensor)
        moved, change = holders[part.tensor]
        found[name] = _Source(source.tensor, rows=FileRows(part, moved), change=change)
    for name, source in sources.items():
        if name in holders:
            continue
        tensor = source.tensor
        if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        moved, change = delta_nets.change_of(architecture, spec, name)
        of_columns = change.columns is not None and len(change.columns) != math.prod(tensor.shape[1:])
        if of_columns or (moved is not None and len(moved) != tensor.shape[0]):
            raise CheckpointError(f"{path}: tensor {name} has shape {tensor.shape}, which is not that of its value heads")
        found[name] = _Source(tensor, rows=FileRows(moved=moved), change=change)
    return found


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def is_gguf(path: Path) -> bool:
    """Whether a file is called one."""
    return path.suffix == ".gguf" and os.path.isfile(path)
