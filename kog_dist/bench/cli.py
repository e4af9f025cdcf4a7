"""`kog-bench`: measures what docs/results.md reports. The last line of every benchmark is one JSON object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.errors import ConfigError, KogError

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Measure an engine on this machine. The last line is one JSON object: commit, machine, configuration, figures.",
)  # fmt: skip

_SAMPLING_HELP = (
    "Compare kinds of sampling, the first with the others: greedy,temperature,top-p-logprobs,mask; a wrong one lists all."
)

Model = Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: the bundled demo model.")]


@app.command()
def decode(
    model: Model = None,
    ranks: Annotated[str, typer.Option(help="Rank counts to measure: 1,8.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 256,
    repeats: Annotated[int, typer.Option(help="Requests per rank count; the median counts.")] = 5,
    idle_s: Annotated[float, typer.Option(help="Seconds over which idle ranks are watched.")] = 5.0,
) -> None:
    """Tokens per second, time to be ready, and what idle ranks cost."""
    from kog_dist.bench import decode as benchmark

    counts = _counts(ranks)
    if tokens < 2 or repeats < 1 or not idle_s > 0:
        raise ConfigError("--tokens must be at least 2, --repeats at least 1, --idle-s more than 0")
    benchmark.run(model, counts, num_tokens=tokens, repeats=repeats, idle_s=idle_s)


@app.command()
def faults(
    model: Model = None,
    ranks: Annotated[int, typer.Option(help="Rank processes.")] = 4,
    kills: Annotated[int, typer.Option(help="Kills of each kind of process.")] = 20,
) -> None:
    """Kill every kind of process during a stream: time to the client's error, and until nothing is left."""
    from kog_dist.bench import faults as benchmark

    if kills < 1:
        raise ConfigError(f"--kills must be at least 1, got {kills}")
    benchmark.run(model, ranks, kills)


@app.command()
def load(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape to write a checkpoint of, with random weights: 2b.")] = "2b",
    folder: Annotated[
        str | None, typer.Option(help="Where that checkpoint is put meanwhile. Default: memory, if it fits.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Loads of each kind; the median counts.")] = 3,
) -> None:
    """Seconds from a checkpoint in the page cache to weights packed on one GPU."""
    from kog_dist.bench import load as benchmark

    if repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    benchmark.run(model, spec, folder, repeats)


@app.command()
def latency(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights: 2b.")] = "2b",
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
    sampling: Annotated[str, typer.Option(help=_SAMPLING_HELP)] = "",
) -> None:
    """Microseconds per token of the monokernel on one GPU, beside the time that reading the weights alone takes."""
    from kog_dist.bench import latency as benchmark
    from kog_dist.bench.torch_baseline import FORMS

    if (model is None) == (not random):
        raise ConfigError("give MODEL or --random, one of the two")
    if tokens < 2:
        raise ConfigError("--tokens must be at least 2")
    baselines = tuple(part for part in baseline.split(",") if part)
    if not set(baselines) <= set(FORMS):
        raise ConfigError(f"--baseline must be one or more of {', '.join(FORMS)}, got {baseline!r}")
    counts, samplings = _counts(lanes, "--lanes"), _samplings(sampling)
    benchmark.run(model, spec, counts, _counts(contexts, "--contexts"), tokens, trace, baselines, samplings)


