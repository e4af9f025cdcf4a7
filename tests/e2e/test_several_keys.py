"""Two API keys of one service: what is kept for one is not used for the other, unless they share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, engine_session, until
from tests.e2e.http_engine import ENDED_S, READY_S, HttpEngine, http_engine

ALICE, BOB = "alice-alice-alice", "bob-bob-bob-bob"
SHARED = "# Rules of this project\n" * 12


def key_file(session: EngineSession) -> Path:
    path = session.folder / "keys"
    path.write_text(f"# of Alice\n{ALICE}\n\n{BOB}\n", encoding="ascii")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with (
        engine_session() as session,
        http_engine(
            session, "--ranks=2", "--device=cpu", "--kv-caches=1", "--prefix-cache=0.02", f"--api-key-file={key_file(session)}"
        ) as made,
    ):
        yield made


def ask(http: httpx.Client, key: str, prompt: str, **fields: object) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = http.post("/v1/completions", json=body, headers=headers).raise_for_status().json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_key_finds_what_it_has_left_and_nothing_else(served: HttpEngine) -> None:
    prompt = SHARED + "of Alice"
    text, num_tokens, num_cached = ask(served.http, ALICE, prompt)
    assert num_cached == 0
    assert ask(served.http, BOB, prompt) == (text, num_tokens, 0), "the cache still holds that of Alice"
    assert ask(served.http, ALICE, prompt)[2] >= num_tokens - 2, "from blocks, behind the request of Bob"
    assert ask(served.http, BOB, prompt + text)[2] >= num_tokens - 2
    for key in (ALICE, BOB):
        assert ask(served.http, key, prompt, cache_salt="mine")[2] == 0
        assert ask(served.http, key, prompt, cache_salt="mine")[2] >= num_tokens - 2
    assert served.http.post("/v1/completions", json={"prompt": prompt}).status_code == 401


def test_chats_of_keys_are_separate(served: HttpEngine) -> None:
    body = {"messages": [{"role": "user", "content": "What follows are rules.\n" + SHARED}], "max_tokens": 4, "temperature": 0}
    cached = []
    for key in (ALICE, BOB, ALICE, BOB):
        answer = served.http.post("/v1/chat/completions", json=body, headers={"x-api-key": key}).raise_for_status().json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 32)
    assert cached == [False, False, True, True]


def test_a_gateway_that_comes_back_knows_the_keys_and_finds_what_they_left(served: HttpEngine) -> None:
    prompt = "What follows has been read.\n" + SHARED
    num_tokens = ask(served.http, ALICE, prompt)[1]
    lost = served.announced()["pid"]
    os.kill(lost, signal.SIGKILL)
    until(lambda: served.announced()["pid"] != lost and served.announced()["serves"], READY_S, served.session.output)
    served.wait_state("ready")
    assert ask(served.http, BOB, prompt)[2] == 0
    assert ask(served.http, ALICE, prompt)[2] >= num_tokens - 2


def test_keys_may_share_what_is_kept(served: HttpEngine) -> None:
    """A second service of the same engine, which separates nothing; what the first one keeps apart it does not find."""
    session, prompt = served.session, SHARED + "of both"
    num_tokens = ask(served.http, ALICE, prompt)[1]
    process = session.start(
        "kog_dist.gateway.cli",
        ["--instance=engine", "--port=0", f"--api-key-file={session.folder / 'keys'}", "--share-prefixes", "--log-format=json"],
        "shared",
    )
    until(lambda: "serving" in session.output("shared") or process.poll() is not None, READY_S, lambda: session.output("shared"))
    url = json.loads(session.output("shared").splitlines()[0])["url"]
    with httpx.Client(base_url=url, timeout=ENDED_S, trust_env=False) as http:
        until(lambda: http.get("/readyz").status_code == 200, ENDED_S, lambda: http.get("/readyz").text)
        assert ask(http, BOB, prompt)[2] == 0
        assert ask(http, ALICE, prompt)[2] >= num_tokens - 2
    process.terminate()
    assert process.wait(ENDED_S) == 0
    for said in (session.output("shared"), session.output(), served.said()):
        assert ALICE not in said
        assert BOB not in said
