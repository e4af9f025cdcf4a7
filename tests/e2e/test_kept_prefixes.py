"""Conversations that take turns on an engine with one KV cache: what they have left is found again, and told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.e2e.http_engine import HttpEngine, http_engine

SHARED = "# Rules of this project\n" * 12
# Longer than what is not worth a copy.
QUESTIONS = [line * 12 for line in ("def add(a, b):\n", "class Stack:\n", "import os, sys\n")]


@pytest.fixture(scope="module")
def served() -> Iterator[HttpEngine]:
    with (
        engine_session() as session,
        http_engine(session, "--ranks=2", "--device=cpu", "--kv-caches=1", "--prefix-cache=0.02") as made,
    ):
        yield made


def ask(served: HttpEngine, prompt: str, **fields: object) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were cached."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = served.http.post("/v1/completions", json=body).raise_for_status().json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_conversations_that_take_turns_find_what_they_left(served: HttpEngine) -> None:
    held = [SHARED + question for question in QUESTIONS]
    num_shared = ask(served, SHARED)[1]
    for turn in range(3):
        for idx, prompt in enumerate(held):
            answer, num_tokens, num_cached = ask(served, prompt)
            assert num_cached >= (num_shared if turn == 0 else num_tokens - 16) - 2, f"turn {turn} of conversation {idx}"
            held[idx] = f"{prompt}{answer}\n"
    for prompt in held:
        assert ask(served, prompt)[0] == ask(served, prompt, cache_salt="never used before" + prompt[-9:])[0], "same tokens"


def test_agents_that_begin_at_once_read_what_they_share_once() -> None:
    prompts = [SHARED * 2 + question for question in QUESTIONS]
    with engine_session() as session, http_engine(session, "--ranks=1", "--device=cpu") as made:
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = list(pool.map(lambda prompt: ask(made, prompt), prompts))
        num_tokens, cached = min(asked[idx][1] for idx in range(3)), sorted(one[2] for one in asked)
        assert cached[1] >= num_tokens // 2, f"all but the first have it from the first: {cached} of {num_tokens}"
        assert ask(made, prompts[2], cache_salt="of one alone")[0] == asked[2][0]


def test_another_salt_finds_nothing(served: HttpEngine) -> None:
    prompt = SHARED + "of salts"
    assert ask(served, prompt, cache_salt="mine")[2] == 0
    assert ask(served, SHARED + "of nobody", cache_salt="yours")[2] == 0
    assert ask(served, prompt)[2] < ask(served, prompt, cache_salt="mine")[2]


def test_status_and_metrics_tell_what_is_kept(served: HttpEngine) -> None:
    ask(served, SHARED)
    status = served.session.run("kog_dist.rpc.cli", ["status", "--instance=engine"]).stdout
    assert "blocks of 64 tokens\n" in status
    metrics = served.http.get("/metrics").text
    (used,) = [line.split()[1] for line in metrics.splitlines() if line.startswith("kog:kept_tokens{")]
    (room,) = [line.split()[1] for line in metrics.splitlines() if line.startswith("kog:kept_tokens_limit{")]
    assert 64 <= float(used) <= float(room)