@app.command()
def prefill(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights, if no MODEL is given: 2b.")] = "2b",
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,4000",
    repeats: Annotated[int, typer.Option(help="Prompts of each length; the median counts.")] = 10,
    choices: Annotated[
        str, typer.Option(help="Tunings separated by semicolons: default; no pairs; or all. A wrong one lists them.")
    ] = "default",
    load: Annotated[bool, typer.Option("--load", help="Measure loading with and without the matrices of prefill, too.")] = False,
    only_prompts: Annotated[bool, typer.Option("--only-prompts", help="Leave out the single operations.")] = False,
    gpus: Annotated[str, typer.Option(help="Prompts on so many GPUs instead: 2,4, a process each, random weights.")] = "1",
) -> None:
    """Milliseconds from a prompt to its first token on one GPU, and microseconds of each operation."""
    from kog_dist.bench import prefill as benchmark
    from kog_dist.bench import prefill_ranks

    present = benchmark.CHOICES if gpus == "1" else prefill_ranks.CHOICES
    names = tuple(present) if choices == "all" else tuple(part.strip() for part in choices.split(";"))
    if not set(names) <= set(present):
        raise ConfigError(f"--choices must be all or one or more of {'; '.join(present)}, got {choices!r}")
    if repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    if gpus != "1":
        benchmark.run_on_several(spec, _counts(gpus, "--gpus"), _counts(prompts, "--prompts"), repeats, names)
        return
    benchmark.run(model, spec, _counts(prompts, "--prompts"), repeats, names, with_load=load, only_prompts=only_prompts)


@app.command()
def inspect(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: the bundled demo model.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers to look at: 0,3,5; each builds a kernel. Default: the last one.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to decode before looking.")] = 20,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of the KV cache: float16 or bfloat16. Default: the weights'.")
    ] = None,
) -> None:
    """Each phase of a layer on one GPU beside the interpreter's. Names the first one that is wrong, and ends with code 1."""
    from kog_dist.bench import inspect as benchmark
    from kog_dist.config import LaunchConfig
    from kog_dist.launch.target import model_folder

    if tokens < 1:
        raise ConfigError("--tokens must be at least 1")
    if kv_dtype not in (None, *benchmark.LIMITS):
        raise ConfigError(f"--kv-dtype must be {' or '.join(benchmark.LIMITS)}, got {kv_dtype!r}")
    try:
        chosen = tuple(int(part) for part in layers.split(",") if part)
    except ValueError:
        raise ConfigError(f"--layers must be numbers separated by commas, got {layers!r}") from None
    if not benchmark.run(model_folder(LaunchConfig(model=model))[0], chosen, tokens, kv_dtype):
        raise typer.Exit(1)


@app.command()
def router(
    rates: Annotated[str, typer.Option(help="Tokens per second of each stream: 230,2000.")] = "230,2000",
    tokens: Annotated[int, typer.Option(help="Tokens per stream.")] = 2000,
    streams: Annotated[int, typer.Option(help="Streams at once, each from a source of its own, beside one alone.")] = 2,
) -> None:
    """Microseconds that the router in front of replicas adds to each token. Needs no model."""
    from kog_dist.bench import router as benchmark

    if tokens < 2 or streams < 1:
        raise ConfigError("--tokens must be at least 2, --streams at least 1")
    benchmark.run(_counts(rates, "--rates"), num_tokens=tokens, num_streams=streams)


@app.command()
def requests(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights: tiny, or on GPUs also 2b.")] = "tiny",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs: 1,2.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of CPU ranks instead: 1,2.")] = "",
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,4000",
    kept: Annotated[int, typer.Option(help="Tokens of a prompt whose KV is kept; 0: not measured.")] = 3900,
    new: Annotated[int, typer.Option(help="Tokens behind them.")] = 50,
    context: Annotated[int, typer.Option(help="Prompt of the answers whose speed is measured.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of these answers.")] = 400,
    repeats: Annotated[int, typer.Option(help="Requests for a figure, at least 2, but no more after 3 s.")] = 10,
    aborts: Annotated[str, typer.Option(help="When engines are aborted, one for each: prefill,decode.")] = "prefill,decode",
) -> None:
    """Whole requests through an engine: first tokens, speed of sampling and JSON schemas, cancels and aborts."""
    from kog_dist.bench import requests as benchmark
    from kog_dist.bench.request_measures import Workload

    during = tuple(aborts.split(","))
    if not set(during) <= set(benchmark.ABORTS):
        raise ConfigError(f"--aborts must be one or more of {', '.join(benchmark.ABORTS)}, got {aborts!r}")
    if bool(gpus) == bool(ranks):
        raise ConfigError("give --gpus or --ranks, one of the two")
    if min(kept, new) < 0 or min(context, repeats) < 2 or tokens < 3:
        raise ConfigError("--kept and --new must be at least 0, --context and --repeats at least 2, --tokens at least 3")
    workload = Workload(_counts(prompts, "--prompts"), kept, new, context, tokens, repeats)
    counts = _counts(gpus, "--gpus") if gpus else _counts(ranks)
    benchmark.run(model, spec, counts, workload, on_gpus=bool(gpus), aborts=during)


