"""`kog-bench prefill`: time from a prompt to its first token on one GPU, and what its operations cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kog_dist.bench.kernel import prefill_ranks
from kog_dist.bench.kernel.gpu import free_memory, gpu_name, require_gpus
from kog_dist.bench.kernel.prefill_operations import cases, row_bits
from kog_dist.bench.kernel.prefill_ranks import first_token
from kog_dist.bench.kernel.prefill_stops import stops
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.shapes import SEED, named_shape, named_spec, random_checkpoint
from kog_dist.cuda.driver import Graph
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.runtime.notes import Watch
from kog_dist.workers.cuda.coded_source import codings_of
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_weights
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES
from kog_dist.workers.prefill.base.matrices import Matrices
from kog_dist.workers.prefill.gpu import (
    DEFAULT,
    GraphRunner,
    matrices_for,
    prefill_by,
    runner_for,
)
from kog_dist.workers.prefill.prefill import Prefill

_TO_1024, _TO_2048 = (tuple(size for size in CHUNK_SIZES if size <= largest) for largest in (1024, 2048))
CHOICES = {  # what could be the default
    "default": DEFAULT,
    "to 1024": replace(DEFAULT, sizes=_TO_1024),
    "to 2048": replace(DEFAULT, sizes=_TO_2048),
    "powers of two": replace(DEFAULT, sizes=(128, 256, 512, 1024, 2048, 4096)),
}
_CACHED, _ADDED = 3900, 50  # a conversation that goes on
_REPEATS_OF_OPERATIONS = 20
_RESTED_REPEATS = 5
_PAUSE_S = 0.15  # of an engine that waits for a request: long products draw so much power that the GPU slows down


def run(
    model: str | None,
    spec_name: str,
    prompts: tuple[int, ...],
    repeats: int,
    choices: tuple[str, ...],
    *,
    with_load: bool,
    only_prompts: bool,
    num_stops: int = 0,
) -> None:
    """Measure and print the report; its last line is one JSON object."""
    configuration: dict[str, object] = {"model": model or f"{spec_name}, random weights", "repeats": repeats, "gpu": gpu_name()}
    before = machine()
    figures: dict[str, Any] = {}
    if with_load:
        figures["load"] = _load(model, spec_name)
    kernel, matrices = _kernel(model, spec_name)
    longest = kernel.shape.spec.max_context - 1
    if max(prompts) > longest:
        raise ConfigError(f"--prompts {max(prompts)}: the model's context leaves room for {longest} tokens")
    figures["prompts"], figures["graphs"] = [], []
    for choice in choices:
        tuning = CHOICES[choice].within(kernel.shape.spec)
        begin_s, watch = time.monotonic(), Watch()
        runner = runner_for(kernel, matrices, tuning=tuning, ended=watch.ended)
        made_s = round(time.monotonic() - begin_s, 2)
        print(f"{choice}: captured in {watch}, {runner.buffers.num_bytes / 1e9:.2f} GB beside the weights", flush=True)
        prefill = prefill_by(runner, tuning)
        for figure in _measure(kernel, prefill, prompts, repeats):
            figures["prompts"].append({"choice": choice, "captured_s": made_s, **figure})
        if num_stops:
            figures.setdefault("stops", []).append({"choice": choice, **_stops(kernel, prefill, max(prompts), num_stops)})
        figures["graphs"] += [{"choice": choice, **figure} for figure in _graphs(runner)]
        if choice == choices[0] and not only_prompts:
            figures["operations"] = _operations(runner, tuning.sizes)
            figures["rows_have_the_bits_of_the_largest_block"] = row_bits(runner, tuning.sizes)
        del runner, prefill
        free_memory()
    finish("prefill", configuration, before, figures)


def run_on_several(
    spec_name: str, gpu_counts: tuple[int, ...], prompts: tuple[int, ...], repeats: int, choices: tuple[str, ...]
) -> None:
    """The prompts on several GPUs, a process each. Prints the report; its last line is one JSON object."""
    configuration = {"model": f"{spec_name}, random weights", "repeats": repeats, "gpu": require_gpus(max(gpu_counts))}
    before = machine()
    cases = _cases(prompts, named_shape(spec_name)[0].max_context)
    figures = [
        figure
        for count in gpu_counts
        for choice in choices
        for figure in prefill_ranks.run(spec_name, count, cases, repeats, choice)
    ]
    finish("prefill", configuration, before, {"prompts": figures})


def _cases(prompts: Sequence[int], max_context: int) -> list[tuple[int, int]]:
    """Lengths of prompts, and how much of each is cached: nothing, and a conversation that goes on."""
    cases = [(length, 0) for length in prompts]
    return [*cases, (_CACHED + _ADDED, _CACHED)] if max_context > _CACHED + _ADDED else cases


def _kernel(model: str | None, spec_name: str) -> tuple[Monokernel, Matrices]:
    if model is not None:
        checkpoint = open_checkpoint(Path(model), verify=False)
        lanes, codings = range(checkpoint.spec.num_lanes), codings_of(checkpoint)
        shape = KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype=checkpoint.dtype, **codings)
        matrices, observe = matrices_for(shape)
        return Monokernel(shape, load_weights(shape, checkpoint, observe)), matrices
    spec, codings = named_shape(spec_name)
    shape = KernelShape(spec, range(spec.num_lanes), **codings)
    matrices, observe = matrices_for(shape)
    return Monokernel(shape, random_weights(shape, SEED, observe)), matrices


def _measure(kernel: Monokernel, prefill: Prefill, prompts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Prefill and first token of each length, then of a conversation that goes on: in a row, and after a pause each."""
    max_context = kernel.shape.spec.max_context
    ids = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, max_context).tolist()
    figures = []
    for length, cached in _cases(prompts, max_context):
        run = partial(first_token, kernel, prefill, ids[:length], cached)
        run()
        times = [run() for _ in range(repeats)]
        rested = []
        for _ in range(min(repeats, _RESTED_REPEATS)):
            time.sleep(_PAUSE_S)
            rested.append(run())
        medians = [round(1e3 * percentile([time_s[i] for time_s in some], 0.5), 3) for some in (times, rested) for i in range(2)]
        figure = {
            "prompt": length,
            "cached": cached,
            "prefill_ms": medians[0],
            "first_token_ms": medians[1],
            "p99_first_token_ms": round(1e3 * percentile([time_s[1] for time_s in times], 0.99), 3),
            "prefill_after_pause_ms": medians[2],
            "first_token_after_pause_ms": medians[3],
        }
        figures.append(figure)
        print(
            f"  prompt {length:5}, {cached:5} cached: prefill {medians[0]:8.3f} ms, first token {medians[1]:8.3f} ms median, "
            f"{figure['p99_first_token_ms']:8.3f} p99; after a pause {medians[2]:8.3f}, {medians[3]:8.3f}",
            flush=True,
        )
    return figures


