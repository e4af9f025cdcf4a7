"""`kog-bench serve`: load on any OpenAI-compatible server, measured as `vllm bench serve` does."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.report import commit, machine, print_json
from kog_dist.bench.service.answers import RequestRecord, answer_of
from kog_dist.bench.service.client import LoadClient, SentRequest
from kog_dist.bench.service.figures import METRICS, figures_of, notes_of, without_details
from kog_dist.bench.service.prompts import Prompt
from kog_dist.bench.service.report import report_html
from kog_dist.chat.wire import ServiceUrl, error_text
from kog_dist.errors import ConfigError, LaunchError, RequestFailed
from kog_dist.records import dataclass
from kog_dist.rpc.output import progress_line, write_out

PATHS: Final = {"openai": "/completions", "openai-chat": "/chat/completions"}
_PREFLIGHT_S = 10.0
_SHOW_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What is asked of the server, and how fast. `request_rate` infinite: closed loop."""

    url: ServiceUrl
    backend: str
    model: str | None
    output_len: int
    request_rate: float
    max_concurrency: int | None
    num_warmups: int
    seed: int
    temperature: float | None
    ignore_eos: bool
    timeout_s: float
    extra_body: dict[str, Any] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)

    def body(self, prompt: Prompt, model: str) -> dict[str, Any]:
        """The JSON of one request."""
        asked = {"messages": prompt.as_messages()} if self.backend == "openai-chat" else {"prompt": prompt.as_text()}
        body = {
            "model": model,
            **asked,
            "max_tokens": prompt.max_tokens or self.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.tools and self.backend == "openai-chat":
            body["tools"] = list(prompt.tools)
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra_body


def run(settings: ServeSettings, prompts: Sequence[Prompt], output: Path | None, html: Path | None, *, each: bool = False) -> int:
    """Measure, print a table and the JSON object, write the files; returns how many requests failed.

    `each`: a line per request, too. Raises LaunchError if nothing answers at the URL, ConfigError if the server has no model to
    ask, RequestFailed if no warm-up request is answered.
    """
    check_folders(output, html)
    result, answers = measured(settings, prompts)
    if output is not None:
        output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(report_html(result), encoding="utf-8")
    if each:
        write_out(table_of_each(answers) + "\n")
    write_out(table_of(result) + "\n")
    print_json(without_details(result))
    return int(result["failed"])


def check_folders(*paths: Path | None) -> None:
    """Before anything is measured. Raises ConfigError naming a file that cannot be written."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")


def measured(settings: ServeSettings, prompts: Sequence[Prompt]) -> tuple[dict[str, Any], list[RequestRecord]]:
    """What `--output` writes, and the answers in the order of the prompts. Raises what `run` raises."""
    before = machine()
    load = asyncio.run(measure(settings, prompts))
    answers = [answer_of(exchange, prompt.num_words) for exchange, prompt in zip(load.exchanges, prompts, strict=True)]
    return _result(settings, load, answers, before), answers


@dataclass(slots=True)
class Load:
    """What came of a run; exchanges are in the order of the prompts."""

    model: str
    exchanges: list[SentRequest]
    begin_ns: int
    end_ns: int
    cpu_s: float  # of this process, meanwhile


async def measure(settings: ServeSettings, prompts: Sequence[Prompt]) -> Load:
    """Ask all prompts, after a warm-up. Raises LaunchError, ConfigError and RequestFailed, see `run`."""
    async with LoadClient(settings.url, settings.api_key) as client:
        path = settings.url.prefix + PATHS[settings.backend]
        model = await _model_of(client, settings)
        bodies = [settings.body(prompt, model) for prompt in prompts]
        for idx in range(settings.num_warmups):
            answer = answer_of(await client.post(path, bodies[idx % len(bodies)], settings.timeout_s), 0)
            if answer.error:
                raise RequestFailed("warmup_failed", f"a warm-up request to {settings.url} failed: {answer.error}")
        gc.collect()
        gc.freeze()
        gc.disable()  # its pauses would be taken for the server's; what is kept here has no cycles
        try:
            begin_ns, cpu_s = time.monotonic_ns(), time.process_time()
            exchanges = await _load(client, path, bodies, settings, begin_ns)
            return Load(model, exchanges, begin_ns, time.monotonic_ns(), time.process_time() - cpu_s)
        finally:
            gc.enable()
            gc.unfreeze()


async def _model_of(client: LoadClient, settings: ServeSettings) -> str:
    """The model that was named, or the first one that the server lists."""
    exchange = await client.get(f"{settings.url.prefix}/models", _PREFLIGHT_S)
    if settings.model is not None:
        return settings.model
    if exchange.error or exchange.response.status != 200:
        why = exchange.error or error_text(exchange.response.status, exchange.plain)
        raise LaunchError(f"{settings.url} gives no list of models ({why}); name one with --model")
    try:
        return str(json.loads(exchange.plain)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"the server at {settings.url} lists no model; name one with --model") from None


async def _load(
    client: LoadClient, path: str, bodies: Sequence[dict[str, object]], settings: ServeSettings, begin_ns: int
) -> list[SentRequest]:
    """Send every body when it is due: Poisson arrivals of a seed, or as soon as there is room."""
    room: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
    if settings.max_concurrency is not None:
        room = asyncio.Semaphore(settings.max_concurrency)
    arrivals_s = arrival_times(len(bodies), settings.request_rate, settings.seed)
    num_done = 0

    async def one(body: dict[str, Any], arrival_s: float | None) -> SentRequest:
        nonlocal num_done
        if arrival_s is not None:
            await asyncio.sleep(arrival_s - (time.monotonic_ns() - begin_ns) / 1e9)
        async with room:
            exchange = await client.post(path, body, settings.timeout_s)
        if arrival_s is not None:
            exchange.wanted_ns = begin_ns + round(arrival_s * 1e9)
        num_done += 1
        return exchange

    tasks = [asyncio.create_task(one(body, at_s)) for body, at_s in zip(bodies, arrivals_s, strict=True)]
    with progress_line(enabled=True) as show:
        shower = asyncio.create_task(_show_progress(show, lambda: num_done, len(bodies), begin_ns))
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            shower.cancel()


def arrival_times(count: int, rate: float, seed: int) -> list[float | None]:
    """Seconds from the beginning at which requests of a Poisson process come; None, all of them, for an infinite rate."""
    if math.isinf(rate):
        return [None] * count
    source, now_s = random.Random(seed), 0.0
    times: list[float | None] = []
    for _ in range(count):
        times.append(now_s)
        now_s += source.expovariate(rate)
    return times


async def _show_progress(show: Callable[[str], None], num_done: Callable[[], int], count: int, begin_ns: int) -> None:
    while True:
        show(f"{num_done()} of {count} requests, {(time.monotonic_ns() - begin_ns) / 1e9:.0f} s")
        await asyncio.sleep(_SHOW_EVERY_S)


def _result(settings: ServeSettings, load: Load, answers: Sequence[RequestRecord], before: dict[str, Any]) -> dict[str, object]:
    duration_s = (load.end_ns - load.begin_ns) / 1e9
    num_chunks = sum(len(exchange.stamps_ns) for exchange in load.exchanges)
    busy_us = sum(exchange.busy_ns for exchange in load.exchanges) / 1e3
    configuration = {
        "url": str(settings.url),
        "output_len": settings.output_len,
        "num_warmups": settings.num_warmups,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "ignore_eos": settings.ignore_eos,
        "extra_body": settings.extra_body,
    }
    return {
        "benchmark": "serve", "commit": commit(), "machine": before, "configuration": configuration,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"), "endpoint_type": settings.backend, "backend": settings.backend,
        "label": None, "model_id": load.model, "tokenizer_id": None, "num_prompts": len(answers),
        "request_rate": "inf" if math.isinf(settings.request_rate) else settings.request_rate, "burstiness": 1.0,
        "max_concurrency": settings.max_concurrency, **figures_of(answers, duration_s, load.begin_ns),
        "client_us_per_chunk": busy_us / num_chunks if num_chunks else None, "client_cpu_share": load.cpu_s / duration_s,
    }  # fmt: skip


def table_of_each(answers: Sequence[RequestRecord]) -> str:
    """A line for each request."""
    lines = [f"{'request':>7}{'input':>9}{'cached':>9}{'output':>9}{'ttft ms':>11}{'tokens/s':>11}"]
    for idx, answer in enumerate(answers):
        cached = "-" if answer.cached_tokens is None else answer.cached_tokens
        rate = f"{1 / answer.tpot_s:.1f}" if answer.tpot_s else "-"
        lines.append(
            f"{idx:>7}{answer.input_tokens:>9}{cached:>9}{answer.output_tokens:>9}{answer.ttft_s * 1e3:>11.1f}{rate:>11}"
            + (f"  {answer.error}" if answer.error else "")
        )
    return "\n".join(lines)


def table_of(result: dict[str, Any]) -> str:
    """What a person reads."""
    tokens = f"{result['total_input_tokens']} tokens in, {result['total_output_tokens']} out"
    lines = [
        f"{result['completed']} requests answered, {result['failed']} failed, in {result['duration']:.2f} s; {tokens}",
        f"{result['output_throughput']:.1f} output tokens/s, {result['request_throughput']:.2f} requests/s"
        + (f", {rate:.1f} tokens/s for one reader (median)" if (rate := result["median_decode_tokens_per_s"]) else ""),
        f"{'ms':<40}{'mean':>10}{'median':>10}{'p90':>10}{'p99':>10}{'std':>10}",
    ]
    for name, meaning in METRICS.items():
        columns = (result[f"{kind}_{name}_ms"] for kind in ("mean", "median", "p90", "p99", "std"))
        lines.append(f"{name:<6}{meaning:<34}" + "".join(f"{value:>10.3f}" for value in columns))
    lines += notes_of(result)
    errors = [error for error in result["errors"] if error]
    for error in sorted(set(errors), key=errors.count, reverse=True)[:5]:
        lines.append(f"error: {errors.count(error)} x {error}")
    return "\n".join(lines)
