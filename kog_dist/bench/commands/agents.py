"""`kog-bench agents`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def agents(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", help="Messages of a session, one a line. None: the one that comes with it.")
    ] = None,
    url: Annotated[str, typer.Option(help="The server: http://HOST:PORT, with or without /v1.")] = "http://127.0.0.1:8000",
    backend: Annotated[
        str, typer.Option(help="openai-chat: /v1/chat/completions; openai: /v1/completions, with a template of its own.")
    ] = "openai-chat",
    model: Annotated[str | None, typer.Option(help="Name to send. Default: the first that the server lists.")] = None,
    output_len: Annotated[int, typer.Option(help="Most tokens of answers without max_tokens in the trace.")] = 128,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for answers of full length (kog_dist, vLLM, SGLang).")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; below 0: the server's default.")] = 0.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For one answer.")] = 600.0,
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="Object with more fields of each request.")] = "{}",
    api_key: Annotated[
        str, typer.Option(envvar=["KOG_API_KEY", "OPENAI_API_KEY"], show_envvar=False, help="Or KOG_API_KEY, OPENAI_API_KEY.")
    ] = "",
) -> None:
    """The turns of a recorded agent, one after the other. Tokens, cached tokens, TTFT and speed of each. Code 4: one failed."""
    from kog_dist.bench.service import agents as benchmark
    from kog_dist.bench.service.options import trace_settings
    from kog_dist.bench.service.own_trace import own_trace
    from kog_dist.bench.service.trace import read_trace, turns_of

    name = trace or "own"
    turns = turns_of(own_trace() if trace is None else read_trace(Path(trace)), name)
    settings = trace_settings(
        url=url, backend=backend, model=model, output_len=output_len, ignore_eos=ignore_eos, temperature=temperature,
        timeout_s=timeout, extra_body=extra_body, api_key=api_key,
    )  # fmt: skip
    if benchmark.run(settings, turns, name):
        raise typer.Exit(4)
