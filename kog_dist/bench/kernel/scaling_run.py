"""`kog-bench scaling`: the monokernel on 1, 2 and 4 GPUs, a process each: microseconds per token, and whether bits are the same.

Every number of GPUs runs the same model with random weights and the same prompts. What is compared are the logits of each
lane's slice of the vocabulary after many greedy tokens, in repeated launches, too, and with `--long-run` every token of one
launch up to the end of the context. `--yardstick` measures the same kernel in the same memory with the delayed sums left out, in
turn: what they cost where they are not hidden. `--builds` compares other builds of the kernel in the same way. What one number
of GPUs had measured is not lost with an error of another.

The KV cache begins with zeros. `--filled` decodes as many positions as the first batch of each split has, and copies that batch
to all others: so attention far into a context has keys and values that are not alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.bench.kernel.gpu import gpu_name, require_gpus
from kog_dist.bench.kernel.latency import TRACED_STEP, draw_trace, kv_bytes_read, traced_token
from kog_dist.bench.kernel.rank_kernel import (
    attempted,
    cubin_for,
    first_difference,
    lane_digests,
    medians_in_turn,
    prepare,
    rank_kernel,
    rank_shape,
    results_of_ranks,
)
from kog_dist.bench.kernel.sampling import figures as processed_figures
from kog_dist.bench.kernel.sampling import times_us
from kog_dist.bench.kernel.token_times import token_times_us
from kog_dist.bench.kernel.yardsticks import build_without_delayed_sums
from kog_dist.bench.report import finishing, machine, percentile
from kog_dist.bench.shapes import SEED, named_shape
from kog_dist.collectives.ranks import RankContext
from kog_dist.errors import ConfigError
from kog_dist.records import dataclass
from kog_dist.runtime.control import ControlPage
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.cache_shape import BATCH

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

# What is wanted of the 2B shape on H200s, tokens per second by GPUs and context, and how many us delayed sums may cost by GPUs.
WANTED_PER_S = {(8, 64): 5300, (4, 64): 3700, (4, 512): 3600, (2, 64): 1880, (2, 512): 1840}
WANTED_EXPOSED_US = {4: 2.0}
_DEADLINE_S = 180.0
_ROUNDS = 5  # of the yardstick
_STREAMED_TOKENS = 50
_WINDOW = 200  # tokens of a long run from each context on
_TRACED_CONTEXT = 512


@dataclass(frozen=True)
class ScalingPlan:
    """What is measured on every number of GPUs."""

    spec: str
    contexts: Sequence[int]
    tokens: int
    repeats: int
    samplings: Sequence[str] = ()
    long_run: bool = False
    yardstick: bool = False
    builds: Sequence[Mapping[str, int]] = ()  # options of TrialShape
    trace: str | None = None  # folder of its pictures
    kv_dtype: str = "bfloat16"
    memory_alone: bool = False
    filled: bool = False


# ---- on a rank ----
def decode_on_ranks(context: RankContext) -> dict[str, object]:
    """What one rank does. By context: `us` of its tokens, `bits` of each of its lanes' logits (SHA-256), `repeated_bits` of a
    launch that is repeated, and how many of the `repeats` had others. What the arguments ask for besides: `alone_us` of the
    weights by themselves and `memory_us` of these with keys and values, `long`, `samplings`, `builds`, `rounds` of the yardstick;
    or the `trace` alone.
    """
    from kog_dist.bench.kernel.stream import stream_cubin, stream_us
    from kog_dist.workers.cuda.random_weights import random_weights

    arguments, world_size = context.arguments, context.info.world_size
    (spec, codings), max_tokens = named_shape(str(arguments["spec"])), int(arguments["tokens"])
    contexts, samplings = [int(at) for at in arguments["contexts"]], list(arguments.get("samplings", ()))
    options = {**codings, "kv_dtype": str(arguments.get("kv_dtype", "bfloat16"))}
    shape, is_alone = rank_shape(context, spec, **options), bool(arguments.get("memory_alone"))
    bare = [partial(build_without_delayed_sums, shape)] if arguments.get("yardstick") and world_size > 1 else []
    if arguments.get("trace"):
        return {"trace": _trace(context, replace(shape, traced_step=TRACED_STEP), Path(str(arguments["trace"])))}
    builds = [rank_shape(context, spec, **options, **build) for build in arguments.get("builds", ())]
    prepare(context, builds, others=[*bare, partial(stream_cubin, shape)] if is_alone else bare)
    prepare(context, [shape], processors=bool(samplings))
    weights = random_weights(shape, SEED)
    page = ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size) if samplings else None  # masks of its own
    found: dict[str, Any] = {"us": {}, "bits": {}, "repeated_bits": {}, "repeats": {}}
    with rank_kernel(context, shape, weights, processors=page is not None, masks=() if page is None else (page.masks,)) as kernel:
        if arguments.get("filled"):
            fill_cache(kernel)
        if is_alone:
            found["alone_us"] = stream_us(kernel, _STREAMED_TOKENS)
            found["memory_us"] = {
                str(at): found["alone_us"] * (1 + kv_bytes_read(shape, at) / shape.tape.read_bytes) for at in contexts
            }
        for at in contexts:
            context.rendezvous.barrier(context.deadline)
            found["us"][str(at)] = token_times_us(kernel, at, max_tokens)
            found["bits"][str(at)] = lane_digests(kernel)
            repeated = [_one_token(kernel, at) for _ in range(int(arguments["repeats"]))]
            found["repeated_bits"][str(at)] = repeated[0] if repeated else []
            found["repeats"][str(at)] = sum(other != repeated[0] for other in repeated)
        if arguments.get("long_run"):
            context.rendezvous.barrier(context.deadline)
            found["long"] = long_run(kernel, contexts)
        if page is not None:
            found["samplings"] = {}
            for name in samplings:
                context.rendezvous.barrier(context.deadline)
                found["samplings"] |= times_us(kernel, page, [name], max(contexts), max_tokens)
        if builds:
            cubins = [cubin_for(kernel, build) for build in builds]
            found["builds"] = {str(at): medians_in_turn(context, kernel, cubins, at, max_tokens, _ROUNDS) for at in contexts}
        if bare:
            cubins = [build().path for build in bare]
            found["rounds"] = {str(at): medians_in_turn(context, kernel, cubins, at, max_tokens, _ROUNDS)[0] for at in contexts}
    return found


def fill_cache(kernel: Monokernel) -> None:
    """Decode the positions of the first batch of each split, and copy each such batch to all that follow. Collective.

    Raises ConfigError where windowed layers keep a ring, whose batches have other places.
    """
    cache = kernel.shape.cache
    if cache.ring_positions:
        raise ConfigError("a KV cache of which windowed layers keep a ring cannot be filled")
    import cupy

    ids = np.random.default_rng(SEED).integers(0, kernel.shape.spec.vocab_size, BATCH * kernel.shape.splits).tolist()
    kernel.begin(ids, 1, SamplingParams())
    kernel.launch(len(ids))
    kernel.finish()
    batches = kernel.kv.reshape(-1, cache.full_batches, cache.batch_bytes)
    batches[:, 1:] = batches[:, :1]
    cupy.cuda.Device().synchronize()  # it was filled on another stream than the kernel's


def _one_token(kernel: Monokernel, at: int) -> list[str]:
    """One position again and again. More would begin with other rows in the rings of windowed layers each time."""
    kernel.begin([1] * at, kernel.shape.spec.max_context, SamplingParams(), first_position=at - 1)
    kernel.launch(1)
    kernel.finish()
    return lane_digests(kernel)


def long_run(kernel: Monokernel, contexts: Sequence[int]) -> dict[str, Any]:
    """One launch from the shortest context to the end: its `tokens`, and median `us` of _WINDOW tokens from each context on."""
    first = min(contexts)
    times = token_times_us(kernel, first, kernel.shape.spec.max_context)
    entries = [kernel.token(index) for index in range(len(times) + 1)]
    medians = {str(at): percentile(times[at - first : at - first + _WINDOW], 0.5) for at in contexts}
    return {"tokens": [-1 if entry is None else entry.token_id for entry in entries], "us": medians}


def _trace(context: RankContext, shape: KernelShape, folder: Path) -> dict[str, object]:
    """Rank 0's trace of a token, as a table and a summary; a picture goes into `folder`."""
    from kog_dist.workers.cuda.random_weights import random_weights

    prepare(context, [shape])
    with rank_kernel(context, shape, random_weights(shape, SEED)) as kernel:
        context.rendezvous.barrier(context.deadline)
        trace = traced_token(kernel, _TRACED_CONTEXT)
    if context.info.rank:
        return {}
    draw_trace(trace, folder / f"token-{context.info.world_size}-gpus.png")
    return {"text": trace.text(), "summary": trace.summary()}


