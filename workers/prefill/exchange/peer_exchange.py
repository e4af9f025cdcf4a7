"""Sums over the lanes of all ranks between GPUs, beside the products (allreduce.cu): each rank adds up some of the rows for all.

A sum is sent on one side stream, added up and awaited on another, so that what a layer adds up travels while the next layers
compute; the main stream waits only where a total is used. Chunks captured in a graph keep that shape. Slots of parts are used in
turn, delay + 1 of each kind, and so are totals: when a rank writes one again, what it has received proves that its peers are done
with it (docs/prefill.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.mailbox import Mailbox
from kog_dist.cuda.driver import Kernel, copy_to_device, copy_to_host
from kog_dist.errors import DeviceError
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer
from kog_dist.runtime.abi import WAIT_RECORD, WaitRecord
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address, current_stream, library
from kog_dist.workers.prefill.base.staging import staged
from kog_dist.workers.prefill.exchange.sums_abi import ROW_TILE, SUM_PARAMS, SUM_THREADS, sums_header

if TYPE_CHECKING:
    from kog_dist.collectives.cuda import CudaCommunicator

PARTS, TOTALS, LAST_PARTS, LAST_TOTALS, ENDS = (
    "prefill parts",
    "prefill totals",
    "prefill parts of the last token",
    "prefill totals of the last token",
    "prefill ends",
)
DEFAULT_CTAS = 16  # thread blocks that send one sum, or add it up, beside the products
WAIT_THREADS = 64  # that look for totals, of a few row tiles each
_KERNELS = ("begin_sums", "send_parts", "add_parts", "await_totals", "share_overflow")
_NUM_CHUNKS, _NUM_ENDS, _NUM_LASTS, _STOPPED, _RECORD = 0, 8, 16, 64, 128  # bytes of the state
_STATE_BYTES = _RECORD + WAIT_RECORD.size_bytes
_FIRST_OF_PRODUCTS = -1  # launch priority: among products a thread block would get no place until they end

Launch = Callable[[str, int, int, bytes], None]  # kernel, thread blocks, threads of each, parameters


class Queues(Protocol):
    """Where work is queued: the caller's own queue, and two beside it."""

    def sending(self) -> AbstractContextManager[None]:
        """What is queued within follows what the caller has queued so far."""

    def collecting(self) -> AbstractContextManager[None]:
        """What is queued within follows what has been sent."""

    def collected(self) -> Callable[[], None]:
        """A point behind what is being collected; calling it makes the caller's queue wait for it."""


