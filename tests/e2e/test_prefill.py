"""Long prompts and conversations on real ranks: progress, cancel, death during prefill, and the same bits from a cache."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, running, until
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client, StreamEvent
from kog_dist.rpc.messages import Done, PrefillProgress, Tokens
from tests.patience import in_time

OBEYED_S = 0.25  # the promise
LONG_PROMPT = [1 + idx % 300 for idx in range(32_000)]  # seconds of prefill


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[tuple[EngineSession, Client]]:
    with running(str(tiny_model), "--ranks=2") as (session, client):
        yield session, client


def answer(client: Client, prompt: list[int], *, reuse_kv: bool = True) -> tuple[list[int], list[str], Done]:
    events = list(
        client.generate(prompt_ids=prompt, max_tokens=12, temperature=0.9, seed=3, logit_digests=True, reuse_kv=reuse_kv)
    )
    tokens = [event for event in events if isinstance(event, Tokens)]
    done = events[-1]
    assert isinstance(done, Done)
    return [i for event in tokens for i in event.token_ids], [d for event in tokens for d in event.digests], done


def follow_prefill(events: Iterator[StreamEvent], num_events: int) -> list[PrefillProgress]:
    seen: list[PrefillProgress] = []
    while len(seen) < num_events:
        event = next(events)
        assert not isinstance(event, Tokens | Done), "the prompt is long enough"
        if isinstance(event, PrefillProgress):
            seen.append(event)
    return seen


@pytest.mark.alone
def test_cancel_during_prefill_frees_the_ranks(engine: tuple[EngineSession, Client]) -> None:
    session, client = engine
    events = client.generate(prompt_ids=LONG_PROMPT, max_tokens=4)
    seen = follow_prefill(events, 3)
    assert 0 < seen[0].position < seen[1].position < seen[2].position < len(LONG_PROMPT)
    assert "prefill" in session.run("kog_dist.rpc.cli", ["status", "--instance=engine"]).stdout
    events.close()  # cancels
    ids, digests, done = answer(client, [5, 6, 7])
    assert in_time(done.queue_s, OBEYED_S), "the ranks had left the long prompt by then"
    assert done.num_cached_tokens == 0
    events = client.generate(prompt_ids=LONG_PROMPT, max_tokens=4)
    assert follow_prefill(events, 1)[0].position > seen[2].position, "what was prefilled before the cancel counts"
    events.close()
    again = answer(client, [5, 6, 7])
    assert (again[0], again[1], again[2].num_cached_tokens) == (ids, digests, 2)


def test_a_conversation_has_the_bits_of_one_that_is_prefilled(engine: tuple[EngineSession, Client]) -> None:
    _, client = engine
    prompt = [3, 1, 4, 1, 5, 9, 2, 6] * 5  # longer than the window of 16
    for _ in range(3):
        cached, fresh = answer(client, prompt), answer(client, prompt, reuse_kv=False)
        assert cached[:2] == fresh[:2]
        assert fresh[2].num_cached_tokens == 0
        prompt = [*prompt, *cached[0], 7, 8]
        followed = answer(client, prompt)
        assert followed[2].num_cached_tokens == len(prompt) - 3, "all but the answer's last token and the two new ones"


@pytest.mark.alone
def test_a_rank_that_dies_during_prefill_ends_the_request(engine: tuple[EngineSession, Client]) -> None:
    session, client = engine  # the last test that uses it
    events = client.generate(prompt_ids=LONG_PROMPT, max_tokens=4)
    follow_prefill(events, 1)
    begin_s = time.monotonic()
    os.kill(session.processes()["rank 1"], signal.SIGKILL)
    with pytest.raises(RequestFailed) as failed:
        list(events)
    assert failed.value.code == "rank_failed"
    assert in_time(time.monotonic() - begin_s, 4 * OBEYED_S)  # looking for the rank's process takes a part of it
    until(lambda: not session.leftovers(), 30.0, lambda: f"left behind: {session.leftovers()}")