@app.command()
def soak(
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 10_000,
    ranks: Annotated[int, typer.Option(help="Rank processes: 1, 2 or 4.")] = 2,
    gpus: Annotated[int, typer.Option(help="GPUs instead of CPU ranks.")] = 0,
    clients: Annotated[int, typer.Option(help="Clients that ask at the same time.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed: other requests.")] = 1,
) -> None:
    """Mixed requests, cancels, disconnects, deadlines; each stream against a replay. Code 1: something was wrong."""
    from kog_dist.bench import soak as benchmark

    if requests < 2 or clients < 1 or gpus < 0:
        raise ConfigError("--requests must be at least 2, --clients at least 1, --gpus at least 0")
    if not benchmark.run(requests, gpus or ranks, clients, seed, on_gpus=gpus > 0):
        raise typer.Exit(1)


@app.command()
def replay(
    rate: Annotated[float, typer.Option(help="Tokens per second of each request.")] = 2000.0,
    instance: Annotated[str, typer.Option(help="Name by which clients and the gateway find it.")] = "default",
    ranks: Annotated[int, typer.Option(help="Ranks that it says it has.")] = 8,
    concurrency: Annotated[int, typer.Option(help="Requests that are answered at the same time; an engine has 1.")] = 1,
    prefill_ms: Annotated[float, typer.Option(help="Milliseconds from the start of a request to its first token.")] = 0.0,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Text to replay. Default: Python source.")] = None,
    stamps: Annotated[
        bool, typer.Option("--stamps", help="The text of each token is the moment at which it is sent (CLOCK_MONOTONIC, ns).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Model whose tokenizer and name are used. Default: the demo model.")
    ] = None,
    context: Annotated[int, typer.Option(help="Context length that it says it has.")] = 32768,
) -> None:
    """A synthetic engine: RPC like any engine, tokens of a text at a fixed rate, no model. Until SIGTERM or Ctrl-C."""
    from kog_dist.bench import replay as synthetic
    from kog_dist.bench.replay_engine import ReplaySettings
    from kog_dist.config import LaunchConfig
    from kog_dist.launch.target import model_folder

    if not 0 < rate <= 1e6:
        raise ConfigError(f"--rate must be more than 0 and at most 1000000 tokens per second, got {rate:g}")
    if min(ranks, concurrency, context) < 1 or not prefill_ms >= 0:
        raise ConfigError("--ranks, --concurrency and --context must be at least 1, --prefill-ms at least 0")
    settings = ReplaySettings(instance, rate, ranks, concurrency, prefill_ms / 1e3, stamps)
    synthetic.run(settings, *model_folder(LaunchConfig(model=model)), text=text, max_context=context)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server: http://HOST:PORT, with or without /v1.")] = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")] = "openai",
    model: Annotated[str | None, typer.Option(help="Name to send. Default: the first that the server lists.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests that are measured.")] = 20,
    num_warmups: Annotated[int, typer.Option(help="Requests before, one after the other, which are not.")] = 1,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests at a time. Default: 1; with --request-rate no limit.")
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson arrivals. Default: each as soon as there is room.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Words of each prompt; the server says how many tokens they are.")] = 64,
    output_len: Annotated[int, typer.Option(help="Most tokens of each answer (max_tokens).")] = 256,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts, one per line; .jsonl: objects with prompt or messages.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length (kog_dist, vLLM, SGLang).")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; below 0: the server's default.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed: other prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one answer.")] = 600.0,
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="Object with more fields of each request.")] = "{}",
    api_key: Annotated[
        str, typer.Option(envvar=["KOG_API_KEY", "OPENAI_API_KEY"], show_envvar=False, help="Or KOG_API_KEY, OPENAI_API_KEY.")
    ] = "",
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the JSON object, each chunk's moment included.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a report with plots.")] = None,
) -> None:
    """Load on any OpenAI-compatible server: TTFT, ITL, TPOT, end to end, in vLLM's JSON. Code 4: a request failed."""
    from kog_dist.bench import serve as benchmark
    from kog_dist.bench.serve_options import settings_of

    settings, asked = settings_of(
        url=url, backend=backend, model=model, num_prompts=num_prompts, num_warmups=num_warmups, max_concurrency=max_concurrency,
        request_rate=request_rate, input_len=input_len, output_len=output_len, prompts=prompts, ignore_eos=ignore_eos,
        temperature=temperature, seed=seed, timeout_s=timeout, extra_body=extra_body, api_key=api_key,
    )  # fmt: skip
    paths = (None if path is None else Path(path) for path in (output, html))
    if benchmark.run(settings, asked, output=next(paths), html=next(paths)):
        raise typer.Exit(4)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A.json", help="Written by kog-bench serve --output.")],
    second: Annotated[str, typer.Argument(metavar="B.json", help="Another one.")],
    fail_if_slower: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Code 1 if B is slower by more than that, and not by chance.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
) -> None:
    """Two results side by side: ratios with 95% intervals, and what is not the same in their configurations."""
    from kog_dist.bench import compare as comparison

    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise ConfigError("--fail-if-slower must be a percentage of at least 0")
    if not comparison.run(Path(first), Path(second), fail_if_slower=fail_if_slower, seed=seed):
        raise typer.Exit(1)


