"""What one rank does in `kog-bench collectives`: chains of dependent all-reduces inside one launch, and the loss of a rank."""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.chain_reference import chain_totals
from kog_dist.collectives.cuda import CudaCommunicator
from kog_dist.collectives.cuda_abi import CHAIN_PARAMS
from kog_dist.collectives.cuda_kernels import ChainShape, chain_cubin
from kog_dist.collectives.ranks import RankContext
from kog_dist.cuda.driver import Kernel
from kog_dist.errors import AbortedError, DeviceError, KogError
from kog_dist.records import dataclass

WARM_STEPS = 16
WAIT_LIMIT_S = 2.0


def mailbox_of(length: int) -> str:
    """Chains of one length share a mailbox: its epochs go on from chain to chain."""
    return f"chain {length}"


def compile_together(context: RankContext, shapes: Sequence[ChainShape]) -> None:
    """Each rank compiles its share; all find all of them in the cache afterwards."""
    for shape in shapes[context.info.rank :: context.info.world_size]:
        chain_cubin(shape)
    context.rendezvous.barrier(context.deadline)


@dataclass
class Chain:
    """One compiled chain with its memory on this rank's GPU."""

    comm: CudaCommunicator
    shape: ChainShape
    kernel: Kernel
    bias: NDArray[np.float32]  # (num_ranks, length): of all ranks, so that each can check its totals
    totals: Any
    on_gpu: tuple[Any, ...]  # bias, local words, stamps
    num_done: int = 0

    @classmethod
    def load(cls, comm: CudaCommunicator, shape: ChainShape) -> Chain:
        """Compile or read from the cache, load, allocate. No kernel that waits for a peer may be running."""
        import cupy

        random = np.random.default_rng((shape.length, shape.num_ranks))
        bias = random.standard_normal((shape.num_ranks, shape.length)).astype(np.float32)
        kernel = Kernel(chain_cubin(shape).path, "kccl_chain", 0)
        memory = (cupy.asarray(bias[comm.rank]), cupy.zeros(shape.num_local_words, cupy.uint64), cupy.zeros(2, cupy.uint64))
        chain = cls(comm, shape, kernel, bias, cupy.zeros(shape.length, cupy.float32), memory)
        cupy.cuda.Device().synchronize()
        return chain

    def run(self, first_epoch: int, num_steps: int) -> float:
        """Microseconds of a step. Uses WARM_STEPS + num_steps epochs. Collective; raises DeviceError or AbortedError."""
        self.launch(first_epoch, num_steps)
        self.comm.finish(f"a chain of {self.shape.length} values", mailbox_of(self.shape.length), WAIT_LIMIT_S + 60.0)
        begin_ns, end_ns = (int(stamp) for stamp in self.on_gpu[2].get(stream=self.comm.stream))
        return (end_ns - begin_ns) / 1e3 / num_steps

    def launch(self, first_epoch: int, num_steps: int) -> None:
        """Queue a chain; see `run`."""
        box = self.comm.mailboxes[mailbox_of(self.shape.length)]
        bias, local_words, stamps = self.on_gpu
        params = np.zeros((), CHAIN_PARAMS.dtype)
        params["bias_ptr"], params["total_ptr"] = bias.data.ptr, self.totals.data.ptr
        params["stamps_ptr"], params["words_ptr"] = stamps.data.ptr, local_words.data.ptr
        params["first_word"], params["row_words"], params["first_epoch"] = box.first_word, box.row_words, first_epoch
        params["num_warm"], params["num_steps"] = WARM_STEPS, num_steps
        self.comm.launch(self.kernel, self.shape.num_ctas, self.shape.num_threads, params, WAIT_LIMIT_S)
        self.num_done += WARM_STEPS + num_steps

    def check(self) -> None:
        """The totals must have the bits of their definition; call it after few steps. Raises KogError."""
        expected = chain_totals(self.bias, self.num_done, self.shape.shift if self.shape.everyone else 0)
        found = self.totals.get(stream=self.comm.stream)
        if found.tobytes() != expected.tobytes():
            wrong = int((found.view(np.uint32) != expected.view(np.uint32)).sum())
            raise KogError(
                f"rank {self.comm.rank}: {wrong} of {len(found)} totals are wrong after {self.num_done} steps of {self.shape}"
            )

    def digest(self) -> bytes:
        """Of the totals, which all ranks must have alike."""
        return hashlib.sha256(self.totals.get(stream=self.comm.stream).tobytes()).digest()


def chains(context: RankContext) -> list[dict[str, Any]]:
    """Median, fastest and slowest microseconds of a step, for every shape of the arguments."""
    world_size, arguments = context.info.world_size, context.arguments
    shapes = [ChainShape(world_size, length, rows, everyone) for length, rows, everyone in arguments["shapes"]]
    compile_together(context, shapes)
    lengths = sorted({shape.length for shape in shapes})
    comm = context.cuda_communicator([MailboxSpec(mailbox_of(length), 2, length) for length in lengths], timeout_s=WAIT_LIMIT_S)
    loaded = [Chain.load(comm, shape) for shape in shapes]
    next_epoch = dict.fromkeys(lengths, 1)
    figures = []
    for chain in loaded:
        length, times = chain.shape.length, list[float]()
        comm.barrier()
        for repeat in range(int(arguments["repeats"]) + 1):  # the first one warms up and is checked
            num_steps = int(arguments["steps"]) if repeat else 100
            microseconds = chain.run(next_epoch[length], num_steps)
            next_epoch[length] += WARM_STEPS + num_steps
            if repeat:
                times.append(microseconds)
            else:
                chain.check()
        digests = context.rendezvous.all_gather_bytes(chain.digest(), context.deadline)
        if len(set(digests)) != 1:
            raise KogError(f"ranks have different totals after {chain.num_done} steps of {chain.shape}")
        spread = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        figures.append({"length": length, "rows": chain.shape.rows, "everyone": chain.shape.everyone, **spread})
    comm.barrier()
    comm.close()
    return figures


def killed_while_spinning(context: RankContext) -> dict[str, object]:
    """All ranks run an endless chain; the last one is killed. How long until the kernels of the others have left.

    `left_ms` counts from the kill; `usable`: whether this rank's GPU still computes.
    """
    import cupy

    rank, world_size = context.info.rank, context.info.world_size
    shape = ChainShape(world_size, 3072, 24, everyone=True)
    comm = context.cuda_communicator([MailboxSpec(mailbox_of(shape.length), 2, shape.length)], timeout_s=WAIT_LIMIT_S)
    chain = Chain.load(comm, shape)
    comm.barrier()
    planned_ns = time.monotonic_ns() + 400_000_000
    kill_ns = int.from_bytes(
        context.rendezvous.all_gather_bytes(planned_ns.to_bytes(8, "little"), context.deadline)[-1], "little"
    )
    chain.launch(1, 1_000_000_000)
    if rank == world_size - 1:
        while time.monotonic_ns() < kill_ns:
            context.control.beat(rank)
        os.kill(os.getpid(), signal.SIGKILL)
    how = "ran on"
    try:
        comm.finish("an endless chain", timeout_s=30.0)
    except (AbortedError, DeviceError) as error:
        how = type(error).__name__
    left_ms = (time.monotonic_ns() - kill_ns) / 1e6
    usable = int(cupy.arange(1000).sum()) == 499500
    comm.close()
    return {"left_ms": left_ms, "how": how, "usable": usable}
