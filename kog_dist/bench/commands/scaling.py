"""`kog-bench scaling`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.files import writing
from kog_dist.bench.options import SAMPLING_HELP, Output, builds_of, counts_of, samplings_of, times_of
from kog_dist.bench.report import check_destination
from kog_dist.errors import ConfigError


def scaling(
    model: Annotated[bool, typer.Option("--model", help="Predict from a simulation instead of measuring.")] = False,
    spec: Annotated[str, typer.Option(help="Shape: 2b, llama-3.1-8b, ...; a wrong one lists all.")] = "2b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,2,4",
    contexts: Annotated[str, typer.Option(help="Positions in the KV cache.")] = "64,512,4000",
    tokens: Annotated[int, typer.Option(help="Tokens of a measurement.")] = 200,
    repeats: Annotated[int, typer.Option(help="Short launches whose bits are compared.")] = 20,
    long_run: Annotated[bool, typer.Option("--long-run", help="Also one launch to the end of the context; its tokens.")] = False,
    yardstick: Annotated[bool, typer.Option("--yardstick", help="Also, in turn, with the delayed sums left out.")] = False,
    builds: Annotated[
        str, typer.Option(help="Also other builds, in turn, by options of TrialShape (max_slots=8;pieces=1,pieces_in_flight=3).")
    ] = "",
    trace: Annotated[str | None, typer.Option(help="Also trace a token on each number of GPUs; folder for the pictures.")] = None,
    lanes_us: Annotated[
        str,
        typer.Option(help="Measured on one GPU, us per token by hosted lanes: 8:1122,4:584,2:343,1:240. The costs are fitted."),
    ] = "",
    gpus_us: Annotated[str, typer.Option(help="Measured on several GPUs, to compare with: 1:1122,2:590,4:350.")] = "",
    peer_hop_us: Annotated[
        float | None, typer.Option(help="Publish to visible on another GPU, 1 unless given; `kog-bench collectives` measures it.")
    ] = None,
    measured: Annotated[
        str, typer.Option(help="Files with the output of latency, scaling and collectives, instead of these three: A,B.")
    ] = "",
    context: Annotated[int, typer.Option(help="Of the figures that are taken from --measured.")] = 64,
    sampling: Annotated[str, typer.Option(help=SAMPLING_HELP)] = "",
    kv_dtype: Annotated[str, typer.Option(help="Format of the KV cache: bfloat16, float16, fp8, int4.")] = "bfloat16",
    memory_alone: Annotated[
        bool, typer.Option("--memory-alone", help="Also the time that reading the weights alone takes.")
    ] = False,
    filled: Annotated[
        bool, typer.Option("--filled", help="A KV cache full of keys and values, instead of zeros: without windowed layers.")
    ] = False,
    output: Output = None,
) -> None:
    """Microseconds per token on several GPUs, or a prediction. Whether the bits are the same, too (else code 1)."""
    from kog_dist.bench.kernel import scaling as benchmark
    from kog_dist.bench.kernel.scaling_files import measured_in
    from kog_dist.bench.shapes import named_shape

    if not model:
        from kog_dist.bench.kernel import scaling_run
        from kog_dist.workers.cuda import kv_format

        check_destination(trace)
        if kv_dtype not in kv_format.NAMES:
            raise ConfigError(f"--kv-dtype must be one of {', '.join(kv_format.NAMES)}, got {kv_dtype!r}")
        if filled and named_shape(spec)[0].window_layers:
            raise ConfigError(f"--filled is for shapes without windowed layers, and {spec} has some; leave it out")
        counts, samplings = counts_of(gpus, "--gpus"), samplings_of(sampling)
        plan = scaling_run.ScalingPlan(
            spec, counts_of(contexts, "--contexts"), tokens, repeats, samplings,
            long_run=long_run, yardstick=yardstick, builds=builds_of(builds), trace=trace, kv_dtype=kv_dtype,
            memory_alone=memory_alone, filled=filled,
        )  # fmt: skip
        with writing(output):
            raise typer.Exit(0 if scaling_run.run(plan, counts) else 1)
    if kv_dtype != "bfloat16" or memory_alone or filled:
        raise ConfigError("--kv-dtype, --memory-alone and --filled are for measurements; leave them out of --model")
    if peer_hop_us is not None and not peer_hop_us > 0:
        raise ConfigError("--peer-hop-us must be more than 0")
    files = measured_in([Path(name) for name in measured.split(",") if name], context)
    hop_us, rate = peer_hop_us or files.peer_hop_us, files.stream_kb_per_us
    costs = benchmark.Costs()
    costs = replace(costs, peer_hop_us=hop_us or costs.peer_hop_us, stream_kb_per_us=rate or costs.stream_kb_per_us)
    lanes = files.lanes_us | times_of(lanes_us, "--lanes-us")
    measured_us = files.gpus_us | times_of(gpus_us, "--gpus-us")
    with writing(output):
        good = benchmark.run(named_shape(spec)[0], spec, lanes, measured_us, costs, has_ceiling=rate is not None)
    raise typer.Exit(0 if good else 1)