def mailboxes(spec: ModelSpec, max_size: int, num_ranks: int) -> list[MailboxSpec]:
    """What the ranks' heaps need for chunks of up to `max_size` tokens.

    A row of parts has the float32 values of one rank's share, then a flag for each row tile. A slot of totals has those of all
    rows, then a flag for each row tile; it takes its `num_ranks` rows together, between which there is no gap.
    """
    boxes = []
    for parts, totals, num_slots, size in (
        (PARTS, TOTALS, spec.delay + 1, max_size),
        (LAST_PARTS, LAST_TOTALS, 1, 1),  # all ranks share their overflows between one last token and the next
    ):
        num_row_tiles, share = _num_row_tiles(size), _share(size, num_ranks)
        boxes.append(MailboxSpec(parts, 2 * num_slots, _value_words(spec, share * ROW_TILE) + share))
        boxes.append(MailboxSpec(totals, 2 * num_slots, -(-(_value_words(spec, size) + num_row_tiles) // num_ranks)))
    return [*boxes, MailboxSpec(ENDS, 2, 1)]


def summed_layers(spec: ModelSpec, sublayer: Sublayer) -> list[int]:
    """Layers whose sums a chunk publishes: those that are added at once, or feed a layer before the last one."""
    layers = range(spec.num_layers - 1)
    feeds = {layer: spec.feeds_layer(layer, sublayer) for layer in layers}
    return [
        layer
        for layer in layers
        if spec.reduce_mode(layer, sublayer) is ReduceMode.BLOCKING or (feeds[layer] or spec.num_layers) < spec.num_layers - 1
    ]


class _Sums:
    """Where sums lie: those of a prompt's chunks, or of its last token. First the slots of attention, then those of FFNs."""

    def __init__(self, spec: ModelSpec, max_size: int, parts: Mailbox, totals: Mailbox, num_chunks_ptr: int) -> None:
        self._parts, self._totals, self._width = parts, totals, spec.hidden_size
        self.num_chunks_ptr = num_chunks_ptr
        self.num_slots = parts.spec.num_slots // 2
        self._flag_word = _value_words(spec, _share(max_size, parts.world_size) * ROW_TILE)
        self._total_flags = _value_words(spec, max_size)

    def place(self, params: NDArray[np.void], sublayer: Sublayer, total: int) -> None:
        """Fill in where a sum's parts lie, and its total, the `total`-th of its kind."""
        slot = sublayer * self.num_slots + total
        params["num_chunks_ptr"] = self.num_chunks_ptr
        params["first_word"], params["row_words"] = self._parts.first_word, self._parts.row_words
        params["flag_word"], params["mailbox"] = self._flag_word, self._parts.index
        params["first_slot"], params["num_slots"] = sublayer * self.num_slots, self.num_slots
        params["total_word"] = self._totals.row(slot, 0)
        params["total_flag_word"] = self._totals.row(slot, 0) + self._total_flags
        params["total_slot"], params["total_mailbox"] = slot, self._totals.index

    def total(self, heap: Array, sublayer: Sublayer, total: int, size: int) -> Array:
        """That total in the own heap, which is `heap` as float32 values."""
        first = 2 * self._totals.row(sublayer * self.num_slots + total, 0)
        return heap[first : first + size * self._width].reshape(size, self._width)


class PeerExchange:
    """See `SumExchange`. One rank's side; `boxes` are `mailboxes` as they lie in the heap, `heap` the own one as float32 values,
    `peers` a `KogPeers`.

    One for a heap: another one would take the words that this one left for its own.
    """

    is_alone = False

    def __init__(
        self,
        spec: ModelSpec,
        max_size: int,
        boxes: Sequence[Mailbox],
        heap: Array,
        peers: bytes,
        launch: Launch,
        queues: Queues,
        *,
        limit_s: float,
        num_ctas: int = DEFAULT_CTAS,
    ) -> None:
        self._launch, self._queues, self._heap, self._peers, self._num_ctas = launch, queues, heap, peers, num_ctas
        self._is_last = False
        is_cuda = not isinstance(heap, np.ndarray)
        xp = library("cuda" if is_cuda else "cpu")
        self._state = xp.zeros(_STATE_BYTES, np.uint8)
        self._seen, self._one = (staged(count, np.uint8, is_cuda=is_cuda) for count in (_STATE_BYTES, 4))
        self._one.fill(1)
        self._stop_stream: Any = xp.cuda.Stream(non_blocking=True) if is_cuda else None
        self._layers = {sublayer: summed_layers(spec, sublayer) for sublayer in Sublayer}
        start = address(self._state)
        parts, totals, last_parts, last_totals, self._ends = boxes
        self._of_chunks = _Sums(spec, max_size, parts, totals, start + _NUM_CHUNKS)
        self._of_last = _Sums(spec, 1, last_parts, last_totals, start + _NUM_LASTS)
        self._num_ranks = parts.world_size
        self._arrived: dict[
            tuple[Sublayer, int], tuple[int, Callable[[], None], Array]
        ] = {}  # layer, how to wait, total; by place
        self._params = np.zeros((), SUM_PARAMS.dtype)
        self._params["stopped_ptr"], self._params["record_ptr"] = start + _STOPPED, start + _RECORD
        self._params["limit_ns"], self._params["width"] = round(limit_s * 1e9), spec.hidden_size

    def begin_chunk(self) -> None:
        """See `SumExchange`."""
        self._begin(is_last=False)

    def begin_last(self) -> None:
        """See `SumExchange`."""
        self._begin(is_last=True)

    def publish(self, sublayer: Sublayer, layer: int, own_sum: Array) -> None:
        """See `SumExchange`. Adds up and awaits, too, as soon as the peers' parts are there."""
        params, sums, size = self._params.copy(), self._sums, len(own_sum)
        place = layer % sums.num_slots
        sums.place(params, sublayer, place)
        layers = [layer] if self._is_last else self._layers[sublayer]
        params["per_chunk"], params["index"] = len(layers), layers.index(layer)
        params["own_sum_ptr"], params["size"] = address(own_sum), size
        whole = params.tobytes() + self._peers
        num_ctas = min(self._num_ctas, _num_row_tiles(size))
        with self._queues.sending():
            self._launch("send_parts", num_ctas, SUM_THREADS, whole)
        with self._queues.collecting():
            self._launch("add_parts", min(self._num_ctas, _share(size, self._num_ranks)), SUM_THREADS, whole)
            self._launch("await_totals", 1, WAIT_THREADS, whole)
        self._arrived[sublayer, place] = (layer, self._queues.collected(), sums.total(self._heap, sublayer, place, size))

    def total(self, sublayer: Sublayer, layer: int, own_sum: Array) -> Array:
        """See `SumExchange`."""
        found_layer, wait, total = self._arrived[sublayer, layer % self._sums.num_slots]
        assert found_layer == layer, f"the sum of layer {layer} was not published; its place holds layer {found_layer}"
        wait()
        return total

    def share_overflow(self, overflow: Array) -> None:
        """See `SumExchange`."""
        params = self._params.copy()
        params["num_chunks_ptr"], params["overflow_ptr"] = address(self._state) + _NUM_ENDS, address(overflow)
        params["first_word"], params["row_words"], params["mailbox"] = (
            self._ends.first_word,
            self._ends.row_words,
            self._ends.index,
        )
        params["num_slots"] = self._ends.spec.num_slots
        self._launch("share_overflow", 1, 32, params.tobytes() + self._peers)
        if self._stop_stream is None:
            self._seen[:] = self._state
        else:
            copy_to_host(address(self._seen), address(self._state), _STATE_BYTES, current_stream())

    def stop(self) -> None:
        """See `SumExchange`."""
        if self._stop_stream is None:
            self._state[_STOPPED : _STOPPED + 4] = self._one
        else:  # by a copy engine, beside whatever runs
            copy_to_device(address(self._state) + _STOPPED, address(self._one), 4, self._stop_stream.ptr)

    def check(self) -> None:
        """See `SumExchange`."""
        record = WaitRecord.unpack(self._seen[_RECORD:].tobytes())
        if record.elapsed_ns:
            raise DeviceError(record)

    @property
    def _sums(self) -> _Sums:
        return self._of_last if self._is_last else self._of_chunks

    def _begin(self, *, is_last: bool) -> None:
        self._is_last = is_last
        params = self._params.copy()
        params["num_chunks_ptr"] = self._sums.num_chunks_ptr
        self._launch("begin_sums", 1, 1, params.tobytes() + self._peers)


class SideStreams:
    """See `Queues`: two CUDA streams beside the current one."""

    def __init__(self) -> None:
        import cupy

        self._cuda: ModuleType = cupy.cuda
        self._send, self._collect = (cupy.cuda.Stream(non_blocking=True, priority=_FIRST_OF_PRODUCTS) for _ in range(2))

    @contextmanager
    def sending(self) -> Iterator[None]:
        """See `Queues`."""
        self._send.wait_event(self._queued(self._cuda.get_current_stream()))
        with self._send:
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """See `Queues`."""
        self._collect.wait_event(self._queued(self._send))
        with self._collect:
            yield

    def collected(self) -> Callable[[], None]:
        """See `Queues`."""
        event = self._queued(self._collect)
        return lambda: self._cuda.get_current_stream().wait_event(event)

    def _queued(self, stream: Any) -> Any:
        """An event behind what a stream has to do."""
        return stream.record(self._cuda.Event(disable_timing=True))


def peer_exchange(
    spec: ModelSpec, max_size: int, comm: CudaCommunicator, *, limit_s: float, num_ctas: int = DEFAULT_CTAS
) -> PeerExchange:
    """The exchange of a rank whose communicator has `mailboxes`. Raises CompileError or LaunchError.

    `limit_s` bounds every wait; `num_ctas` thread blocks send a sum, and as many add its share up.
    """
    cubin = compiled.build("allreduce", sums_header(comm.world_size))
    kernels = {name: Kernel(cubin.path, name, 0) for name in _KERNELS}
    boxes = [comm.mailboxes[box.name] for box in mailboxes(spec, max_size, comm.world_size)]
    heap = _floats(comm.heap.peer_ptr(comm.rank, 0), comm.heap.size_bytes)
    peers = comm.heap.device_handle().tobytes()
    launch = partial(_launch, kernels)
    return PeerExchange(spec, max_size, boxes, heap, peers, launch, SideStreams(), limit_s=limit_s, num_ctas=num_ctas)


def _floats(start: int, num_bytes: int) -> Array:
    """Memory of the current GPU as float32 values. The caller keeps it."""
    import cupy

    memory = cupy.cuda.UnownedMemory(start, num_bytes, None, cupy.cuda.Device().id)
    floats: Array = cupy.ndarray((num_bytes // 4,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
    return floats


def _launch(kernels: dict[str, Kernel], name: str, num_ctas: int, num_threads: int, params: bytes) -> None:
    compiled.launch(kernels[name], num_ctas, num_threads, params, priority=_FIRST_OF_PRODUCTS)


def _num_row_tiles(size: int) -> int:
    return -(-size // ROW_TILE)


def _share(size: int, num_ranks: int) -> int:
    """Most row tiles that belong to one rank."""
    return -(-_num_row_tiles(size) // num_ranks)


def _value_words(spec: ModelSpec, max_size: int) -> int:
    return -(-max_size * spec.hidden_size // 2)
