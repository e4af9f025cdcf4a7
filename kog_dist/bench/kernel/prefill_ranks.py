"""Prefill on several GPUs, one process each: what `kog-bench prefill --gpus` measures."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.bench.report import percentile
from kog_dist.bench.shapes import SEED, named_shape
from kog_dist.collectives.ranks import RankContext, run_ranks
from kog_dist.errors import LaunchError
from kog_dist.model.spec import ModelSpec
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES
from kog_dist.workers.prefill.exchange import peer_exchange
from kog_dist.workers.prefill.gpu import DEFAULT, Tuning, matrices_for, prefill_for

if TYPE_CHECKING:
    from kog_dist.collectives.cuda import CudaCommunicator
    from kog_dist.decode.coding import Coding
    from kog_dist.workers.cuda.monokernel import Monokernel
    from kog_dist.workers.prefill.prefill import Prefill

_DEADLINE_S = 150.0
_LIMIT_S = 2.0
_LONGEST_TOKEN_S = 10.0
_TO_512, _TO_2048 = (tuple(size for size in CHUNK_SIZES if size <= largest) for largest in (512, 2048))
CHOICES = {  # tuning, and thread blocks that send or collect a sum
    "default": (DEFAULT, peer_exchange.DEFAULT_CTAS),
    "8 thread blocks": (DEFAULT, 8),
    "32 thread blocks": (DEFAULT, 32),
    "to 2048": (Tuning(_TO_2048), peer_exchange.DEFAULT_CTAS),
    "to 512": (Tuning(_TO_512), peer_exchange.DEFAULT_CTAS),
}
_DECODED = 256  # the last cached positions, which prefill has to fetch from the kernel's cache


def prepared(
    context: RankContext,
    spec: ModelSpec,
    seed: int,
    tuning: Tuning = DEFAULT,
    limit_s: float = _LIMIT_S,
    exchange_ctas: int = peer_exchange.DEFAULT_CTAS,
    coding: Coding | None = None,
    head_coding: Coding | None = None,
    kv_dtype: str = "bfloat16",
) -> tuple[CudaCommunicator | None, Monokernel, Prefill]:
    """One rank's communicator (None if it is alone), kernel with random weights, and prefill. Collective."""
    import cupy

    from kog_dist.workers.cuda.build import PLAIN_HEAD_SOURCE, PLAIN_SOURCE, STREAMS_SOURCE, build
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel
    from kog_dist.workers.cuda.random_weights import random_weights

    rank, world_size = context.info.rank, context.info.world_size
    shape = KernelShape(
        spec,
        spec.lanes_of_rank(rank, world_size),
        num_ranks=world_size,
        kv_dtype=kv_dtype,
        coding=coding,
        head_coding=head_coding,
    )
    cupy.cuda.Device(context.gpu).use()
    if rank == 0:
        for source in (PLAIN_SOURCE, PLAIN_HEAD_SOURCE, STREAMS_SOURCE):
            build(headers(shape), source)
    context.rendezvous.barrier(context.deadline)
    tuning = tuning.within(spec)
    matrices, observe = matrices_for(shape)
    weights = random_weights(shape, seed, observe)
    boxes = [*shape.words.boxes.specs(), *peer_exchange.mailboxes(spec, max(tuning.sizes), world_size)]
    comm = context.cuda_communicator(boxes, timeout_s=_LIMIT_S) if world_size > 1 else None
    kernel = Monokernel(shape, weights, rank=rank, wait_limit_us=2_000_000, heap=None if comm is None else comm.heap)
    exchange = None
    if comm is not None:
        exchange = peer_exchange.peer_exchange(spec, max(tuning.sizes), comm, limit_s=limit_s, num_ctas=exchange_ctas)
    prefill = prefill_for(kernel, matrices, exchange=exchange, tuning=tuning)
    context.rendezvous.barrier(context.deadline)
    return comm, kernel, prefill


def measure(context: RankContext) -> dict[str, object]:
    """Median milliseconds of each case from a prompt to a full cache, and to its first token, on this rank."""
    (spec, codings), repeats = named_shape(str(context.arguments["spec"])), int(context.arguments["repeats"])
    tuning, exchange_ctas = CHOICES[str(context.arguments["choice"])]
    comm, kernel, prefill = prepared(context, spec, SEED, tuning, exchange_ctas=exchange_ctas, **codings)
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, spec.max_context).tolist()
    figures = []
    for length, cached in context.arguments["cases"]:
        times = []
        for _ in range(repeats + 1):
            context.rendezvous.barrier(context.deadline)
            times.append(first_token(kernel, prefill, ids[:length], cached))
        medians = [round(1e3 * percentile([time_s[i] for time_s in times[1:]], 0.5), 3) for i in range(2)]
        figures.append({"prompt": length, "cached": cached, "prefill_ms": medians[0], "first_token_ms": medians[1]})
    context.rendezvous.barrier(context.deadline)
    if comm is not None:
        comm.close()
    return {"figures": figures}


def first_token(kernel: Monokernel, prefill: Prefill, ids: list[int], cached: int) -> tuple[float, float]:
    """Seconds from the prompt to a full cache, and to the first token in host memory; the kernel is queued as the engine does it.

    Collective where the kernel has peers. Raises LaunchError if prefill cannot run the prompt.
    """
    prefill.forget(max(0, cached - _DECODED))
    begin_s = time.perf_counter()

    def launch() -> None:
        kernel.begin(ids, 1, SamplingParams(), first_position=len(ids) - 1, streams=prefill.streams)
        kernel.launch(1)

    reached = prefill.run(ids, cached, should_stop=lambda: False, on_queued=launch)
    filled_s = time.perf_counter()
    if reached != len(ids):
        raise LaunchError(f"prefill gave up and left {reached} positions: a value left the range of binary16")
    while kernel.token(0) is None and time.perf_counter() < filled_s + _LONGEST_TOKEN_S:
        pass
    first_s = time.perf_counter()
    kernel.finish()
    return filled_s - begin_s, first_s - begin_s


def run(spec_name: str, num_gpus: int, cases: list[tuple[int, int]], repeats: int, choice: str) -> list[dict[str, Any]]:
    """The figures of the slowest rank. Raises LaunchError when a rank failed."""
    arguments = {"spec": spec_name, "cases": cases, "repeats": repeats, "choice": choice}
    outcomes = run_ranks(
        num_gpus, "kog_dist.bench.kernel.prefill_ranks:measure", arguments, deadline_s=_DEADLINE_S, device="cuda"
    )
    if failed := [outcome for outcome in outcomes if outcome.status]:
        raise LaunchError(f"prefill on {num_gpus} GPUs failed:\n" + "\n".join(asdict(outcome)["error"] for outcome in failed))
    ranks = [outcome.result["figures"] for outcome in outcomes]
    figures = []
    for case in zip(*ranks, strict=True):
        figure = {"gpus": num_gpus, "choice": choice, **max(case, key=lambda row: row["first_token_ms"])}
        figures.append(figure)
        print(
            f"  {num_gpus} GPUs, {choice}, prompt {figure['prompt']:5}, {figure['cached']:5} cached: "
            f"prefill {figure['prefill_ms']:8.3f} ms, first token {figure['first_token_ms']:8.3f} ms median",
            flush=True,
        )
    return figures
