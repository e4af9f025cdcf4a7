"""`kog-launch --check` and `--dry-run`: what would be started, without starting it."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import cpu_weights
from kog_dist.decode.cpu.cpu_weights import SINGLE_BYTES, kept_and_read_bytes, kept_as
from kog_dist.decode.cpu.pool_sizes import BLOCK_TOKENS, pool_slots
from kog_dist.decode.plan.recipes import position_values, state_bytes
from kog_dist.errors import CheckpointError
from kog_dist.hardware.cpu_lists import parse_cpu_list
from kog_dist.hardware.cpus import read_cpu_map
from kog_dist.late_numpy import np
from kog_dist.launch.choice import choose_launcher
from kog_dist.launch.gpu_choice import gpu_rank_bytes, gpu_rank_shape
from kog_dist.launch.prediction import LAYER_S, architecture, most_tokens_per_s, predictions
from kog_dist.launch.preflight import preflight
from kog_dist.launch.target import (
    Target,
    model_folder,
    plan_target,
    why_not_on_gpus,
)
from kog_dist.model.checkpoint import has_weights
from kog_dist.model.formats.rounded_cache import RoundedCache
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weight_bytes import bytes_per_token, formats, quantised, weight_bytes
from kog_dist.speculation import Speculation

if TYPE_CHECKING:
    from kog_dist.decode.plan.plan import Plan
    from kog_dist.model.checkpoint import Checkpoint

_PROBE_BYTES = 128 << 20
_H200_PEAK_BYTES_S = 4.8e12  # HBM3e bandwidth in NVIDIA's data sheet
_MIB = 2**20


def check(settings: LaunchConfig, *, deep: bool = False, serves: bool = True) -> str:
    """One line about what a start would accept: opens what a start opens, and with `deep` reads all weights.

    `serves`: whether the start would be for no single prompt. Raises KogError.
    """
    from kog_dist.decode.plan.validate import check as check_plan
    from kog_dist.gateway.model_files import read_model
    from kog_dist.workers.coordinator.model_folder import ModelFolder

    preflight(settings, serves=serves)
    try:
        target, obstacles = plan_target(settings)
    except CheckpointError as error:
        if has_weights(model_folder(settings)[0]):
            raise
        raise CheckpointError(f"{error}; --dry-run shows what config.json alone says") from None
    if obstacles and (target.device == "cpu" or target.gpus):
        raise obstacles[0]  # of memory; a folder is also checked for GPUs that are not here
    opened = target.checkpoint
    served = ModelFolder.from_folder(target.folder, target.model_name)
    template = read_model(target.folder)[1]
    if template is not None:
        template.close()
    check_plan(plan_of(target))
    if deep:
        opened.verify_all()
    tokenizer = "with" if served.tokenizer is not None else "without"
    hashes = "with hash manifest" if opened.manifest is not None else "without hash manifest"
    files, lanes = _count(len(opened.files), "file"), _count(opened.spec.num_lanes, "lane")
    return (
        f"{target.model_name}: {opened.spec.num_parameters:,} parameters, {formats(opened)}, {files}, "
        f"{opened.num_bytes / _MIB:.1f} MiB{_per_token(target)}, {lanes}, {hashes}, {tokenizer} tokenizer"
        f"{', all weights read' if deep else ''}{_kept_rounded(opened, settings)}{opened.note and f'; {opened.note}'}"
    )


def _kept_rounded(opened: Checkpoint, settings: LaunchConfig) -> str:
    """How much of what a start would round is kept from an earlier one."""
    cache = RoundedCache.of(opened, settings.quantize_cache_bytes, lambda text: None)
    if cache is None:
        return ""
    kept, of = cache.num_kept()
    return f", {'all' if kept == of else f'{kept} of'} {of} rounded matrices of lanes kept in {cache.folder}"


def _per_token(target: Target) -> str:
    """What a token needs of quantised weights and of experts: nobody can tell from their files' size."""
    opened = target.checkpoint
    if quantised(opened) or opened.spec.experts is not None:
        return f" ({bytes_per_token(opened) / _MIB:.1f} MiB per token as they are)"
    if opened.stored_format == opened.dtype:
        return ""
    read = cpu_weights.bytes_per_token(opened, target.world_size) if target.device == "cpu" else bytes_per_token(opened)
    return f" ({read / _MIB:.1f} MiB read per token)"


