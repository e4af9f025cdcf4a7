"""The header of a GGUF file: its metadata and where its tensors lie. Bounded before anything is built from it."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kog_dist.errors import CheckpointError
from kog_dist.model.exact_file import FileIdentity, file_identity, opened, read_exactly, refuse_pointer
from kog_dist.model_limits import MAX_DIMENSIONS, MAX_GGUF_HEADER_BYTES, MAX_GGUF_ITEMS, MAX_GGUF_KEYS, MAX_TENSORS
from kog_dist.quoting import short
from kog_dist.records import dataclass

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_READ_BYTES = 2**20
_MAX_NAME_BYTES = 256  # of keys and tensors; the format allows 64 KiB
_MAX_TEXT_BYTES = 2**20  # a chat template is the longest
_MAX_ALIGNMENT = 2**16
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9


class Format(NamedTuple):
    """How values are stored: blocks of so many values in so many bytes."""

    name: str
    block_values: int
    block_bytes: int


FORMATS: Final[Mapping[int, Format]] = MappingProxyType(
    {
        0: Format("F32", 1, 4), 1: Format("F16", 1, 2), 30: Format("BF16", 1, 2), 2: Format("Q4_0", 32, 18),
        3: Format("Q4_1", 32, 20), 6: Format("Q5_0", 32, 22), 7: Format("Q5_1", 32, 24), 8: Format("Q8_0", 32, 34),
        10: Format("Q2_K", 256, 84), 11: Format("Q3_K", 256, 110), 12: Format("Q4_K", 256, 144), 13: Format("Q5_K", 256, 176),
        14: Format("Q6_K", 256, 210), 16: Format("IQ2_XXS", 256, 66), 17: Format("IQ2_XS", 256, 74),
        18: Format("IQ3_XXS", 256, 98), 19: Format("IQ1_S", 256, 50), 20: Format("IQ4_NL", 32, 18), 21: Format("IQ3_S", 256, 110),
        22: Format("IQ2_S", 256, 82), 23: Format("IQ4_XS", 256, 136), 29: Format("IQ1_M", 256, 56), 34: Format("TQ1_0", 256, 54),
        35: Format("TQ2_0", 256, 66), 39: Format("MXFP4", 32, 17),
    }
)  # fmt: skip
PLAIN: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` with the rows first, `begin` and `end` in bytes from the start of the file."""

    format: Format
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says, found consistent with its size. Arrays of the metadata are lists."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    sha256: str  # of the header's bytes
    identity: FileIdentity


def read_header(path: Path) -> GgufHeader:
    """Read and check the header. Raises CheckpointError naming the file."""
    with opened(path) as fd:
        identity = file_identity(fd)
        reader = _Reader(path, fd, identity[2])
        try:
            return _parse(path, reader, identity)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; the file is damaged or not one that can be read here") from None
        except MemoryError:
            raise CheckpointError(f"{path}: there is not enough memory to read its header") from None


class _Reader:
    """The header's bytes in order, read as they are needed. Raises ValueError beyond their end or limit."""

    def __init__(self, path: Path, fd: int, file_bytes: int) -> None:
        self._path, self._fd, self.file_bytes = path, fd, file_bytes
        self._raw = bytearray()
        self.at = 0
        self.items_left = MAX_GGUF_ITEMS

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.at + num_bytes
        if end > min(self.file_bytes, MAX_GGUF_HEADER_BYTES):
            limit = "file" if end > self.file_bytes else f"{MAX_GGUF_HEADER_BYTES} bytes that a header may have"
            raise ValueError(f"{what} needs {num_bytes} bytes at byte {self.at}, beyond the end of the {limit}")
        if end > len(self._raw):
            have, want = len(self._raw), min(self.file_bytes, max(end, len(self._raw) + _READ_BYTES))
            self._raw += bytes(want - have)
            view = memoryview(self._raw)
            read_exactly(self._path, self._fd, view[have:want], have, "the header")
            view.release()
        taken = bytes(self._raw[self.at : end])
        self.at = end
        return taken

    def number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))
        return value

    def text(self, most_bytes: int, what: str) -> str:
        num_bytes = self.number("Q", f"the length of {what}")
        if num_bytes > most_bytes:
            raise ValueError(f"{what} has {num_bytes} bytes, at most {most_bytes} are accepted")
        try:
            return self.take(num_bytes, what).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not UTF-8") from None

    def count_items(self, number: int, what: str) -> None:
        self.items_left -= number
        if self.items_left < 0:
            raise ValueError(f"{what} has {number} entries; at most {MAX_GGUF_ITEMS} are accepted in all")

    def sha256(self) -> str:
        return hashlib.sha256(self._raw[: self.at]).hexdigest()


