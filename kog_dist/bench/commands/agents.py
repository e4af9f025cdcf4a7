"""`kog-bench agents`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.options import AnswerTimeout, ApiKey, ExtraBody, IgnoreEos, ServedModel, Temperature, Url


def agents(
    trace: Annotated[
        str | None, typer.Argument(metavar="TRACE", help="Messages of a session, one a line. None: the one that comes with it.")
    ] = None,
    url: Url = "http://127.0.0.1:8000",
    backend: Annotated[
        str, typer.Option(help="openai-chat: /v1/chat/completions; openai: /v1/completions, with a template of its own.")
    ] = "openai-chat",
    model: ServedModel = None,
    output_len: Annotated[int, typer.Option(help="Most tokens of answers without max_tokens in the trace.")] = 128,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    timeout: AnswerTimeout = 600.0,
    extra_body: ExtraBody = "{}",
    api_key: ApiKey = "",
) -> None:
    """The turns of a recorded agent, one after the other. Tokens, cached tokens, TTFT and speed of each. Code 4: one failed."""
    from kog_dist.bench.service import agents as benchmark
    from kog_dist.bench.service.options import trace_settings
    from kog_dist.bench.service.own_trace import own_trace
    from kog_dist.bench.service.trace import read_trace, turns_of

    name = trace or "own"
    turns = turns_of(own_trace() if trace is None else read_trace(Path(trace)), name)
    settings = trace_settings(
        url=url,
        backend=backend,
        model=model,
        output_len=output_len,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_s=timeout,
        extra_body=extra_body,
        api_key=api_key,
    )
    if benchmark.run(settings, turns, name):
        raise typer.Exit(4)
