"""`kog-bench latency`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.files import writing
from kog_dist.bench.options import SAMPLING_HELP, Output, counts_of, samplings_of
from kog_dist.bench.report import check_destination
from kog_dist.errors import ConfigError


def latency(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights: 2b, llama-3.1-8b, ...; a wrong one lists all.")] = "2b",
    random: Annotated[bool, typer.Option("--random", help="Random weights of the shape --spec.")] = False,
    lanes: Annotated[str, typer.Option(help="Hosted lanes to measure: 8,4,2,1. Fewer than the model's: no peers' sums.")] = "8",
    contexts: Annotated[str, typer.Option(help="Context lengths.")] = "64,512,2048,4000",
    tokens: Annotated[int, typer.Option(help="Tokens at each context.")] = 200,
    trace: Annotated[
        str | None, typer.Option(help="Folder for a Chrome trace (Perfetto) and a picture of one token for each lane count.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(help="Measure compiled torch in a CUDA graph, too: lanes, dense (one wide lane), or lanes,dense.")
    ] = "",
    sampling: Annotated[str, typer.Option(help=SAMPLING_HELP)] = "",
    kv_dtype: Annotated[
        str | None, typer.Option(help="Format of the KV cache: bfloat16, float16, fp8, int4; none: the weights' type.")
    ] = None,
    router_skew: Annotated[
        float, typer.Option(min=1.0, help="Router rows of some random experts, which are chosen more often, are so much larger.")
    ] = 1.0,
    whole_windows: Annotated[
        bool, typer.Option("--whole-windows", help="Windowed layers of a shape keep all positions, as with kv_windows whole.")
    ] = False,
    pass_tokens: Annotated[
        int, typer.Option(help="Tokens of a pass of the weights: 1, 2 or 4, all different; times are those of a pass.")
    ] = 1,
    requests: Annotated[
        int, typer.Option(help="Requests of which a pass has a token each: 1, 2 or 4; times are those of a pass.")
    ] = 1,
    output: Output = None,
) -> None:
    """Microseconds per token of the kernel on one GPU. Beside the time that reading the weights alone takes."""
    from kog_dist.bench.kernel import latency as benchmark
    from kog_dist.bench.kernel.torch_baseline import FORMS
    from kog_dist.bench.shapes import named_shape
    from kog_dist.workers.cuda.kernel_boxes import COMPANY_SIZES

    if (model is None) == (not random):
        raise ConfigError("give MODEL or --random, one of the two")
    if tokens < 2:
        raise ConfigError("--tokens must be at least 2")
    baselines = tuple(part for part in baseline.split(",") if part)
    if not set(baselines) <= set(FORMS):
        raise ConfigError(f"--baseline must be one or more of {', '.join(FORMS)}, got {baseline!r}")
    if router_skew != 1 and (model is not None or named_shape(spec)[0].experts is None):
        raise ConfigError("--router-skew is for random weights of a shape with experts: --random --spec qwen3-30b-a3b")
    if whole_windows and (model is not None or not named_shape(spec)[0].window_layers):
        raise ConfigError("--whole-windows is for random weights of a shape with windowed layers: --random --spec gpt-oss-20b")
    if pass_tokens != 1 and sampling:
        raise ConfigError("--sampling is for passes of one token: leave out --pass-tokens")
    if requests not in (1, *COMPANY_SIZES):
        raise ConfigError(f"--requests must be 1 or one of {', '.join(map(str, COMPANY_SIZES))}, got {requests}")
    if requests != 1 and (sampling or trace is not None or pass_tokens != 1):
        raise ConfigError("--requests is for times alone: leave out --sampling, --trace and --pass-tokens")
    check_destination(trace)
    counts, samplings = counts_of(lanes, "--lanes"), samplings_of(sampling)
    with writing(output):
        benchmark.run(
            model, spec, counts, counts_of(contexts, "--contexts"), tokens, trace, baselines, samplings, kv_dtype, router_skew,
            whole_windows=whole_windows, pass_tokens=pass_tokens, requests=requests,
        )  # fmt: skip
