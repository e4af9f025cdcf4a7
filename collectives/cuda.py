"""KCCL for GPU ranks of one machine, launched from the host: the `Communicator` over device memory that the peers have mapped.

Every operation is one small kernel (kernels/exchange.cu) of the device functions that the monokernel calls inside its own. The
host waits for it without blocking in the driver: it beats, and hands the abort word on to the GPU. Vectors lie in page-locked
memory that the kernel reads and writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives import words
from kog_dist.collectives.api import MailboxSpec, Vector
from kog_dist.collectives.cuda_abi import EXCHANGE_PARAMS, KCCL_HOST, WAITS, Collects, KernelStatus
from kog_dist.collectives.cuda_heap import CudaHeap
from kog_dist.collectives.cuda_kernels import EXCHANGE_THREADS, exchange_cubin
from kog_dist.collectives.device_memory import CupyMemory
from kog_dist.collectives.fault import Fault
from kog_dist.collectives.mailbox import BARRIER, Mailbox, fingerprint, place
from kog_dist.cuda.driver import Kernel
from kog_dist.cuda.errors import cuda_errors
from kog_dist.errors import DeviceError, LaunchError
from kog_dist.runtime.abi import WaitRecord
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline, WaitResult, wait

_NOT_READY = 600  # cudaErrorNotReady
_LEAVE_S = 5.0  # for a kernel to start and to leave, beyond its own limit


class CudaCommunicator:
    """The `Communicator` of a GPU rank. Not for several threads. See `api.Communicator` for what the methods mean.

    The first wait that does not end well is the last: afterwards every method raises AbortedError and nothing is published.
    Also what a benchmark or a persistent kernel needs to make its own launches: `heap`, `mailboxes`, `waits`, `stream`.
    """

    def __init__(
        self, heap: CudaHeap, mailboxes: list[Mailbox], kernel: Kernel, control: ControlPage, *, timeout_s: float, epoch_bits: int
    ) -> None:
        import cupy

        self.rank, self.world_size = heap.rank, heap.world_size
        self.heap = heap
        self.mailboxes = {mailbox.spec.name: mailbox for mailbox in mailboxes}
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._runtime: ModuleType = cupy.cuda.runtime
        self._kernel, self._control, self._timeout_s = kernel, control, timeout_s
        self._tag = words.EpochTag(epoch_bits)
        self._fault = Fault(heap.rank, control)
        self._host = pinned(KCCL_HOST.size_bytes).view(KCCL_HOST.dtype)
        self._mirror = cupy.zeros(32, cupy.uint32)
        longest = max(mailbox.spec.length for mailbox in mailboxes)
        self._values = pinned(4 * longest).view(np.float32)
        self._result = pinned(4 * longest * self.world_size).view(np.float32)
        self._num_barriers = 0
        cupy.cuda.Device().synchronize()  # the mirror was zeroed on another stream

    @classmethod
    def create(
        cls,
        mailboxes: Sequence[MailboxSpec],
        *,
        rendezvous: Rendezvous,
        control: ControlPage,
        deadline: Deadline,
        device: int,
        timeout_s: float = 30.0,
        epoch_bits: int = words.TAG_BITS,
        shares_gpus: bool = False,
    ) -> CudaCommunicator:
        """Collective: every rank calls it with equal mailboxes (ConfigError otherwise); `deadline` bounds the meeting.

        `device`: ordinal of this rank's GPU in this process. `timeout_s` bounds every later wait. `shares_gpus`: as of
        `CudaHeap.create`. Raises also CompileError, and LaunchError when the GPU or a peer's memory is not to be had.
        """
        world_size = rendezvous.world_size
        placed = place([*mailboxes, BARRIER], world_size)
        memory = CupyMemory(device)
        cubin = exchange_cubin(world_size)
        # All modules are loaded before anything waits for another GPU: loading one may wait for the kernels that run.
        kernel = Kernel(cubin.path, "kccl_exchange", 0)
        layout = fingerprint(mailboxes, world_size, epoch_bits) + cubin.path.name.encode()
        heap = CudaHeap.create(
            (placed[-1].first_word + placed[-1].num_words) * words.WORD_BYTES,
            rendezvous,
            deadline,
            memory,
            generation=control.generation,
            fingerprint=hashlib.sha256(layout).digest(),
            shares_gpus=shares_gpus,
        )
        with cuda_errors(f"rank {rendezvous.rank}: preparing its GPU for collectives"):
            comm = cls(heap, placed, kernel, control, timeout_s=timeout_s, epoch_bits=epoch_bits)
        comm.barrier()  # the first kernel that touches the peers' memory does so here, within a bound
        return comm

    def publish(self, mailbox: str, slot: int, epoch: int, values: Vector) -> None:
        """Push `values` to every peer; AbortedError when the engine is being stopped."""
        self._run(self._box(mailbox), slot, epoch, values, publishes=True, collects=Collects.PUBLISH_ONLY)

    def collect(self, mailbox: str, slot: int, epoch: int, own: Vector) -> NDArray[np.float32]:
        """Every rank's values of the epoch, (world_size, length); a new array."""
        return self._run(self._box(mailbox), slot, epoch, own, publishes=False, collects=Collects.GATHER)

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: Vector) -> Vector:
        """Sum over ranks, in the tree of `reference.tree_sum`."""
        return self._run(self._box(mailbox), slot, epoch, own, publishes=False, collects=Collects.SUM)

    def all_reduce(self, mailbox: str, slot: int, epoch: int, values: Vector) -> Vector:
        """Publish and reduce in one kernel."""
        return self._run(self._box(mailbox), slot, epoch, values, publishes=True, collects=Collects.SUM)

    def all_gather(self, mailbox: str, slot: int, epoch: int, values: Vector) -> NDArray[np.float32]:
        """Publish and collect in one kernel."""
        return self._run(self._box(mailbox), slot, epoch, values, publishes=True, collects=Collects.GATHER)

    def barrier(self) -> None:
        """Return when every rank has come as often as this one."""
        box = self._box(BARRIER.name)
        self._num_barriers += 1
        slot, nothing = self._num_barriers % BARRIER.num_slots, np.zeros(1, np.float32)
        self._run(box, slot, self._num_barriers, nothing, publishes=True, collects=Collects.BARRIER_WAIT)

    def close(self) -> None:
        """Unmap everything. Later calls raise AbortedError; closing twice is harmless."""
        self._fault.text = self._fault.text or "its communicator is closed"
        self.heap.close()

    # ---- for kernels that are launched beside it ----
    def waits(self, timeout_s: float | None = None) -> NDArray[np.void]:
        """How waits of this rank's kernels end: a `KogWaits`, by value."""
        params = np.zeros((), WAITS.dtype)
        params["host_ptr"], params["mirror_ptr"] = self._host.ctypes.data, self._mirror.data.ptr
        params["limit_us"] = round((self._timeout_s if timeout_s is None else timeout_s) * 1e6)
        return params

    def finish(self, doing: str, label: str = "", timeout_s: float | None = None) -> None:
        """Wait for the launches on `stream`, beating and heeding the abort word. Raises DeviceError or AbortedError.

        `doing` is what an AbortedError says was given up; `label` names the mailbox in a DeviceError.
        """
        limit_s = (self._timeout_s if timeout_s is None else timeout_s) + _LEAVE_S
        with cuda_errors(f"rank {self.rank}: {doing}"):
            result = wait(self._ended, aborted=lambda: False, deadline=Deadline.after(limit_s), on_poll=self._attend)
        if result is WaitResult.TIMEOUT:
            self._fault.text = "its GPU did not answer"
            self._control.request_abort(self.rank)
            raise LaunchError(f"rank {self.rank}: {doing} did not end within {limit_s:.0f} s; see nvidia-smi and the kernel log")
        if int(self._host["status"][0]) == KernelStatus.STOPPED:
            self._left(doing, label)

    # --------------------------------------------------------------------------------------------------------------------------

    def _ended(self) -> bool:
        """Whether the stream is empty. Raises what cupy raises when a kernel on it has failed."""
        code = int(self._runtime.streamQuery(self.stream.ptr))
        if code not in (0, _NOT_READY):
            self.stream.synchronize()
        return code == 0

    def _attend(self) -> None:
        self._control.beat(self.rank)
        if self._control.aborted():
            self._host["abort"] = 1

    def _box(self, name: str) -> Mailbox:
        if self._fault.text:
            self._fault.stop(f"mailbox {name!r} alone")
        return self.mailboxes[name]

    def _run(
        self, box: Mailbox, slot: int, epoch: int, values: Vector, *, publishes: bool, collects: Collects
    ) -> NDArray[np.float32]:
        box.check(slot, values)
        tag, length = self._tag.of(epoch), box.spec.length
        doing = f"waiting for epoch {epoch} of" if collects else f"publishing epoch {epoch} to"
        if publishes and self._control.aborted():
            self._fault.stop(f"{doing} mailbox {box.spec.name!r}")
        self._values[:length] = values
        params = np.zeros((), EXCHANGE_PARAMS.dtype)
        params["values_ptr"], params["result_ptr"] = self._values.ctypes.data, self._result.ctypes.data
        params["first_word"], params["row_words"], params["mailbox"] = box.first_word, box.row_words, box.index
        params["slot"], params["length"], params["tag"] = slot, length, tag
        params["publishes"], params["collects"] = publishes, collects
        self.launch(self._kernel, 1, EXCHANGE_THREADS, params)
        self.finish(f"{doing} mailbox {box.spec.name!r}", box.spec.name)
        if collects == Collects.GATHER:
            return self._result[: self.world_size * length].reshape(self.world_size, length).copy()
        return self._result[:length].copy()

    def launch(
        self, kernel: Kernel, num_ctas: int, num_threads: int, params: NDArray[np.void], timeout_s: float | None = None
    ) -> None:
        """Queue a kernel whose parameters are `params`, the waits and the peers, one after the other. `finish` waits for it."""
        self._host["status"] = KernelStatus.OK
        whole = params.tobytes() + self.waits(timeout_s).tobytes() + self.heap.device_handle().tobytes()
        kernel.launch(num_ctas, num_threads, whole, self.stream.ptr)

    def _left(self, doing: str, label: str) -> None:
        """The kernel left a wait: because of the abort word, or because the time was up, which a record then tells."""
        record = WaitRecord.unpack(self._host["record"].tobytes())
        if not record.elapsed_ns:
            self._fault.stop(doing)
        self._fault.text = "a wait had run out of time"
        record = replace(record, label=label)
        self._control.request_abort(self.rank, record)
        raise DeviceError(record)


def pinned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed page-locked host memory that the GPU can address; freed with the array."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(num_bytes)
    array = np.frombuffer(memory, np.uint8, num_bytes)
    array[:] = 0
    return array
