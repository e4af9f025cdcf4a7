"""The tensors of a GGUF file under Hugging Face's names, in 16 bit: what `SafetensorsFile` is for safetensors."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import CheckpointError, install
from kog_dist.late_numpy import NDArray, np
from kog_dist.model.exact_file import file_identity, opened, read_exactly
from kog_dist.model.gguf.config import ROPE_FACTORS
from kog_dist.model.gguf.header import PLAIN, GgufHeader, GgufTensor
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile, StoredTensor, narrow, widen
from kog_dist.records import dataclass

_READ_BYTES = 2**20  # of the file, or one row or head where that is more
_LAYER: Final = re.compile(r"blk\.([0-9]{1,5})\.([a-z_]+)\.(weight|bias)")
_OUTER: Final = {
    "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # fmt: skip
_MODULES: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_PERMUTED: Final = ("attn_q", "attn_k")  # of the llama architecture


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor as it lies in the file. `pairs`: values per head if rotary pairs lie side by side there, else 0."""

    tensor: GgufTensor
    pairs: int


@dataclass(frozen=True, slots=True)
class GgufFile(SafetensorsFile):
    """A file whose header was found consistent. `tensors` are as they are read; their `begin` is 0."""

    sources: Mapping[str, _Source]

    @classmethod
    def from_header(cls, header: GgufHeader, architecture: object, head_dim: int) -> GgufFile:
        """Of a file, or a part, of a model of that architecture. Raises CheckpointError if a tensor cannot be read here."""
        kinds = {tensor.format.name for tensor in header.tensors.values()}
        if not kinds <= set(PLAIN) and importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"{header.path} has quantised weights; to read them, {install('gguf')}")
        is_permuted = architecture == "llama"
        tensors, sources = {}, {}
        for name, tensor in header.tensors.items():
            if name == ROPE_FACTORS:
                continue  # part of the config
            theirs, module = _published_name(name)
            pairs = head_dim if is_permuted and module in _PERMUTED else 0
            if pairs and (pairs % 2 or tensor.shape[0] % pairs):
                raise CheckpointError(f"{header.path}: tensor {name} has {tensor.shape[0]} rows, which are no heads of {pairs}")
            dtype = tensor.format.name if tensor.format.name in PLAIN else "F16"
            tensors[theirs] = StoredTensor(dtype, tensor.shape, 0, math.prod(tensor.shape) * DTYPES[dtype][1])
            sources[theirs] = _Source(tensor, pairs)
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
        form, shape = source.tensor.format, source.tensor.shape
        values_per_row = math.prod(shape[1:]) if len(shape) > 1 else 1
        if len(shape) == 1 and form.block_values > 1:
            raise CheckpointError(f"{self.path}: tensor {name} of one dimension is quantised, which is not supported")
        row_bytes = values_per_row // form.block_values * form.block_bytes
        unit = source.pairs or 1  # rows that must be read together
        step = max(1, _READ_BYTES // (row_bytes * unit)) * unit
        begin, end = first // unit * unit, -(-last // unit) * unit
        with opened(self.path) as fd:
            if file_identity(fd) != self.identity:
                raise CheckpointError(f"{self.path} was changed or replaced while it was being read; load the model again")
            for at in range(begin, end, step):
                rows = min(step, end - at)
                raw = bytearray(rows * row_bytes)
                read_exactly(self.path, fd, memoryview(raw), source.tensor.begin + at * row_bytes, f"tensor {name}")
                values = dequantised(raw, form.name).reshape(rows, values_per_row)
                if source.pairs:
                    values = _in_halves(values, source.pairs)
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


def _in_halves(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Undo what llama.cpp's converter does to queries and keys: pairs (2i, 2i + 1) of a head become (i, i + head_dim / 2)."""
    return rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _published_name(name: str) -> tuple[str, str]:
    """A tensor's name for Hugging Face, and its module in the file; what has none keeps its own, to be refused as unexpected."""
    if name in _OUTER:
        return _OUTER[name], ""
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _MODULES:
        return name, ""
    return f"model.layers.{int(match[1])}.{_MODULES[match[2]]}.{match[3]}", match[2]


def is_gguf(path: Path) -> bool:
    """Whether a file is called one."""
    return path.suffix == ".gguf" and os.path.isfile(path)
