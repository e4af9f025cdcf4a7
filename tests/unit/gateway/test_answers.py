"""Answers on their way: streamed, whole, refused, lost, abandoned, and read too slowly."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from kog_dist.gateway.body_reader import SMALL_BYTES
from kog_dist.gateway.limits import Limits
from kog_dist.rpc.messages import Accepted, Alive, ErrorCode, FinishReason, PrefillProgress
from tests.patience import in_time
from tests.unit.gateway.scripted_engine import (
    WAIT_S,
    Received,
    RunningGateway,
    ScriptedEngine,
    client,
    frames_of,
    gateway,
    says,
    until,
)

ASK = {"prompt": "x", "max_tokens": 100}


def test_a_stream_is_what_the_engine_said(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.on_generate = says("def", " é", "\n", "🙂")
    with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        frames = frames_of(response.read().decode())
    assert frames[-1] == "[DONE]"
    assert "".join(frame["choices"][0]["text"] for frame in frames[:-1] if frame["choices"]) == "def é\n🙂"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_whole_answer(http: httpx.Client, engine: ScriptedEngine, path: str) -> None:
    engine.on_generate = says("a", "b")
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"input": "x"} if "resp" in path else ASK
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "ab" in response.text
    assert response.json()["usage"]


def test_choices_are_one_answer(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.on_generate = says("q")
    found = http.post("/v1/completions", json={**ASK, "n": 3}).json()
    assert [choice["text"] for choice in found["choices"]] == ["q"] * 3
    assert len({received.peer for received in engine.received}) == 1, "one HTTP client, one connection"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("code", "status", "retry_after_s"),
    [
        (ErrorCode.QUEUE_FULL, 429, 2.4), (ErrorCode.DRAINING, 503, None), (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400, None),
        (ErrorCode.RANK_FAILED, 503, None), (ErrorCode.INTERNAL_ERROR, 500, None),
    ],
)  # fmt: skip
def test_refusals_of_the_engine(
    http: httpx.Client, engine: ScriptedEngine, stream: bool, code: ErrorCode, status: int, retry_after_s: float | None
) -> None:
    engine.on_generate = lambda received: received.fail(code, "because of a test", retry_after_s)
    response = http.post("/v1/completions", json={**ASK, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["message"] == "because of a test"
    assert response.json()["error"]["code"] == code
    assert response.headers.get("retry-after") == ("3" if retry_after_s else None)


def test_one_refused_choice_refuses_all(http: httpx.Client, engine: ScriptedEngine) -> None:
    def play(received: Received) -> None:
        if len(engine.received) == 2:
            received.fail(ErrorCode.QUEUE_FULL, "full", 1.0)
        else:
            received.accept()

    engine.on_generate = play
    assert http.post("/v1/completions", json={**ASK, "n": 2, "stream": True}).status_code == 429
    engine.wait_cancelled(engine.received[0].message.request_id)


def test_an_error_ends_a_stream_that_has_begun(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.on_generate = says("good", finish=None)
    with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        engine.received[0].fail(ErrorCode.RANK_FAILED, "rank 1 died")
        frames = frames_of("\n".join([first, *lines]))
    assert frames[-1]["error"]["message"] == "rank 1 died"
    assert frames[0]["choices"][0]["text"] == "good"
    assert "[DONE]" not in frames


def test_a_lost_engine_is_one_error_and_the_next_engine_is_used(
    shared_engine: ScriptedEngine, running: RunningGateway, http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.on_generate = says("good", finish=None)
    with http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
        lines = response.iter_lines()
        assert "good" in next(lines)
        shared_engine.stop()
        begin_s = time.monotonic()
        rest = frames_of("\n".join(lines))
        assert in_time(time.monotonic() - begin_s, 1.0)
    assert rest[-1]["error"]["code"] == "engine_lost"
    lost = http.get("/readyz")
    assert (lost.status_code, lost.json()["state"]) == (503, "failed")
    assert http.get("/livez").status_code == 200
    refused = http.post("/v1/completions", json=ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_failed")
    assert refused.headers["retry-after"]
    shared_engine.start()
    until(lambda: http.get("/readyz").status_code == 200)
    engine.on_generate = says("back")
    assert http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "back"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_cancels(running: RunningGateway, engine: ScriptedEngine, stream: bool) -> None:
    engine.on_generate = says("a", finish=None)
    body = json.dumps({**ASK, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        request_id = engine.next_request().message.request_id
        if stream:
            assert b"200 OK" in connection.recv(4096)
    engine.wait_cancelled(request_id)
    until(lambda: not running.service.answering)
    until(lambda: any(line.get("status") == 499 for line in running.log()))
    assert running.service.metrics.num_buffered_bytes == 0


@pytest.mark.parametrize("leaves_queue", [True, False])
def test_the_line_of_a_client_that_went_has_its_prompt_and_its_time_in_the_queue(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine, leaves_queue: bool
) -> None:
    def play(received: Received) -> None:
        request_id = received.message.request_id
        engine.send(received.peer, Accepted(request_id, 2, 11, 5))
        if leaves_queue:
            engine.send(received.peer, Alive(request_id, 0))

    engine.on_generate = play
    with gateway(shared_engine, folder) as made:
        begin_s = time.monotonic()
        with client(made) as http, http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response:
            assert response.headers["x-kog-queue-position"] == "2"
            left_s = time.monotonic() - begin_s
            until(lambda: time.monotonic() - begin_s > left_s + 0.1)
        until(lambda: any(line.get("status") == 499 for line in made.log()))
        (line,) = (line for line in made.log() if line.get("status") == 499)
    assert line["num_prompt_tokens"] == 11
    assert (0 <= line["queue_s"] <= left_s + 0.09) if leaves_queue else (0.1 <= line["queue_s"] <= line["total_s"] + 0.001)


def test_a_silent_stream_has_comments(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    def play(received: Received) -> None:
        engine.send(received.peer, Alive(received.message.request_id, 0))
        threading.Timer(0.3, engine.send, (received.peer, Alive(received.message.request_id, 0))).start()
        threading.Timer(0.4, says("late"), (received,)).start()

    engine.on_generate = play
    with gateway(shared_engine, folder, limits=Limits(accept_s=0.1, keepalive_s=0.05)) as made, client(made) as http:
        text = http.post("/v1/completions", json={**ASK, "stream": True}).text
    assert ": keep-alive\n\n" in text
    assert frames_of(text)[-1] == "[DONE]"


def test_tokens_without_text_keep_a_stream_alive(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    """Of a model whose tokens have no text the client would hear nothing until the end."""

    def play(received: Received) -> None:
        received.accept()
        threading.Timer(0.2, received.say, ("",)).start()
        threading.Timer(0.3, received.say, ("late",)).start()
        threading.Timer(0.4, received.finish).start()

    engine.on_generate = play
    with gateway(shared_engine, folder, limits=Limits(keepalive_s=0.05)) as made, client(made) as http:
        text = http.post("/v1/completions", json={**ASK, "stream": True}).text
    comment, _, rest = text.partition("\n\n")
    assert comment == ": keep-alive"
    assert frames_of(rest)[0]["choices"][0]["text"] == "late"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_that_waits_hears_how_many_are_before_it(http: httpx.Client, engine: ScriptedEngine, path: str) -> None:
    def play(received: Received) -> None:
        request_id = received.message.request_id
        received.accept(num_before=2)
        for num_before in (2, 1, 1, 0, 0):
            engine.send(received.peer, Alive(request_id, num_before))
        received.say("late")
        received.finish()

    engine.on_generate = play
    body = {"input": "x"} if "responses" in path else ASK
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["x-kog-queue-position"] == "2"
        comments = [line for line in response.iter_lines() if line.startswith(":")]
    assert comments == [": 2 before this one", ": 1 before this one", ": 0 before this one"]
    whole = http.post(path, json=body)
    assert (whole.headers["x-kog-queue-position"], "late" in whole.text) == ("2", True)
    assert float(whole.headers["x-kog-queue-ms"]) >= 0
    engine.on_generate = says("at once")
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["x-kog-queue-position"] == "0"
        assert not [line for line in response.iter_lines() if line.startswith(":")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_stream_hears_how_much_of_its_prompt_has_been_read(http: httpx.Client, engine: ScriptedEngine, path: str) -> None:
    def play(received: Received) -> None:
        received.accept()
        for position in (4096, 20480):
            engine.send(received.peer, PrefillProgress(received.message.request_id, position, 30000))
        received.say("read")
        received.finish()

    engine.on_generate = play
    body = {"input": "x"} if "responses" in path else ASK
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        comments = [line for line in response.iter_lines() if line.startswith(":")]
    assert comments == [": 4096 of 30000 prompt tokens", ": 20480 of 30000 prompt tokens"]
    assert "read" in http.post(path, json=body).text


@pytest.mark.parametrize(("mode", "told"), [("warn", "wings, feet"), ("ignore", None), ("refuse", None)])
def test_unknown_fields_are_told_ignored_or_refused(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine, mode: str, told: str | None
) -> None:
    engine.on_generate = says("a")
    with gateway(shared_engine, folder, unknown_fields=mode) as made, client(made) as http:
        for stream in (False, True):
            response = http.post("/v1/completions", json={**ASK, "stream": stream, "wings": 2, "feet": None})
            assert response.status_code == (400 if mode == "refuse" else 200), response.text
            assert response.headers.get("x-kog-unknown-fields") == told
        if mode != "refuse":
            until(lambda: len([line for line in made.log() if line.get("event") == "request"]) == 2)
            assert {line.get("left_out") for line in made.log() if line.get("event") == "request"} == {told}


def test_what_the_prompt_does_not_show_is_told(shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine) -> None:
    """The model of these tests has no template, so nothing shows it tools; also of a body that another process reads."""
    engine.on_generate = says("a")
    tool = {"type": "function", "function": {"name": "f", "description": ""}}
    with gateway(shared_engine, folder) as made, client(made) as http:
        for padding, stream in (("", False), ("", True), ("x" * (SMALL_BYTES + 1), False)):
            tools = [{**tool, "function": {"name": "f", "description": padding}}]
            body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "stream": stream}
            response = http.post("/v1/chat/completions", json=body)
            assert response.headers.get("x-kog-not-in-prompt") == "tools", response.text
        until(lambda: len([line for line in made.log() if line.get("event") == "request"]) == 3)
        assert {line.get("unseen") for line in made.log() if line.get("event") == "request"} == {"tools"}


def test_a_slow_reader_loses_its_stream_and_nobody_else_does(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine
) -> None:
    limits = Limits(buffer_bytes=64 << 10, stall_s=0.5)
    with gateway(shared_engine, folder, limits=limits) as made, client(made) as http:
        body = json.dumps({**ASK, "stream": True}).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", made.port))
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            received = engine.next_request()
            received.accept()
            for _ in range(400):
                received.say("x" * 16384)
                if engine.cancelled:
                    break
                time.sleep(0.001)
            engine.wait_cancelled(received.message.request_id)
            assert made.service.metrics.num_buffered_bytes <= limits.buffer_bytes + 20_000
            engine.on_generate = says("fine")
            assert http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "fine"
            until(lambda: not made.service.answering)  # cut, since it read nothing for so long
        assert made.service.metrics.num_slow_readers == 1
        assert made.service.metrics.num_buffered_bytes == 0


def test_a_reader_that_catches_up_is_told_why_its_stream_ended(
    shared_engine: ScriptedEngine, folder: Path, engine: ScriptedEngine
) -> None:
    with (
        gateway(shared_engine, folder, limits=Limits(buffer_bytes=64 << 10)) as made,
        client(made) as http,
        http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as response,
    ):
        _flood(engine)
        frames = frames_of(response.read().decode())
    texts = [frame["choices"][0]["text"] for frame in frames if "choices" in frame]
    assert frames[-1]["error"]["code"] == "slow_reader"
    assert [int(text.split(":")[0]) for text in texts] == list(range(len(texts))), "an exact prefix of the answer"


def _flood(engine: ScriptedEngine) -> None:
    """More than sockets and buffers hold, for a reader that waits until it is over."""
    received = engine.next_request()
    for number in range(3000):
        received.say(f"{number}:" + "x" * 8192)
        if engine.cancelled:
            return
        time.sleep(0.0005)
    engine.wait_cancelled(received.message.request_id)


def test_clients_of_other_connections_have_their_own_turn(running: RunningGateway, engine: ScriptedEngine) -> None:
    engine.on_generate = says("y", finish=None)
    stream = {**ASK, "stream": True}
    with (
        client(running) as one,
        client(running) as other,
        one.stream("POST", "/v1/completions", json=stream),
        other.stream("POST", "/v1/completions", json=stream),
    ):
        first, second = (received.peer for received in engine.received)
        assert first != second
    for received in engine.received:
        engine.wait_cancelled(received.message.request_id)
    engine.on_generate = says("y")
    with client(running) as third:
        until(lambda: third.post("/v1/completions", json=ASK).status_code == 200)
    assert engine.received[-1].peer in (first, second), "connections are used again"


def test_deadlines_and_lengths_are_finish_reasons(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.on_generate = says("z", finish=FinishReason.LENGTH)
    assert http.post("/v1/completions", json=ASK).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_prompts_and_answers_are_logged_only_when_asked_for(
    shared_engine: ScriptedEngine, folder: Path, wanted: bool, stream: bool
) -> None:  # fmt: skip
    shared_engine.on_generate = says("pass", " it on")
    with gateway(shared_engine, folder, log_prompts=wanted) as made:
        body = {"prompt": "def secret():", "stream": stream, "max_tokens": 9}
        assert httpx.post(f"{made.url}/v1/completions", json=body, trust_env=False).status_code == 200
    [line] = [line for line in made.log() if line["event"] == "request"]
    assert (line.get("prompt"), line.get("answer")) == (("def secret():", "pass it on") if wanted else (None, None))
    assert wanted or "secret" not in made.log_path.read_text(encoding="utf-8")
