"""Minutes of hostile traffic: `make service`. Small forms of it are in tests/unit/gateway and in test_http.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.engine.session import EngineSession, until
from tests.e2e.http_engine import READY_S

pytestmark = [pytest.mark.service, pytest.mark.timeout(1800)]
SCHEMATHESIS = Path(sys.executable).parent / "schemathesis"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection,"
    "unsupported_method,allow_header_conformance"
)
CASES = 20_000
HOSTILE, ROUNDS, BEGUN_S = 500, 5, 5.0  # after so many seconds all hostile clients are at it
ASK = {"prompt": "def add(a, b):", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@contextmanager
def gateway_of_replay(session: EngineSession, rate: int, name: str = "engine") -> Iterator[tuple[str, psutil.Process]]:
    """A fake engine of that name and `kog-gateway` in front of it, whose output is that of `name`-gateway."""
    replay, gateway = f"{name}-replay", f"{name}-gateway"
    session.variables["PYTHONPATH"] = str(Path(__file__).parents[2])  # where the clients of tests are: children look nowhere else
    engine = session.start("kog_dist.bench.cli", ["replay", f"--instance={name}", f"--rate={rate}"], replay)
    until(lambda: "tokens/s" in session.output(replay), READY_S, lambda: session.output(replay))
    model = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"
    process = session.start(
        "kog_dist.gateway.cli", [f"--instance={name}", "--port=0", f"--model={model}", "--log-format=json"], gateway
    )  # fmt: skip
    until(lambda: "serving" in session.output(gateway) or process.poll() is not None, READY_S, lambda: session.output(gateway))
    url = json.loads(session.output(gateway).splitlines()[0])["url"]
    until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, READY_S, lambda: session.output(gateway))
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
        problems = [line for line in session.output("engine-gateway").splitlines() if json.loads(line)["level"] == "error"]
        assert not problems, problems[:3]
        grown = (process.memory_info().rss - before_bytes) / 2**20
        print(f"\n{num_cases} cases in {seed - 1} rounds, the gateway grew by {grown:.1f} MiB")
        assert grown < 100


def gaps_ms(url: str) -> list[float]:
    """Gaps between the chunks of an answer that a well-behaved client reads, sorted; it repeats what is refused as busy."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        while True:
            with http.stream("POST", "/v1/completions", json=ASK) as response:
                if response.status_code == 429:
                    time.sleep(0.1)
                    continue
                assert response.status_code == 200, response.read()
                stamps = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
            return sorted(1000 * (after - before) for before, after in pairwise(stamps))


class Hostility:
    """Hostile clients of one gateway or the other, and what they did."""

    def __init__(self, session: EngineSession) -> None:
        self.done: Counter[str] = Counter()
        self._session, self._num_times = session, 0

    @contextmanager
    def towards(self, url: str, process: psutil.Process) -> Iterator[None]:
        """They are all at it; afterwards they are stopped, and the gateway is waited for to have let go of them."""
        self._num_times += 1
        name = f"hostile-{self._num_times}"
        clients = self._session.start("tests.e2e.hostile_clients", [url.rpartition(":")[2], str(HOSTILE)], name)
        time.sleep(BEGUN_S)
        yield
        clients.send_signal(signal.SIGTERM)
        assert clients.wait(30) == 0, self._session.output(name)
        self.done.update(json.loads(self._session.output(name, "out")))
        until(lambda: _num_connections(process) <= 2, 60.0, lambda: f"{_num_connections(process)} connections are left")


def middle(answers: list[list[float]], share: float) -> float:
    """The median over answers of their gap at this share, such as 0.99 for p99."""
    return median(at(gaps, share) for gaps in answers)


def at(gaps: list[float], share: float) -> float:
    return gaps[int(share * len(gaps))]


def test_500_hostile_clients_and_one_good_one(session: EngineSession) -> None:
    """Its p99 at most doubles.

    Measured in turns, since other work on the machine comes and goes: the neighbours of a round are compared, and of the rounds
    the middle one counts. While they are clients of another gateway they cost the machine's cores as much: that is only told.
    """
    with ExitStack() as stack:
        url, process = stack.enter_context(gateway_of_replay(session, 1000))
        other_url, other = stack.enter_context(gateway_of_replay(session, 1000, "other"))
        hostility = Hostility(session)
        alone, beside, among = list[list[float]](), list[list[float]](), list[list[float]]()
        before_bytes, peak_bytes = process.memory_info().rss, 0
        for _ in range(ROUNDS):
            alone.append(gaps_ms(url))
            with hostility.towards(other_url, other):
                beside.append(gaps_ms(url))
            with hostility.towards(url, process):
                among.append(gaps_ms(url))
                peak_bytes = max(peak_bytes, process.memory_info().rss)
        grown = (peak_bytes - before_bytes) / 2**20
        p50, p99 = ([middle(each, share) for each in (alone, beside, among)] for share in (0.5, 0.99))
        doubled, shared = (
            sorted(at(after, 0.99) / at(before, 0.99) for before, after in zip(each, among, strict=True))
            for each in (alone, beside)
        )
        print(
            f"\ngaps between the good client's chunks, alone, beside {HOSTILE} at another gateway, and among them: "
            f"p50 {p50[0]:.3f}, {p50[1]:.3f}, {p50[2]:.3f} ms; p99 {p99[0]:.2f}, {p99[1]:.2f}, {p99[2]:.2f} ms; "
            f"p99 among over alone, by round: {', '.join(f'{ratio:.2f}' for ratio in doubled)}; "
            f"over beside: {', '.join(f'{ratio:.2f}' for ratio in shared)}; "
            f"the gateway grew by {grown:.1f} MiB; they did {json.dumps(hostility.done)}"
        )
        assert median(doubled) <= 2, "the good client's p99 at most doubles"
        assert grown < 200
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200


def _num_connections(process: psutil.Process) -> int:
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections("tcp"))