@app.command()
def gateway(
    rate: Annotated[float, typer.Option(help="Tokens per second.")] = 2000.0,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 4000,
    repeats: Annotated[int, typer.Option(help="Answers over each way, in turns.")] = 3,
) -> None:
    """Microseconds of a token from a synthetic engine to a client, over RPC and over HTTP. Needs no model."""
    from kog_dist.bench import gateway_path as benchmark

    if not 0 < rate <= 1e5 or not 2 <= tokens <= 30_000 or repeats < 1:
        raise ConfigError("--rate must be from 0 to 100000, --tokens from 2 to 30000, --repeats at least 1")
    benchmark.run(rate, num_tokens=tokens, repeats=repeats)


@app.command()
def collectives(
    gpus: Annotated[int, typer.Option(help="GPUs, a rank each. Under mpirun: as many as it has started.")] = 4,
    sizes: Annotated[str, typer.Option(help="Bytes of each all-reduce: 6144,12288.")] = "6144,12288",
    steps: Annotated[int, typer.Option(help="Dependent all-reduces in one launch.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Launches; the median counts.")] = 11,
    libraries: Annotated[bool, typer.Option(help="Measure NCCL and torch symmetric memory, too.")] = True,
    kills: Annotated[int, typer.Option(help="Times that a rank is killed while all others spin.")] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for collectives.json and collectives.png.")] = None,
) -> None:
    """Microseconds of an all-reduce inside a kernel, beside NCCL and torch. Code 1: a killed rank held the others up."""
    from kog_dist.bench import collectives as benchmark

    chosen = _counts(sizes, "--sizes")
    if not 2 <= gpus <= 8 or any(size % 4096 and size % 6144 for size in chosen) or steps < 1 or repeats < 1 or kills < 0:
        raise ConfigError(
            "--gpus must be from 2 to 8, --sizes multiples of 4096 or 6144, --steps and --repeats at least 1, --kills at least 0"
        )
    if not benchmark.run(gpus, chosen, steps=steps, repeats=repeats, libraries=libraries, kills=kills, folder=out):
        raise typer.Exit(1)


