"""No stream waits for another client's body: `make service`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import httpx
import pytest

from kog_dist.bench.session import EngineSession, engine_session, until
from tests.e2e.http_engine import READY_S
from tests.e2e.large_bodies import BODIES
from tests.e2e.test_http_service import gateway_of_replay

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]
RATE = 500
MEASURED_S = 4.0
NUM_CLIENTS = 10
MOST_GAP_MS, MOST_LIVEZ_MS = 20.0, 50.0
ASK = {"prompt": "def add(a, b):", "max_tokens": round(RATE * MEASURED_S), "ignore_eos": True, "stream": True}


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


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_and_livez_go_on(gateway: tuple[EngineSession, str], kind: str) -> None:
    session, url = gateway
    livez_ms: list[float] = []
    is_over = threading.Event()

    def ask_livez() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            while not is_over.wait(0.05):
                begin_s = time.perf_counter()
                assert http.get("/livez").status_code == 200
                livez_ms.append(1000 * (time.perf_counter() - begin_s))

    thread = threading.Thread(target=ask_livez)
    with posting(session, url, kind):
        thread.start()
        worst_ms, usual_ms = worst_gap_ms(url)
        is_over.set()
        thread.join()
    print(f"gap p99 {usual_ms:.1f}, max {worst_ms:.1f} ms; /livez max {max(livez_ms):.1f} ms", flush=True)
    assert worst_ms <= MOST_GAP_MS
    assert max(livez_ms) <= MOST_LIVEZ_MS
