"""What the gateway tells Prometheus: vLLM's metrics (names, types, labels, bounds) with the prefix `kog:`, and some of our own.

Dashboards made for vLLM work after `vllm:` was replaced by `kog:`. Histograms have vLLM's bounds and finer ones below or between
them: its lowest bound for the gap between tokens is 10 ms, an order of magnitude above ours.

Moments are seconds of `time.monotonic()`. All calls come from one thread, that of the event loop; there are no locks, and a token
costs well under 2 us. docs/operations.md lists all metrics.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kog_dist.gateway.engine_metrics import LABELS, EngineFacts, EngineView
from kog_dist.rpc.messages import Done, Error, ErrorCode, FinishReason, StatusReport

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
UNREAD = "unread"  # the handler of responses to what was no request that could be read, or to a connection too many
MAX_HANDLERS = 64  # more different routes than that are counted together: a label must not grow with what clients send

# Bounds of vLLM (vllm/v1/metrics/loggers.py), in seconds.
_VLLM_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_VLLM_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_FINER_GAP = (
    0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005, 0.0006, 0.0007, 0.0008, 0.001, 0.00125, 0.0015, 0.002,
    0.0025, 0.003, 0.004, 0.005, 0.006, 0.0075,
)  # fmt: skip
_FINER_TTFT = (0.002, 0.003, 0.004, 0.006, 0.008, 0.0125, 0.015, 0.0175, 0.025, 0.03, 0.035, 0.05)
_FINER_REQUEST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
GAP_BOUNDS = _FINER_GAP + _VLLM_GAP
TTFT_BOUNDS = tuple(sorted({*_FINER_TTFT, *_VLLM_TTFT}))
REQUEST_BOUNDS = _FINER_REQUEST + _VLLM_REQUEST

# vLLM's words for how a request ended; `deadline` has none there.
_FINISHED = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "deadline",
}
_FAILED = "error"


class GapHistogram:
    """Counts of gaps between tokens: plain numbers, because an observation of the library costs more than 2 us."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)  # not cumulative; the last one has no upper bound
        self.sum_s = 0.0

    def add(self, gap_s: float, count: int) -> None:
        """`count` gaps that took `gap_s` together."""
        self.counts[bisect_left(self.bounds, gap_s / count)] += count
        self.sum_s += gap_s

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        names = [*map(str, self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class RequestMeter:
    """The moments of one request to the engine. Call `finished` exactly once; later calls count nothing."""

    __slots__ = ("_first_s", "_gap_s", "_gaps", "_last_s", "_metrics", "_num_prompt", "_num_tokens", "_started_s", "ended")

    def __init__(self, metrics: Metrics, started_s: float) -> None:
        self._metrics = metrics
        self._gaps = metrics.gaps
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._gap_s = 0.0
        self._num_prompt: int | None = None
        self._num_tokens = 0
        self.ended = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the reception by the gateway to the first token; None before it."""
        return None if self._first_s is None else self._first_s - self._started_s

    @property
    def num_prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None until the engine has taken the request."""
        return self._num_prompt

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return self._num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first, divided by the time they took; 0 as long as there are none."""
        return (self._num_tokens - 1) / self._gap_s if self._gap_s > 0 and self._num_tokens > 1 else 0.0

    def accepted(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """The engine has taken it, with these limits."""
        self._num_prompt = num_prompt_tokens
        self._metrics.request_max_tokens.observe(max_tokens)

    def first_token(self, now_s: float) -> None:
        """The first token has come. `tokens` calls this by itself."""
        if self._first_s is None:
            self._first_s = self._last_s = now_s
            self._metrics.time_to_first_token.observe(max(0.0, now_s - self._started_s))
            self._metrics.num_prompt_tokens += self._num_prompt or 0
            self._metrics.newest = self

    def tokens(self, count: int, now_s: float) -> None:
        """`count` tokens have come with one event. Several that come together share the gap before them equally."""
        if count <= 0:
            return
        if self._first_s is None:
            self.first_token(now_s)
        gaps = count if self._num_tokens else count - 1
        if gaps:
            gap_s = now_s - self._last_s if now_s > self._last_s else 0.0
            self._gaps.add(gap_s, gaps)
            self._gap_s += gap_s
        self._num_tokens += count
        self._last_s = now_s
        self._metrics.num_generated_tokens += count

    def finished(self, end: Done | Error, now_s: float) -> None:
        """The last event has come; an `Error` also if the request was refused, or the engine was lost."""
        if self.ended:
            return
        self.ended = True
        metrics = self._metrics
        metrics.num_open_requests -= 1
        if isinstance(end, Error):
            metrics.request_errors[end.code].inc()
            if self._num_prompt is not None:
                metrics.successes[_FAILED].inc()
            return
        metrics.successes[_FINISHED[end.finish_reason]].inc()
        metrics.e2e_latency.observe(max(0.0, now_s - self._started_s))
        metrics.queue_time.observe(end.queue_s)
        metrics.inference_time.observe(max(0.0, end.total_s - end.queue_s))
        if end.prefill_s is not None:
            metrics.prefill_time.observe(end.prefill_s)
            metrics.decode_time.observe(max(0.0, end.total_s - end.queue_s - end.prefill_s))
        if self._num_tokens > 1:
            metrics.time_per_output_token.observe(self._gap_s / (self._num_tokens - 1))
        metrics.request_prompt.observe(end.num_prompt_tokens)
        metrics.request_generation.observe(end.num_generated_tokens)
        metrics.num_cache_queries += end.num_prompt_tokens
        metrics.num_cache_hits += end.num_cached_tokens
        metrics.num_drafted += end.num_drafted_tokens
        metrics.num_accepted += end.num_accepted_tokens


class _Labelled(Protocol):
    """A counter or histogram with its labels filled in."""

    def observe(self, amount: float) -> None:
        """Count one value."""


class Metrics:
    """All metrics of one gateway, in a registry of its own. The plain numbers may be changed by whoever measures them."""

    def __init__(self, model_name: str, *, max_context: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.model_name = model_name
        self._clock = clock
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = EngineView(clock, EngineFacts(max_context=max_context))
        self.gaps = GapHistogram(GAP_BOUNDS)
        self.newest: RequestMeter | None = None  # the one that has last had its first token
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_cache_queries = 0  # tokens of prompts
        self.num_cache_hits = 0  # of them those that were not prefilled again
        self.num_drafted = 0  # tokens
        self.num_accepted = 0  # of them those that were right
        self.num_open_requests = 0
        self.num_open_streams = 0
        self.num_buffered_bytes = 0
        self.num_slow_readers = 0
        self.num_disconnects = 0
        self._handlers: dict[tuple[str, int], int] = {}
        self._make_histograms(max_context)
        self._make_counters()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def _make_histograms(self, max_context: int) -> None:
        """The library's histograms: of what happens once in a request."""
        lengths = _one_two_five(max_context or 131072)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", "Reception to first token.", TTFT_BOUNDS)
        text = "Mean gap between the tokens of a request."
        self.time_per_output_token = self._histogram("request_time_per_output_token_seconds", text, GAP_BOUNDS)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Reception to end.", REQUEST_BOUNDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Time spent waiting in the engine.", REQUEST_BOUNDS)
        self.inference_time = self._histogram("request_inference_time_seconds", "Time on the ranks.", REQUEST_BOUNDS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Hand-over to first token.", REQUEST_BOUNDS)
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to end.", REQUEST_BOUNDS)
        self.request_prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", lengths)
        self.request_generation = self._histogram("request_generation_tokens", "Tokens of an answer.", lengths)
        self.request_max_tokens = self._histogram("request_params_max_tokens", "Tokens that a request may generate.", lengths)

    def _make_counters(self) -> None:
        values = (self.model_name, "0")
        success = self._counter("request_success", "Requests that the engine took, by how they ended.", "finished_reason")
        self.successes = {word: success.labels(*values, word) for word in (*_FINISHED.values(), _FAILED)}
        errors = self._counter("request_errors", "Requests that were refused or failed, by the engine's code.", "code")
        self.request_errors = {code: errors.labels(*values, str(code)) for code in ErrorCode}
        self._requests = self._counter("requests", "Requests handed to the engine, by endpoint.", "endpoint")

    def _histogram(self, suffix: str, text: str, bounds: Sequence[float]) -> _Labelled:
        made = Histogram(f"kog:{suffix}", text, LABELS, buckets=bounds, registry=self._registry)
        return made.labels(self.model_name, "0")

    def _counter(self, suffix: str, text: str, label: str) -> Counter:
        return Counter(f"kog:{suffix}", text, (*LABELS, label), registry=self._registry)

    # ---- what happens ----
    def request_started(self, endpoint: str, now_s: float | None = None) -> RequestMeter:
        """A request is about to be sent to the engine. `endpoint` is one of the gateway's routes, such as /v1/completions."""
        self._requests.labels(self.model_name, "0", endpoint).inc()
        self.num_open_requests += 1
        return RequestMeter(self, self._clock() if now_s is None else now_s)

    def engine_report(self, report: StatusReport | None) -> None:
        """What the engine answered to `status`; None: it did not."""
        self._engine.update(report)

    def engine_facts(self, facts: EngineFacts) -> None:
        """What is known about the engine once it is there."""
        self._engine.facts = facts

    def stream_opened(self) -> None:
        """An answer is being written to a client, piece by piece."""
        self.num_open_streams += 1

    def stream_closed(self) -> None:
        """And now it is not any more."""
        self.num_open_streams -= 1

    def buffered(self, num_bytes: int) -> None:
        """So many more bytes (or fewer, below 0) wait in the gateway for clients to read them."""
        self.num_buffered_bytes += num_bytes

    def slow_reader_dropped(self) -> None:
        """A client did not read, and its stream was ended."""
        self.num_slow_readers += 1

    def client_disconnected(self) -> None:
        """A client went before its answer was complete."""
        self.num_disconnects += 1

    def http_response(self, handler: str, status: int) -> None:
        """A response was begun. `handler` is the template of a route, never a path that a client made up."""
        key = (handler, status)
        if key not in self._handlers and len(self._handlers) >= MAX_HANDLERS:
            key = ("other", status)
        self._handlers[key] = self._handlers.get(key, 0) + 1

    # ---- what is told ----
    def render(self) -> bytes:
        """The whole page, of media type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Families of the plain numbers; called by the registry."""
        yield self._gap_family()
        for suffix, text, value in (
            ("prompt_tokens", "Tokens of prompts of which the first answer token has come.", self.num_prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.num_generated_tokens),
            ("prefix_cache_queries", "Tokens of prompts that were looked up in the kept caches.", self.num_cache_queries),
            ("prefix_cache_hits", "Of them those that were found.", self.num_cache_hits),
            ("spec_decode_num_draft_tokens", "Tokens that were drafted.", self.num_drafted),
            ("spec_decode_num_accepted_tokens", "Of them those that were right.", self.num_accepted),
            ("gateway_slow_readers", "Streams that were ended because the client did not read.", self.num_slow_readers),
            ("gateway_disconnects", "Clients that went before their answer was complete.", self.num_disconnects),
        ):
            counter = CounterMetricFamily(f"kog:{suffix}", text, labels=LABELS)
            counter.add_metric([self.model_name, "0"], value)
            yield counter
        for suffix, text, value in (
            ("gateway_open_requests", "Requests that the engine has not ended yet.", self.num_open_requests),
            ("gateway_open_streams", "Answers that are being written.", self.num_open_streams),
            ("gateway_buffered_bytes", "Bytes that wait for clients to read them.", self.num_buffered_bytes),
        ):
            gauge = GaugeMetricFamily(f"kog:{suffix}", text, labels=LABELS)
            gauge.add_metric([self.model_name, "0"], value)
            yield gauge
        yield from self._responses()
        yield from self._engine.families(self.model_name, self.newest.tokens_per_s if self.newest is not None else 0.0)

    def _gap_family(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily("kog:inter_token_latency_seconds", "Gap between two tokens of a request.", labels=LABELS)
        family.add_metric([self.model_name, "0"], buckets=self.gaps.buckets(), sum_value=self.gaps.sum_s)
        return family

    def _responses(self) -> Iterator[Metric]:
        family = CounterMetricFamily("kog:http_responses", "Responses by route and status.", labels=("handler", "status"))
        for (handler, status), count in sorted(self._handlers.items()):
            family.add_metric([handler, str(status)], count)
        yield family


def _one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to `most`: vLLM's bounds for numbers of tokens."""
    bounds = (mantissa * 10**power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)
