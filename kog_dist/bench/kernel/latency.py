"""`kog-bench latency`: the monokernel's time per token by context, beside the ceiling of the same tape, ring and machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.bench.kernel import sampling as processed_requests
from kog_dist.bench.kernel.gpu import free_memory, gpu_name
from kog_dist.bench.kernel.stream import stream_us
from kog_dist.bench.kernel.token_times import expect_random, token_times_us
from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.bench.report import drawn, finishing, machine, percentile
from kog_dist.bench.shapes import SEED, named_shape
from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.control import ControlPage
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel

if TYPE_CHECKING:
    from kog_dist.bench.kernel.trace import Trace

_STREAMED_TOKENS, _COUNTED_PASSES = 50, 16
TRACED_STEP = 8
_BASELINE_BUDGET_S = 60.0  # after which no further context is compiled


def run(
    model: str | None,
    spec_name: str,
    lane_counts: tuple[int, ...],
    contexts: tuple[int, ...],
    tokens: int,
    trace: str | None,
    baselines: tuple[str, ...],
    samplings: tuple[str, ...] = (),
    kv_dtype: str | None = None,
    router_skew: float = 1.0,
    *,
    whole_windows: bool = False,
    pass_tokens: int = 1,
    requests: int = 1,
) -> None:
    """Measure every lane count at every context and print the report; its last line is one JSON object."""
    configuration: dict[str, object] = {"model": model or f"{spec_name}, random weights", "tokens": tokens, "gpu": gpu_name()}
    if kv_dtype is not None:
        configuration["kv_dtype"] = kv_dtype
    if router_skew != 1:
        configuration["router_skew"] = router_skew
    if whole_windows:
        configuration["whole_windows"] = True
    if pass_tokens != 1:
        configuration["pass_tokens"] = pass_tokens
    if requests != 1:
        configuration["requests"] = requests
    before = machine()
    figures: list[dict[str, Any]] = []
    traces: dict[str, object] = {}
    with finishing("latency", configuration, before, figures):
        for lanes in lane_counts:
            page = _mask_page(model, spec_name) if samplings else None
            kernel = _kernel(
                model,
                spec_name,
                lanes,
                kv_dtype,
                router_skew,
                page=page,
                whole_windows=whole_windows,
                pass_tokens=pass_tokens,
                requests=requests,
            )
            _measure(kernel, contexts, tokens, figures, requests)
            if page is not None:
                at = _nearest(contexts, 512)
                figures += processed_requests.figures(
                    processed_requests.times_us(kernel, page, samplings, at, tokens), at, lanes=lanes
                )
                kernel.close()
                page.close()
            if trace is not None:
                configuration["traces_us"] = traces
                traces[str(lanes)] = write_trace(kernel, _nearest(contexts, 512), Path(trace) / f"token-{lanes}-lanes")
            spec = kernel.shape.spec
            del kernel
            free_memory()
        for form in baselines:
            figures += _measure_baseline(spec, form, contexts, tokens)


def _measure(kernel: Monokernel, contexts: tuple[int, ...], tokens: int, figures: list[dict[str, Any]], requests: int) -> None:
    """Add a figure for each context to `figures` as soon as it is there."""
    shape = kernel.shape
    ceiling_us = stream_us(kernel, _STREAMED_TOKENS)
    tape_bytes = shape.tape.read_bytes
    print(
        f"{shape.num_lanes} lanes hosted: {tape_bytes / 1e6:.1f} MB per token, read alone in {ceiling_us:.1f} us "
        f"({tape_bytes / ceiling_us / 1e6:.3f} TB/s)"
    )
    for context in contexts:
        times_us = token_times_us(kernel, context, tokens, requests=requests)
        of_pass: dict[str, float] = {}
        if shape.experts is not None and shape.tokens > 1:
            each = shape.tokens * shape.experts.per_token
            num_experts = experts_of_pass(kernel, context) if shape.experts.unites else each
            tape_bytes, of_pass = shape.tape.pass_bytes(num_experts), {"experts_per_layer": round(num_experts, 2)}
        median, kv_bytes = percentile(times_us, 0.5), requests * kv_bytes_read(shape, context)
        state_bytes = 0 if shape.delta is None else 2 * requests * shape.delta.num_bytes  # read and written
        all_bytes = tape_bytes + kv_bytes + state_bytes
        figure = {
            "lanes": shape.num_lanes,
            "context": context,
            "num_steps": len(times_us),
            "us_per_token": round(median, 1),
            "p99_us": round(percentile(times_us, 0.99), 1),
            "tokens_per_s": round(1e6 / median, 1),
            "tape_bytes": tape_bytes,
            "kv_bytes": kv_bytes,
            "state_bytes": state_bytes,
            "bytes_per_token": all_bytes,
            "tb_per_s": round(all_bytes / median / 1e6, 3),
            "ceiling_us": round(ceiling_us, 1),
            "percent_of_ceiling": round(100 * ceiling_us / median, 1),
            **of_pass,
        }
        figures.append(figure)
        print(
            f"  context {context:5}: {median:8.1f} us median, {figure['p99_us']:8.1f} p99, "
            f"{figure['tokens_per_s']:8.1f} tokens/s, {figure['bytes_per_token'] / 1e6:.1f} MB per token, "
            f"{figure['percent_of_ceiling']:5.1f} % of the ceiling"
            + "".join(f", {number} experts in a layer" for number in of_pass.values()),
            flush=True,
        )


def experts_of_pass(kernel: Monokernel, context: int) -> float:
    """How many different experts a pass of random tokens at this context reads in a layer, by mean."""
    shape, most = kernel.shape, kernel.shape.spec.max_context
    assert shape.experts is not None
    checked = Monokernel(replace(shape, checks_experts=True), kernel.weights)
    expect_random(checked)
    prompt = np.random.default_rng(1).integers(0, shape.spec.vocab_size, context).tolist()
    checked.begin(prompt, most, SamplingParams(), first_position=context - 1)
    counts = list[int]()
    for _ in range(_COUNTED_PASSES):
        first = int(checked.state()["position"])
        checked.launch(1)
        checked.finish()
        choices = checked.choices(first, min(first + shape.tokens, most))[:, :, 0]
        numbers = choices[:, :, None] >> np.arange(0, 8 * shape.experts.per_token, 8, dtype=np.uint64) & np.uint64(0xFF)
        counts += [np.unique(numbers[:, layer]).size for layer in range(shape.spec.num_layers)]
    return float(np.mean(counts))


def _measure_baseline(spec: ModelSpec, form: str, contexts: tuple[int, ...], tokens: int) -> list[dict[str, object]]:
    """The compiled torch decoder on the same shape, at the most telling context first."""
    from kog_dist.bench.kernel import torch_baseline

    first = _nearest(contexts, 512)
    ordered = (first, *(context for context in sorted(contexts, reverse=True) if context != first))
    try:
        figures = torch_baseline.measure(spec, form, ordered, tokens, _BASELINE_BUDGET_S)
    except Exception as error:  # torch's compiler is not ours: what the kernel measured must not be lost with it
        print(f"compiled torch, {form}: {type(error).__name__}: {error}", flush=True)
        return [{"baseline": "compiled torch in a CUDA graph", "form": form, "error": f"{type(error).__name__}: {error}"}]
    for figure in figures:
        print(
            f"compiled torch, {form}, {figure['product']}, context {figure['context']:5}: {figure['us_per_token']:8.1f} us "
            f"median, {figure['p99_us']:8.1f} p99, compiled in {figure['compile_s']:.0f} s",
            flush=True,
        )
    return [{"baseline": "compiled torch in a CUDA graph", **figure} for figure in figures]


def _nearest(contexts: tuple[int, ...], wanted: int) -> int:
    return min(contexts, key=lambda context: abs(context - wanted))


def _mask_page(model: str | None, spec_name: str) -> ControlPage:
    """A control page, for its masks alone."""
    from kog_dist.model.checkpoint import open_checkpoint

    spec = named_shape(spec_name)[0] if model is None else open_checkpoint(Path(model), verify=False).spec
    return ControlPage.create(1, spec.max_context, vocab_size=spec.vocab_size)


def _kernel(
    model: str | None,
    spec_name: str,
    lanes: int,
    kv_dtype: str | None,
    router_skew: float,
    page: ControlPage | None,
    *,
    whole_windows: bool,
    pass_tokens: int,
    requests: int,
) -> Monokernel:
    from kog_dist.workers.cuda.load import load_weights
    from kog_dist.workers.cuda.random_weights import random_weights

    together: dict[str, Any] = {"num_slots": requests, "num_caches": requests, "company": (requests,) * (requests > 1)}
    if model is None:
        spec, codings = named_shape(spec_name)
        hosted, own_type = _hosted(spec, lanes), kv_dtype or "bfloat16"
        shape: KernelShape = TrialShape(
            spec, hosted, kv_dtype=own_type, whole_windows=whole_windows, tokens=pass_tokens, **codings
        )
        weights = random_weights(shape, SEED, router_skew=router_skew)
        return Monokernel(shape, weights, processors=page is not None, masks=() if page is None else (page.masks,), **together)
    from kog_dist.model.checkpoint import open_checkpoint
    from kog_dist.workers.cuda.coded_source import codings_of

    checkpoint = open_checkpoint(Path(model), verify=False)
    hosted = _hosted(checkpoint.spec, lanes)
    dtype, codings = checkpoint.dtype, codings_of(checkpoint)
    own_type = kv_dtype or dtype
    shape = KernelShape(checkpoint.spec, hosted, weight_dtype=dtype, kv_dtype=own_type, tokens=pass_tokens, **codings)
    weights = load_weights(shape, checkpoint)
    return Monokernel(shape, weights, processors=page is not None, masks=() if page is None else (page.masks,), **together)


def _hosted(spec: ModelSpec, lanes: int) -> range:
    if lanes > spec.num_lanes:
        raise ConfigError(f"--lanes {lanes}: the model has {spec.num_lanes}")
    return range(lanes)


def kv_bytes_read(shape: KernelShape, context: int) -> int:
    """Bytes of keys and values that a step at this context reads."""
    spec = shape.spec
    positions = sum(min(context, spec.window(layer) or context) for layer in shape.cache.layers)
    return positions * shape.cache.kv_heads * shape.cache.batch_bytes // 16


def write_trace(kernel: Monokernel, context: int, path: Path) -> dict[str, Any]:
    """Trace one token: a Chrome trace (`path`.json), a picture (`path`.png) and a table on stdout. Returns the summary."""
    trace = traced_token(Monokernel(replace(kernel.shape, traced_step=TRACED_STEP), kernel.weights), context)
    print(trace.text(), flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps({"traceEvents": trace.chrome_events()}), encoding="utf-8")
    draw_trace(trace, path.with_suffix(".png"))
    return trace.summary()


def traced_token(kernel: Monokernel, context: int) -> Trace:
    """The trace of a token of a kernel whose `traced_step` is TRACED_STEP."""
    import cupy

    from kog_dist.bench.kernel.trace import Trace

    stamps = cupy.zeros(TRACED_STEP + 2, cupy.uint64)
    kernel.begin([1] * context, kernel.shape.spec.max_context, SamplingParams(), first_position=context - 1)
    kernel.launch(TRACED_STEP + 2, stamps)
    kernel.finish()
    assert kernel.trace is not None
    return Trace(kernel.trace.get(), kernel.shape)


def draw_trace(trace: Trace, path: Path) -> None:
    """A picture, if it can be drawn."""

    def draw() -> None:
        from kog_dist.bench.kernel import trace_picture

        path.parent.mkdir(parents=True, exist_ok=True)
        trace_picture.draw(trace, path)

    drawn(draw)
