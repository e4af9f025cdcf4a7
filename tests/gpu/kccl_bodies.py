"""What one rank does in the tests of KCCL that only GPUs can run; the others are in tests/multi/communicator_bodies.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kog_dist.bench.collectives.kccl import WARM_STEPS, Chain, compile_together, mailbox_of
from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cuda_abi import HANDOFF_PARAMS
from kog_dist.collectives.cuda_kernels import ChainShape, handoff_cubin
from kog_dist.collectives.handoff_reference import handoff_results
from kog_dist.collectives.ranks import RankContext
from kog_dist.cuda.driver import Kernel
from kog_dist.errors import AbortedError, DeviceError, KogError, RendezvousTimeout
from kog_dist.runtime.control import AbortCause
from kog_dist.runtime.wait import Deadline

REPLICAS = 4  # kReplicas of handoff.cu


def handoff(context: RankContext) -> int:
    """Vectors and candidates among all thread blocks of all ranks, step after step in one launch; answers that were compared."""
    import cupy

    num_ctas, rows, steps = (int(context.arguments[name]) for name in ("ctas", "rows", "steps"))
    copy_words = (num_ctas * rows // 2 + 15) // 16 * 16
    candidate_words = (2 * num_ctas + 15) // 16 * 16
    boxes = [MailboxSpec("vectors", 1, REPLICAS * copy_words), MailboxSpec("candidates", 2, REPLICAS * candidate_words)]
    comm = context.cuda_communicator(boxes, timeout_s=2.0)
    kernel = Kernel(handoff_cubin(comm.world_size, num_ctas, rows).path, "kccl_handoff", 0)
    results = cupy.zeros((steps, num_ctas, 4), cupy.uint32)
    cupy.cuda.Device().synchronize()
    params = np.zeros((), HANDOFF_PARAMS.dtype)
    params["result_ptr"], params["first_epoch"], params["num_steps"] = results.data.ptr, 1, steps
    for name, box in (("vector", comm.mailboxes["vectors"]), ("candidate", comm.mailboxes["candidates"])):
        params[f"{name}_first_word"], params[f"{name}_row_words"] = box.first_word, box.row_words
    comm.barrier()
    comm.launch(kernel, num_ctas, 64, params)
    comm.finish("the handoff", "vectors", 10.0)
    found = results.get(stream=comm.stream)
    expected = handoff_results(comm.world_size, num_ctas, rows, range(1, steps + 1))
    wrong = np.argwhere((found != expected[:, None, :]).any(axis=2))
    assert not len(wrong), f"step and thread block {wrong[0]}: {found[tuple(wrong[0])]}, expected {expected[wrong[0][0]]}"
    comm.close()
    return int(found.size)


def chain_bits(context: RankContext) -> list[str]:
    """Chains of every kind against their definition; three launches each, so that epochs go on from launch to launch."""
    shapes = [
        ChainShape(context.info.world_size, length, rows, everyone)
        for length, rows in ((2, 2), (3072, 24), (1536, 12), (3072, 192))
        for everyone in (False, True)
        if length > 2 or not everyone
    ]  # fmt: skip
    compile_together(context, shapes)
    lengths = sorted({shape.length for shape in shapes})
    comm = context.cuda_communicator([MailboxSpec(mailbox_of(length), 2, length) for length in lengths], timeout_s=2.0)
    chains = [Chain.load(comm, shape) for shape in shapes]
    next_epoch = dict.fromkeys(lengths, 1)
    for chain in chains:
        comm.barrier()
        for num_steps in (1, 200, 33):
            chain.run(next_epoch[chain.shape.length], num_steps)
            next_epoch[chain.shape.length] += WARM_STEPS + num_steps
        chain.check()
    comm.close()
    return [str(chain.shape) for chain in chains]


def missing_rank_in_a_chain(context: RankContext) -> dict[str, Any]:
    """The last rank does not launch its chain: the waits of the others must end, with a record or by the abort that follows."""
    shape = ChainShape(context.info.world_size, 3072, 24, everyone=True)
    comm = context.cuda_communicator([MailboxSpec(mailbox_of(shape.length), 2, shape.length)], timeout_s=30.0)
    chain = Chain.load(comm, shape)
    comm.barrier()
    if context.info.rank == context.info.world_size - 1:
        while not context.control.aborted() and not context.deadline.expired():
            context.control.beat(context.info.rank)
            os.sched_yield()
        return {"how": "stayed away"}
    try:
        chain.run(1, 10)
    except DeviceError as error:
        record = error.record
        return {
            "how": "DeviceError",
            "peer": record.peer,
            "label": record.label,
            "elapsed_ns": record.elapsed_ns,
            "text": str(error),
        }
    except AbortedError as error:
        return {"how": "AbortedError", "text": str(error)}
    return {"how": "ran on"}


def late_rank(context: RankContext) -> str:
    """The last rank never comes to the meeting."""
    from kog_dist.collectives.cuda import CudaCommunicator

    rank = context.info.rank
    if rank == context.info.world_size - 1:
        while not context.control.aborted() and not context.deadline.expired():
            os.sched_yield()
        return "stayed away"
    deadline = Deadline.after(2.0 if rank == 0 else 30.0)
    try:
        CudaCommunicator.create(
            [MailboxSpec("sum", 2, 8)], rendezvous=context.rendezvous, control=context.control, deadline=deadline, device=rank
        )
    except RendezvousTimeout as error:
        context.control.set_abort(AbortCause.STARTUP_FAILED, 0)
        return f"missing {error.missing}"
    except AbortedError:
        return "aborted"
    return "nothing was raised"


def one_gpu_for_two(context: RankContext) -> str:
    """Ranks 0 and 1 both take GPU 0."""
    from kog_dist.collectives.cuda import CudaCommunicator

    try:
        CudaCommunicator.create(
            [MailboxSpec("sum", 2, 8)],
            rendezvous=context.rendezvous,
            control=context.control,
            deadline=context.deadline,
            device=0,
        )
    except KogError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def own_gpu_only(context: RankContext) -> int:
    """Every rank sees one GPU only, as number 0: the peers' memory must be reachable all the same."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(context.info.rank)  # before this process uses CUDA
    from kog_dist.collectives.cuda import CudaCommunicator

    comm = CudaCommunicator.create(
        [MailboxSpec("sum", 2, 33)], rendezvous=context.rendezvous, control=context.control, deadline=context.deadline, device=0
    )
    values = np.arange(33, dtype=np.float32)
    for epoch in range(1, 20):
        total = comm.all_reduce("sum", epoch % 2, epoch, values)
        assert np.array_equal(total, values * comm.world_size)
    comm.close()
    return 19


def memory_comes_back(context: RankContext) -> int:
    """Free bytes that are lost from the second of several communicators to the last one."""
    import cupy

    free = []
    for _ in range(4):
        comm = context.cuda_communicator([MailboxSpec("sum", 2, 1 << 20)])
        comm.all_reduce("sum", 0, 1, np.zeros(1 << 20, np.float32))
        comm.close()
        del comm
        cupy.get_default_memory_pool().free_all_blocks()
        context.rendezvous.barrier(context.deadline)
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    return int(free[1] - free[-1])
