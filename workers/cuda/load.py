"""A checkpoint's tensors on their way to the GPU: read, hashed and copied as the 16-bit words that the files hold.

Reader threads fill page-locked buffers from the files (reading, hashing and copying leave the interpreter's lock) and queue the
copies; meanwhile the main thread packs what came before. Everything runs on the null stream, so packing a tensor comes after its
copies, and memory that packing has freed is not overwritten too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np

from kog_dist.decode.coded_packing import Codes
from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import Checkpoint
from kog_dist.model.layout import EXPERTS, ffn_prefixes, tensor_layouts
from kog_dist.records import dataclass
from kog_dist.workers.cuda.coded_source import CodesReader, is_coded
from kog_dist.workers.cuda.device_weights import DeviceWeights, from_tensors, needed_parts, needed_rows
from kog_dist.workers.cuda.expert_weights import ExpertsBatch, GpuArray
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.stacked_source import StacksReader, stacked_experts
from kog_dist.workers.cuda.staging import READERS, Stages

AHEAD_BYTES = 256 * 2**20  # of tensors that are read before they are asked for


def load_weights(
    shape: KernelShape,
    checkpoint: Checkpoint,
    observe: Callable[[str, GpuArray], None] | None = None,
    *,
    on_share: Callable[[float], None] = lambda share: None,
) -> DeviceWeights:
    """Read and pack what a rank needs of a checkpoint; no 16-bit value passes through float32 or stays on the host.

    `observe` is shown every tensor of 16 bits, as it goes into the packing: its name and the rank's rows of it; not biases of
    experts that are read several at once (`stacked_experts`). `on_share` is told which share of all words has come so far.
    With `shape.coding` the matrices of layers are packed as codes.

    With `checkpoint.verify` the bytes of the rank's own parts are compared with the manifest on the way, and all values must be
    finite, which the GPU looks at. GPU memory at the peak: what `from_tensors` says and AHEAD_BYTES; host memory: 2 * READERS
    buffers. Raises CheckpointError naming file and tensor.
    """
    import cupy

    num_words, num_taken = sum(_needed_words(shape).values()), 0
    with _opened(shape, checkpoint) as (tensors, experts), _codes_of(shape, checkpoint) as reader:

        def count(words: int) -> None:
            nonlocal num_taken
            num_taken += words
            on_share(num_taken / num_words)

        def codes(name: str, lane: int) -> Codes:
            found = reader.codes(name, lane)
            count(int(found.codes.size))
            return found

        def take(name: str) -> GpuArray:
            words = tensors.take(name)
            count(int(words.size))
            if observe is not None:
                observe(name, words)
            return words

        def stacked(layer: int) -> Iterator[ExpertsBatch]:
            assert experts is not None
            for batch in experts.batches(layer):
                yield batch
                count(len(batch.experts) * expert_words)

        expert_words = _expert_words(shape) if experts is not None else 0
        coded = codes if shape.coding is not None else None
        weights = from_tensors(shape, take, coded, stacked=None if experts is None else stacked)
        tensors.check_finite()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return weights


def _needed_words(shape: KernelShape) -> dict[str, int]:
    """Values of every tensor that a rank needs."""
    layouts = tensor_layouts(shape.spec)
    rows = {name: needed_rows(shape, name) for name in layouts}
    return {name: (last - first) * layouts[name].values_per_row for name, (first, last) in rows.items()}


def _expert_words(shape: KernelShape) -> int:
    """Those of one expert."""
    start = ffn_prefixes(shape.spec, 0)[0]
    return sum(words for name, words in _needed_words(shape).items() if name.startswith(start))


@dataclass
class _Loading:
    """A tensor that is being read: its memory on the GPU, and one job for each part."""

    words: GpuArray
    jobs: list[Future[None]]


class _Tensors:
    """The tensors of a checkpoint in the order of use, read a little ahead of the one who takes them."""

    def __init__(
        self, shape: KernelShape, checkpoint: Checkpoint, pool: ThreadPoolExecutor, stages: Stages, *, has_experts: bool
    ) -> None:
        self._shape, self._checkpoint, self._pool, self._stages = shape, checkpoint, pool, stages
        self._layouts = tensor_layouts(shape.spec)
        self._waiting = deque(
            name
            for name in self._layouts
            if not is_coded(self._layouts, shape.coding, name) and (has_experts or EXPERTS not in name)
        )
        self._loading: dict[str, _Loading] = {}
        self._largest: dict[str, GpuArray] = {}  # by name: the largest magnitude, as a word

    def take(self, name: str) -> GpuArray:
        """The tensor's `needed_rows`. Every tensor can be taken once. Raises CheckpointError."""
        while name not in self._loading or (self._waiting and self._bytes_ahead() < AHEAD_BYTES):
            next_name = self._waiting.popleft()
            self._loading[next_name] = self._start(next_name)
        loading = self._loading.pop(name)
        for job in loading.jobs:
            job.result()
        if self._checkpoint.verify and loading.words.size:
            self._largest[name] = (loading.words & np.uint16(0x7FFF)).max()
        return loading.words

    def check_finite(self) -> None:
        """Raise CheckpointError naming file, tensor and element if a value of what was taken is not finite."""
        infinity = 0x7C00 if self._checkpoint.dtype == "float16" else 0x7F80
        for name, largest in self._largest.items():
            if int(largest) >= infinity:
                self._checkpoint.tensor(name)  # finds the place
                raise CheckpointError(f"{self._checkpoint.folder}: tensor {name} has a value that is not finite")

    def _bytes_ahead(self) -> int:
        return sum(int(loading.words.nbytes) for loading in self._loading.values())

    def _start(self, name: str) -> _Loading:
        import cupy

        first, last = needed_rows(self._shape, name)
        layout = self._layouts[name]
        words = cupy.empty((last - first, *layout.shape[1:]), cupy.uint16)
        jobs = []
        for part_idx in needed_parts(self._shape, name):
            start = (layout.parts[part_idx][0] - first) * layout.values_per_row * 2
            jobs.append(self._pool.submit(self._read_part, name, part_idx, words.data.ptr + start))
        return _Loading(words, jobs)

    def _read_part(self, name: str, part_idx: int, target_ptr: int) -> None:
        """Job of a reader thread."""
        # Parts that every rank has are verified by the rank that hosts the part's lane.
        verify = self._checkpoint.verify and part_idx in self._shape.hosted_lanes
        self._stages.send(partial(self._checkpoint.stored_part, name, part_idx, verify=verify), target_ptr)


@contextmanager
def _opened(shape: KernelShape, checkpoint: Checkpoint) -> Iterator[tuple[_Tensors, StacksReader | None]]:
    """Tensors, and experts that are read several at once, with their threads; after an error what still waits is not read."""
    pool, stages = ThreadPoolExecutor(READERS, "kog-reader"), Stages()
    try:
        experts = stacked_experts(shape, checkpoint, pool, stages)
        yield _Tensors(shape, checkpoint, pool, stages, has_experts=experts is None), experts
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _codes_of(shape: KernelShape, checkpoint: Checkpoint) -> Iterator[CodesReader]:
    """The reader of quantised matrices; its threads begin with the first one that is asked for."""
    reader = CodesReader(checkpoint, shape.coding, shape.hosted_lanes)
    try:
        yield reader
    finally:
        reader.close()
