"""The figures of `kog-bench serve`, under the names that `vllm bench serve` gives them (vllm/benchmarks/serve.py).

| name | of each request that was answered |
|---|---|
| ttft | sending to the first chunk that brings something |
| itl | gap between such chunks; as many as there are gaps |
| tpot | (e2el - ttft) / (output tokens - 1), for two tokens or more |
| e2el | sending to the last chunk |

Percentiles are interpolated linearly, `std` is that of the population: numpy's defaults, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kog_dist.bench.service.answers import RequestRecord

METRICS: Final = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "gap between chunks",
    "e2el": "end to end",
}
_BUSY_SHARE = 0.8  # of a core: above it the client may be what is measured
PERCENTILES: Final = (90, 99)
DETAILS: Final = (  # one entry for each request
    "input_lens", "cached_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
    "errors", "stamps", "finish_reasons",
)  # fmt: skip


def without_details(result: Mapping[str, object]) -> dict[str, Any]:
    """A result's figures of all requests."""
    return {name: value for name, value in result.items() if name not in DETAILS}


def figures_of(answers: Sequence[RequestRecord], duration_s: float, begin_ns: int) -> dict[str, object]:
    """Everything that is derived from the answers. `start_times` are seconds after `begin_ns`, `stamps` after each start."""
    good = [answer for answer in answers if not answer.error]
    total_input, total_output = sum(a.input_tokens for a in good), sum(a.output_tokens for a in good)
    peak_tokens, peak_requests = _peaks(good, begin_ns)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
        "rtfx": 0.0,
    }
    for name, values in samples_of(good).items():
        figures |= _summary(name, values)
    return figures | _own_figures(good) | _details(answers, begin_ns)


def samples_of(good: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Milliseconds of each metric."""
    return {
        "ttft": [answer.ttft_s * 1e3 for answer in good],
        "tpot": [tpot_s * 1e3 for answer in good if (tpot_s := answer.tpot_s) is not None],
        "itl": [gap_s * 1e3 for answer in good for gap_s in answer.itls_s],
        "e2el": [answer.latency_s * 1e3 for answer in good],
    }


def _summary(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    import numpy as np

    values = np.asarray(values_ms if len(values_ms) else [0.0])
    found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    found |= {f"p{p}": np.percentile(values, p) for p in PERCENTILES}
    return {f"{kind}_{name}_ms": float(value) for kind, value in found.items()}


def _own_figures(good: Sequence[RequestRecord]) -> dict[str, object]:
    """What vLLM does not report: how fast one reader saw tokens, and how the tokens were counted."""
    import numpy as np

    rates = [1.0 / tpot_s for answer in good if (tpot_s := answer.tpot_s)]
    num_chunks = sum(len(answer.stamps_s) for answer in good)
    return {
        "median_decode_tokens_per_s": float(np.median(rates)) if rates else None,
        "output_tokens_from": " and ".join(sorted({answer.counts_from for answer in good})),
        "tokens_per_chunk": sum(answer.output_tokens for answer in good) / num_chunks if num_chunks else None,
        "cached_input_tokens": sum(answer.cached_tokens or 0 for answer in good),
        "spec_decode_draft_tokens": sum(answer.drafted_tokens for answer in good),
        "spec_decode_accepted_tokens": sum(answer.accepted_tokens for answer in good),
    }


def _details(answers: Sequence[RequestRecord], begin_ns: int) -> dict[str, object]:
    return {
        "input_lens": [answer.input_tokens for answer in answers],
        "cached_lens": [answer.cached_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itls_s for answer in answers],
        "latencies": [answer.latency_s for answer in answers],
        "start_times": [(answer.started_ns - begin_ns) / 1e9 for answer in answers],
        "queue_times": [answer.queue_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "stamps": [answer.stamps_s for answer in answers],
        "finish_reasons": [answer.finish_reason for answer in answers],
    }


def _peaks(good: Sequence[RequestRecord], begin_ns: int) -> tuple[float, int]:
    """Most output tokens in one of the seconds since the beginning, and most requests under way at a moment."""
    tokens: dict[int, float] = {}
    changes: list[tuple[float, int]] = []
    for answer in good:
        start_s = (answer.started_ns - begin_ns) / 1e9
        changes += [(start_s, 1), (start_s + answer.latency_s, -1)]
        share = answer.output_tokens / len(answer.stamps_s)
        for stamp_s in answer.stamps_s:
            second = int(start_s + stamp_s)
            tokens[second] = tokens.get(second, 0.0) + share
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return max(tokens.values(), default=0.0), most


def notes_of(result: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    notes = []
    per_chunk = result["tokens_per_chunk"]
    if "chunks" in result["output_tokens_from"]:
        notes.append("note: the server did not count its tokens (no usage); chunks are counted instead, which may be fewer")
    elif per_chunk and per_chunk > 1.02:
        notes.append(f"note: a chunk brought {per_chunk:.2f} tokens on average; itl is the gap between chunks, tpot is per token")
    if result["cached_input_tokens"]:
        notes.append(f"note: {result['cached_input_tokens']} input tokens came from the server's cache and were not prefilled")
    if drafted := result["spec_decode_draft_tokens"]:
        right = result["spec_decode_accepted_tokens"]
        notes.append(f"note: {right} of {drafted} drafted tokens were right; those of a pass come together, with one gap")
    share = result["client_cpu_share"]
    spent = f"{result['client_us_per_chunk'] or 0:.0f} us for each chunk, {share * 100:.0f}% of a core in all"
    notes.append(f"note: this client spent {spent}")
    if share > _BUSY_SHARE:
        notes.append("note: this client was busy nearly all the time; the server may be faster than what it could see")
    return notes
