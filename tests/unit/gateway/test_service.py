"""Readiness, keys, origins, drain, limits of connections, models, tokens, pages and the document."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.gateway.args import GatewayArgs
from kog_dist.gateway.bind import check_exposure, is_loopback, listen
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.props import slots
from kog_dist.gateway.readiness import Readiness
from kog_dist.rpc.messages import EngineState, FinishReason
from kog_dist.runtime.http_file import HTTP_FILE
from tests.patience import in_time
from tests.unit.gateway.scripted_engine import (
    JSON,
    REPORT,
    WAIT_S,
    RunningGateway,
    ScriptedEngine,
    client,
    frames_of,
    gateway,
    raw_request,
    says,
    until,
)


# ---- readiness ----
class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_readiness_follows_the_engine() -> None:
    clock = Clock()
    readiness = Readiness(clock=clock)
    assert (readiness.health().state, readiness.health().serves) == ("loading", False)
    loading = dataclasses.replace(REPORT, state=EngineState.LOADING, rank_states=("ready", "loading"))
    readiness.reported(loading)
    assert (readiness.health().state, readiness.health().reason) == ("loading", "rank 1 is loading")
    readiness.reported(REPORT)
    assert readiness.health().serves
    readiness.reported(dataclasses.replace(REPORT, beat_ages_s=(0.0, 0.51)))
    assert (readiness.health().state, readiness.health().reason) == ("failed", "rank 1 has given no sign of life for 0.5 s")
    readiness.reported(dataclasses.replace(REPORT, state=EngineState.DRAINING))
    assert readiness.health().state == "draining"
    readiness.reported(dataclasses.replace(REPORT, state=EngineState.FAILED))
    assert readiness.health().state == "failed"
    readiness.reported(loading)
    assert readiness.health().state == "failed", "an engine that has served does not load: a rank is gone"
    readiness.lost("gone")
    assert (readiness.health().state, readiness.health().reason) == ("failed", "gone")


def test_an_engine_that_does_not_answer_has_failed() -> None:
    clock = Clock()
    readiness = Readiness(clock=clock)
    readiness.reported(REPORT)
    clock.now_s += 3600.0
    assert readiness.health().serves, "nobody asked"
    readiness.asked()
    clock.now_s += 0.4
    readiness.asked()
    assert readiness.health().serves
    clock.now_s += 0.2
    assert "has not answered for 0.6 s" in readiness.health().reason
    readiness.forgive()
    assert readiness.health().serves, "this process was held up itself"


def test_a_request_that_does_not_get_on_is_a_failure() -> None:
    clock = Clock()
    readiness = Readiness(clock=clock)
    stuck = dataclasses.replace(REPORT, running="r", running_position=5)
    readiness.reported(stuck)
    for _ in range(11):
        clock.now_s += 1.0
        readiness.reported(stuck)
    assert readiness.health().state == "failed"
    readiness.reported(dataclasses.replace(stuck, running_position=6))
    assert readiness.health().serves


def test_a_fleet_with_a_replica_missing_is_degraded_and_serves() -> None:
    readiness = Readiness()
    fleet = dataclasses.replace(REPORT, replica_names=("r0", "r1"), replica_states=("ready", "ready"), beat_ages_s=(9.0,))
    readiness.reported(fleet)
    assert readiness.health().state == "ready"
    readiness.reported(dataclasses.replace(fleet, replica_states=("ready", "lost: rank 1 died")))
    assert (readiness.health().state, readiness.health().serves) == ("degraded", True)
    assert "r1 lost: rank 1 died" in readiness.health().reason
    readiness.reported(dataclasses.replace(fleet, state=EngineState.LOADING, replica_states=("lost", "lost")))
    assert (readiness.health().state, readiness.health().serves) == ("failed", False)


def test_readyz_turns_within_a_quarter_of_a_second(
    http: httpx.Client, shared_engine: ScriptedEngine, engine: ScriptedEngine
) -> None:
    assert http.get("/readyz").json() == {"state": "ready", "reason": "all ranks answer"}
    engine.report = dataclasses.replace(REPORT, beat_ages_s=(0.0, 2.0))
    assert until(lambda: http.get("/readyz").status_code == 503) < 0.25
    assert http.get("/health").headers["retry-after"]
    refused = http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    engine.report = REPORT
    until(lambda: http.get("/readyz").status_code == 200)
    engine.answers_status = False
    assert until(lambda: http.get("/readyz").status_code == 503) < 1.0
    assert http.get("/livez").json() == {"status": "alive"}
    engine.answers_status = True
    until(lambda: http.get("/readyz").status_code == 200)


# ---- who may ask ----
def test_a_key_is_asked_for(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    engine.on_generate = lambda received: received.finish(FinishReason.STOP)
    with (
        gateway(shared_engine, folder, keys=["s3cret-s3cret"], cors_origins=("https://a.example",)) as made,
        client(made) as http,
    ):
        for path in ("/livez", "/readyz", "/health"):
            assert http.get(path).status_code in (200, 503)
        for path in ("/metrics", "/kog/info", "/v1/models", "/openapi.json", "/nothing"):
            refused = http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), path
            assert refused.headers["www-authenticate"] == "Bearer"
        for given in ("Bearer wrong", "Bearer s3cret-s3cre", "Basic s3cret-s3cret", "s3cret-s3cret", "Bearer \xe9"):
            assert http.get("/v1/models", headers={b"authorization": given.encode("latin-1")}).status_code == 401
        assert http.get("/v1/models", headers={"authorization": "Bearer s3cret-s3cret"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "s3cret-s3cret"}).status_code == 200
        page = {"origin": "https://a.example"}
        preflight = http.options("/v1/models", headers={**page, "access-control-request-method": "GET"})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "https://a.example")
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert http.get("/v1/models", headers=page).headers["access-control-allow-origin"] == "https://a.example"
        of_page = {**page, "sec-fetch-site": "cross-site", "x-api-key": "s3cret-s3cret"}
        assert http.post("/v1/completions", json={"prompt": "x"}, headers=of_page).status_code == 200
        http.get("/v1/models?key=s3cret-s3cret", headers={"x-request-id": "s3cret-s3cret"})
    assert "s3cret-s3cret" not in made.log_path.read_text(encoding="utf-8")


def test_an_address_that_others_reach_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="--api-key-file"):
            check_exposure(host, ())
        check_exposure(host, ["12345678"])
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"):
        check_exposure(host, ())


def test_a_port_that_is_taken_names_its_holder() -> None:
    port = listen("127.0.0.1", 0)
    number = port.listener.getsockname()[1]
    begin_s = time.monotonic()
    with pytest.raises(LaunchError, match=rf"port {number}: Address already in use; it is in use by process \d+ \(.*--port"):
        listen("127.0.0.1", number)
    assert in_time(time.monotonic() - begin_s, 5.0), "at once"
    assert port.url == f"http://127.0.0.1:{number}"
    port.close()
    with pytest.raises(ConfigError, match="no address of this machine"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(LaunchError, match="--host"):
        listen("192.0.2.1", 0)


def test_arguments_survive_the_command_line() -> None:
    args = GatewayArgs(7, "127.0.0.1", instance_folder="/x", cors_origins=("*",), ends_with_engine=True)
    assert GatewayArgs.from_json(args.to_json()) == args
    for text in ("{}", "[]", '{"listen_fd": 1, "host": "x", "wings": 2}', "x"):
        with pytest.raises(ConfigError, match="gateway's argument"):
            GatewayArgs.from_json(text)


# ---- the end ----
def test_a_drain_finishes_what_runs_and_refuses_the_rest(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine
) -> None:
    engine.on_generate = says("first", finish=None)
    with gateway(shared_engine, folder) as made, client(made) as http, client(made) as other:
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            lines = response.iter_lines()
            assert "first" in next(lines)
            made.begin_stop()
            until(lambda: other.get("/readyz").json()["state"] == "draining")
            refused = other.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_draining")
            assert refused.headers["retry-after"]
            received = engine.received[0]
            received.say("last")
            received.finish()
            frames = frames_of("\n".join(lines))
        assert frames[-1] == "[DONE]"
        until(lambda: made.loop.is_closed())
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{made.url}/livez", trust_env=False)


def test_a_drain_does_not_wait_for_ever(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    engine.on_generate = says("first", finish=None)
    with (
        gateway(shared_engine, folder, drain_s=0.1) as made,
        client(made) as http,
        http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response,
    ):
        next(response.iter_lines())
        made.begin_stop()
        assert until(lambda: made.loop.is_closed()) < 5.0


def test_the_launcher_is_told_when_requests_are_taken(tmp_path: Path) -> None:
    """Not when the port answers: the gateway hears of the engine's readiness a little later than the launcher."""
    tmp_path.chmod(0o700)
    engine = ScriptedEngine(tmp_path)
    announced = engine.folder / HTTP_FILE
    engine.report = dataclasses.replace(REPORT, state=EngineState.LOADING, rank_states=("ready", "loading"))
    engine.on_generate = says("a")
    with gateway(engine, tmp_path, ends_with_engine=True, drain_s=0.1) as made:
        until(announced.exists)
        until(lambda: made.service.readiness.report is not None)
        assert json.loads(announced.read_text(encoding="utf-8"))["serves"] is False
        engine.report = REPORT
        until(lambda: json.loads(announced.read_text(encoding="utf-8"))["serves"])
        assert httpx.post(f"{made.url}/v1/completions", json={"prompt": "x"}, trust_env=False).status_code == 200
        engine.stop()


