"""/metrics and the log of a running service agree with what its clients saw."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kog_dist.bench.engine.session import engine_session, until
from tests.e2e.http_engine import ENDED_S, HttpEngine, http_engine, texts

ROOT = Path(__file__).parents[2]
PROMPT = "def zanzibar(a, b):"
ASK = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with engine_session() as session:
        flags = ("--ranks=2", "--device=cpu", "--log-format=json", f"--log-dir={session.folder / 'logs'}")
        with http_engine(session, *flags) as made:
            yield made


def logged(served: HttpEngine) -> str:
    """All that any process of the engine has logged."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((served.session.folder / "logs").glob("*.log")))


def values(served: HttpEngine) -> dict[str, float]:
    """The page: `name{label=value,...}` without the labels that all have, and without times of creation."""
    response = served.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name not in ("model_name", "engine")]
            found[sample.name + (f"{{{','.join(labels)}}}" if labels else "")] = sample.value
    return found


def test_figures_are_those_of_the_answers(served: HttpEngine) -> None:
    before = values(served)
    assert before["kog:engine_state{state=ready}"] == 1
    whole = served.http.post("/v1/completions", json=ASK).json()
    with served.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        assert "".join(texts(response.iter_lines())) == whole["choices"][0]["text"]
    usage = whole["usage"]
    until(lambda: values(served)["kog:gateway_open_requests"] == 0, ENDED_S, lambda: "a request has not ended")
    grown = {name: value - before.get(name, 0.0) for name, value in values(served).items()}
    assert grown["kog:generation_tokens_total"] == 2 * usage["completion_tokens"] == 40
    assert grown["kog:prompt_tokens_total"] == grown["kog:prefix_cache_queries_total"] == 2 * usage["prompt_tokens"]
    assert grown["kog:prefix_cache_hits_total"] >= usage["prompt_tokens"] - 1, "the second time all but the last token is kept"
    assert grown["kog:request_success_total{finished_reason=length}"] == 2
    assert grown["kog:time_to_first_token_seconds_count"] == grown["kog:e2e_request_latency_seconds_count"] == 2
    assert grown["kog:inter_token_latency_seconds_count"] == 2 * 19
    assert 0 < grown["kog:inter_token_latency_seconds_sum"] < grown["kog:e2e_request_latency_seconds_sum"]
    assert grown["kog:request_prefill_time_seconds_sum"] <= grown["kog:time_to_first_token_seconds_sum"]
    assert grown["kog:http_responses_total{handler=/v1/completions,status=200}"] == 2


def test_every_metric_of_the_dashboard_is_on_the_page(served: HttpEngine) -> None:
    served.http.post("/v1/completions", json=ASK)
    until(lambda: "kog:rank_state{rank=1,state=ready}" in values(served), ENDED_S, lambda: "the engine has not reported")
    page = {name.partition("{")[0] for name in values(served)}
    text = (ROOT / "docs" / "operations" / "grafana-dashboard.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"kog:[a-z0-9_]+", text))
    elsewhere = {"kog:num_replicas", "kog:memory_peak_bytes_per_second", "kog:memory_bandwidth_share"}  # a router; a known peak
    assert len(asked) > 30
    assert asked - page <= elsewhere
    assert values(served)["kog:bytes_per_token"] > 1e6


def test_a_refusal_is_counted_and_said_once(served: HttpEngine) -> None:
    before = values(served)
    refused = served.http.post("/v1/completions", json={**ASK, "max_tokens": 10**6})
    assert refused.status_code == 400
    after = values(served)
    assert after["kog:generation_tokens_total"] == before["kog:generation_tokens_total"]
    assert after["kog:gateway_open_requests"] == 0


def test_the_log_has_every_request_and_nothing_that_was_said(served: HttpEngine) -> None:
    answer = served.http.post("/v1/completions", json=ASK, headers={"x-request-id": "test-log-1"}).json()

    def lines() -> list[dict[str, object]]:
        said = [line for line in logged(served).splitlines() if line.startswith("{")]
        return [json.loads(line) for line in said if "test-log-1" in line]

    until(lines, ENDED_S, lambda: logged(served))
    (line,) = lines()
    assert (line["event"], line["status"], line["endpoint"], line["client"]) == ("request", 200, "/v1/completions", "loopback")
    assert (line["finish_reason"], line["num_generated_tokens"]) == ("length", 20)
    said = logged(served) + served.session.output() + served.session.output(stream="out")
    assert "zanzibar" not in said
    assert answer["choices"][0]["text"].strip() not in said