# ---- the benchmark ----
def run(plan: ScalingPlan, gpu_counts: Sequence[int]) -> bool:
    """Measure and print a table; the last line is one JSON object. False: bits or tokens differ, or a number of GPUs failed."""
    require_gpus(max(gpu_counts))
    before, figures = machine(), list[dict[str, Any]]()
    configuration = {
        "model": f"{plan.spec}, random weights",
        "tokens": plan.tokens,
        "gpu": gpu_name(),
        "kv_dtype": plan.kv_dtype,
        "filled": plan.filled,
    }
    bits, tokens = dict[str, list[str]](), list[int]()  # of the first number of GPUs that did not fail
    whole: dict[str, Any] = {
        "spec": plan.spec,
        "contexts": list(plan.contexts),
        "tokens": plan.tokens,
        "repeats": plan.repeats,
        "kv_dtype": plan.kv_dtype,
        "filled": plan.filled,
    }
    once_more = {**whole, "repeats": 0, "yardstick": plan.yardstick, "builds": [dict(options) for options in plan.builds]}
    trace = {**whole, "trace": None if plan.trace is None else str(Path(plan.trace).absolute())}
    whole |= {"samplings": list(plan.samplings), "long_run": plan.long_run, "memory_alone": plan.memory_alone}
    with finishing("scaling", configuration, before, figures):
        for count in gpu_counts:  # parts in processes of their own: one that fails takes nothing from the others
            if ranks := attempted(figures, decode, count, whole):
                figures += [_figure(plan, count, context, ranks, bits) for context in plan.contexts]
                if plan.long_run:
                    tokens = tokens or ranks[0]["long"]["tokens"]
                    figures.append(_long_figure(plan, count, [rank["long"] for rank in ranks], tokens))
                if plan.samplings:
                    figures += processed_figures(ranks[0]["samplings"], max(plan.contexts), gpus=count)
            if (plan.builds or (plan.yardstick and count > 1)) and (ranks := attempted(figures, decode, count, once_more)):
                for context in plan.contexts:
                    if "rounds" in ranks[0]:
                        figures.append(_exposed_figure(plan, count, context, ranks[0]["rounds"][str(context)]))
                    if plan.builds:
                        figures += _build_figures(plan, count, context, [rank["builds"][str(context)] for rank in ranks])
            if plan.trace is not None and (ranks := attempted(figures, decode, count, trace)):
                print(f"{count} GPUs, rank 0: {ranks[0]['trace']['text']}", flush=True)
                figures.append({"gpus": count, "trace_us": ranks[0]["trace"]["summary"]})
    return not any(
        figure.get("different_repeats") or not figure.get("same_bits", True) or not figure.get("same", True) for figure in figures
    )