# ---- limits of connections ----
def test_connections_that_say_nothing_are_cut(shared_engine: ScriptedEngine, folder: Path) -> None:
    with gateway(shared_engine, folder, limits=Limits(head_s=0.2, keep_alive_s=1.0, body_s=0.3)) as made:
        for start in ("", "GET /livez HTTP/1.1\r\nhost: loc"):
            begin_s = time.monotonic()
            assert raw_request(made.port, start) == b""
            assert in_time(time.monotonic() - begin_s, 2.0)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
        assert b" 408 " in raw_request(made.port, head, b"{").partition(b"\r\n")[0]


def test_one_connection_too_many_is_refused(shared_engine: ScriptedEngine, folder: Path) -> None:
    with gateway(shared_engine, folder, limits=Limits(connections=3)) as made:
        silent = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(3)]
        until(lambda: len(made.server.server_state.connections) == 3)
        answer = raw_request(made.port, "")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for connection in silent:
            connection.close()
        until(lambda: not made.server.server_state.connections)
        assert httpx.get(f"{made.url}/livez", trust_env=False).status_code == 200
        metrics = httpx.get(f"{made.url}/metrics", trust_env=False).text
        assert 'kog:http_responses_total{handler="unread",status="503"} 1.0' in metrics


def test_bodies_share_a_bound(shared_engine: ScriptedEngine, folder: Path) -> None:
    with gateway(shared_engine, folder, limits=Limits(bodies_bytes=100_000)) as made, client(made) as http:
        refused = http.post("/v1/completions", content=b" " * 200_000, headers=JSON)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_busy")
        assert made.service.bodies_bytes == 0


