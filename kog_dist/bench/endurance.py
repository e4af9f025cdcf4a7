"""`kog-bench endurance`: very many tokens on one GPU or several, and whether all ranks took the same way.

The kernel of this run keeps a hash of every token and the bits of its score, written down every 64 tokens. It must be the same on
all ranks, and on every number of GPUs; what it costs is measured beside the kernel without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kog_dist.bench.gpu import gpu_name, require_gpus
from kog_dist.bench.latency import token_times_us
from kog_dist.bench.rank_kernel import prepare, rank_kernel, rank_shape, results_of_ranks
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.shapes import SEED, named_spec
from kog_dist.collectives.ranks import RankContext
from kog_dist.decode.sampling import Sampling
from kog_dist.errors import ConfigError

_PROMPT_TOKENS = 64
_CONTEXT, _TIMED_TOKENS, _ROUNDS = 512, 400, 5  # where the cost of hashes is measured


def decode_on_ranks(context: RankContext) -> dict[str, Any]:
    """What one rank does: `hashes` (hexadecimal) of the long run, and `us` per token without and with them, round by round."""
    from kog_dist.workers.cuda.device_weights import random_weights

    tokens = int(context.arguments["tokens"])
    spec = named_spec(str(context.arguments["spec"]))
    shapes = [rank_shape(context, spec, keeps_hashes=keeps) for keeps in (False, True)]
    prepare(context, shapes)
    weights = random_weights(shapes[0], SEED)
    rounds = []
    for _ in range(_ROUNDS):  # in turn, since a GPU that gets warm gets slower
        medians = []
        for shape in shapes:
            with rank_kernel(context, shape, weights) as kernel:
                medians.append(percentile(token_times_us(kernel, _CONTEXT, _TIMED_TOKENS), 0.5))
        rounds.append(medians)
    with rank_kernel(context, shapes[1], weights) as kernel:
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
    """Decode on each number of GPUs; the last line is one JSON object. False: hashes differ.

    Raises ConfigError for so few tokens that no hash is written, or more than there is room for.
    """
    from kog_dist.workers.cuda.kernel_shape import HASH_TOKENS, NUM_HASHES

    if not HASH_TOKENS <= tokens <= HASH_TOKENS * NUM_HASHES:
        raise ConfigError(
            f"--tokens {tokens}: must be from {HASH_TOKENS}, after which the first hash is written down, "
            f"to {HASH_TOKENS * NUM_HASHES}, for whose hashes there is room"
        )
    require_gpus(max(gpu_counts))
    before, arguments = machine(), {"spec": spec_name, "tokens": tokens}
    figures: list[dict[str, Any]] = []
    reference: list[str] = []
    for count in gpu_counts:
        found = results_of_ranks(count, "kog_dist.bench.endurance:decode_on_ranks", arguments, deadline_s)
        hashes = [rank["hashes"] for rank in found]
        reference = reference or hashes[0]
        rounds = found[0]["us"]
        bare, hashed = (min(medians[number] for medians in rounds) for number in (0, 1))
        cost = percentile([with_hashes / without - 1 for without, with_hashes in rounds], 0.5)
        figure = {
            "gpus": count, "tokens": tokens, "hashes": len(hashes[0]), "same": all(of_rank == reference for of_rank in hashes),
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
