"""What one rank does in the communicator tests. A body takes a RankContext and makes its communicator from it, so the same bodies
serve every kind of communicator; what it must find is computed from the NumPy definitions in `collectives.reference`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives import reference
from kog_dist.collectives.api import Communicator, MailboxSpec
from kog_dist.collectives.ranks import RankContext
from kog_dist.errors import AbortedError, ConfigError, DeviceError, PeerLost, RendezvousTimeout
from kog_dist.runtime.control import AbortCause
from kog_dist.runtime.instance import process_start_time

Row = NDArray[np.float32]
SPECIAL_BITS = (0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x3F800000)


def published(rank: int, epoch: int, length: int) -> Row:
    """What `rank` publishes at `epoch`: finite floats of very different sizes, so that the order of additions shows."""
    random = np.random.default_rng((rank, epoch))
    return (random.standard_normal(length) * 10.0 ** random.integers(-8, 8, length)).astype(np.float32)


def any_bits(rank: int, epoch: int, length: int) -> Row:
    """Arbitrary bit patterns, the special ones among them."""
    random = np.random.default_rng((rank, epoch, 1))
    bits = random.integers(0, 2**32, length, dtype=np.uint32)
    chosen = random.integers(0, len(SPECIAL_BITS), length)
    special = np.array(SPECIAL_BITS, np.uint32)[chosen]
    return np.where(random.random(length) < 0.3, special, bits).astype(np.uint32).view(np.float32)


def same(found: Row, expected: Row) -> bool:
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def every_operation(context: RankContext) -> int:
    """all_reduce, all_gather and barrier of several mailboxes, against the definitions. Returns the number of comparisons."""
    rank, world_size = context.info.rank, context.info.world_size
    lengths = {"one": 1, "line": 16, "odd": 33, "long": 1500}
    comm = context.communicator([MailboxSpec(name, 2, length) for name, length in lengths.items()])
    num_compared = 0
    for epoch in range(1, 13):
        for name, length in lengths.items():
            values = [published(peer, epoch, length) for peer in range(world_size)]
            expected = reference.all_reduce(values)
            assert same(comm.all_reduce(name, epoch % 2, epoch, values[rank]), expected), (name, epoch)
            num_compared += 1
        comm.barrier()
        for name, length in lengths.items():
            values = [any_bits(peer, epoch, length) for peer in range(world_size)]
            gathered = comm.all_gather(name, epoch % 2, 100 + epoch, values[rank])
            assert same(gathered, reference.all_gather(values)), (name, epoch)
            num_compared += 1
        comm.barrier()
    comm.close()
    return num_compared


def delayed_steps(context: RankContext) -> int:
    """Publish epoch e, reduce epoch e - delay, with the smallest number of slots the rule allows, narrow tags and random pauses.

    Long enough for an 8-bit tag to wrap many times.
    """
    rank, world_size = context.info.rank, context.info.world_size
    delay, steps, length = (int(context.arguments[name]) for name in ("delay", "steps", "length"))
    num_slots = 2 * delay + 2
    comm = context.communicator([MailboxSpec("sum", num_slots, length)], epoch_bits=int(context.arguments["epoch_bits"]))
    pauses = np.random.default_rng((rank, 99)).integers(0, 40, steps + delay + 1)
    # Cheap, distinct values: what rank p publishes at epoch e is table[p, e % period] + e, all of it float32 arithmetic.
    period = 13
    table = np.stack([[published(peer, place + 1, length) for place in range(period)] for peer in range(world_size)])

    def value(peer: int, epoch: int) -> Row:
        row: Row = table[peer, epoch % period] + np.float32(epoch)
        return row

    num_compared = 0
    for epoch in range(1, steps + 1):
        comm.publish("sum", epoch % num_slots, epoch, value(rank, epoch))
        pause(int(pauses[epoch]))
        wanted = epoch - delay
        if wanted >= 1:
            found = comm.delayed_reduce("sum", wanted % num_slots, wanted, value(rank, wanted))
            expected = reference.all_reduce([value(peer, wanted) for peer in range(world_size)])
            assert same(found, expected), f"rank {rank} at epoch {wanted}"
            num_compared += 1
    comm.barrier()
    comm.close()
    return num_compared


def pause(kind: int) -> None:
    """Most steps go straight on; some give the core away a few times, a few sleep."""
    if kind >= 38:
        time.sleep(0.0003)
    elif kind >= 30:
        for _ in range(kind - 29):
            os.sched_yield()


def all_bits(context: RankContext) -> int:
    """Gather every special pattern and many arbitrary ones over a wrapping tag."""
    rank, world_size = context.info.rank, context.info.world_size
    comm = context.communicator([MailboxSpec("bits", 2, 64)], epoch_bits=8)
    for epoch in range(1, 301):
        values = [any_bits(peer, epoch, 64) for peer in range(world_size)]
        assert same(comm.all_gather("bits", epoch % 2, epoch, values[rank]), reference.all_gather(values)), epoch
    comm.close()
    return 300


def refused(comm: Communicator, values: Row) -> list[str]:
    """Every method after the end: the name of those that raise AbortedError."""
    attempts = {
        "publish": lambda: comm.publish("sum", 0, 9, values),
        "collect": lambda: comm.collect("sum", 0, 9, values),
        "delayed_reduce": lambda: comm.delayed_reduce("sum", 0, 9, values),
        "all_reduce": lambda: comm.all_reduce("sum", 0, 9, values),
        "all_gather": lambda: comm.all_gather("sum", 0, 9, values),
        "barrier": comm.barrier,
    }
    names = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except AbortedError:
            names.append(name)
    return names


def abort_in_wait(context: RankContext) -> dict[str, Any]:
    """All but the last rank wait for it in the operation of the test; the last one lets the engine be aborted meanwhile."""
    rank, world_size = context.info.rank, context.info.world_size
    operation = str(context.arguments["operation"])
    comm = context.communicator([MailboxSpec("sum", 2, 8)])
    values = np.full(8, rank, np.float32)
    comm.barrier()
    if rank == world_size - 1:
        context.control.set_abort(AbortCause.SHUTDOWN)  # as the supervisor would
        return {"pid": os.getpid(), "refused": refused(comm, values)}
    message = ""
    try:
        if operation == "barrier":
            comm.barrier()
        elif operation == "collect":
            comm.publish("sum", 1, 1, values)
            comm.collect("sum", 1, 1, values)
        else:
            getattr(comm, operation)("sum", 1, 1, values)
    except AbortedError as error:
        message = str(error)
    found = refused(comm, values)
    comm.close()
    comm.close()
    return {"pid": os.getpid(), "message": message, "refused": found}


def missing_epoch(context: RankContext) -> dict[str, Any]:
    """The last rank leaves out epoch 5; rank 0 has the shortest patience and must say exactly what it missed.

    Whatever else it collects is there before it looks.
    """
    rank, world_size = context.info.rank, context.info.world_size
    comm = context.communicator([MailboxSpec("other", 1, 1), MailboxSpec("sum", 2, 8)], timeout_s=0.05 if rank == 0 else 30.0)
    values = np.full(8, rank, np.float32)
    for epoch in range(1, 5):
        comm.publish("sum", epoch % 2, epoch, values)
        context.rendezvous.barrier(context.deadline)
        comm.delayed_reduce("sum", epoch % 2, epoch, values)
    if rank != world_size - 1:
        comm.publish("sum", 1, 5, values)
    context.rendezvous.barrier(context.deadline)
    if rank == world_size - 1:
        while not context.control.aborted():
            context.control.beat(rank)
            time.sleep(0.001)
        return {"pid": os.getpid(), "refused": refused(comm, values)}
    try:
        comm.delayed_reduce("sum", 1, 5, values)
    except DeviceError as error:
        record = error.record
        seen = {name: getattr(record, name) for name in record.__slots__}
        return {"pid": os.getpid(), "record": seen, "message": str(error), "refused": refused(comm, values)}
    except AbortedError as error:
        return {"pid": os.getpid(), "message": str(error), "refused": refused(comm, values)}
    return {"pid": os.getpid(), "message": "nothing was raised"}


def killed_rank(context: RankContext) -> str:
    """The last rank is killed in the middle of the steps; the others must leave their waits, and their memory must stay whole."""
    rank, world_size = context.info.rank, context.info.world_size
    comm = context.communicator([MailboxSpec("sum", 2, 64)])
    values = np.full(64, rank, np.float32)
    try:
        for epoch in range(1, 1_000_000):
            if rank == world_size - 1 and epoch == 50:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce("sum", epoch % 2, epoch, values)
    except AbortedError as error:
        comm.close()
        return str(error)
    return "nothing was raised"


def dead_peer_memory(context: RankContext) -> str:
    """The last rank publishes and is gone; what it published can be collected, and publishing to it does no harm."""
    rank, world_size = context.info.rank, context.info.world_size
    comm = context.communicator([MailboxSpec("sum", 4, 64)])
    pids = context.rendezvous.all_gather_bytes(str(os.getpid()).encode(), context.deadline)
    values = [published(peer, 1, 64) for peer in range(world_size)]
    comm.publish("sum", 1, 1, values[rank])
    comm.barrier()
    if rank == world_size - 1:
        return "gone"
    while process_start_time(int(pids[-1])) is not None and not context.deadline.expired():
        os.sched_yield()
    found = comm.delayed_reduce("sum", 1, 1, values[rank])
    for epoch in range(2, 40):
        comm.publish("sum", 2 + epoch % 2, epoch, values[rank])  # slot 1 may still be read by the other survivor
    comm.close()
    return "whole" if same(found, reference.all_reduce(values)) else "damaged"


def late_rank(context: RankContext) -> str:
    """The last rank never comes to the meeting. Rank 0 has little patience, but begins when rank 1 is about to come."""
    rank = context.info.rank
    if rank == context.info.world_size - 1:
        while not context.control.aborted():
            time.sleep(0.001)
        return "stayed away"
    from kog_dist.collectives.cpu import CpuCommunicator
    from kog_dist.runtime.wait import Deadline

    boxes = [MailboxSpec("sum", 2, 8)]
    if rank == 1:
        context.control.beat(rank)
    while rank == 0 and not context.control.beat_age_s(1) and not context.deadline.expired():
        time.sleep(0.001)
    deadline = Deadline.after(0.3 if rank == 0 else 30.0)
    try:
        CpuCommunicator.create(boxes, rendezvous=context.rendezvous, control=context.control, deadline=deadline)
    except RendezvousTimeout as error:
        context.control.set_abort(AbortCause.STARTUP_FAILED, 0)
        return f"missing {error.missing}"
    except AbortedError:
        return "aborted"
    return "nothing was raised"


def different_plans(context: RankContext) -> str:
    """Rank 0 declares other mailboxes than the rest."""
    length = 8 if context.info.rank == 0 else 9
    try:
        context.communicator([MailboxSpec("sum", 2, length)])
    except ConfigError as error:
        return str(error)
    except (AbortedError, PeerLost) as error:
        return type(error).__name__
    return "nothing was raised"


def misuse(context: RankContext) -> list[str]:
    """Arguments that cannot be meant; each is refused before anything is published."""
    comm = context.communicator([MailboxSpec("sum", 2, 8)])
    good = np.zeros(8, np.float32)
    bad: list[tuple[Any, ...]] = [
        ("sum", 0, 0, good),
        ("sum", 0, -3, good),
        ("sum", 0, 1, good[:7]),
        ("sum", 0, 1, good.astype(np.float64)),
        ("sum", 0, 1, np.zeros((8, 2), np.float32)[:, 0]),
        ("sum", 0, 1, good.reshape(2, 4)),
        ("sum", 2, 1, good),
        ("sum", -1, 1, good),
        ("none", 0, 1, good),
    ]
    raised = []
    for arguments in bad:
        for method in (comm.publish, comm.collect):
            try:
                method(*arguments)
            except (ValueError, IndexError, KeyError) as error:
                raised.append(type(error).__name__)
    comm.barrier()
    assert same(comm.all_reduce("sum", 0, 1, good + 1), good + context.info.world_size)
    comm.close()
    return raised


def resources(context: RankContext) -> list[int]:
    """Descriptors before, with, and after several communicators, one after the other."""
    counts = [len(os.listdir("/proc/self/fd"))]
    for _ in range(3):
        comm = context.communicator([MailboxSpec("sum", 2, 8)])
        comm.all_reduce("sum", 0, 1, np.zeros(8, np.float32))
        comm.barrier()
        comm.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def beats_while_waiting(context: RankContext) -> bool:
    """Rank 0 waits for long in a collective; the last rank watches its heartbeat and only publishes after several beats."""
    comm = context.communicator([MailboxSpec("sum", 2, 8)])
    values = np.zeros(8, np.float32)
    num_beats = 0
    if context.info.rank == context.info.world_size - 1:
        comm.publish("sum", 1, 1, values)  # rank 0 is past its start once it answers
        comm.collect("sum", 1, 1, values)
        last_age_s = context.control.beat_age_s(0)
        while num_beats < 10 and not context.deadline.expired():
            age_s = context.control.beat_age_s(0)
            num_beats += age_s < last_age_s  # without a beat the age only grows
            last_age_s = age_s
        comm.all_reduce("sum", 0, 2, values)
        return num_beats == 10
    comm.all_reduce("sum", 1, 1, values)
    comm.all_reduce("sum", 0, 2, values)
    return True


def raises(context: RankContext) -> None:
    """Rank 1 raises; the others wait for ever in a barrier."""
    comm = context.communicator([])
    if context.info.rank == 1:
        raise RuntimeError("planted")
    comm.barrier()


def ignores_everything(context: RankContext) -> None:
    """Rank 1 does not heed anything; only a kill ends it."""
    if context.info.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