def plan_of(target: Target, *, checks_experts: bool = False) -> Plan:
    """The plan that the ranks of a target make. Hosts of GPUs compare choices of experts between launches, which no plan has."""
    from kog_dist.decode.plan.plan import make_plan
    from kog_dist.workers.cuda.kernel_plan import kernel_plan

    checkpoint, world_size = target.checkpoint, target.world_size
    if target.device == "cpu":
        return make_plan(checkpoint.spec, world_size, checks_experts=checks_experts)
    return kernel_plan(
        [
            gpu_rank_shape(checkpoint, rank, world_size, target.kv_dtype, whole_windows=target.whole_windows)
            for rank in range(world_size)
        ]
    )


def dry_run(settings: LaunchConfig) -> str:
    """Launcher, plan, places, bytes per rank and ceiling; also for GPUs that are not here, and then it says what is missing.

    Raises what is wrong with the configuration or the model wherever it is started.
    """
    from kog_dist.decode.plan.validate import check as check_plan

    launcher = choose_launcher(settings, os.environ)
    target, obstacles = plan_target(settings, needs_weights=False)
    spec = target.checkpoint.spec
    plan = plan_of(target, checks_experts=settings.check_experts)
    check_plan(plan)
    steps = Counter(step.phase.name.lower() for step in plan.ranks[0].steps)
    sent = sum(step.publishes is not None for step in plan.ranks[0].steps)
    lines = [
        f"model      {target.model_name}: {spec.num_parameters:,} parameters, {formats(target.checkpoint)}{_on_disk(target)}",
        f"           {architecture(_as_published(target, settings))}",
        f"launcher   {launcher.launcher}, because {launcher.reason}{_engines(settings)}",
        f"ranks      {target.world_size} on {target.device}, {_count(spec.num_lanes // target.world_size, 'lane')} each",
        f"plan       {plan.digest()[:16]}: {len(plan.ranks[0].steps)} steps per token and rank, {sent} of them publish",
        "           " + ", ".join(f"{count} {name}" for name, count in steps.items()),
        f"mailboxes  {', '.join(f'{box.name} {box.num_slots} x {box.length}' for box in plan.mailboxes) or 'none'}",
    ]
    for rank in range(target.world_size):
        lines += [f"rank {rank:<5} {_place(target, rank)}", f"           {_memory(target, rank)}"]
    lines.append(f"together   {_together(target)}")
    lines.append(f"drafts     {_drafts(target, plan, settings)}")
    lines += _gpu_ceiling(target) if target.device == "cuda" else _cpu_ceiling(target)
    first, *others = predictions(
        _as_published(target, settings), bytes_per_token(target.checkpoint), weight_bytes(target.checkpoint), settings.kv_dtype
    )
    lines += [f"predicted  {first}", *(f"           {other}" for other in others)]
    if reason := why_not_on_gpus(target.checkpoint):
        lines.append(f"note       {reason}; predicted is for GPUs that would run it as it is")
    lines += [f"note       {kept.removeprefix(', ')}"] if (kept := _kept_rounded(target.checkpoint, settings)) else []
    lines += [f"note       {target.note}"] if target.note else []
    lines += [f"refused    on this machine now: {obstacle}" for obstacle in obstacles]
    return "\n".join(lines)


def _together(target: Target) -> str:
    """Requests that decode together, and why not more."""
    if target.parallel == 1:
        return "1 request at a time; others wait"
    how = "in passes of the weights that they share"
    if target.device == "cuda":
        from kog_dist.workers.cuda.company_build import obstacle_to_company

        shape = gpu_rank_shape(target.checkpoint, 0, 1, target.kv_dtype, whole_windows=target.whole_windows)
        if cause := obstacle_to_company(shape, 2):
            how = f"in turns, since {cause}"
    return f"{_count(target.parallel, 'request')} at most, {how}; more wait"


