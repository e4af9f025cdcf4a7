"""What /metrics says, read back with the parser of Prometheus' own client library."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kog_dist.gateway import metrics as module
from kog_dist.gateway.engine_metrics import RANK_STATES, EngineFacts
from kog_dist.gateway.metrics import GAP_BOUNDS, MAX_HANDLERS, REQUEST_BOUNDS, TTFT_BOUNDS, Metrics
from kog_dist.rpc.messages import Done, EngineState, Error, ErrorCode, FinishReason, StatusReport

LABELS = {"model_name": "demo", "engine": "0"}
# Name and type of what vLLM 0.11 and later have and this engine has, too. Counters lose `_total` in the parser's names.
OF_VLLM = {
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_max_tokens": "histogram",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "request_success": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
}


class Page:
    """A rendered page: families by name, and single values."""

    def __init__(self, metrics: Metrics) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, /, **labels: str) -> float:
        return self.samples[f"kog:{name}", frozenset({**LABELS, **labels}.items())]

    def has(self, name: str, /, **labels: str) -> bool:
        return (f"kog:{name}", frozenset({**LABELS, **labels}.items())) in self.samples


def report(**changes: object) -> StatusReport:
    values: dict[str, object] = {
        "state": EngineState.READY, "instance": "one", "model": "demo", "build": "b", "pid": 1, "world_size": 2,
        "rank_states": ("running", "ready"), "beat_ages_s": (0.01, 0.02), "uptime_s": 12.0, "running": "a",
        "waiting": ("b", "c"), "queue_limit": 64, "num_completed": 5, "num_cancelled": 1, "num_failed": 0, "num_refused": 2,
        "num_dropped_clients": 3, "num_bad_messages": 4, "num_tokens": 640, "running_position": 512,
    }  # fmt: skip
    return StatusReport(**{**values, **changes})  # type: ignore[arg-type]


def done(reason: FinishReason = FinishReason.STOP, **changes: object) -> Done:
    values: dict[str, object] = {
        "request_id": "a", "finish_reason": reason, "num_prompt_tokens": 30, "num_generated_tokens": 4, "queue_s": 0.1,
        "total_s": 1.0, "prefill_s": 0.3, "ttft_s": 0.4, "num_cached_tokens": 20,
    }  # fmt: skip
    return Done(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("demo", max_context=2048)


def test_names_and_types_are_those_of_vllm(metrics: Metrics) -> None:
    metrics.engine_report(report())
    families = Page(metrics).families
    assert {name: families[f"kog:{name}"].type for name in OF_VLLM} == OF_VLLM
    for name in OF_VLLM:
        labelled = [sample for sample in families[f"kog:{name}"].samples if not sample.name.endswith("_created")]
        assert labelled
        assert all(sample.labels.items() >= LABELS.items() for sample in labelled), name


def test_bounds_contain_those_of_vllm_and_ascend() -> None:
    # A query for one bound, such as le="0.1", must find it.
    assert {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0} <= set(
        GAP_BOUNDS
    )
    assert {0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0} <= set(REQUEST_BOUNDS)
    assert {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 640.0, 2560.0} <= set(TTFT_BOUNDS)
    near = [bound for bound in TTFT_BOUNDS if 0.001 <= bound <= 0.05]
    assert all(after <= 2 * before for before, after in pairwise(near)), "a first token takes 1 to 50 ms"
    for bounds in (GAP_BOUNDS, REQUEST_BOUNDS, TTFT_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
    assert GAP_BOUNDS[0] == 0.00005


def test_one_request(metrics: Metrics) -> None:
    meter = metrics.request_started("/v1/completions", 100.0)
    meter.accepted(30, 64)
    meter.tokens(1, 100.4)
    meter.tokens(1, 100.6)
    meter.tokens(2, 101.2)  # two tokens share 0.6 s
    assert meter.ttft_s == pytest.approx(0.4)
    assert meter.tokens_per_s == pytest.approx(3 / 0.8)
    assert Page(metrics).value("generation_tokens_total") == 4  # counted as they come, not at the end
    assert Page(metrics).value("gateway_open_requests") == 1
    meter.finished(done(), 101.25)
    page = Page(metrics)
    for name, total in {
        "time_to_first_token_seconds": 0.4, "e2e_request_latency_seconds": 1.25, "request_queue_time_seconds": 0.1,
        "request_prefill_time_seconds": 0.3, "request_decode_time_seconds": 0.6, "request_inference_time_seconds": 0.9,
        "request_prompt_tokens": 30, "request_generation_tokens": 4, "request_params_max_tokens": 64,
        "request_time_per_output_token_seconds": 0.8 / 3,
    }.items():  # fmt: skip
        assert page.value(f"{name}_sum") == pytest.approx(total), name
        assert page.value(f"{name}_count") == 1, name
    assert page.value("inter_token_latency_seconds_count") == 3
    assert page.value("inter_token_latency_seconds_sum") == pytest.approx(0.8)
    assert page.value("inter_token_latency_seconds_bucket", le="0.2") == 1
    assert page.value("inter_token_latency_seconds_bucket", le="0.4") == 3
    assert page.value("request_success_total", finished_reason="stop") == 1
    assert page.value("requests_total", endpoint="/v1/completions") == 1
    assert (page.value("prompt_tokens_total"), page.value("prefix_cache_queries_total")) == (30, 30)
    assert page.value("prefix_cache_hits_total") == 20
    assert page.value("gateway_open_requests") == 0


def test_a_gap_equal_to_a_bound_is_below_it_and_a_long_one_is_counted(metrics: Metrics) -> None:
    metrics.gaps.add(0.0005, 1)
    metrics.gaps.add(1000.0, 1)
    page = Page(metrics)
    assert page.value("inter_token_latency_seconds_bucket", le="0.0004") == 0
    assert page.value("inter_token_latency_seconds_bucket", le="0.0005") == 1
    assert page.value("inter_token_latency_seconds_bucket", le="80.0") == 1
    assert page.value("inter_token_latency_seconds_bucket", le="+Inf") == 2


def test_several_tokens_in_the_first_event_have_gaps_of_nothing(metrics: Metrics) -> None:
    meter = metrics.request_started("/v1/completions", 0.0)
    meter.tokens(3, 0.5)
    assert (metrics.gaps.sum_s, sum(metrics.gaps.counts)) == (0.0, 2)
    meter.tokens(1, 0.4)  # a clock that seems to go back must not make a negative gap
    assert metrics.gaps.sum_s == 0.0


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CANCELLED, "abort"),
        (FinishReason.DEADLINE, "deadline"),
    ],
)
def test_reasons_have_the_words_of_vllm(metrics: Metrics, reason: FinishReason, word: str) -> None:
    metrics.request_started("/v1/completions", 0.0).finished(done(reason, prefill_s=None), 1.0)
    page = Page(metrics)
    assert page.value("request_success_total", finished_reason=word) == 1
    assert page.value("request_prefill_time_seconds_count") == 0


def test_every_request_ends_once(metrics: Metrics) -> None:
    meter = metrics.request_started("/v1/completions", 0.0)
    meter.accepted(3, 4)
    meter.finished(Error(ErrorCode.RANK_FAILED, "rank 1 died"), 1.0)
    meter.finished(done(), 2.0)
    page = Page(metrics)
    assert page.value("request_errors_total", code="rank_failed") == 1
    assert page.value("request_success_total", finished_reason="error") == 1
    assert page.value("request_success_total", finished_reason="stop") == 0
    assert page.value("gateway_open_requests") == 0


def test_a_refused_request_is_no_request_of_the_engine(metrics: Metrics) -> None:
    metrics.request_started("/v1/completions", 0.0).finished(Error(ErrorCode.QUEUE_FULL, "full"), 0.1)
    page = Page(metrics)
    assert page.value("request_errors_total", code="queue_full") == 1
    assert page.value("request_success_total", finished_reason="error") == 0
    assert page.value("e2e_request_latency_seconds_count") == 0


def test_series_exist_before_anything_happened(metrics: Metrics) -> None:
    page = Page(metrics)  # else rate() misses the first event of a kind
    assert all(page.value("request_errors_total", code=str(code)) == 0 for code in ErrorCode)
    assert page.value("request_success_total", finished_reason="stop") == 0
    assert page.value("engine_state", state="unreachable") == 1


def test_engine_report(metrics: Metrics) -> None:
    metrics.engine_report(report(prefill=True))
    page = Page(metrics)
    assert page.value("engine_state", state="ready") == 1
    assert page.value("prefill") == 1
    assert page.value("engine_state", state="unreachable") == 0
    assert (page.value("num_requests_running"), page.value("num_requests_waiting")) == (1, 2)
    assert page.value("kv_cache_usage_perc") == 0.25
    assert page.value("rank_heartbeat_age_seconds", rank="1") == pytest.approx(0.02)
    assert page.value("rank_state", rank="0", state="running") == 1
    assert page.value("rank_state", rank="0", state="ready") == 0
    assert page.value("engine_requests_total", outcome="completed") == 5
    assert page.value("engine_tokens_total") == 640
    metrics.engine_report(report(world_size=1, rank_states=("ready",), beat_ages_s=(0.0,), running=None, waiting=()))
    page = Page(metrics)
    assert not page.has("rank_heartbeat_age_seconds", rank="1"), "a rank that is gone must not stay behind"
    assert page.value("num_requests_running") == 0


def test_requests_that_decode_together(metrics: Metrics) -> None:
    several = report(running="a", also_running=("b", "c"), parallel=4, used_positions=1024, waiting=("d", "e"))
    metrics.engine_report(several)
    page = Page(metrics)
    assert (page.value("num_requests_running"), page.value("requests_processing")) == (3, 3)
    assert (page.value("num_requests_waiting"), page.value("requests_deferred")) == (2, 2)
    assert page.value("kv_cache_usage_perc") == 1024 / 4 / 2048


def test_kept_tokens_of_engines_that_have_blocks(metrics: Metrics) -> None:
    metrics.engine_report(report(kept_block_tokens=64, kept_used=3, kept_slots=10, kept_host_used=0, kept_host_slots=2))
    page = Page(metrics)
    assert (page.value("kept_tokens", memory="device"), page.value("kept_tokens_limit", memory="device")) == (192, 640)
    assert (page.value("kept_tokens", memory="host"), page.value("kept_tokens_limit", memory="host")) == (0, 128)
    metrics.engine_report(report())
    assert not {"kog:kept_tokens", "kog:kept_tokens_limit"} & Page(metrics).families.keys()


def test_epochs_waited_of_ranks_that_count_them(metrics: Metrics) -> None:
    metrics.engine_report(report(epochs_waited=(7, 0), waited_s=(0.25, 0.0)))
    text = metrics.render().decode()
    assert 'kog:epochs_waited_total{engine="0",model_name="demo",rank="0"} 7.0\n' in text
    assert Page(metrics).families["kog:epochs_waited"].type == "counter"
    assert Page(metrics).value("epochs_waited_total", rank="1") == 0
    assert Page(metrics).value("epoch_wait_seconds_total", rank="0") == 0.25
    metrics.engine_report(report(epochs_waited=(None, 3), waited_s=(None, 0.5)))
    assert not Page(metrics).has("epochs_waited_total", rank="0"), "not counted is not 0"
    assert Page(metrics).value("epochs_waited_total", rank="1") == 3
    metrics.engine_report(report())  # of an engine that knows nothing of it
    assert not {"kog:epochs_waited", "kog:epoch_wait_seconds"} & Page(metrics).families.keys()


def test_an_engine_that_does_not_answer_has_no_queue_but_a_growing_age() -> None:
    now = [5.0]
    metrics = Metrics("demo", clock=lambda: now[0])
    metrics.engine_report(report())
    now[0] = 12.5
    metrics.engine_report(None)
    page = Page(metrics)
    assert page.value("engine_state", state="unreachable") == 1
    assert page.value("engine_report_age_seconds") == 7.5
    assert not page.has("num_requests_running")
    assert page.value("engine_tokens_total") == 640


def test_a_router_reports_its_replicas(metrics: Metrics) -> None:
    replicas: dict[str, object] = {
        "replica_names": ("a", "b", "c"), "replica_states": ("ready", "ready", "down: rank 0 died"),
        "replica_addresses": ("", "", ""), "replica_running": ("x y", "", ""), "running": "x", "also_running": ("y",),
    }  # fmt: skip
    metrics.engine_report(report(**replicas))
    page = Page(metrics)
    assert page.value("num_requests_running") == 2
    assert page.value("num_replicas", state="ready") == 2
    assert page.value("num_replicas", state="down") == 1


def test_bandwidth_share_says_which_peak(metrics: Metrics) -> None:
    assert not Page(metrics).has("bytes_per_token")
    metrics.engine_facts(EngineFacts(2048, bytes_per_token=4_000_000, peak_bytes_s=1e10, peak_source="measured here"))
    meter = metrics.request_started("/v1/completions", 0.0)
    for idx in range(11):
        meter.tokens(1, 1.0 + idx * 0.001)
    page = Page(metrics)
    assert page.value("decode_tokens_per_second") == pytest.approx(1000.0)
    assert page.value("memory_bandwidth_share", peak="measured here") == pytest.approx(0.4)
    assert page.value("memory_peak_bytes_per_second", peak="measured here") == 1e10


def test_gateway_s_own(metrics: Metrics) -> None:
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    metrics.buffered(700)
    metrics.buffered(-200)
    metrics.slow_reader_dropped()
    metrics.client_disconnected()
    metrics.http_response("/v1/completions", 200)
    metrics.http_response("/v1/completions", 429)
    page = Page(metrics)
    assert (page.value("gateway_open_streams"), page.value("gateway_buffered_bytes")) == (1, 500)
    assert (page.value("gateway_slow_readers_total"), page.value("gateway_disconnects_total")) == (1, 1)
    assert page.samples["kog:http_responses_total", frozenset({("handler", "/v1/completions"), ("status", "429")})] == 1


def test_clients_cannot_make_labels_grow(metrics: Metrics) -> None:
    for idx in range(10 * MAX_HANDLERS):
        metrics.http_response(f"/made/up/{idx}", 404)
    series = [name for name, _ in Page(metrics).samples if name == "kog:http_responses_total"]
    assert len(series) <= MAX_HANDLERS + 1


def test_two_gateways_in_one_process_share_nothing() -> None:
    first, second = Metrics("demo"), Metrics("demo")
    first.request_started("/v1/completions", 0.0).tokens(5, 1.0)
    assert Page(second).value("generation_tokens_total") == 0


def test_rank_states_are_those_of_the_control_page() -> None:
    from kog_dist.runtime.control import RankState

    assert tuple(state.name.lower() for state in RankState) == RANK_STATES


def test_a_token_is_cheap(metrics: Metrics) -> None:
    """The best of several rounds, against the cost of a call of the library in the same rounds: no figure of this machine."""
    meter = metrics.request_started("/v1/completions", 0.0)
    best_s = [1.0, 1.0]
    num = 2000
    for _ in range(7):
        begin_s = time.perf_counter()
        for idx in range(num):
            meter.tokens(1, idx * 0.0004)
        middle_s = time.perf_counter()
        for _ in range(num):
            metrics.time_to_first_token.observe(0.0004)
        best_s = [min(best_s[0], middle_s - begin_s), min(best_s[1], time.perf_counter() - middle_s)]
    assert best_s[0] < best_s[1], "the whole of `tokens` must cost less than one observation of the library"


def test_length_bounds_are_vllm_s() -> None:
    assert module._one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)
    assert module._one_two_five(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
