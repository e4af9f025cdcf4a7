"""One safetensors file: its header checked strictly, its values read in bounded chunks into float arrays.

The library's reader is not used: it maps the file (one truncated meanwhile kills the process) and has no bfloat16 in NumPy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import safetensors

from kog_dist.errors import CheckpointError
from kog_dist.late_numpy import Array, np
from kog_dist.model.exact_file import FileIdentity, file_identity, opened, read_exactly, refuse_pointer
from kog_dist.model_limits import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS
from kog_dist.quoting import short
from kog_dist.records import dataclass
from kog_dist.strict_json import parse_json

_CHUNK_BYTES = 2**20

# name in a header -> (name in safetensors' writer and in config.json, bytes per value)
DTYPES: Mapping[str, tuple[str, int]] = {"BF16": ("bfloat16", 2), "F16": ("float16", 2), "F32": ("float32", 4)}
# Bytes per value of what a header may name: also what codes, scales and indices of quantised weights are stored as.
_STORED: Mapping[str, int] = {name: width for name, (_, width) in DTYPES.items()} | {
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I32": 4,
    "I64": 8,
}
# What else the library writes, or will: files that have it are not damaged.
_OTHERS = re.compile(r"(BOOL|C64|[IUF](8|16|32|64)|F(8|6|4)(_E\dM\d)?(FNUZ)?)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `dtype` as in the header, `begin` and `end` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file whose header was found consistent with its exact size. `identity` tells if it was replaced or changed since."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    header_sha256: str  # of the first 8 bytes and the header's text
    identity: FileIdentity

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header. Raises CheckpointError naming the file and, where there is one, the tensor."""
        with opened(path) as fd:
            identity = file_identity(fd)
            prefix = bytearray(8)
            read_exactly(path, fd, memoryview(prefix), 0, "the header's length")
            refuse_pointer(path, prefix)
            length = int.from_bytes(prefix, "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, identity[2] - 8):
                raise CheckpointError(
                    f"{path}: a header of {length} bytes is announced; expected 2 to {MAX_HEADER_BYTES}, and no more than the "
                    f"file's {identity[2]} bytes: it is truncated (copy it again) or no safetensors file"
                )
            header = bytearray(length)
            read_exactly(path, fd, memoryview(header), 8, "the header")
        tensors = _parse_header(path, bytes(header), identity[2])
        return cls(path, tensors, hashlib.sha256(prefix + header).hexdigest(), identity)

    def stored_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """The bytes of rows [first, last) of a tensor as they are stored, in pieces: each the used front of a `next_buffer()`.

        Raises CheckpointError if the file ends early or has changed since `open`.
        """
        tensor = self.tensors[name]
        row_bytes = (tensor.end - tensor.begin) // tensor.shape[0]
        yield from self.raw_chunks(name, first * row_bytes, last * row_bytes, next_buffer)

    def raw_chunks(self, name: str, first: int, last: int, next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
        """The same of bytes [first, last) of a tensor of the file itself."""
        begin = self.tensors[name].begin
        with self._unchanged() as fd:
            while first < last:
                chunk = next_buffer()[: last - first]
                read_exactly(self.path, fd, chunk, begin + first, f"tensor {name}")
                yield chunk
                first += len(chunk)

    @contextmanager
    def _unchanged(self) -> Iterator[int]:
        """The opened file. Raises CheckpointError if it is another one than at `open`."""
        with opened(self.path) as fd:
            if file_identity(fd) != self.identity:
                raise CheckpointError(f"{self.path} was changed or replaced while it was being read; load the model again")
            yield fd

    def raw(self, name: str, first: int, last: int) -> bytearray:
        """Bytes [first, last) of a tensor. Raises CheckpointError as `stored_chunks` does."""
        bytes_of = bytearray(last - first)
        with self._unchanged() as fd:
            read_exactly(self.path, fd, memoryview(bytes_of), self.tensors[name].begin + first, f"tensor {name}")
        return bytes_of

    def box_rows(self, name: str, box: tuple[int, int, int, int], step: int) -> Iterator[Array]:
        """Rows [first, last) of a matrix, of each the columns [left, right), as they are stored; multiples of `step` at a time.

        Raises CheckpointError as `stored_chunks` does.
        """
        first, last, left, right = box
        tensor = self.tensors[name]
        columns, width = prod(tensor.shape[1:]), DTYPES[tensor.dtype][1]
        step *= max(1, _CHUNK_BYTES // max(step * columns * width, 1))
        buffer = memoryview(bytearray(step * columns * width))
        for chunk in self.stored_chunks(name, first, last, lambda: buffer):
            yield np.frombuffer(chunk, f"<u{width}").reshape(-1, columns)[:, left:right]

    def read(self, name: str, first: int, last: int, out: Array, *, verify: bool) -> str:
        """Fill `out` (C-contiguous, float32 or float64) with rows [first, last) of a tensor; returns the SHA-256 of their bytes.

        With `verify` off nothing is looked at but the byte count, and "" is returned.
        Raises CheckpointError as `stored_chunks` does, and (with `verify`) if a value is not finite.
        """
        row_values = prod(self.tensors[name].shape[1:])

        def chunks(next_buffer: Callable[[], memoryview]) -> Iterator[memoryview]:
            return self.stored_chunks(name, first, last, next_buffer)

        if out.size != (last - first) * row_values:
            raise ValueError(f"out {out.shape} is no array for rows {first} to {last} of {name} {self.tensors[name].shape}")
        not_finite = f"tensor {name} has a value that is not finite (element {{}} of it)"
        return self.read_chunks(name, chunks, out, verify=verify, first=first * row_values, not_finite=not_finite)

    def read_chunks(
        self,
        name: str,
        chunks: Callable[[Callable[[], memoryview]], Iterator[memoryview]],
        out: Array,
        *,
        verify: bool,
        first: int,
        not_finite: str,
    ) -> str:
        """`read` of any bytes of a tensor: `chunks(next_buffer)` gives them in order, `first` values of the tensor lie before.

        `not_finite`: what to say of a value that is not, with {} for its number.
        """
        dtype = self.tensors[name].dtype
        width = DTYPES[dtype][1]
        flat = out.reshape(-1)
        if not np.shares_memory(flat, out):
            raise ValueError(f"out {out.shape} is not contiguous")
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, flat.size * width)))
        start = 0
        for chunk in chunks(lambda: buffer):
            values = flat[start : start + len(chunk) // width]
            widen(chunk, dtype, values)
            if verify:
                hasher.update(chunk)
                if not np.isfinite(values).all():
                    bad = first + start + int(np.argmin(np.isfinite(values)))
                    raise CheckpointError(f"{self.path}: {str(bad).join(not_finite.rsplit('{}', 1))}")  # names may have braces
            start += values.size
        if start != flat.size:
            raise ValueError(f"{start} values of tensor {name} were read for an array of {flat.size}")
        return hasher.hexdigest() if verify else ""


def write_safetensors(path: Path, stored: Mapping[str, tuple[str, tuple[int, ...], Array]]) -> None:
    """Write one file; values are (dtype as in DTYPES or U8, shape, array of `narrow` or of bytes).

    It appears under its name only when complete.

    Raises CheckpointError naming the file when it cannot be written (no space, no permission).
    """
    names = {dtype: name for dtype, (name, _) in DTYPES.items()} | {"U8": "uint8"}
    views = {
        name: safetensors.TensorSpec(dtype=names[dtype], shape=list(shape), data_ptr=values.ctypes.data, data_len=values.nbytes)
        for name, (dtype, shape, values) in stored.items()
    }
    try:
        safetensors.serialize_file(views, path, {"format": "pt"})
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from None


def stored_dtype_of(dtype: str) -> str:
    """The key of `DTYPES` of a type, by its name in config.json. Raises ValueError."""
    found = {name: key for key, (name, _) in DTYPES.items()}.get(dtype)
    if found is None:
        raise ValueError(f"dtype must be one of {', '.join(name for name, _ in DTYPES.values())}, got {dtype!r}")
    return found


def widen(chunk: memoryview | Array, dtype: str, out: Array) -> None:
    """Values stored as `dtype` become float32 or float64 in `out`; exact for every value."""
    if dtype == "BF16" and out.dtype == np.float32:
        bits = out.view(np.uint32)
        bits[:] = np.frombuffer(chunk, "<u2")
        bits <<= 16
    elif dtype == "BF16":
        out[:] = (np.frombuffer(chunk, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        out[:] = np.frombuffer(chunk, "<f2" if dtype == "F16" else "<f4")


def narrow(values: Array, dtype: str) -> Array:
    """The bits to store: rounded to nearest, ties to even; for BF16 as uint16. Overflow gives infinities, as in IEEE 754."""
    single = np.ascontiguousarray(values, dtype="<f4")
    if dtype == "F32":
        return single
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return single.astype("<f2")
    bits = single.view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    nan_kept = (bits >> 16) | 0x40  # rounding could carry a NaN into an infinity
    return np.where(np.isnan(single), nan_kept, rounded).astype("<u2")


def num_values_by_dtype(tensors: Iterable[StoredTensor]) -> dict[str, int]:
    """How many values of a model have each type: keys of DTYPES; BF16 where there are none at all."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[tensor.dtype] = found.get(tensor.dtype, 0) + prod(tensor.shape)
    return found or {"BF16": 0}


def converted(chunk: memoryview, dtype: str, wanted: str) -> memoryview:
    """The values of a chunk in another dtype, rounded to nearest; in the chunk's own memory if they get no longer."""
    single = np.empty(len(chunk) // DTYPES[dtype][1], np.float32)
    widen(chunk, dtype, single)
    values = narrow(single, wanted).view(np.uint8).data
    if len(values) > len(chunk):
        return values
    chunk[: len(values)] = values
    return chunk[: len(values)]


# ---- the header ----
def _parse_header(path: Path, header: bytes, file_bytes: int) -> dict[str, StoredTensor]:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: {why}; the file is damaged or no safetensors file")

    # Counted before parsing, so that a hostile header cannot become hundreds of megabytes of Python objects.
    if header.count(b"{") > MAX_TENSORS + 2 or header.count(b"[") > 2 * MAX_TENSORS or header.count(b",") > 16 * MAX_TENSORS:
        raise refuse(f"the header describes more than {MAX_TENSORS} tensors")
    try:
        entries = parse_json(header, 32 * MAX_TENSORS)
    except ValueError as error:
        raise refuse(f"the header is not valid JSON ({error})") from None
    if header[:1] != b"{" or not isinstance(entries, dict):
        raise refuse("the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("__metadata__ in the header must map names to strings")
    data_start = 8 + len(header)
    tensors = {}
    for name, entry in entries.items():
        if isinstance(entry, dict) and _is_unread(entry.get("dtype")):
            raise CheckpointError(f"{path}: tensor {short(name)}: {_unsupported(entry['dtype'])}")
        try:
            tensors[name] = _parse_entry(entry, data_start)
        except ValueError as error:
            raise refuse(f"tensor {short(name)}: {error}") from None
    expected_begin = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != expected_begin:
            kind = "overlaps the tensor before it" if tensor.begin < expected_begin else "leaves a hole before it"
            raise refuse(f"tensor {short(name)} {kind} (begins at byte {tensor.begin}, expected {expected_begin})")
        expected_begin = tensor.end
    if expected_begin != file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes} bytes, its header describes {expected_begin}: "
            f"it is {'truncated' if file_bytes < expected_begin else 'followed by bytes that belong to nothing'}, copy it again"
        )
    return tensors


def _is_unread(dtype: object) -> bool:
    """Whether it is one of safetensors that no model here has."""
    return isinstance(dtype, str) and dtype not in _STORED and _OTHERS.fullmatch(dtype) is not None


def _unsupported(dtype: object) -> str:
    return f"dtype {short(dtype)} is not supported; supported: {', '.join(_STORED)}"


def _parse_entry(entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _STORED:
        raise ValueError(_unsupported(dtype))
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"shape {short(shape)} is not a list of at most {MAX_DIMENSIONS} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"data_offsets {short(offsets)} are not two ascending offsets")
    num_bytes = _STORED[dtype]
    for size in shape:
        num_bytes *= size
    if num_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"shape {short(shape)} of {dtype} needs another number of bytes than data_offsets {offsets} give")
    return StoredTensor(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
