"""`kog-bench endurance`: very many tokens on one GPU or several, and whether all ranks took the same way.

The kernel of this run keeps a hash of every token and the bits of its score, written down every 64 tokens. It must be the same on
all ranks, and on every number of GPUs; what it costs is measured beside the kernel without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kog_dist.bench.kernel.gpu import gpu_name, require_gpus
from kog_dist.bench.kernel.rank_kernel import (
    attempted,
    cubin_for,
    first_difference,
    medians_in_turn,
    prepare,
    rank_kernel,
    rank_shape,
    results_of_ranks,
)
from kog_dist.bench.report import finishing, machine, percentile
from kog_dist.bench.shapes import SEED, named_spec
from kog_dist.collectives.ranks import RankContext
from kog_dist.errors import ConfigError
from kog_dist.sampling_params import SamplingParams

_HERE = "kog_dist.bench.kernel.endurance"
_PROMPT_TOKENS = 64
_WANTED_PERCENT = 0.5  # more time per token, at most
_CONTEXT, _TIMED_TOKENS, _ROUNDS = 512, 400, 5  # where the cost of hashes is measured


def decode_on_ranks(context: RankContext) -> dict[str, object]:
    """What one rank does: `hashes` (hexadecimal) of the long run, and the seconds it `took_s`."""
    from kog_dist.workers.cuda.random_weights import random_weights

    tokens = int(context.arguments["tokens"])
    spec = named_spec(str(context.arguments["spec"]))
    shape = rank_shape(context, spec, keeps_hashes=True)
    prepare(context, [shape])
    with rank_kernel(context, shape, random_weights(shape, SEED)) as kernel:
        assert kernel.hashes is not None
        decoded, begin_s = 0, time.monotonic()
        while decoded < tokens:
            context.rendezvous.barrier(context.deadline)
            steps = min(tokens - decoded, spec.max_context - _PROMPT_TOKENS - 1)
            prompt = [(decoded + number) % spec.vocab_size for number in range(_PROMPT_TOKENS)]
            kernel.begin(prompt, spec.max_context, SamplingParams(), first_position=_PROMPT_TOKENS - 1)
            kernel.launch(steps)
            kernel.finish()
            decoded += steps
        took_s = time.monotonic() - begin_s
        hashes = [f"{value:016x}" for value in kernel.hashes.get().tolist() if value]
    return {"hashes": hashes, "took_s": took_s}


def cost_on_ranks(context: RankContext) -> list[list[float]]:
    """What one rank does to measure what hashes cost: `us` per token with and without them, round by round."""
    from kog_dist.workers.cuda.random_weights import random_weights

    spec = named_spec(str(context.arguments["spec"]))
    hashing, plain = (rank_shape(context, spec, keeps_hashes=keeps) for keeps in (True, False))
    prepare(context, [hashing, plain])
    with rank_kernel(context, hashing, random_weights(hashing, SEED)) as kernel:
        return medians_in_turn(context, kernel, [cubin_for(kernel, plain)], _CONTEXT, _TIMED_TOKENS, _ROUNDS)[0]


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
    reference: list[str] = []  # of the first number of GPUs that did not fail
    with finishing("endurance", {"model": f"{spec_name}, random weights", "gpu": gpu_name()}, before, figures):
        for count in gpu_counts:
            if ranks := attempted(figures, results_of_ranks, count, f"{_HERE}:decode_on_ranks", arguments, deadline_s):
                reference = reference or ranks[0]["hashes"]
                figures.append(_figure(count, tokens, ranks, reference))
            if costs := attempted(figures, results_of_ranks, count, f"{_HERE}:cost_on_ranks", arguments, deadline_s):
                figures.append(_cost(count, costs[0]))
    return all(figure.get("same", True) for figure in figures)


def _figure(count: int, tokens: int, ranks: Sequence[dict[str, Any]], reference: Sequence[str]) -> dict[str, Any]:
    """One number of GPUs, printed."""
    from kog_dist.workers.cuda.kernel_shape import HASH_TOKENS

    differs_at = first_difference([rank["hashes"] for rank in ranks], reference)
    figure = {
        "gpus": count,
        "tokens": tokens,
        "hashes": len(ranks[0]["hashes"]),
        "same": differs_at is None and len(reference) == tokens // HASH_TOKENS,
        "last_hash": ranks[0]["hashes"][-1:],
        "took_s": round(ranks[0]["took_s"], 2),
    }
    told = f"all {count} {'rank has' if count == 1 else 'ranks have'} "
    told += "the same" if differs_at is None else f"OTHERS from hash {differs_at} on"
    print(
        f"{count} GPUs: {tokens} tokens in {figure['took_s']} s, {figure['hashes']} hashes of {tokens // HASH_TOKENS}, "
        f"{told}, the last {''.join(figure['last_hash'])}",
        flush=True,
    )
    return figure


def _cost(count: int, rounds: Sequence[Sequence[float]]) -> dict[str, object]:
    """What hashes cost, printed."""
    hashed, bare = (min(medians[number] for medians in rounds) for number in (0, 1))
    cost = percentile([with_hashes / without - 1 for with_hashes, without in rounds], 0.5)
    print(
        f"{count} GPUs: {bare:.1f} us per token, {hashed:.1f} with hashes ({100 * cost:+.2f} %, median of {len(rounds)} rounds, "
        f"wanted {_WANTED_PERCENT:g})",
        flush=True,
    )
    return {
        "gpus": count,
        "us_per_token": round(bare, 1),
        "us_with_hashes": round(hashed, 1),
        "cost": round(cost, 5),
        "rounds": rounds,
    }
