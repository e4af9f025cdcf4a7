"""The HTTP service as `kog-launch` starts it: one engine for most of these, real processes, real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, engine_session, until
from tests.e2e.http_engine import ENDED_S, READY_S, HttpEngine, http_engine, texts
from tests.patience import in_time, slowness

PROMPT = "def add(a, b):"
ASK = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
LONG = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with engine_session() as session, http_engine(session, "--ranks=2", "--device=cpu") as made:
        yield made


def test_http_and_rpc_say_the_same(served: HttpEngine) -> None:
    with served.session.connect() as rpc:
        expected = "".join(getattr(event, "text", "") for event in rpc.generate(prompt=PROMPT, max_tokens=24))
    whole = served.http.post("/v1/completions", json=ASK)
    assert whole.json()["choices"][0]["text"] == expected
    with served.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        assert "".join(texts(response.iter_lines())) == expected


def test_a_second_start_on_the_port_fails_at_once_and_names_the_first(served: HttpEngine) -> None:
    begin_s = time.monotonic()
    done = served.session.run("kog_dist.launch.cli", ["--instance=second", "--http", f"--port={served.port}"])
    took_s = time.monotonic() - begin_s
    assert done.returncode == 3
    assert f"it is in use by process {served.launcher.pid} (" in done.stderr
    assert "kog_dist.launch.cli" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert in_time(took_s, 6.0), "0.9 s where little else runs, nearly all of it for Python to start"
    assert served.http.get("/readyz").status_code == 200


def test_an_open_address_without_a_key_does_not_start(served: HttpEngine) -> None:
    done = served.session.run("kog_dist.launch.cli", ["--instance=open", "--http", "--host=0.0.0.0", "--port=0"])
    assert done.returncode == 2
    assert "--host 0.0.0.0 lets other machines in" in done.stderr


def test_a_client_that_goes_frees_the_ranks(served: HttpEngine) -> None:
    with served.http.stream("POST", "/v1/completions", json=LONG) as response:
        next(texts(response.iter_lines()))

    def is_cancelled() -> bool:
        engine = served.http.get("/kog/info").json()["engine"]
        return bool(engine["num_cancelled"] and not engine["num_running"])

    until(is_cancelled, 5.0, lambda: "it still runs")


def test_kog_gateway_by_itself(served: HttpEngine) -> None:
    """Without a model folder, and with a key."""
    session = served.session
    key = session.folder / "key"
    key.write_text("an-api-key", encoding="ascii")
    key.chmod(0o600)
    process = session.start(
        "kog_dist.gateway.cli", ["--instance=engine", "--port=0", f"--api-key-file={key}", "--log-format=json"], "own"
    )  # fmt: skip
    until(lambda: "serving" in session.output("own") or process.poll() is not None, READY_S, lambda: session.output("own"))
    url = json.loads(session.output("own").splitlines()[0])["url"]
    with httpx.Client(base_url=url, timeout=ENDED_S, trust_env=False) as http:
        until(lambda: http.get("/readyz").status_code == 200, ENDED_S, lambda: http.get("/readyz").text)
        assert http.post("/v1/completions", json={**ASK, "prompt": [5, 6]}).status_code == 401
        http.headers["authorization"] = "Bearer an-api-key"
        assert http.post("/v1/completions", json={**ASK, "prompt": [5, 6]}).status_code == 200
        assert http.post("/tokenize", json={"prompt": "x"}).json()["error"]["code"] == "no_tokenizer"
    process.send_signal(signal.SIGTERM)
    assert process.wait(ENDED_S) == 0
    assert "an-api-key" not in session.output("own")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("signum", "why", "told_s"),
    [
        (signal.SIGKILL, "it was killed by SIGKILL; ", 0.75),
        (signal.SIGTERM, "it was killed by SIGTERM; ", 0.75),
        (signal.SIGSTOP, "it gave no sign of life for 1.", 1.75),
    ],
)
def test_a_gateway_that_is_lost_comes_back_and_the_engine_is_not_harmed(
    served: HttpEngine, signum: int, why: str, told_s: float
) -> None:
    """Killed by whatever signal, or stopped: promised are 250 ms, and the same after --stall-timeout."""
    served.wait_state("ready", READY_S)
    pid, engine_pid = served.announced()["pid"], served.session.processes()["coordinator"]
    with served.http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pid, signum)
        lost_s = time.monotonic()
        with pytest.raises(httpx.HTTPError):
            list(lines)
        assert in_time(time.monotonic() - lost_s, told_s)
    begin_s = time.monotonic()
    assert served.http.get("/readyz", timeout=READY_S).status_code == 200, "the port was never free: this waited for the new one"
    assert in_time(time.monotonic() - begin_s, 20.0)
    until(lambda: served.announced()["pid"] != pid, ENDED_S, lambda: "the new one answers, and has not announced itself")
    assert served.session.processes()["coordinator"] == engine_pid
    assert f"the gateway (pid {pid}) ended: {why}" in served.session.output()
    assert served.http.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(("signum", "why"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "gave no sign of life")])
def test_a_gateway_that_is_lost_while_ranks_load_is_started_again(
    session: EngineSession, tiny_model: Path, signum: int, why: str
) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=1", "--http", "--port=0", "--stall-timeout=0.5")
    until(lambda: {"gateway", "rank 0"} <= set(session.processes()), ENDED_S, session.output)
    pids = session.processes()
    os.kill(pids["gateway"], signum)
    until(lambda: f"the gateway (pid {pids['gateway']}) ended: it {why}" in session.output(), ENDED_S, session.output)
    until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0


@pytest.mark.alone
@pytest.mark.parametrize(("signum", "limit_s"), [(signal.SIGKILL, 0.5), (signal.SIGSTOP, 1.5)])
def test_readiness_tells_of_a_lost_rank(session: EngineSession, signum: int, limit_s: float) -> None:
    """Promised are 250 ms for a death and half of --stall-timeout for a hang; machines that run tests are slower."""
    with http_engine(session, "--ranks=2", "--device=cpu") as served:
        with served.http.stream("POST", "/v1/completions", json=LONG) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            next(lines)
            os.kill(session.processes()["rank 1"], signum)
            begin_s = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                assert served.http.get("/livez").status_code == 200
                # The gateway ends, and who connects between it and the next one waits for that: a look unanswered is not ready.
                patience_s = limit_s / 2
                until(
                    lambda: served.http.get("/readyz", timeout=patience_s).status_code == 503,
                    limit_s * slowness(), lambda: "still ready",
                )  # fmt: skip
            assert in_time(time.monotonic() - begin_s, limit_s)
            frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert frames[-1]["error"]["code"] == "rank_failed", frames[-1]
        served.wait_state("ready", READY_S)
        until(lambda: "generation 2 is ready after" in served.said(), READY_S, session.output)
        served.launcher.send_signal(signal.SIGTERM)
        assert served.launcher.wait(ENDED_S) == 0
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")


def test_a_service_starts_its_engine_again_three_times(session: EngineSession, tiny_model: Path) -> None:
    ask = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "logprobs": 0}
    logs = session.folder / "logs"
    with http_engine(session, str(tiny_model), "--ranks=2", f"--log-dir={logs}") as served:
        expected = served.http.post("/v1/completions", json=ask).json()["choices"][0]["logprobs"]["tokens"]
        for generation, victim in enumerate(("rank 1", "coordinator", "rank 0", "rank 1"), 2):
            with served.http.stream("POST", "/v1/completions", json={**ask, "max_tokens": 20_000, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                pid = session.processes()[victim]
                os.kill(pid, signal.SIGKILL)
                frames = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert frames[-1]["error"]["code"] == ("engine_lost" if victim == "coordinator" else "rank_failed"), frames[-1]
            lost = f"kog-launch: {victim} (pid {pid}) was killed by SIGKILL while serving; the engine was stopped; "
            if generation > 4:
                break
            until(lambda: f"generation {generation} is ready after" in served.said(), READY_S, session.output)  # noqa: B023
            assert f"{lost}starting it again as generation {generation}\n" in session.output()
            assert served.announced()["url"] == served.url
            with served.session.connect() as rpc:
                assert rpc.status().world_size == 2
            answer = served.http.post("/v1/completions", json=ask)
            assert answer.json()["choices"][0]["logprobs"]["tokens"] == expected
        assert served.launcher.wait(ENDED_S) == 4
    assert f"{lost}it is not started again after 3 restarts in 10 min\n" in session.output()
    assert json.loads((logs / "exit.json").read_text(encoding="utf-8"))["reason"] == "rank_died"
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")


def test_a_stop_while_the_engine_starts_again_is_obeyed(session: EngineSession, tiny_model: Path) -> None:
    with http_engine(session, str(tiny_model), "--ranks=2") as served:
        os.kill(session.processes()["rank 1"], signal.SIGKILL)
        until(lambda: "starting it again" in session.output(), ENDED_S, session.output)
        served.launcher.send_signal(signal.SIGTERM)
        assert served.launcher.wait(ENDED_S) == 128 + signal.SIGTERM
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")


@pytest.mark.parametrize("victim", ["gateway", "launcher"])
def test_nothing_is_left_after_a_kill(session: EngineSession, tiny_model: Path, victim: str) -> None:
    with http_engine(session, str(tiny_model), "--ranks=2") as served:
        pids = session.processes()
        if victim == "gateway":  # killed at the worst moment: as the launcher stops
            served.launcher.send_signal(signal.SIGTERM)
        os.kill(pids[victim], signal.SIGKILL)
        assert served.launcher.wait(ENDED_S) == (0 if victim == "gateway" else -signal.SIGKILL)
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/livez", trust_env=False)


def test_sigterm_finishes_the_running_answer_and_refuses_others(served: HttpEngine) -> None:
    """The last test of the shared engine."""
    ask = {**LONG, "max_tokens": 60}
    with served.http.stream("POST", "/v1/completions", json=ask) as response:
        lines = response.iter_lines()
        next(lines)
        served.launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.HTTPError), httpx.Client(base_url=served.url, timeout=ENDED_S, trust_env=False) as other:
            until(lambda: other.get("/readyz").status_code == 503, 5.0, lambda: "still ready")  # unless it has finished already
            refused = other.post("/v1/completions", json=ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_draining")
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert served.launcher.wait(ENDED_S) == 0
    until(lambda: not served.session.leftovers(), 3.0, lambda: f"left behind: {served.session.leftovers()}")


def test_one_service_in_front_of_replicas(session: EngineSession) -> None:
    with http_engine(session, "--replicas=2", "--ranks=1", "--device=cpu") as served:
        pids = session.processes()
        assert {"gateway", "router", "rank 0 of r0", "rank 0 of r1"} <= set(pids)
        expected = served.http.post("/v1/completions", json=ASK).json()["choices"][0]["text"]
        os.kill(pids["rank 0 of r1"], signal.SIGKILL)
        served.wait_state("degraded", 5.0)
        assert served.http.get("/readyz").status_code == 200
        assert served.http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == expected
        served.wait_state("ready", READY_S)
        os.kill(pids["router"], signal.SIGKILL)
        until(lambda: session.processes().get("router") not in (None, pids["router"]), ENDED_S, session.output)
        served.wait_state("ready", READY_S)
        assert served.http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == expected
        served.launcher.send_signal(signal.SIGTERM)
        assert served.launcher.wait(ENDED_S) == 0
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")
