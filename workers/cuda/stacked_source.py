"""Experts of gpt-oss as it is published, several at once: files have one tensor for all experts of a layer, in MXFP4.

Their bytes go to the GPU as they are, and become words of tapes there.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kog_dist.decode.coded_packing import WORD_COLUMNS, CodeWords, code_tables, code_words
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.mxfp4 import FORM
from kog_dist.model.formats.numbers import NUMBERS, e8m0_values
from kog_dist.model.formats.source import StoredPiece
from kog_dist.model.formats.stacked_experts import Stacks, stacks
from kog_dist.model.layout import ffn_prefixes
from kog_dist.model.safetensors_file import DTYPES, converted
from kog_dist.records import dataclass
from kog_dist.workers.cuda.expert_weights import ExpertsBatch, GpuArray, lane_columns
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.staging import Stages

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint

BATCH_BYTES = 128 * 2**20  # of experts that are packed together; the interpreter takes as long for few of them as for many
JOB_BYTES = 8 * 2**20  # that a reader reads at a time
_AHEAD = 2  # batches that are read before they are asked for
with np.errstate(over="ignore"):  # the first scale with which the largest code is no finite value
    _TOO_LARGE = int(np.argmin(np.isfinite(e8m0_values(np.arange(256)) * np.float32(NUMBERS[FORM.number].values.max()))))


def stacked_experts(shape: KernelShape, checkpoint: Checkpoint, pool: ThreadPoolExecutor, stages: Stages) -> StacksReader | None:
    """A reader of a rank's experts; None if they are no stacks in MXFP4, or are compared with a manifest, which is by lane."""
    if shape.experts is None or shape.coding is None or (checkpoint.verify and checkpoint.manifest is not None):
        return None
    first = [ffn_prefixes(shape.spec, layer)[0] for layer in range(shape.spec.num_layers)]
    found = [one for prefix in first if (one := stacks(checkpoint.owner, checkpoint.names, prefix)) is not None]
    if len(found) < len(first) or shape.spec.lane_ffn % WORD_COLUMNS:
        return None
    return StacksReader(shape, checkpoint, found, pool, stages)


class _Kind(enum.Enum):
    CODES = enum.auto()
    SCALES = enum.auto()
    BIAS = enum.auto()  # 16-bit words on the GPU, whatever files have


