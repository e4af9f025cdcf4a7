"""The monokernel of one rank with its peers, with random weights: what benchmarks and tests of several GPUs run.

shape = rank_shape(context, spec)
prepare(context, [shape])
with rank_kernel(context, shape, random_weights(shape, SEED)) as kernel: ...
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_dist.bench.report import percentile
from kog_dist.collectives.ranks import RankContext, run_ranks
from kog_dist.errors import ConfigError, KogError
from kog_dist.workers.cuda.kernel_header import headers

if TYPE_CHECKING:
    from kog_dist.model.spec import ModelSpec
    from kog_dist.runtime.masks import MaskSlots
    from kog_dist.workers.cuda.device_weights import DeviceWeights
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

WAIT_LIMIT_US = 2_000_000  # ranks do not begin at the same moment
_PAUSE_S = 0.05  # before each turn: without it figures drift by several per cent as GPUs get warm


def rank_shape(context: RankContext, spec: ModelSpec, **options: Any) -> KernelShape:
    """The shape of this rank's kernel; options go to TrialShape."""
    from kog_dist.bench.kernel.trial_shape import TrialShape

    rank, world_size = context.info.rank, context.info.world_size
    return TrialShape(spec, spec.lanes_of_rank(rank, world_size), num_ranks=world_size, **options)


def prepare(
    context: RankContext,
    shapes: Sequence[KernelShape],
    *,
    processors: bool = False,
    others: Sequence[Callable[[], object]] = (),
) -> None:
    """Choose this rank's GPU and have its kernels built, once for all ranks. Collective.

    `processors`: the builds with processors, too. `others`: calls that build something else.
    """
    import cupy

    from kog_dist.workers.cuda.build import KERNEL_SOURCES, build

    cupy.cuda.Device(context.gpu).use()
    if context.info.rank == 0:
        for shape in shapes:
            for source in KERNEL_SOURCES[: 1 + processors]:
                build(headers(shape), source)
        for other in others:
            other()
    context.rendezvous.barrier(context.deadline)  # the others find it in the cache


@contextmanager
def rank_kernel(
    context: RankContext,
    shape: KernelShape,
    weights: DeviceWeights,
    *,
    processors: bool = False,
    masks: Sequence[MaskSlots] = (),
    drafts: bool = False,
) -> Iterator[Monokernel]:
    """This rank's kernel, linked with those of its peers. Collective, in the beginning and in the end.

    After an exception nothing is closed: peers may still read this rank's memory, which goes with the process.
    """
    from kog_dist.workers.cuda.draft_builds import drafting_shape
    from kog_dist.workers.cuda.monokernel import Monokernel

    comm = None
    if context.info.world_size > 1:
        boxes = (drafting_shape(shape) if drafts else shape).words.boxes.specs()
        comm = context.cuda_communicator(boxes, timeout_s=WAIT_LIMIT_US / 1e6)
    heap = None if comm is None else comm.heap
    kernel = Monokernel(
        shape,
        weights,
        rank=context.info.rank,
        wait_limit_us=WAIT_LIMIT_US,
        heap=heap,
        processors=processors,
        masks=masks,
        drafts=drafts,
    )
    context.rendezvous.barrier(context.deadline)
    yield kernel
    context.rendezvous.barrier(context.deadline)
    kernel.close()
    if comm is not None:
        comm.close()


def medians_in_turn(
    context: RankContext, kernel: Monokernel, others: Sequence[Path], at: int, tokens: int, rounds: int
) -> tuple[list[list[float]], list[bool]]:
    """Median us per token of the kernel as it is and as other cubins (`cubin_for`), round by round; and of each whether its
    logits had the bits of the first one. Collective.

    In turn and behind a pause, since GPUs that get warm get slower, and in the same memory, since the place of a kernel's words
    changes its time by up to 3 %. Each begins with an empty KV cache: past the window, what a launch leaves there would change
    the bits of the next one.
    """
    import cupy

    from kog_dist.bench.kernel.token_times import token_times_us
    from kog_dist.cuda.driver import Kernel
    from kog_dist.workers.cuda.monokernel import KERNEL_NAME
    from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

    builds = [kernel._kernel, *(Kernel(path, KERNEL_NAME, SHARED_BYTES) for path in others)]
    found, same = list[list[float]](), [True] * len(builds)
    for _ in range(rounds):
        medians, digests = [], []
        for kernel._kernel in builds:
            kernel.kv.fill(0)
            cupy.cuda.Device().synchronize()
            context.rendezvous.barrier(context.deadline)
            time.sleep(_PAUSE_S)
            medians.append(percentile(token_times_us(kernel, at, tokens), 0.5))
            digests.append(lane_digests(kernel))
        found.append(medians)
        same = [before and one == digests[0] for before, one in zip(same, digests, strict=True)]
    kernel._kernel = builds[0]
    return found, same


def cubin_for(kernel: Monokernel, shape: KernelShape) -> Path:
    """The plain build of a shape that lays out its memory like the kernel's. Raises ConfigError for another."""
    from kog_dist.workers.cuda.build import build

    own = kernel.shape
    if (shape.words.num_words, shape.cache.num_bytes) != (own.words.num_words, own.cache.num_bytes):
        raise ConfigError("builds with other words or another KV cache cannot be compared in the same memory")
    return build(headers(shape)).path


def lane_digests(kernel: Monokernel) -> list[str]:
    """SHA-256 of the logits of each hosted lane's slice of the vocabulary, after the last step of a launch that has ended."""
    shape, logits = kernel.shape, kernel.logits.get()
    first = shape.head.vocab_rows[0]
    slices = [shape.spec.vocab_slice(lane) for lane in shape.hosted_lanes]
    return [hashlib.sha256(logits[begin - first : end - first].tobytes()).hexdigest() for begin, end in slices]


def first_difference(found: Sequence[Sequence[Any]], reference: Sequence[object]) -> int | None:
    """The first place where any of `found` is not `reference`, their length where only that differs; None: all are the same."""
    others = [one for one in found if one != reference]
    pairs = (enumerate(zip(one, reference, strict=False)) for one in others)
    ends = (min(len(one), len(reference)) for one in others)
    firsts = (next((place for place, (a, b) in one if a != b), end) for one, end in zip(pairs, ends, strict=True))
    return min(firsts, default=None)


def results_of_ranks(num_gpus: int, body: str, arguments: Mapping[str, object], deadline_s: float) -> list[Any]:
    """What `body` ("module:function") has returned on each of the GPUs. Raises KogError with what went wrong on any."""
    try:
        outcomes = run_ranks(num_gpus, body, arguments, deadline_s=deadline_s, device="cuda")
    except subprocess.TimeoutExpired:
        raise KogError(f"decoding on {num_gpus} GPUs did not end within {deadline_s:g} s") from None
    failed = [f"rank {outcome.rank}: {outcome.error or f'status {outcome.status}'}" for outcome in outcomes if outcome.status]
    if failed:
        raise KogError(f"decoding on {num_gpus} GPUs failed:\n" + "\n".join(failed))
    return [outcome.result for outcome in outcomes]


def attempted(figures: list[dict[str, Any]], measure: Callable[..., list[Any]], num_gpus: int, *arguments: Any) -> list[Any]:
    """What `measure(num_gpus, ...)` found on the ranks; nothing after an error, which is printed and becomes a figure."""
    try:
        return measure(num_gpus, *arguments)
    except KogError as error:
        print(f"{num_gpus} GPUs: {error}", flush=True)
        figures.append({"gpus": num_gpus, "error": str(error)[-2000:], "same": False})
        return []
