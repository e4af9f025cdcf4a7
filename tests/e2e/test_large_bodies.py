"""No stream waits for another client's body: `make service`.

Each kind of body is measured against the same stream without hostile clients right before it: what
other work on the machine costs is in both.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, engine_session, until
from tests.e2e.http_engine import READY_S
from tests.e2e.large_bodies import BODIES
from tests.e2e.test_http_service import gateway_of_replay

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]
RATE = 500
MEASURED_S = 4.0
JSON = {"content-type": "application/json"}
NUM_CLIENTS = 10
MOST_GAP_MS, MOST_LIVEZ_MS = 20.0, 50.0  # more than without hostile clients
MOST_GOOD_S = 10.0  # until a good large body is answered
ASK = {"prompt": "def add(a, b):", "max_tokens": round(RATE * MEASURED_S), "ignore_eos": True, "stream": True}
PROMPTS: dict[str, tuple[Any, int]] = {"ids": ([17] * 1000, 1 << 20), "text": ("def add(a, b): " * 100, 1 << 19)}  # and bytes


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[EngineSession, str]]:
    with engine_session() as session, gateway_of_replay(session, RATE) as (url, _process):
        yield session, url


@contextmanager
def posting(session: EngineSession, url: str, kind: str) -> Iterator[None]:
    name = f"posting-{kind.replace(' ', '-')}"
    clients = session.start("tests.e2e.large_bodies", [url.rpartition(":")[2], str(NUM_CLIENTS), kind], name)
    until(lambda: "begun" in session.output(name, "out"), READY_S, lambda: session.output(name))
    time.sleep(0.5)
    yield
    clients.send_signal(signal.SIGTERM)
    assert clients.wait(30) == 0, session.output(name)
    print(f"{kind}: {session.output(name, 'out').splitlines()[-1]}", end=", ")


def worst_gap_ms(url: str) -> tuple[float, float]:
    """The largest gap between chunks of a stream, and the one of 99 %."""
    stamps = []
    http = httpx.Client(base_url=url, timeout=60, trust_env=False)
    with http, http.stream("POST", "/v1/completions", json=ASK) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                stamps.append(time.perf_counter())
    gaps = sorted(1000 * (after - before) for before, after in pairwise(stamps))
    return gaps[-1], gaps[round(0.99 * (len(gaps) - 1))]


def measured(url: str) -> tuple[float, float, float]:
    """Largest and usual gap of a stream, and the slowest /livez meanwhile, in ms."""
    livez_ms: list[float] = []
    is_over = threading.Event()

    def ask_livez() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            while not is_over.wait(0.05):
                begin_s = time.perf_counter()
                assert http.get("/livez").status_code == 200
                livez_ms.append(1000 * (time.perf_counter() - begin_s))

    thread = threading.Thread(target=ask_livez)
    thread.start()
    worst_ms, usual_ms = worst_gap_ms(url)
    is_over.set()
    thread.join()
    return worst_ms, usual_ms, max(livez_ms)


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_and_livez_go_on(gateway: tuple[EngineSession, str], kind: str) -> None:
    session, url = gateway
    alone = measured(url)
    with posting(session, url, kind):
        beside = measured(url)
    for what, figures in (("alone", alone), ("beside", beside)):
        print(f"{what}: gap max {figures[0]:.1f}, p99 {figures[1]:.1f}, /livez max {figures[2]:.1f} ms", end="; ")
    print(f"max {beside[0] - alone[0]:+.1f} ms", flush=True)
    assert beside[0] - alone[0] <= MOST_GAP_MS
    assert beside[2] - alone[2] <= MOST_LIVEZ_MS


@pytest.mark.parametrize("good", PROMPTS)
@pytest.mark.parametrize("kind", ["lists", "ids", "objects", "keys"])
def test_a_good_large_body_does_not_starve(gateway: tuple[EngineSession, str], kind: str, good: str) -> None:
    session, url = gateway
    prompt, num_bytes = PROMPTS[good]
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).ljust(num_bytes)
    with posting(session, url, kind):
        begin_s = time.perf_counter()
        response = httpx.post(f"{url}/v1/completions", content=body, headers=JSON, timeout=60, trust_env=False)
        took_s = time.perf_counter() - begin_s
    print(f"good {good} answered {response.status_code} after {took_s:.2f} s", flush=True)
    assert response.status_code == 200, response.text
    assert took_s <= MOST_GOOD_S