def _parse(path: Path, reader: _Reader, identity: FileIdentity) -> GgufHeader:
    if reader.file_bytes >= 24:
        refuse_pointer(path, reader.take(8, "the magic number"))
        reader.at = 0
    if reader.file_bytes < 24 or reader.take(4, "the magic number") != _MAGIC:
        raise ValueError("it does not begin as a GGUF file does")
    version = reader.number("I", "the version")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        raise ValueError(f"it is of version {version}{', big-endian' if swapped else ''}; supported: little-endian 2 and 3")
    num_tensors, num_keys = reader.number("Q", "the number of tensors"), reader.number("Q", "the number of keys")
    if num_tensors > MAX_TENSORS or num_keys > MAX_GGUF_KEYS:
        raise ValueError(
            f"it announces {num_tensors} tensors and {num_keys} keys; at most {MAX_TENSORS} and {MAX_GGUF_KEYS} are accepted"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.text(_MAX_NAME_BYTES, "the name of a key")
        if key in metadata:
            raise ValueError(f"key {short(key)} stands twice")
        metadata[key] = _value(reader, reader.number("I", f"the type of {short(key)}"), short(key))
    entries: dict[str, tuple[Format, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = reader.text(_MAX_NAME_BYTES, "the name of a tensor")
        if name in entries:
            raise ValueError(f"tensor {short(name)} stands twice")
        entries[name] = _entry(reader, f"tensor {short(name)}")
    sha256 = reader.sha256()
    tensors = _placed(entries, _data_start(metadata, reader.at), reader.file_bytes)
    return GgufHeader(path, MappingProxyType(metadata), MappingProxyType(tensors), sha256, identity)


def _value(reader: _Reader, kind: int, key: str) -> Any:
    if kind == _TEXT:
        return reader.text(_MAX_TEXT_BYTES, key)
    if kind in _SCALARS:
        return _scalar(reader, kind, key)
    if kind != _ARRAY:
        raise ValueError(f"{key} is of type {kind}, which the format does not have")
    kind, length = reader.number("I", key), reader.number("Q", key)
    reader.count_items(length, key)
    if kind == _TEXT:
        return [reader.text(_MAX_TEXT_BYTES, f"an entry of {key}") for _ in range(length)]
    if kind not in _SCALARS:
        raise ValueError(f"{key} is an array of type {kind}; arrays of numbers and of texts are supported")
    if kind == _BOOL:
        return [_scalar(reader, kind, key) for _ in range(length)]
    code = f"<{length}{_SCALARS[kind]}"
    return list(struct.unpack(code, reader.take(struct.calcsize(code), key)))


def _scalar(reader: _Reader, kind: int, key: str) -> Any:
    if kind == _BOOL:
        value = reader.number("B", key)
        if value > 1:
            raise ValueError(f"{key} must be true or false, got {value}")
        return bool(value)
    return reader.number(_SCALARS[kind], key)


def _entry(reader: _Reader, what: str) -> tuple[Format, tuple[int, ...], int]:
    """Format, shape and offset of a tensor."""
    num_dimensions = reader.number("I", what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{what} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{num_dimensions}Q", reader.take(8 * num_dimensions, what))
    kind, offset = reader.number("I", what), reader.number("Q", what)
    if kind not in FORMATS:
        names = ", ".join(known.name for known in FORMATS.values())
        raise ValueError(f"{what} is of type {_type_name(kind)}, which is not supported; supported: {names}")
    form = FORMATS[kind]
    if 0 in sizes or math.prod(sizes) >= 2**60:
        raise ValueError(f"{what} has the shape {list(reversed(sizes))}")
    if sizes[0] % form.block_values:
        raise ValueError(f"{what} has rows of {sizes[0]} values, which are no whole blocks of {form.block_values} ({form.name})")
    return form, tuple(reversed(sizes)), offset


def _type_name(kind: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(kind).name)
    except (ImportError, ValueError):
        return str(kind)


def _data_start(metadata: Mapping[str, object], header_end: int) -> tuple[int, int]:
    """Where the tensors' bytes begin, and the alignment of each."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got {short(alignment)}")
    return -(-header_end // alignment) * alignment, alignment


def _placed(
    entries: Mapping[str, tuple[Format, tuple[int, ...], int]], data: tuple[int, int], file_bytes: int
) -> dict[str, GgufTensor]:
    """The tensors, which must follow one another with nothing but padding between them, as llama.cpp wants it."""
    start, alignment = data
    tensors, expected = {}, 0
    for name, (form, shape, offset) in sorted(entries.items(), key=lambda entry: entry[1][2]):
        if offset != expected:
            raise ValueError(f"tensor {short(name)} begins at byte {offset} of the data, expected {expected}")
        num_bytes = math.prod(shape) // form.block_values * form.block_bytes
        tensors[name] = GgufTensor(form, shape, start + offset, start + offset + num_bytes)
        expected = -(-(offset + num_bytes) // alignment) * alignment
    end = max((tensor.end for tensor in tensors.values()), default=start)
    if file_bytes < end:
        raise ValueError(f"it has {file_bytes} bytes, its header describes {end}: it is truncated, copy it again")
    if file_bytes > start + expected:
        raise ValueError(f"it has {file_bytes} bytes, its header describes {end}: bytes at its end belong to nothing")
    return {name: tensors[name] for name in entries}