def _figure(
    plan: ScalingPlan, count: int, context: int, ranks: Sequence[Mapping[str, Any]], reference: dict[str, list[str]]
) -> dict[str, Any]:
    """One number of GPUs at one context, printed. The first one's bits become `reference`."""
    at = str(context)
    digests = [digest for name in ("bits", "repeated_bits") for rank in ranks for digest in rank[name][at]]
    median = percentile(ranks[0]["us"][at], 0.5)
    figure: dict[str, Any] = {
        "gpus": count,
        "context": context,
        "us_per_token": round(median, 1),
        "p99_us": round(percentile(ranks[0]["us"][at], 0.99), 1),
        "tokens_per_s": round(1e6 / median, 1),
        "same_bits": digests == reference.setdefault(at, digests),
        "different_repeats": max(rank["repeats"][at] for rank in ranks),
        "repeats": plan.repeats,
    }
    alone = ""
    if plan.memory_alone:  # of the slowest rank
        figure["alone_us"] = round(max(rank["alone_us"] for rank in ranks), 1)
        figure["memory_us"] = round(max(rank["memory_us"][at] for rank in ranks), 1)
        alone = f", weights alone {figure['alone_us']:.1f} us ({100 * figure['alone_us'] / median:.1f} %)"
    line = (
        f"{count} GPUs, context {context:>5}: {figure['us_per_token']:8.1f} us median, {figure['p99_us']:8.1f} p99, "
        f"{figure['tokens_per_s']:8.1f} tokens/s{_wanted(plan, WANTED_PER_S.get((count, context)))}{alone}, "
        f"bits {'the same' if figure['same_bits'] else 'OTHERS'}, {figure['different_repeats']} of {plan.repeats} repeats differ"
    )
    print(line, flush=True)
    return figure