def _drafts(target: Target, plan: Plan, settings: LaunchConfig) -> str:
    """Whether tokens are drafted where a request does not say, and how many in a pass."""
    from kog_dist.decode.cpu.passes import most_verified
    from kog_dist.workers.cuda.draft_builds import drafting_shape, why_unasked_without

    if target.device == "cuda" and settings.speculate == Speculation.OFF:
        return "none"
    if target.device == "cuda":
        shape = gpu_rank_shape(target.checkpoint, 0, target.world_size, target.kv_dtype, whole_windows=target.whole_windows)
        if not target.drafts:
            return f"none: {why_unasked_without(shape)}"
        return f"speculate {settings.speculate}: lookup, up to {drafting_shape(shape).tokens - 1} in a pass"
    most = most_verified(plan) - 1
    if not most:
        return "none: the model has layers whose state a refused draft would change"
    asked = f"speculate {settings.speculate}"
    return f"{asked}; a request may ask for them" if settings.speculate == "off" else f"{asked}: lookup, up to {most} in a pass"


def _as_published(target: Target, settings: LaunchConfig) -> ModelSpec:
    """The model with the context that is asked for, or its own, whatever this machine has room for."""
    from kog_dist.model.published_config import spec_of_folder

    spec = spec_of_folder(target.folder).with_context(settings.context)
    return replace(spec, num_lanes=target.checkpoint.spec.num_lanes)


def _on_disk(target: Target) -> str:
    return " on disk" if target.checkpoint.files else "; the folder has no weights, only what config.json says"


def _engines(settings: LaunchConfig) -> str:
    if settings.max_replicas is not None:
        return f"; {settings.min_replicas} to {settings.max_replicas} engines of this kind behind one endpoint"
    return f"; {settings.replicas} engines of this kind behind one endpoint" if settings.replicas > 1 else ""


def cpu_rank_bytes(target: Target, rank: int) -> dict[str, int]:
    """Memory of a CPU rank by use, in bytes: `weights` it keeps, `read` of them per token, `cache` of keys and values, `state` of
    recurrent layers.
    """
    spec = target.checkpoint.spec
    lanes = spec.lanes_of_rank(rank, target.world_size)
    kept, read = kept_and_read_bytes(target.checkpoint, lanes)
    cache = position_values(spec) * spec.max_context * len(lanes) // spec.num_lanes
    state = state_bytes(spec) * len(lanes) // spec.num_lanes
    return {"weights": kept, "read": read, "cache": SINGLE_BYTES * cache, "state": state}


def _place(target: Target, rank: int) -> str:
    lanes = target.checkpoint.spec.lanes_of_rank(rank, target.world_size)
    hosted = f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]}-{lanes[-1]}"
    nodes = ", ".join(map(str, read_cpu_map().nodes_of(parse_cpu_list(target.placement(rank).cpus))))
    return f"{hosted} on {target.place(rank)}{f' of node {nodes}' if nodes else ''}"


def _memory(target: Target, rank: int) -> str:
    if target.device == "cuda":
        uses = gpu_rank_bytes(
            target.checkpoint,
            rank,
            target.world_size,
            target.kv_dtype,
            prefill=target.prefill != "off",
            whole_windows=target.whole_windows,
            drafts=target.drafts,
            parallel=target.parallel,
            num_caches=target.num_kv_caches,
        )
        windows = f" ({_windows(target)})" if target.checkpoint.spec.window_layers else ""
        shown = {
            "tape": "weights tape",
            "experts": "experts",
            "tables": "tables and norms",
            "cache": f"{target.kv_dtype} KV cache{windows}",
            "states": "states, read and written per token",
            "words": "words",
            "drafts": "for drafts",
            "slots": "for requests that run together",
            "prefill weights": "weights of prefill",
            "prefill": "memory of prefill",
        }
        return ", ".join(f"{_size(uses[use])} {text}" for use, text in shown.items() if use in uses) + _kept(target)
    uses = cpu_rank_bytes(target, rank)
    weights = f"{_size(uses['weights'])} weights in {kept_as(target.checkpoint)} ({_size(uses['read'])} read per token)"
    form = "" if target.kv_dtype == "float32" else f" ({target.kv_dtype} values kept in float32)"
    state = ""
    if uses["state"]:
        state = f" and {target.num_kv_caches} x {_size(uses['state'])} state, read and written per token"
    return f"{weights}, at most {target.num_kv_caches} x {_size(uses['cache'])} KV cache{form}{state}{_kept(target)}"


