"""`kog-bench agents`: the turns of a recorded agent, asked of a server one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kog_dist.bench.report import finish, machine
from kog_dist.bench.service.answers import RequestRecord, answer_of
from kog_dist.bench.service.prompts import Prompt
from kog_dist.bench.service.serve import ServeSettings, measure
from kog_dist.bench.service.trace import as_text
from kog_dist.rpc.output import write_out

_COLUMNS = ("prompt", "cached", "output")


def run(settings: ServeSettings, turns: Sequence[Prompt], trace: str) -> int:
    """Ask, print a table and the JSON object; returns how many turns failed. Raises as `serve.run` does."""
    before = machine()
    if settings.backend == "openai":
        turns = [Prompt(as_text(turn), (), turn.max_tokens) for turn in turns]
    load = asyncio.run(measure(settings, turns))
    answers = [answer_of(exchange, turn.num_words) for exchange, turn in zip(load.exchanges, turns, strict=True)]
    figures = figures_of(answers)
    write_out(table_of(figures) + "\n")
    configuration = {
        "trace": trace,
        "url": str(settings.url),
        "backend": settings.backend,
        "model": load.model,
        "ignore_eos": settings.ignore_eos,
        "temperature": settings.temperature,
        "extra_body": settings.extra_body,
    }
    finish("agents", configuration, before, figures)
    return sum(bool(answer.error) for answer in answers)


def figures_of(answers: Sequence[RequestRecord]) -> dict[str, Any]:
    """Of each turn and of all; `tokens_per_s` counts from the first token on, as a reader sees it."""
    turns = [
        {
            "turn": number,
            "prompt_tokens": answer.input_tokens,
            "cached_tokens": answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "ttft_ms": answer.ttft_s * 1e3,
            "tokens_per_s": 1 / answer.tpot_s if answer.tpot_s else None,
            "error": answer.error,
        }
        for number, answer in enumerate(answers, 1)
    ]
    good = [answer for answer in answers if not answer.error]
    decode_s = sum(answer.latency_s - answer.ttft_s for answer in good)
    num_gaps = sum(max(0, answer.output_tokens - 1) for answer in good)
    cached = [answer.cached_tokens for answer in good if answer.cached_tokens is not None]
    total = {
        "turns": len(good),
        "prompt_tokens": sum(answer.input_tokens for answer in good),
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": sum(answer.output_tokens for answer in good),
        "ttft_ms": sum(answer.ttft_s for answer in good) * 1e3,
        "tokens_per_s": num_gaps / decode_s if decode_s else None,
        "seconds": sum(answer.latency_s for answer in good),
    }
    return {"turns": turns, "total": total}


def table_of(figures: dict[str, Any]) -> str:
    """What a person reads."""
    lines = [f"{'turn':>6}{'prompt':>9}{'cached':>9}{'output':>9}{'ttft ms':>11}{'tokens/s':>11}"]
    for turn in figures["turns"]:
        lines.append(f"{turn['turn']:>6}  {turn['error']}" if turn["error"] else _row(str(turn["turn"]), turn))
    total = figures["total"]
    lines += [_row("all", total), f"{total['turns']} turns in {total['seconds']:.2f} s"]
    return "\n".join(lines)


def _row(name: str, of: dict[str, Any]) -> str:
    counts = "".join(f"{'-' if (count := of[f'{column}_tokens']) is None else count:>9}" for column in _COLUMNS)
    rate = "-" if of["tokens_per_s"] is None else f"{of['tokens_per_s']:.1f}"
    return f"{name:>6}{counts}{of['ttft_ms']:>11.1f}{rate:>11}"