@app.command()
def scaling(
    model: Annotated[bool, typer.Option("--model", help="Predict from a simulation instead of measuring.")] = False,
    spec: Annotated[str, typer.Option(help="Shape: 2b.")] = "2b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1,2,4",
    contexts: Annotated[str, typer.Option(help="Positions in the KV cache.")] = "64,512,4000",
    tokens: Annotated[int, typer.Option(help="Tokens of a measurement.")] = 200,
    repeats: Annotated[int, typer.Option(help="Short launches whose bits are compared.")] = 20,
    yardstick: Annotated[bool, typer.Option("--yardstick", help="Once more with the delayed sums left out.")] = False,
    lanes_us: Annotated[
        str,
        typer.Option(help="Measured on one GPU, us per token by hosted lanes: 8:1122,4:584,2:343,1:240. The costs are fitted."),
    ] = "",
    gpus_us: Annotated[str, typer.Option(help="Measured on several GPUs, to compare with: 1:1122,2:590,4:350.")] = "",
    peer_hop_us: Annotated[
        float, typer.Option(help="Publish to visible on another GPU; `kog-bench collectives` measures it.")
    ] = 1.0,
    sampling: Annotated[str, typer.Option(help=_SAMPLING_HELP)] = "",
) -> None:
    """Microseconds per token on several GPUs, and whether the bits are the same (else code 1); or a prediction."""
    from kog_dist.bench import scaling as benchmark
    from kog_dist.bench.shapes import named_spec

    if not model:
        from kog_dist.bench import scaling_run

        counts, samplings = _counts(gpus, "--gpus"), _samplings(sampling)
        same = scaling_run.run(
            spec, counts, _counts(contexts, "--contexts"), tokens, repeats, yardstick=yardstick, samplings=samplings
        )
        raise typer.Exit(0 if same else 1)
    if not peer_hop_us > 0:
        raise ConfigError("--peer-hop-us must be more than 0")
    costs = benchmark.Costs(peer_hop_us=peer_hop_us)
    benchmark.run(named_spec(spec), spec, _times(lanes_us, "--lanes-us"), _times(gpus_us, "--gpus-us"), costs)


def _samplings(text: str) -> tuple[str, ...]:
    from kog_dist.bench.shaped import SAMPLINGS

    names = tuple(part for part in text.split(",") if part)
    if not set(names) <= set(SAMPLINGS):
        raise ConfigError(f"--sampling must be one or more of {', '.join(SAMPLINGS)}, got {text!r}")
    return names


@app.command()
def endurance(
    spec: Annotated[str, typer.Option(help="Shape: 2b.")] = "2b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1",
    tokens: Annotated[int, typer.Option(help="Tokens to decode on each number of GPUs.")] = 100_000,
    deadline_s: Annotated[float, typer.Option(help="Longest time for each, seconds.")] = 400.0,
) -> None:
    """Very many tokens, with a running hash that must be the same on all ranks and on every number of GPUs (else code 1)."""
    from kog_dist.bench import endurance as benchmark

    if tokens < 1 or not deadline_s > 0:
        raise ConfigError("--tokens must be at least 1, and --deadline-s more than 0")
    raise typer.Exit(0 if benchmark.run(spec, _counts(gpus, "--gpus"), tokens, deadline_s) else 1)


def _times(text: str, option: str) -> dict[int, float]:
    """Microseconds by count: 8:1122,4:584."""
    try:
        pairs = [part.split(":") for part in text.split(",") if part]
        times = {int(count): float(us) for count, us in pairs}
    except ValueError:
        raise ConfigError(f"{option} must be like 8:1122,4:584, got {text!r}") from None
    if any(count not in (1, 2, 4, 8) or not us > 0 for count, us in times.items()):
        raise ConfigError(f"{option} takes counts of 1, 2, 4 and 8 with times above 0, got {text!r}")
    return times


def _counts(text: str, option: str = "--ranks") -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be numbers separated by commas, got {text!r}") from None
    if min(counts) < 1:
        raise ConfigError(f"{option} must be at least 1, got {text!r}")
    return counts


def main() -> None:
    """Run `kog-bench` and exit with its code."""
    try:
        app(prog_name="kog-bench")
    except KogError as error:
        print(f"kog-bench: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