class _Rows(NamedTuple):
    """Rows [first, last) of every expert of a tensor (experts, rows, ...)."""

    kind: _Kind
    piece: StoredPiece
    first: int
    last: int

    @property
    def of_expert(self) -> int:
        """How many rows each has."""
        return self.piece.tensor.shape[1]

    @property
    def row_bytes(self) -> int:
        """Of the file."""
        tensor = self.piece.tensor
        return (tensor.end - tensor.begin) // prod(tensor.shape[:2])

    def runs(self, experts: range) -> Iterator[tuple[int, int]]:
        """Those of some experts in the order of the file, as [first, last) of all rows of the tensor: at most JOB_BYTES each."""
        whole = self.first == 0 and self.last == self.of_expert
        starts = (
            [(experts[0] * self.of_expert, len(experts) * self.of_expert)]
            if whole
            else [(expert * self.of_expert + self.first, self.last - self.first) for expert in experts]
        )
        step = max(JOB_BYTES // self.row_bytes, 1)
        for start, count in starts:
            yield from ((at, min(at + step, start + count)) for at in range(start, start + count, step))


@dataclass(frozen=True)
class _BatchBeingRead:
    """Experts of a layer that are being read: their memory on the GPU, (experts, rows, bytes), and the jobs."""

    layer: int
    experts: range
    arrays: list[GpuArray]
    jobs: list[Future[None]]


class StacksReader:
    """The experts of a checkpoint in the order of use, read a little ahead of the one who takes them."""

    def __init__(
        self, shape: KernelShape, checkpoint: Checkpoint, layers: list[Stacks], pool: ThreadPoolExecutor, stages: Stages
    ) -> None:
        import cupy

        assert shape.experts is not None
        assert shape.coding is not None
        self._shape, self._experts, self._checkpoint, self._layers = shape, shape.experts, checkpoint, layers
        self._pool, self._stages = pool, stages
        self._tables = cupy.asarray(code_tables(shape.coding))
        self._dtype = {name: key for key, (name, _) in DTYPES.items()}[checkpoint.dtype]
        self._waiting = deque((layer, experts) for layer in range(len(layers)) for experts in self._batches())
        self._reading: deque[_BatchBeingRead] = deque()

    def batches(self, layer: int) -> Iterator[ExpertsBatch]:
        """All experts of a layer; layers come in order. Raises CheckpointError naming file and tensor."""
        while True:
            while self._waiting and len(self._reading) <= _AHEAD:
                self._reading.append(self._start(*self._waiting.popleft()))
            if not self._reading or self._reading[0].layer != layer:
                return
            reading = self._reading.popleft()
            for job in reading.jobs:
                job.result()
            yield self._made(reading)

    def _batches(self) -> list[range]:
        num_experts = self._experts.num_experts
        step = max(BATCH_BYTES // (2 * self._experts.num_values), 1)
        return [range(first, min(first + step, num_experts)) for first in range(0, num_experts, step)]

    def _rows(self, layer: int) -> list[_Rows]:
        """In the order of `_BatchBeingRead.arrays`."""
        (gate_up, down, *biases), hosted = self._layers[layer], self._shape.hosted_lanes
        width, hidden = 2 * self._shape.spec.lane_ffn, self._shape.spec.hidden_size
        found = []
        for pieces, bias, first, last in (
            (gate_up, biases[0], hosted[0] * width, (hosted[-1] + 1) * width),
            (down, biases[1], 0, hidden),
        ):
            kinds = {_Kind.CODES: pieces["codes"], _Kind.SCALES: pieces["scales"], _Kind.BIAS: bias}
            found += [_Rows(kind, piece, first, last) for kind, piece in kinds.items()]
        return found

    def _start(self, layer: int, experts: range) -> _BatchBeingRead:
        import cupy

        reading = _BatchBeingRead(layer, experts, [], [])
        for rows in self._rows(layer):
            width = 2 if rows.kind is _Kind.BIAS else rows.row_bytes
            array = cupy.empty((len(experts), rows.last - rows.first, width), np.uint8)
            reading.arrays.append(array)
            target_ptr = array.data.ptr
            for first, last in rows.runs(experts):
                chunks = partial(self._chunks, layer, rows, first, last)
                reading.jobs.append(self._pool.submit(self._stages.send, chunks, target_ptr))
                target_ptr += (last - first) * width
        return reading

    def _chunks(
        self, layer: int, rows: _Rows, first: int, last: int, next_buffer: Callable[[], memoryview]
    ) -> Iterator[memoryview]:
        """Bytes of rows [first, last) of all rows of a tensor, as they go to the GPU."""
        piece, dtype = rows.piece, rows.piece.tensor.dtype
        for chunk in piece.file.raw_chunks(piece.name, first * rows.row_bytes, last * rows.row_bytes, next_buffer):
            sent = converted(chunk, dtype, self._dtype) if rows.kind is _Kind.BIAS and dtype != self._dtype else chunk
            if self._checkpoint.verify and not self._is_finite(rows.kind, sent):
                self._refuse(layer, rows, range(first // rows.of_expert, -(-last // rows.of_expert)))
            yield sent

    def _is_finite(self, kind: _Kind, chunk: memoryview) -> bool:
        if kind is _Kind.CODES:
            return True
        if kind is _Kind.SCALES:
            return bool(np.frombuffer(chunk, np.uint8).max() < _TOO_LARGE)
        infinity = 0x7C00 if self._dtype == "F16" else 0x7F80
        return bool((np.frombuffer(chunk, "<u2") & 0x7FFF).max() < infinity)

    def _refuse(self, layer: int, rows: _Rows, experts: range) -> None:
        """Raise CheckpointError naming the expert's part, of one that has a value which is not finite."""
        prefixes = ffn_prefixes(self._shape.spec, layer)
        for prefix in prefixes[experts.start : experts.stop]:
            for name in ("w1", "w3", "w2"):
                if rows.kind is _Kind.BIAS:
                    self._checkpoint.tensor(f"{prefix}{name}.bias")
                    continue
                for lane in self._shape.hosted_lanes:
                    lane_codes(self._checkpoint, f"{prefix}{name}.weight", lane, may_split=True)
        raise rows.piece.refusal("has a value that is not finite")

    def _made(self, reading: _BatchBeingRead) -> ExpertsBatch:
        codes, scales, bias, down_codes, down_scales, down_bias = reading.arrays
        down = CodeWords(code_words(down_codes, self._tables), down_scales)
        return ExpertsBatch(
            experts=reading.experts,
            gate_up=CodeWords(code_words(codes, self._tables), scales),
            downs=[lane_columns(self._experts, lane, down) for lane in self._shape.hosted_lanes],
            gate_up_bias=bias.view(np.uint16)[..., 0],
            down_bias=down_bias.view(np.uint16)[..., 0],
        )
