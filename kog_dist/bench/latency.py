"""`kog-bench latency`: the monokernel's time per token by context, beside the ceiling of the same tape, ring and machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.bench.report import finish, machine, percentile
from kog_dist.decode.sampling import Sampling
from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import STAMP_KINDS, Monokernel

_STREAMED_TOKENS = 50
_TRACED_STEP = 8


def run(
    model: str | None, spec_name: str, lane_counts: tuple[int, ...], contexts: tuple[int, ...], tokens: int, trace: str | None
) -> None:
    """Measure every lane count at every context and print the report; its last line is one JSON object."""
    before = machine()
    figures = []
    for lanes in lane_counts:
        kernel = _kernel(model, spec_name, lanes)
        shape = kernel.shape
        ceiling_us = kernel.stream_us(_STREAMED_TOKENS)
        tape_bytes = 2 * shape.tape_values * shape.num_ctas
        print(
            f"{lanes} lanes hosted: {tape_bytes / 1e6:.1f} MB per token, read alone in {ceiling_us:.1f} us "
            f"({tape_bytes / ceiling_us / 1e6:.3f} TB/s)"
        )
        for context in contexts:
            times_us = token_times_us(kernel, context, tokens)
            median = percentile(times_us, 0.5)
            figure = {
                "lanes": lanes,
                "context": context,
                "us_per_token": round(median, 1),
                "p99_us": round(percentile(times_us, 0.99), 1),
                "tokens_per_s": round(1e6 / median, 1),
                "tape_bytes": tape_bytes,
                "kv_bytes": kv_bytes_read(shape, context),
                "ceiling_us": round(ceiling_us, 1),
                "percent_of_ceiling": round(100 * ceiling_us / median, 1),
            }
            figures.append(figure)
            print(
                f"  context {context:5}: {median:8.1f} us median, {figure['p99_us']:8.1f} p99, {figure['tokens_per_s']:8.1f} "
                f"tokens/s, {figure['percent_of_ceiling']:5.1f} % of the ceiling",
                flush=True,
            )
        if trace is not None:
            write_trace(kernel, contexts[0], Path(trace) / f"token-{lanes}-lanes.json")
        del kernel
        _free_memory()
    configuration = {"model": model or f"{spec_name}, random weights", "tokens": tokens, "gpu": _gpu_name()}
    finish("latency", configuration, before, figures)


def _kernel(model: str | None, spec_name: str, lanes: int, **options: Any) -> Monokernel:
    from kog_dist.workers.cuda.device_weights import random_weights
    from kog_dist.workers.cuda.load import load_weights

    if model is None:
        specs = {"2b": laneformer_2b}
        if spec_name not in specs:
            raise ConfigError(f"--spec {spec_name!r} is not known; known: {', '.join(specs)}")
        shape = KernelShape(specs[spec_name](), _hosted(specs[spec_name](), lanes), **options)
        return Monokernel(shape, random_weights(shape, seed=1))
    from kog_dist.model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(model), verify=False)
    hosted = _hosted(checkpoint.spec, lanes)
    shape = KernelShape(checkpoint.spec, hosted, weight_dtype=checkpoint.dtype, kv_dtype=checkpoint.dtype, **options)
    return Monokernel(shape, load_weights(shape, checkpoint))


def _hosted(spec: ModelSpec, lanes: int) -> range:
    if lanes > spec.num_lanes:
        raise ConfigError(f"--lanes {lanes}: the model has {spec.num_lanes}")
    return range(lanes)


def token_times_us(kernel: Monokernel, context: int, tokens: int) -> list[float]:
    """Time of each of `tokens` - 1 steps of one launch that begins with `context` - 1 positions in the KV cache."""
    import cupy

    max_context = kernel.shape.spec.max_context
    steps = min(tokens, max_context - context - 1)
    if steps < 2:
        raise ConfigError(f"a context of {context} leaves no room for tokens; the model's context is {max_context}")
    stamps = cupy.zeros(steps, cupy.uint64)
    prompt = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, context).tolist()
    kernel.begin(prompt, max_context, Sampling(), first_position=context - 1)
    kernel.launch(steps, stamps)
    kernel.finish()
    times: list[float] = (np.diff(stamps.get().astype(np.int64)) / 1000).tolist()
    return times


def kv_bytes_read(shape: KernelShape, context: int) -> int:
    """Bytes of keys and values that a step at this context reads."""
    spec = shape.spec
    positions = sum(min(context, spec.window(i) or context) for i in range(spec.num_layers))
    return positions * shape.num_lanes * spec.lane_kv_heads * 2 * spec.head_dim * 2


def write_trace(kernel: Monokernel, context: int, path: Path) -> None:
    """Write one token's time stamps of all thread blocks as a Chrome trace, which Perfetto opens; times in us."""
    import cupy

    shape = replace(kernel.shape, traced_step=_TRACED_STEP)
    traced = Monokernel(shape, kernel.weights)
    stamps = cupy.zeros(_TRACED_STEP + 2, cupy.uint64)
    prompt = [1] * context
    traced.begin(prompt, shape.spec.max_context, Sampling(), first_position=context - 1)
    traced.launch(_TRACED_STEP + 2, stamps)
    traced.finish()
    assert traced.trace is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_events(traced.trace.get(), shape)}), encoding="utf-8")


def trace_events(stamps: NDArray[np.uint64], shape: KernelShape) -> list[dict[str, Any]]:
    """Chrome trace events of stamps (thread blocks, kinds, products): one process per thread block, one track per kind."""
    names = ("qkv", "out", "gate_up", "down")
    first = int(stamps[stamps > 0].min())
    events = []
    for cta, kinds in enumerate(stamps):
        for kind, products in enumerate(kinds):
            for product in np.nonzero(products)[0].tolist():
                layer, rest = divmod(product, 4 * shape.num_lanes)
                phase, lane = divmod(rest, shape.num_lanes)
                label = "head" if layer == shape.spec.num_layers else f"{names[phase]} layer {layer} lane {lane}"
                event = {"name": f"{label} {STAMP_KINDS[kind]}", "ph": "X", "pid": cta, "tid": kind, "dur": 0.3}
                events.append({**event, "ts": (int(products[product]) - first) / 1000})
    return events


def _free_memory() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def _gpu_name() -> str:
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode())
