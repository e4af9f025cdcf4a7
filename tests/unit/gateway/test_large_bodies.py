"""Bodies that are work to read are read in another process, with the same result; what is refused is refused before that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.gateway import body_reader
from kog_dist.gateway.body_reader import SMALL_BYTES, SMALL_CONTAINERS, is_small
from kog_dist.gateway.limits import LIMITS
from kog_dist.system import stopped_child
from tests.living_children import living_children
from tests.unit.gateway.scripted_engine import JSON, WAIT_S, Received, RunningGateway, ScriptedEngine

PADDING = " " * SMALL_BYTES  # behind the value, where JSON allows it
BODY = json.dumps({"prompt": "x"}) + PADDING


def processes() -> list[psutil.Process]:
    return living_children("kog_dist.gateway.body_process")


def answered(engine: ScriptedEngine) -> None:
    def answer(received: Received) -> None:
        received.accept()
        received.say("hello")
        received.finish()

    engine.on_generate = answer


@pytest.mark.parametrize(
    ("raw", "small"),
    [
        (b"{" + b" " * (SMALL_BYTES - 2) + b"}", True),
        (b"{" + b" " * (SMALL_BYTES - 1) + b"}", False),
        (b"[" * SMALL_CONTAINERS, True),
        (b"[" * SMALL_CONTAINERS + b"{", False),
        (b"[1,2]" * 100, True),
    ],
)
def test_what_is_small(raw: bytes, small: bool) -> None:
    assert is_small(raw) is small


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True, "logprobs": True, "n": 2}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "stream": True}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/responses", {"input": "hi", "stream": True, "metadata": {"n": 2**70}}),
        ("/tokenize", {"prompt": "def add(a, b):"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
        ("/v1/completions", {"prompt": {}}),
        ("/v1/completions", {"prompt": "x", "temperature": 9}),
    ],
)
def test_the_process_gives_what_the_thread_gives(
    running: RunningGateway, engine: ScriptedEngine, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answered(engine)
    text = json.dumps(body)
    answers, before = [], running.service.bodies.num_outside
    for content in (text, text + PADDING):
        response = http.post(path, content=content, headers=JSON)
        answers.append((response.status_code, without_stamps(response.text)))
    assert answers[0] == answers[1]
    assert running.service.bodies.num_outside == before + 1


def without_stamps(text: str) -> list[str]:
    """The lines of an answer, without names, dates and times."""
    return [str(bare(json.loads(line.removeprefix("data: ")))) for line in text.splitlines() if "{" in line]


def bare(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "created", "created_at", "item_id", "timings", "completed_at")
        return {name: bare(inner) for name, inner in value.items() if name not in hidden}
    return [bare(inner) for inner in value] if isinstance(value, list) else value


def test_a_process_that_is_killed_is_replaced(running: RunningGateway, http: httpx.Client) -> None:
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200
    (process,) = processes()
    process.kill()
    process.wait(WAIT_S)
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "starting"])
def test_a_process_that_is_stopped_is_replaced(
    running: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, is_ready: bool
) -> None:
    monkeypatch.setattr(stopped_child, "STOPPED_S", 0.2)
    stopped: list[int] = []
    if is_ready:
        assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200
        processes()[0].suspend()
        stopped.append(processes()[0].pid)
    else:
        start = body_reader._Child

        def started(model: str | None) -> object:
            child = start(model)
            if not stopped:
                os.kill(child._process.pid, signal.SIGSTOP)
                stopped.append(child._process.pid)
            return child

        monkeypatch.setattr(body_reader, "_Child", started)
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200
    assert [process.pid for process in processes()] != stopped
    assert len(processes()) == 1


def test_a_process_whose_answer_nobody_wants_is_killed() -> None:
    """It may be far from its answer, or stopped."""
    child = body_reader._Child(None)
    os.kill(child._process.pid, signal.SIGSTOP)
    child.kill()
    assert asyncio.run(child.exit_code()) == -signal.SIGKILL


def test_processes_that_are_lost_again_and_again_are_an_error(
    running: RunningGateway, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = body_reader._Child

    def killed(model: str | None) -> object:
        child = start(model)
        child._process.kill()
        return child

    for process in processes():
        process.kill()
    with monkeypatch.context() as patch:
        patch.setattr(body_reader, "_Child", killed)
        refused = http.post("/tokenize", content=BODY, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_busy")
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200


def test_a_body_that_takes_too_long_is_refused_and_the_next_one_is_read(running: RunningGateway, http: httpx.Client) -> None:
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200
    (process,) = processes()
    process.send_signal(signal.SIGPROF)  # as its timer does
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the gateway asks how it ended
    refused = http.post("/tokenize", content=BODY, headers=JSON)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "body_too_complex")
    assert http.post("/tokenize", content=BODY, headers=JSON).status_code == 200


def raw_answer(running: RunningGateway, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", running.port), WAIT_S) as connection:
        connection.sendall(request)
        return connection.recv(1 << 16)


@pytest.mark.parametrize(("num_chunks", "status"), [(LIMITS.small_chunks, b"200"), (LIMITS.small_chunks + 10, b"400")])
def test_a_body_in_many_small_chunks_is_refused(running: RunningGateway, num_chunks: int, status: bytes) -> None:
    """h11 takes 6 us for a chunk, and 43,000 of them may be in what is read at once."""
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'{"prompt":"x"}'
    chunks = [b"%x\r\n%b\r\n" % (len(body), body), *[b"1\r\n \r\n"] * (num_chunks - 1)]
    assert raw_answer(running, head + b"".join(chunks) + b"0\r\n\r\n")[9:12] == status


@pytest.mark.parametrize(("num_lines", "status"), [(LIMITS.head_lines, b"200"), (LIMITS.head_lines + 1, b"400")])
def test_a_head_of_many_lines_is_refused(running: RunningGateway, num_lines: int, status: bytes) -> None:
    head = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * (num_lines - 3) + b"\r\n"
    assert raw_answer(running, head)[9:12] == status


def test_a_body_of_many_fields_is_refused_before_each_is_looked_at(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=json.dumps({f"f{place}": 0 for place in range(257)}), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["message"][:23]) == (400, "the body has 257 fields")
