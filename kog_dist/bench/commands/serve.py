"""`kog-bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.options import AnswerTimeout, ApiKey, ExtraBody, IgnoreEos, ServedModel, Temperature, Url, counts_of
from kog_dist.bench.report import check_destination


def serve(
    url: Url = "http://127.0.0.1:8000",
    backend: Annotated[str, typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")] = "openai",
    model: ServedModel = None,
    num_prompts: Annotated[int, typer.Option(help="Requests that are measured.")] = 20,
    num_warmups: Annotated[int, typer.Option(help="Requests before, one after the other, which are not.")] = 1,
    max_concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Requests at a time; of several a load each. Default: 1; with --request-rate no limit."
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson arrivals. Default: each as soon as there is room.")
    ] = None,
    input_len: Annotated[int, typer.Option(help="Words of each prompt; the server says how many tokens they are.")] = 64,
    output_len: Annotated[int, typer.Option(help="Most tokens of each answer (max_tokens).")] = 256,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts, one per line; .jsonl: objects with prompt or messages.")
    ] = None,
    agents: Annotated[int, typer.Option(help="Agents that take turns: --input-len words more each time. 0: none.")] = 0,
    shared_len: Annotated[int, typer.Option(help="Words that the prompts of all agents begin with.")] = 0,
    each: Annotated[bool, typer.Option("--each", help="A line for each request, in the order in which they were asked.")] = False,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed: other prompts and arrivals.")] = 0,
    timeout: AnswerTimeout = 600.0,
    speculate: Annotated[
        str | None, typer.Option(help="Drafts of later tokens: off, lookup or auto. Default: the server's.")
    ] = None,
    extra_body: ExtraBody = "{}",
    api_key: ApiKey = "",
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the JSON object, each chunk's moment included.")
    ] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a report with plots.")] = None,
) -> None:
    """Load on any OpenAI-compatible server. TTFT, ITL, TPOT, end to end, in vLLM's JSON. Code 4: a request failed."""
    from kog_dist.bench.service import serve as benchmark
    from kog_dist.bench.service import side_by_side
    from kog_dist.bench.service.options import settings_of

    limits = (None,) if max_concurrency is None else counts_of(max_concurrency, "--max-concurrency")
    loads = [
        settings_of(
            url=url, backend=backend, model=model, num_prompts=num_prompts, num_warmups=num_warmups, max_concurrency=limit,
            request_rate=request_rate, input_len=input_len, output_len=output_len, prompts=prompts, ignore_eos=ignore_eos,
            temperature=temperature, seed=seed + number, timeout_s=timeout, extra_body=extra_body, api_key=api_key,
            agents=agents, shared_len=shared_len, speculate=speculate,
        )
        for number, limit in enumerate(limits)
    ]  # fmt: skip
    check_destination(output, html)
    files = [None if path is None else Path(path) for path in (output, html)]
    num_failed = benchmark.run(*loads[0], *files, each=each) if len(loads) == 1 else side_by_side.run(loads, *files, each=each)
    if num_failed:
        raise typer.Exit(4)