def _stops(kernel: Monokernel, prefill: Prefill, length: int, count: int) -> dict[str, object]:
    """Within a whole prompt of `length` tokens."""
    ids = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, length).tolist()

    def run(should_stop: Callable[[], bool]) -> int:
        prefill.forget(0)
        return prefill.run(ids, 0, should_stop=should_stop)

    return {"prompt": length, **stops(run, count)}


def _graphs(runner: GraphRunner) -> list[dict[str, object]]:
    """Microseconds of each graph at the beginning of the context: what its operations take, and the gaps between them."""
    import cupy

    figures = []
    for size, graph in sorted(runner.graphs.items()):
        figure: dict[str, object] = {"graph": size}
        for name, measured in (("us", graph), ("end_us", runner.ends[size])):
            times = []
            for _ in range(5):
                if measured is graph:
                    runner.buffers.next_start.fill(0)
                runner.buffers.last_position[...] = runner.rows(size).place[:1] * (measured is not graph) + size - 1
                cupy.cuda.Device().synchronize()
                times.append(_graph_us(runner, measured))
            figure[name] = round(percentile(times, 0.5), 1)
        figures.append(figure)
    cells = [f"{figure['graph']} rows: {figure['us']} and {figure['end_us']}" for figure in figures]
    print("  us of a graph, and of the rest of the last token:", ", ".join(cells), flush=True)
    return figures


def _graph_us(runner: GraphRunner, graph: Graph) -> float:
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(runner.stream)
    graph.launch(runner.stream.ptr)
    end.record(runner.stream)
    end.synchronize()
    return 1000 * float(cupy.cuda.get_elapsed_time(begin, end))


def _operations(runner: GraphRunner, sizes: Sequence[int]) -> list[dict[str, object]]:
    """Microseconds of every operation by itself, in a chunk at position 0 and one at the end of the context."""
    figures: list[dict[str, Any]] = []
    for size in sizes:
        cells = []
        for name, operation, flops, num_bytes in cases(runner, size):
            us = _time_us(runner, operation)
            figure = {"size": size, "operation": name, "us": round(us, 1)}
            figure |= {"tflop_per_s": round(flops / us / 1e6, 1)} if flops else {}
            figure |= {"tb_per_s": round(num_bytes / us / 1e6, 2)} if num_bytes else {}
            figures.append(figure)
            rate = f" ({flops / us / 1e6:.0f} TFLOP/s)" if flops else f" ({num_bytes / us / 1e6:.1f} TB/s)" if num_bytes else ""
            cells.append(f"{name} {us:.1f}{rate}")
        print(f"  us at {size} rows: {', '.join(cells)}", flush=True)
    return figures


def _time_us(runner: GraphRunner, operation: Callable[[], object]) -> float:
    """Of one run among many in a graph. Small matrices are then found in the L2 cache, which in a chunk they are not."""
    import cupy

    cupy.cuda.Device().synchronize()
    graph, events = Graph(), [cupy.cuda.Event() for _ in range(5)]
    with runner.stream:
        operation()
        runner.stream.synchronize()
        with graph.captured_from(runner.stream.ptr):
            for _ in range(_REPEATS_OF_OPERATIONS):
                operation()
        for event in events:
            graph.launch(runner.stream.ptr)
            event.record(runner.stream)
        runner.stream.synchronize()
    times = [1000 * cupy.cuda.get_elapsed_time(a, b) / _REPEATS_OF_OPERATIONS for a, b in itertools.pairwise(events)]
    return percentile(times, 0.5)


def _load(model: str | None, spec_name: str) -> dict[str, float]:
    """Seconds from a checkpoint in the page cache to weights on the GPU, without and with the matrices of prefill."""
    import cupy

    made = nullcontext(Path(model)) if model else random_checkpoint(named_spec(spec_name), None)
    times: dict[str, float] = {}
    with made as path:
        checkpoint = open_checkpoint(path, verify=False)
        lanes = range(checkpoint.spec.num_lanes)
        shape = KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype=checkpoint.dtype)
        for name in ("first", "without", "with"):
            matrices, observe = matrices_for(shape)
            begin_s = time.monotonic()
            weights = load_weights(shape, checkpoint, observe if name == "with" else None)
            cupy.cuda.Device().synchronize()
            times[name] = round(time.monotonic() - begin_s, 3)
            del weights, matrices, observe
            free_memory()
    print(f"loading: {times['without']} s, with the matrices of prefill {times['with']} s", flush=True)
    return times