# ---- what else there is ----
def test_models(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert http.get("/v1/models/default").json()["id"] == "demo"
    missing = http.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_tokens(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "def add(a, b):", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert (found["max_model_len"], "".join(found["token_strs"])) == (2048, "def add(a, b):")
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "def add(a, b):"}
    assert http.post("/detokenize", json={"tokens": [4096]}).status_code == 400
    assert http.post("/tokenize", json={"prompt": "a", "messages": []}).status_code == 400
    assert (
        http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["error"]["code"]
        == "no_chat_template"
    )


def test_what_is_said_of_the_tokenizer(http: httpx.Client) -> None:
    assert http.get("/tokenizer_info").json() == {"eos_token": "<|endoftext|>", "chat_template": None}


def test_what_clients_of_llama_cpp_ask_first(http: httpx.Client) -> None:
    until(lambda: http.get("/readyz").status_code == 200)
    found = http.get("/props").json()
    assert (found["model_alias"], found["total_slots"], found["chat_template"]) == ("demo", 1, "")
    assert found["default_generation_settings"]["n_ctx"] == 2048
    assert found["default_generation_settings"]["params"]["temperature"] == 0.2
    assert http.get("/slots").json() == [{"id": 0, "n_ctx": 2048, "speculative": False, "is_processing": False}]
    assert http.get("/version").json()["version"]


def test_slots_are_those_of_all_engines() -> None:
    served = ServedModel("demo", (), 2048, 10, None, None, 0)
    report = dataclasses.replace(REPORT, replica_names=("a", "b"), running="7", also_running=("8",), parallel=4)
    assert [slot["is_processing"] for slot in slots(served, report)] == [True, True, False, False]
    assert [slot["is_processing"] for slot in slots(served, None)] == [False]


def test_a_model_answers_to_its_names_and_to_patterns() -> None:
    served = ServedModel("demo", ("gpt-*", "other"), 2048, 10, None, None, 0)
    asked = (None, "demo", "other", "gpt-4o", "gpt-*", "gpt4", "another", "Demo")
    assert [served.answers_to(name) for name in asked] == [True] * 5 + [False] * 3
    assert not ServedModel("demo", ("[a-z]",), 2048, 10, None, None, 0).answers_to("b"), "no pattern without a star"


def test_a_gateway_without_the_model_s_folder(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    engine.on_generate = says("ok")
    with gateway(shared_engine, folder, model=None) as made, client(made) as http:
        until(lambda: http.get("/readyz").status_code == 200)
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_tokenizer")
        assert http.get("/tokenizer_info").json()["error"]["code"] == "no_tokenizer"
        answer = http.post("/v1/completions", json={"prompt": [7, 8]})
        assert answer.status_code == 200, answer.text
        assert list(engine.received[0].message.prompt_ids or ()) == [7, 8]
        chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert (chat.status_code, chat.json()["error"]["code"]) == (400, "no_tokenizer")
        assert "without --model" in chat.json()["error"]["message"]
        answer = http.post("/v1/completions", json={"prompt": ["x = ", "y = "], "max_tokens": 5})  # the engine has a tokenizer
        assert answer.status_code == 200, answer.text
        asked = [received.message for received in engine.received[1:]]
        assert [(message.prompt, message.prompt_ids, message.max_tokens) for message in asked] == [
            ("x = ", None, 5), ("y = ", None, 5),
        ]  # fmt: skip


def test_an_engine_of_another_model_is_not_spoken_for(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    other = ScriptedEngine(tmp_path)
    other.welcome = dataclasses.replace(other.welcome, vocab_size=100, model="other")
    try:
        with gateway(other, tmp_path) as made, client(made) as http:
            until(lambda: "give the gateway the folder of that model" in http.get("/readyz").json()["reason"])
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    finally:
        other.stop()


def test_pages_have_a_strict_policy(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-frame-options"] == "DENY"
    again = http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_metrics_and_info(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.on_generate = says("a", "b")
    assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    text = http.get("/metrics").text
    assert 'kog:http_responses_total{handler="/v1/completions",status="200"}' in text
    assert "kog:time_to_first_token_seconds_count" in text
    found = http.get("/kog/info").json()
    assert (found["state"], found["model"]["id"], len(found["ranks"])) == ("ready", "demo", 2)
    assert found["speed"]["num_tokens"] == 2
    assert found["devices"] == [{"name": "CPU", "count": 2}]
    size = {"num_parameters": 16_421_760, "num_lanes": 8, "format": "bfloat16"}
    assert {name: found["model"][name] for name in size} == size


def test_the_document_names_what_there_is(running: RunningGateway, http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/tokenize", "/readyz", "/kog/info", "/metrics", "/"} <= set(document["paths"])
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    schemas = document["components"]["schemas"]
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schemas[body["$ref"].rpartition("/")[2]]["properties"]["prompt"]
    assert document["paths"]["/v1/completions"]["post"]["responses"]["429"]


def test_idle_connections_do_no_harm(running: RunningGateway, http: httpx.Client) -> None:
    connections = [socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) for _ in range(100)]
    threads = [threading.Thread(target=connection.sendall, args=(b"POST /v1/comp",)) for connection in connections[:50]]
    for thread in threads:
        thread.start()
        thread.join()
    assert http.get("/livez").status_code == 200
    for connection in connections:
        connection.close()
    until(lambda: len(running.server.server_state.connections) <= 2)
