"""Reports come through a connection that stays open, requests through new ones: both must lead to the same engine."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kog_dist.errors import LaunchError
from kog_dist.rpc.file_end import EngineBusy
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from tests.unit.gateway.scripted_engine import REPORT, WAIT_S, RunningGateway, ScriptedEngine, client, gateway, says, until

LISTEN = """
import socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
made.listen()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    tmp_path.chmod(0o700)
    made = ScriptedEngine(tmp_path)
    made.on_generate = says("a")
    yield made
    made.stop()


@pytest.fixture
def ready(own_engine: ScriptedEngine, tmp_path: Path) -> Iterator[tuple[RunningGateway, httpx.Client]]:
    with gateway(own_engine, tmp_path) as made, client(made) as http:
        until(lambda: http.get("/readyz").status_code == 200)
        yield made, http


@contextlib.contextmanager
def other_engine(path: Path) -> Iterator[int]:
    """A process that listens at this path, and its pid."""
    with subprocess.Popen([sys.executable, "-c", LISTEN, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], WAIT_S)[0], "it does not listen"
            yield process.pid
        finally:
            process.kill()
            path.unlink()


def ask(http: httpx.Client) -> httpx.Response:
    return http.post("/v1/completions", json={"prompt": "x"})


def refusal(http: httpx.Client) -> str:
    """Why a request is refused; the service must say from then on that it is not ready, and the same reason."""
    refused = ask(http)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
    reason = refused.json()["error"]["message"]
    judged = http.get("/readyz")
    assert (judged.status_code, judged.json()) == (503, {"state": "failed", "reason": reason})
    return str(reason)


def report_again(engine: ScriptedEngine, made: RunningGateway) -> None:
    """Wait for a report of the engine that comes after this call."""
    num_tokens = engine.report.num_tokens + 1
    engine.report = dataclasses.replace(REPORT, num_tokens=num_tokens)
    until(lambda: (report := made.service.readiness.report) is not None and report.num_tokens == num_tokens)


def test_a_removed_socket_file(
    own_engine: ScriptedEngine, ready: tuple[RunningGateway, httpx.Client], tmp_path: Path
) -> None:  # fmt: skip
    made, http = ready
    (tmp_path / SOCKET_NAME).rename(tmp_path / "aside")
    assert refusal(http).startswith(f"no engine listens at ipc://{tmp_path / SOCKET_NAME}")
    report_again(own_engine, made)
    assert http.get("/readyz").status_code == 503, "the engine says that it is ready, and no request would reach it"
    (tmp_path / "aside").rename(tmp_path / SOCKET_NAME)
    until(lambda: http.get("/readyz").status_code == 200)
    assert ask(http).status_code == 200
    assert [line["event"] for line in made.log()].count("engine_unreachable") == 1


def test_another_engine_at_the_same_place_gets_no_request(
    own_engine: ScriptedEngine, ready: tuple[RunningGateway, httpx.Client], tmp_path: Path
) -> None:  # fmt: skip
    made, http = ready
    (tmp_path / SOCKET_NAME).rename(tmp_path / "aside")
    with other_engine(tmp_path / SOCKET_NAME) as pid:
        assert f"another engine (process {pid}) listens at" in refusal(http)
        report_again(own_engine, made)
        assert http.get("/readyz").status_code == 503
    (tmp_path / "aside").rename(tmp_path / SOCKET_NAME)
    until(lambda: http.get("/readyz").status_code == 200)
    assert ask(http).status_code == 200
    assert len(own_engine.received) == 1


def test_an_engine_with_too_many_connections_is_ready(
    own_engine: ScriptedEngine, ready: tuple[RunningGateway, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, http = ready

    def fail(error: LaunchError) -> None:
        def find() -> Access:
            raise error

        monkeypatch.setattr(made.service.bridge, "_find", find)

    fail(EngineBusy("too many connections wait for it"))
    refused = ask(http)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "too many connections wait for it")
    report_again(own_engine, made)
    assert http.get("/readyz").status_code == 200
    fail(LaunchError("its key is gone"))
    assert refusal(http) == "its key is gone"
    fail(EngineBusy("too many connections wait for it"))
    report_again(own_engine, made)
    assert http.get("/readyz").json()["reason"] == "its key is gone", "nobody knows better"
