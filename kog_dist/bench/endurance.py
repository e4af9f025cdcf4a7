"""`kog-bench endurance`: very many tokens on one GPU or several, and whether all ranks took the same way.

The kernel of this run keeps a hash of every token and the bits of its score, written down every 64 tokens. It must be the same on
all ranks, and on every number of GPUs; what it costs is measured beside the kernel without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kog_dist.bench.gpu import gpu_name, require_gpus
from kog_dist.bench.latency import token_times_us
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.shapes import SEED, named_spec
from kog_dist.collectives.ranks import RankContext, run_ranks
from kog_dist.decode.sampling import Sampling
from kog_dist.errors import ConfigError, KogError

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

_WAIT_LIMIT_US = 2_000_000  # ranks do not begin at the same moment
_PROMPT_TOKENS = 64
_CONTEXT, _TIMED_TOKENS, _ROUNDS = 512, 400, 5  # where the cost of hashes is measured


def decode_on_ranks(context: RankContext) -> dict[str, Any]:
    """What one rank does: `hashes` (hexadecimal) of the long run, and `us` per token without and with them, round by round."""
    import cupy

    from kog_dist.workers.cuda.build import build
    from kog_dist.workers.cuda.device_weights import random_weights
    from kog_dist.workers.cuda.kernel_shape import HASH_TOKENS, NUM_HASHES, KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

    rank, world_size, tokens = context.info.rank, context.info.world_size, int(context.arguments["tokens"])
    if tokens > HASH_TOKENS * NUM_HASHES:
        raise ConfigError(f"--tokens {tokens}: there is room for the hashes of {HASH_TOKENS * NUM_HASHES} tokens")
    spec = named_spec(str(context.arguments["spec"]))
    lanes = spec.lanes_of_rank(rank, world_size)
    shapes = [KernelShape(spec, lanes, num_ranks=world_size, keeps_hashes=keeps) for keeps in (False, True)]
    cupy.cuda.Device(context.info.local_rank).use()
    if rank == 0:
        for shape in shapes:
            build(shape.headers())
    context.rendezvous.barrier(context.deadline)  # the others find it in the cache
    weights = random_weights(shapes[0], SEED)

    @contextmanager
    def opened(shape: KernelShape) -> Iterator[Monokernel]:
        comm = context.cuda_communicator(shape.boxes.specs(), timeout_s=_WAIT_LIMIT_US / 1e6) if world_size > 1 else None
        heap = None if comm is None else comm.heap
        kernel = Monokernel(shape, weights, rank=rank, wait_limit_us=_WAIT_LIMIT_US, heap=heap)
        context.rendezvous.barrier(context.deadline)
        yield kernel
        context.rendezvous.barrier(context.deadline)
        kernel.close()
        if comm is not None:
            comm.close()

    rounds = []
    for _ in range(_ROUNDS):  # in turn, since a GPU that gets warm gets slower
        medians = []
        for shape in shapes:
            with opened(shape) as kernel:
                medians.append(percentile(token_times_us(kernel, _CONTEXT, _TIMED_TOKENS), 0.5))
        rounds.append(medians)
    with opened(shapes[1]) as kernel:
        assert kernel.hashes is not None
        decoded = 0
        while decoded < tokens:
            context.rendezvous.barrier(context.deadline)
            steps = min(tokens - decoded, spec.max_context - _PROMPT_TOKENS - 1)
            prompt = [(decoded + number) % spec.vocab_size for number in range(_PROMPT_TOKENS)]
            kernel.begin(prompt, spec.max_context, Sampling(), first_position=_PROMPT_TOKENS - 1)
            kernel.launch(steps)
            kernel.finish()
            decoded += steps
        hashes = [f"{value:016x}" for value in kernel.hashes.get().tolist() if value]
    return {"us": rounds, "hashes": hashes}


def run(spec_name: str, gpu_counts: Sequence[int], tokens: int, deadline_s: float) -> bool:
    """Decode on each number of GPUs; the last line is one JSON object. False: hashes differ."""
    require_gpus(max(gpu_counts))
    before, arguments = machine(), {"spec": spec_name, "tokens": tokens}
    figures: list[dict[str, Any]] = []
    reference: list[str] = []
    for count in gpu_counts:
        body = "kog_dist.bench.endurance:decode_on_ranks"
        outcomes = run_ranks(count, body, arguments, deadline_s=deadline_s, device="cuda")
        failed = [f"rank {outcome.rank}: {outcome.error or f'status {outcome.status}'}" for outcome in outcomes if outcome.status]
        if failed:
            raise KogError(f"decoding on {count} GPUs failed:\n" + "\n".join(failed))
        hashes = [outcome.result["hashes"] for outcome in outcomes]
        reference = reference or hashes[0]
        rounds = outcomes[0].result["us"]
        bare, hashed = (min(medians[number] for medians in rounds) for number in (0, 1))
        cost = percentile([with_hashes / without - 1 for without, with_hashes in rounds], 0.5)
        figure = {
            "gpus": count, "tokens": tokens, "hashes": len(hashes[0]), "same": all(found == reference for found in hashes),
            "us_per_token": round(bare, 1), "us_with_hashes": round(hashed, 1),
            "cost": round(cost, 5), "rounds": rounds,
        }  # fmt: skip
        figures.append(figure)
        ranks = "rank has" if count == 1 else "ranks have"
        print(
            f"{count} GPUs: {tokens} tokens, {figure['hashes']} hashes, all {count} {ranks} "
            f"{'the same' if figure['same'] else 'OTHERS'}; {bare:.1f} us per token, {hashed:.1f} with hashes "
            f"({100 * cost:+.2f} %, median of {len(rounds)} rounds)",
            flush=True,
        )
    finish("endurance", {"model": f"{spec_name}, random weights", "gpu": gpu_name()}, before, figures)
    return all(figure["same"] and figure["hashes"] for figure in figures)
