"""Minutes of hostile traffic: `make service`. Small forms of it are in tests/unit/gateway and in test_http.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.session import EngineSession, until
from tests.e2e.http_engine import READY_S

pytestmark = [pytest.mark.service, pytest.mark.timeout(1800)]
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection,"
    "unsupported_method,allow_header_conformance"
)
CASES = 20_000
HOSTILE, HOSTILE_S = 500, 40.0
ASK = {"prompt": "def add(a, b):", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@contextmanager
def gateway_of_replay(session: EngineSession, rate: int) -> Iterator[tuple[str, psutil.Process]]:
    """A synthetic engine and `kog-gateway` in front of it."""
    engine = session.start("kog_dist.bench.cli", ["replay", "--instance=engine", f"--rate={rate}"], "replay")
    until(lambda: "tokens/s" in session.output("replay"), READY_S, lambda: session.output("replay"))
    model = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"
    process = session.start(
        "kog_dist.gateway.cli", ["--instance=engine", "--port=0", f"--model={model}", "--log-format=json"], "gateway"
    )  # fmt: skip
    until(
        lambda: "serving" in session.output("gateway") or process.poll() is not None, READY_S, lambda: session.output("gateway")
    )
    url = json.loads(session.output("gateway").splitlines()[0])["url"]
    until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, READY_S, lambda: session.output("gateway"))
    yield url, psutil.Process(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    engine.send_signal(signal.SIGTERM)
    engine.wait(20)


def reaching_the_model(url: str, folder: Path) -> Path:
    """The document with model names that exist, so that most requests get further than that."""
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["default", None]}
    path = folder / "openapi.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def fuzz(url: str, document: Path, examples: int, seed: int) -> int:
    """Run schemathesis; returns the number of cases, all of which passed."""
    done = subprocess.run(
        [
            str(SCHEMATHESIS), "run", str(document), f"--url={url}", f"-n{examples}", "--phases=coverage,fuzzing",
            f"--checks={CHECKS}",
            "--no-color", f"--seed={seed}", "--continue-on-failure", "--suppress-health-check=all", "--generation-database=none",
            "--request-timeout=60", "--warnings=off",
        ],
        capture_output=True, text=True, check=False, cwd=document.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    counted = re.search(r"([\d,]+) generated, ([\d,]+) passed", done.stdout)
    assert counted is not None, done.stdout[-2000:]
    assert counted[1] == counted[2]
    return int(counted[1].replace(",", ""))


def test_20000_fuzzed_requests(session: EngineSession, tmp_path: Path) -> None:
    with gateway_of_replay(session, rate=50_000) as (url, process):
        document, num_cases, seed = reaching_the_model(url, tmp_path), 0, 1
        before_bytes = process.memory_info().rss
        while num_cases < CASES:
            num_cases += fuzz(url, document, 400, seed)
            seed += 1
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
        whole = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, trust_env=False)
        assert whole.status_code == 200
        problems = [line for line in session.output("gateway").splitlines() if json.loads(line)["level"] == "error"]
        assert not problems, problems[:3]
        grown = (process.memory_info().rss - before_bytes) / 2**20
        print(f"\n{num_cases} cases in {seed - 1} rounds, the gateway grew by {grown:.1f} MiB")
        assert grown < 100


def good_gaps_ms(url: str, num_answers: int) -> list[float]:
    """Gaps between the chunks of answers that a well-behaved client reads; it repeats what is refused as busy."""
    gaps: list[float] = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for _ in range(num_answers):
            while True:
                with http.stream("POST", "/v1/completions", json=ASK) as response:
                    if response.status_code == 429:
                        time.sleep(0.1)
                        continue
                    assert response.status_code == 200, response.read()
                    stamps = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
                break
            gaps += [1000 * (after - before) for before, after in pairwise(stamps)]
    return sorted(gaps)


def test_500_hostile_clients_and_one_good_one(session: EngineSession) -> None:
    with gateway_of_replay(session, rate=1000) as (url, process):
        alone = good_gaps_ms(url, 2)
        before_bytes = process.memory_info().rss
        port = url.rpartition(":")[2]
        hostile = session.start("tests.e2e.hostile_clients", [port, str(HOSTILE), str(HOSTILE_S)], "hostile")
        time.sleep(5.0)  # until all of them are at it
        among = good_gaps_ms(url, 4)
        peak_bytes = process.memory_info().rss
        assert hostile.wait(120) == 0, session.output("hostile")
        p99 = [gaps[int(0.99 * len(gaps))] for gaps in (alone, among)]
        p50 = [gaps[len(gaps) // 2] for gaps in (alone, among)]
        grown = (peak_bytes - before_bytes) / 2**20
        print(
            f"\ngaps between the good client's chunks: p50 {p50[0]:.3f} ms alone, {p50[1]:.3f} ms among {HOSTILE}; "
            f"p99 {p99[0]:.3f} ms, {p99[1]:.3f} ms; the gateway grew by {grown:.1f} MiB; "
            f"they did {session.output('hostile', 'out').strip()}"
        )
        assert p99[1] <= 2 * p99[0], "the good client's p99 at most doubles"
        assert grown < 200
        until(lambda: _num_connections(process) <= 2, 60.0, lambda: f"{_num_connections(process)} connections are left")
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200


def _num_connections(process: psutil.Process) -> int:
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))