def _exposed_figure(plan: ScalingPlan, count: int, context: int, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What the delayed sums cost, printed: the median of the rounds' differences."""
    exposed = percentile([with_sums - without for with_sums, without in rounds], 0.5)
    print(
        f"{count} GPUs, context {context:>5}: delayed sums cost {exposed:+.1f} us{_wanted(plan, WANTED_EXPOSED_US.get(count))}: "
        f"{', '.join(f'{with_sums:.1f} - {without:.1f}' for with_sums, without in rounds)}",
        flush=True,
    )
    return {"gpus": count, "at": context, "exposed_us": round(exposed, 2), "rounds_us": [list(pair) for pair in rounds]}


def _long_figure(plan: ScalingPlan, count: int, ranks: Sequence[Mapping[str, Any]], reference: Sequence[int]) -> dict[str, Any]:
    """One launch to the end of the context, printed: speed by context, and whether its tokens are those of `reference`."""
    differs_at = first_difference([rank["tokens"] for rank in ranks], reference)
    times = {int(at): us for at, us in ranks[0]["us"].items()}
    speeds = ", ".join(f"{1e6 / us:.1f} at {at}{_wanted(plan, WANTED_PER_S.get((count, at)))}" for at, us in times.items())
    told = "the same on all ranks and GPUs" if differs_at is None else f"OTHERS from token {differs_at} on"
    print(f"{count} GPUs, one launch of {len(reference)} tokens: {speeds} tokens/s; tokens {told}", flush=True)
    return {
        "gpus": count,
        "long_run": len(reference),
        "same": differs_at is None,
        "tokens_per_s": {at: round(1e6 / us, 1) for at, us in times.items()},
    }


def _build_figures(plan: ScalingPlan, count: int, context: int, ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Every build beside the kernel as it is, printed: medians of the rounds of rank 0, and whether any rank had other bits."""
    rounds = ranks[0][0]
    figures = []
    for number, options in enumerate(({}, *plan.builds)):
        times = [medians[number] for medians in rounds]
        same = all(of_rank[1][number] for of_rank in ranks)
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "as it is"
        print(
            f"{count} GPUs, context {context:>5}, {name:>24}: {percentile(times, 0.5):8.1f} us "
            f"({', '.join(f'{us:.1f}' for us in times)}), bits {'the same' if same else 'OTHERS'}",
            flush=True,
        )
        figures.append({"gpus": count, "at": context, "build": dict(options), "rounds_us": times, "same": same})
    return figures


def _wanted(plan: ScalingPlan, limit: float | None) -> str:
    return "" if limit is None or plan.spec != "2b" else f" (wanted {limit:g})"


def decode(count: int, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What `decode_on_ranks` found on every rank. Raises KogError with what went wrong on any."""
    return results_of_ranks(count, "kog_dist.bench.kernel.scaling_run:decode_on_ranks", arguments, _DEADLINE_S)
