"""`kog-bench scaling`: the monokernel on 1, 2 and 4 GPUs, a process each: microseconds per token, and whether bits are the same.

Every number of GPUs runs the same model with random weights and the same prompts. What is compared are the logits of each
lane's slice of the vocabulary after many greedy tokens, in repeated launches, too. `--yardstick` measures the same kernel once
more with the delayed sums left out: what they cost where they are not hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kog_dist.bench.gpu import gpu_name, require_gpus
from kog_dist.bench.latency import token_times_us
from kog_dist.bench.rank_kernel import lane_digests, prepare, rank_kernel, rank_shape, results_of_ranks
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.shaped import figures as shaped_figures
from kog_dist.bench.shaped import times_us
from kog_dist.bench.shapes import SEED, named_spec
from kog_dist.collectives.ranks import RankContext
from kog_dist.control import ControlPage
from kog_dist.decode.sampling import Sampling

_DEADLINE_S = 180.0


def decode_on_ranks(context: RankContext) -> dict[str, Any]:
    """What one rank does. By context: `us` of its tokens, `bits` of each of its lanes' logits (SHA-256), and how many of the
    `repeats` had others."""
    from kog_dist.workers.cuda.device_weights import random_weights

    spec, max_tokens = named_spec(str(context.arguments["spec"])), int(context.arguments["tokens"])
    shape = rank_shape(context, spec, leaves_out_delayed=bool(context.arguments.get("leaves_out_delayed")))
    prepare(context, [shape], shaped=True)
    samplings = list(context.arguments.get("samplings", ()))
    page = ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size) if samplings else None  # masks of its own
    masks = None if page is None else page.masks
    found: dict[str, Any] = {"us": {}, "bits": {}, "repeats": {}}
    with rank_kernel(context, shape, random_weights(shape, SEED), shaped=page is not None, masks=masks) as kernel:
        for tokens in context.arguments["contexts"]:
            context.rendezvous.barrier(context.deadline)
            found["us"][str(tokens)] = token_times_us(kernel, int(tokens), max_tokens)
            found["bits"][str(tokens)] = lane_digests(kernel)
            repeated = []
            for _ in range(int(context.arguments["repeats"])):
                # One position again and again. More would begin with other rows in the rings of windowed layers each time.
                kernel.begin([1] * int(tokens), spec.max_context, Sampling(), first_position=int(tokens) - 1)
                kernel.launch(1)
                kernel.finish()
                repeated.append(lane_digests(kernel))
            found["repeats"][str(tokens)] = sum(other != repeated[0] for other in repeated)
        if page is not None:
            found["samplings"] = {}
            for name in samplings:
                context.rendezvous.barrier(context.deadline)
                at = max(map(int, context.arguments["contexts"]))
                found["samplings"] |= times_us(kernel, page, [name], at, max_tokens)
    return found


def run(
    spec_name: str,
    gpu_counts: Sequence[int],
    contexts: Sequence[int],
    tokens: int,
    repeats: int,
    *,
    yardstick: bool = False,
    samplings: Sequence[str] = (),
) -> bool:
    """Measure and print a table; the last line is one JSON object. False: bits differ."""
    require_gpus(max(gpu_counts))
    before = machine()
    arguments = {
        "spec": spec_name, "contexts": list(contexts), "tokens": tokens, "repeats": repeats, "samplings": list(samplings),
    }  # fmt: skip
    figures: list[dict[str, Any]] = []
    reference: dict[str, list[str]] = {}
    for count in gpu_counts:
        ranks = decode(count, arguments)
        bare = (
            decode(count, {**arguments, "repeats": 0, "samplings": [], "leaves_out_delayed": True})
            if yardstick and count > 1
            else None
        )
        for context in map(str, contexts):
            bits = [digest for rank in ranks for digest in rank["bits"][context]]
            times = ranks[0]["us"][context]
            median = percentile(times, 0.5)
            figure = {
                "gpus": count, "context": int(context), "us_per_token": round(median, 1),
                "p99_us": round(percentile(times, 0.99), 1), "tokens_per_s": round(1e6 / median, 1),
                "same_bits": bits == reference.setdefault(context, bits),
                "different_repeats": max(rank["repeats"][context] for rank in ranks), "repeats": repeats,
            }  # fmt: skip
            line = (
                f"{count} GPUs, context {context:>5}: {figure['us_per_token']:8.1f} us median, {figure['p99_us']:8.1f} p99, "
                f"{figure['tokens_per_s']:8.1f} tokens/s, bits {'the same' if figure['same_bits'] else 'OTHERS'}, "
                f"{figure['different_repeats']} of {repeats} repeats differ"
            )
            if bare is not None:
                figure["us_without_delayed_sums"] = round(percentile(bare[0]["us"][context], 0.5), 1)
                line += f", {figure['us_without_delayed_sums']:.1f} us without the delayed sums"
            figures.append(figure)
            print(line, flush=True)
        if samplings:
            figures += shaped_figures(ranks[0]["samplings"], max(contexts), gpus=count)
    finish("scaling", {"model": f"{spec_name}, random weights", "tokens": tokens, "gpu": gpu_name()}, before, figures)
    return all(figure["same_bits"] and not figure["different_repeats"] for figure in figures if "same_bits" in figure)


def decode(count: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What `decode_on_ranks` found on every rank. Raises KogError with what went wrong on any."""
    return results_of_ranks(count, "kog_dist.bench.scaling_run:decode_on_ranks", arguments, _DEADLINE_S)
