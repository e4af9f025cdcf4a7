"""Sums over the lanes of all ranks between GPUs: pushed into the peers' mailboxes and added up beside the products (sums.cu).

A sum is sent on one side stream and collected on another, so that what a layer adds up travels while the next layers compute; the
main stream waits only where a total is used. Blocks captured in a graph keep that shape. Slots are used in turn, 2 * delay + 2 of
each kind: when a rank writes a slot again, what it has received proves that its peers are done with it (docs/prefill.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kog_dist.abi import WAIT_RECORD, WaitRecord
from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.mailbox import Mailbox
from kog_dist.cuda.driver import Kernel
from kog_dist.errors import DeviceError
from kog_dist.model.spec import Block, ModelSpec, ReduceMode
from kog_dist.workers.prefill import compiled
from kog_dist.workers.prefill.prefill_abi import CHUNK_ROWS, SUM_PARAMS, SUM_THREADS, sums_header
from kog_dist.workers.prefill.staging import staged

if TYPE_CHECKING:
    from torch import Tensor

    from kog_dist.collectives.cuda import CudaCommunicator

SUMS, LASTS, ENDS = "prefill sums", "prefill last token", "prefill ends"
DEFAULT_CTAS = 16  # thread blocks that send or collect one sum, beside the products
_KERNELS = {"begin_sums": 1, "send_sum": SUM_THREADS, "collect_sum": SUM_THREADS, "share_overflow": 32}  # threads
_NUM_BLOCKS, _NUM_ENDS, _NUM_LASTS, _STOPPED, _RECORD = 0, 8, 16, 64, 128  # bytes of the state
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


def mailboxes(spec: ModelSpec, max_size: int) -> list[MailboxSpec]:
    """What the ranks' heaps need for blocks of up to `max_size` tokens. A row: float32 values, then a flag for each chunk."""
    words = _value_words(spec, max_size) + -(-max_size // CHUNK_ROWS)
    last = MailboxSpec(LASTS, 2, _value_words(spec, 1) + 1)
    return [MailboxSpec(SUMS, 2 * _num_slots(spec), words), last, MailboxSpec(ENDS, 2, 1)]


def totals_bytes(spec: ModelSpec, max_size: int) -> int:
    """Memory of a rank beside its heap: the totals that layers still want, in float32."""
    return 4 * prod(_totals_shape(spec, max_size))


def summed_layers(spec: ModelSpec, block: Block) -> list[int]:
    """Layers whose sums a block publishes: those that are added at once, or feed a layer before the last one."""
    layers = range(spec.num_layers - 1)
    feeds = {layer: spec.feeds_layer(layer, block) for layer in layers}
    return [
        layer
        for layer in layers
        if spec.reduce_mode(layer, block) is ReduceMode.BLOCKING or (feeds[layer] or spec.num_layers) < spec.num_layers - 1
    ]


class PeerExchange:
    """See `SumExchange`. One rank's side; `boxes` are `mailboxes` as they lie in the heap, `peers` a `KogPeers`.

    One for a heap: another one would take the words that this one left for its own.
    """

    is_alone = False

    def __init__(
        self,
        spec: ModelSpec,
        max_size: int,
        boxes: tuple[Mailbox, Mailbox, Mailbox],
        peers: bytes,
        launch: Launch,
        queues: Queues,
        *,
        device: str,
        limit_s: float,
        num_ctas: int = DEFAULT_CTAS,
    ) -> None:
        import torch

        self._launch, self._queues, self._peers, self._num_ctas = launch, queues, peers, num_ctas
        self._sums, self._lasts, self._ends = boxes
        self._is_last = False
        is_cuda = device.startswith("cuda")
        self._state = torch.zeros(_STATE_BYTES, dtype=torch.uint8, device=device)
        self._seen, self._one = (staged(count, torch.uint8, is_cuda=is_cuda) for count in (_STATE_BYTES, 4))
        self._one.fill_(1)
        self._stop_stream = torch.cuda.Stream() if is_cuda else None  # type: ignore[no-untyped-call]
        self._totals = torch.zeros(_totals_shape(spec, max_size), device=device)
        self._kept_layers = self._totals.shape[1]
        self._arrived: dict[tuple[Block, int], tuple[int, Callable[[], None]]] = {}  # layer, and how to wait, by place
        self._layers = {block: summed_layers(spec, block) for block in Block}
        self._params = np.zeros((), SUM_PARAMS.dtype)
        start = self._state.data_ptr()
        self._params["num_blocks_ptr"], self._params["stopped_ptr"] = start + _NUM_BLOCKS, start + _STOPPED
        self._params["record_ptr"], self._params["limit_ns"] = start + _RECORD, round(limit_s * 1e9)
        self._params["flag_word"], self._params["width"] = _value_words(spec, max_size), spec.hidden_size
        self._num_slots, self._last_flag_word = _num_slots(spec), _value_words(spec, 1)

    def begin_block(self) -> None:
        """See `SumExchange`."""
        self._is_last = False
        self._launch("begin_sums", 1, 1, self._params.tobytes() + self._peers)

    def begin_last(self) -> None:
        """See `SumExchange`. Each kind of sums has one slot: all ranks share an overflow between one last token and the next."""
        self._is_last = True
        self._launch("begin_sums", 1, 1, self._of_last().tobytes() + self._peers)

    def publish(self, block: Block, layer: int, own_sum: Tensor) -> None:
        """See `SumExchange`. Collects, too, as soon as the peers' sums are there."""
        if self._is_last:
            params, box = self._of_last(), self._lasts
            params["per_block"], params["index"], params["first_slot"], params["num_slots"] = 1, 0, block, 1
        else:
            params, box, layers = self._params.copy(), self._sums, self._layers[block]
            params["per_block"], params["index"] = len(layers), layers.index(layer)
            params["first_slot"], params["num_slots"] = block * self._num_slots, self._num_slots
        params["own_sum_ptr"], params["total_ptr"] = own_sum.data_ptr(), self._total(block, layer, own_sum).data_ptr()
        params["size"] = len(own_sum)
        whole = self._placed(params, box)
        num_ctas = min(self._num_ctas, -(-len(own_sum) // CHUNK_ROWS))
        with self._queues.sending():
            self._launch("send_sum", num_ctas, SUM_THREADS, whole)
        with self._queues.collecting():
            self._launch("collect_sum", num_ctas, SUM_THREADS, whole)
        self._arrived[block, layer % self._kept_layers] = (layer, self._queues.collected())

    def total(self, block: Block, layer: int, own_sum: Tensor) -> Tensor:
        """See `SumExchange`."""
        collected_layer, wait = self._arrived[block, layer % self._kept_layers]
        assert collected_layer == layer, f"the sum of layer {layer} was not published; its place holds layer {collected_layer}"
        wait()
        return self._total(block, layer, own_sum)

    def share_overflow(self, overflow: Tensor) -> None:
        """See `SumExchange`."""
        params = self._params.copy()
        params["num_blocks_ptr"], params["overflow_ptr"] = self._state.data_ptr() + _NUM_ENDS, overflow.data_ptr()
        params["num_slots"] = 2
        self._launch("share_overflow", 1, 32, self._placed(params, self._ends))
        self._seen.copy_(self._state, non_blocking=True)

    def stop(self) -> None:
        """See `SumExchange`."""
        import torch

        place = self._state[_STOPPED : _STOPPED + 4]
        if self._stop_stream is None:
            place.copy_(self._one)
            return
        with torch.cuda.stream(self._stop_stream):  # by a copy engine, beside whatever runs
            place.copy_(self._one, non_blocking=True)

    def check(self) -> None:
        """See `SumExchange`."""
        record = WaitRecord.unpack(self._seen[_RECORD:].numpy().tobytes())
        if record.elapsed_ns:
            raise DeviceError(record)

    def _of_last(self) -> Any:
        params = self._params.copy()
        params["num_blocks_ptr"], params["flag_word"] = self._state.data_ptr() + _NUM_LASTS, self._last_flag_word
        return params

    def _total(self, block: Block, layer: int, own_sum: Tensor) -> Tensor:
        return self._totals[block, layer % self._kept_layers, : len(own_sum)]

    def _placed(self, params: Any, box: Mailbox) -> bytes:
        params["first_word"], params["row_words"], params["mailbox"] = box.first_word, box.row_words, box.index
        whole: bytes = params.tobytes() + self._peers
        return whole


class SideStreams:
    """See `Queues`: two CUDA streams beside the current one."""

    def __init__(self) -> None:
        import torch

        self._send, self._collect = (torch.cuda.Stream(priority=_FIRST_OF_PRODUCTS) for _ in range(2))  # type: ignore[no-untyped-call]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """See `Queues`."""
        import torch

        self._send.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._send):
            yield

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """See `Queues`."""
        import torch

        self._collect.wait_stream(self._send)
        with torch.cuda.stream(self._collect):
            yield

    def collected(self) -> Callable[[], None]:
        """See `Queues`."""
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._collect)
        return lambda: torch.cuda.current_stream().wait_event(event)


def peer_exchange(
    spec: ModelSpec, max_size: int, comm: CudaCommunicator, *, limit_s: float, num_ctas: int = DEFAULT_CTAS
) -> PeerExchange:
    """The exchange of a rank whose communicator has `mailboxes`. Raises CompileError or LaunchError.

    `limit_s` bounds every wait; `num_ctas` thread blocks send a sum, and as many collect one.
    """
    cubin = compiled.build("sums", sums_header(comm.world_size))
    kernels = {name: Kernel(cubin.path, name, 0) for name in _KERNELS}
    boxes, peers = (comm.mailboxes[SUMS], comm.mailboxes[LASTS], comm.mailboxes[ENDS]), comm.heap.device_handle().tobytes()
    launch = partial(_launch, kernels)
    return PeerExchange(
        spec, max_size, boxes, peers, launch, SideStreams(), device="cuda", limit_s=limit_s, num_ctas=num_ctas
    )  # fmt: skip


def _launch(kernels: dict[str, Kernel], name: str, num_ctas: int, num_threads: int, params: bytes) -> None:
    compiled.launch(kernels[name], num_ctas, num_threads, params, priority=_FIRST_OF_PRODUCTS)


def _totals_shape(spec: ModelSpec, max_size: int) -> tuple[int, int, int, int]:
    """Attention or FFN, layer in turn, row, column."""
    return 2, spec.delay + 1, max_size, spec.hidden_size


def _num_slots(spec: ModelSpec) -> int:
    return 2 * spec.delay + 2


def _value_words(spec: ModelSpec, max_size: int) -> int:
    return -(-max_size * spec.hidden_size // 2)