def _windows(target: Target) -> str:
    return "all positions of windowed layers, too" if target.whole_windows else "of windowed layers a ring of positions"


def _kept(target: Target) -> str:
    of_host = f" and {_size(target.kept_host_bytes)} of the host" if target.kept_host_bytes else ""
    return f", {_size(target.kept_bytes)}{of_host} for kept prefixes{_kept_states(target)}" if target.kept_bytes else ""


def _kept_states(target: Target) -> str:
    """What these are in both memories, of a model with a state, each copy of which is large."""
    spec, block = target.checkpoint.spec, BLOCK_TOKENS
    if not spec.is_recurrent:
        return ""
    if target.device == "cuda":
        from kog_dist.workers.cuda import kv_blocks

        shape = gpu_rank_shape(target.checkpoint, 0, target.world_size, target.kv_dtype)
        pools = [kv_blocks.pool_slots(shape, num_bytes) for num_bytes in (target.kept_bytes, target.kept_host_bytes)]
        block, (blocks, states) = kv_blocks.block_tokens(shape), map(sum, zip(*pools, strict=True))
    else:
        blocks, states = pool_slots(spec, spec.num_lanes // target.world_size, SINGLE_BYTES, target.kept_bytes)
    return f" ({states} copies of the state, {blocks * block} tokens)"


def _gpu_ceiling(target: Target) -> list[str]:
    """What memory and waits in a row allow: every rank reads its tape for each token, all at the same time, and its KV cache.

    Of experts it reads those that are chosen; a state it reads and writes.
    """
    spec = target.checkpoint.spec
    chosen = spec.num_ffns_read / spec.num_ffns
    ranks = [gpu_rank_bytes(target.checkpoint, r, target.world_size, target.kv_dtype) for r in range(target.world_size)]
    known = min((gpu.peak_bytes_s for gpu in target.gpus), default=0.0)
    peak, source = (known, "memory clock x bus width") if known else (_H200_PEAK_BYTES_S, "the data sheet of an H200")
    steady = [uses["tape"] + chosen * uses.get("experts", 0) + 2 * uses.get("states", 0) for uses in ranks]
    read = (max(own + share * uses["cache"] for own, uses in zip(steady, ranks, strict=True)) for share in (0, 1))
    empty, full = (most_tokens_per_s(spec, num_bytes, peak) for num_bytes in read)
    return [
        f"ceiling    {empty:,.0f} tokens/s with an empty KV cache, {full:,.0f} with a full one: what a rank reads at "
        f"{peak / 1e12:.1f} TB/s for each GPU",
        f"           (from {source}), or {LAYER_S * 1e6:.0f} us of waits in each layer if they take longer; "
        "communication not counted",
    ]


def _cpu_ceiling(target: Target) -> list[str]:
    """What memory bandwidth alone allows: a decode step reads all weights but the embedding once, and reads and writes states."""
    uses = [cpu_rank_bytes(target, rank) for rank in range(target.world_size)]
    read_bytes = sum(of_rank["read"] + 2 * of_rank["state"] for of_rank in uses)
    measured = _read_bandwidth()
    rate = measured / read_bytes
    return [
        f"ceiling    {rate:,.{0 if rate >= 10 else 2}f} tokens/s here: {read_bytes / _MIB:.1f} MiB per token at "
        f"{measured / 1e9:.1f} GB/s (one core, main memory, measured just now); a model that fits the caches can exceed it",
    ]


def _size(num_bytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= unit), (2**10, "KiB"))
    return f"{num_bytes / unit:.1f} {name}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _read_bandwidth() -> float:
    """Bytes per second that one core reads from an array larger than the caches: the best of three passes."""
    probe = np.ones(_PROBE_BYTES // 8, np.int64)
    best_s = float("inf")
    for _ in range(3):
        begin_s = time.perf_counter()
        np.bitwise_or.reduce(probe)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return _PROBE_BYTES / best_s
