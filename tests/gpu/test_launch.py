"""`kog-launch --gpus 1`: the same worker, coordinator and client as on CPU ranks, and the same tokens."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs pyzmq, which RPC speaks")

from kog_dist.bench.engine.request_measures import Workload
from kog_dist.bench.engine.requests import OBEYED_MS, run
from kog_dist.bench.engine.session import EngineSession, engine_session, until
from kog_dist.bench.engine.soak import SoakedEngine, soak
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, ErrorCode, PromptLogprobs, Tokens

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

PROMPT = "def add(a, b):\n    return"
READY_S = 120.0
ENDED_S = 20.0


@pytest.fixture
def session() -> Iterator[EngineSession]:
    with engine_session() as made:
        yield made


def answer(session: EngineSession, *arguments: str) -> Any:
    done = session.run("kog_dist.launch.cli", [f"--prompt={PROMPT}", "--json", *arguments], timeout_s=READY_S)
    assert done.returncode == 0, done.stderr
    assert session.leftovers() == []
    return json.loads(done.stdout)


def token_ids(client: Client, max_tokens: int) -> list[int]:
    events = client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True, timeout_s=60.0)
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def test_prompt_has_the_tokens_of_cpu_ranks(session: EngineSession) -> None:
    flags = ("--max-tokens=200", "--ignore-eos", "--kv-dtype=bfloat16")
    on_gpu = answer(session, "--gpus=1", "--prefill=off", *flags)  # prefill rounds otherwise
    on_cpu = answer(session, "--device=cpu", "--ranks=4", *flags)
    assert len(on_gpu["token_ids"]) == 200
    assert on_gpu["token_ids"] == on_cpu["token_ids"]
    assert on_gpu["text"] == on_cpu["text"]
    assert on_gpu["finish_reason"] == on_cpu["finish_reason"] == "length"


def test_sampled_prompt_has_the_tokens_of_cpu_ranks(session: EngineSession) -> None:
    flags = ("--max-tokens=64", "--temperature=0.8", "--seed=7", "--kv-dtype=bfloat16")
    on_gpu = answer(session, "--gpus=1", "--prefill=off", *flags)
    assert on_gpu["token_ids"] == answer(session, "--device=cpu", "--ranks=1", *flags)["token_ids"]


def test_a_prompt_has_the_log_probabilities_with_which_it_was_generated(session: EngineSession) -> None:
    launcher = session.launch("--gpus=1", "--prefill=off")
    with session.connect(READY_S) as client:
        events = list(client.generate(prompt_ids=[5, 6], max_tokens=100, logprobs=2, ignore_eos=True, timeout_s=60.0))
        answer = [event for event in events if isinstance(event, Tokens)]
        ids = [token_id for event in answer for token_id in event.token_ids]
        again = client.generate(
            prompt_ids=[5, 6, *ids], max_tokens=3, logprobs=2, prompt_logprobs=True, ignore_eos=True, timeout_s=60.0
        )
        found = list(again)
        scored = [event for event in found if isinstance(event, PromptLogprobs)]
        assert [token_id for event in scored for token_id in event.token_ids] == [6, *ids]
        expected = [value for event in answer for value in event.logprobs]
        assert [value for event in scored for value in event.logprobs][1:] == pytest.approx(expected, abs=1e-4)
        assert [token_id for event in scored for token_id in event.top_ids][2:] == [i for event in answer for i in event.top_ids]
        (done,) = [event for event in found if isinstance(event, Done)]
        assert (done.num_prompt_tokens, done.num_generated_tokens) == (102, 3)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0


def test_engine_serves_cancels_and_drains(session: EngineSession) -> None:
    launcher = session.launch("--gpus=1")
    with session.connect(READY_S) as client:
        whole = token_ids(client, 100)
        assert len(whole) == 100
        events = client.generate(PROMPT, max_tokens=1500, ignore_eos=True)
        taken: list[int] = []
        for event in events:
            if isinstance(event, Tokens):
                taken += event.token_ids
            if len(taken) >= 20:
                break
        events.close()  # cancels
        assert taken[:20] == whole[:20]
        assert token_ids(client, 100) == whole
        assert client.status().num_cancelled == 1
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")


def test_killed_worker_is_one_error_and_the_next_engine_serves(session: EngineSession) -> None:
    launcher = session.launch("--gpus=1")
    with session.connect(READY_S) as client:
        whole = token_ids(client, 50)
        events = client.generate(PROMPT, max_tokens=1500, ignore_eos=True)
        while not isinstance(next(events), Tokens):
            pass
        os.kill(session.processes()["rank 0"], signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            list(events)
        assert caught.value.code == ErrorCode.RANK_FAILED
    assert launcher.wait(ENDED_S) == 4
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")
    launcher = session.launch("--gpus=1", name="again")
    with session.connect(READY_S) as client:
        assert token_ids(client, 50) == whole
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0


def test_mixed_requests_leave_no_wrong_stream_and_nothing_behind() -> None:
    figures = soak(SoakedEngine.tiny(on_gpus=True), 200, ranks=1, num_clients=4, seed=5)
    assert figures["findings"] == []
    assert figures["replayed"] > 50
    assert figures["cached_tokens"] > 0
    assert any(name.startswith("GPU ") for name in figures["growth"])


def test_cancels_and_aborts_are_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    """With the tiny model; of the 2B shape `kog-bench requests --gpus 1 --spec 2b` says it."""
    workload = Workload(prompts=(64, 500), kept=300, new=20, context=64, tokens=200, repeats=3)
    assert run(None, "tiny", (1,), workload, on_gpus=True)
    (figures,) = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert [figure["cached_tokens"] for figure in figures["first_tokens"]] == [[0], [0], [300]]
    assert all(figure.get("most_free_ms", 0.0) < OBEYED_MS for figure in figures["cancels"])
    assert all(abort["told_ms"] < OBEYED_MS for abort in figures["aborts"])
    assert figures["aborts"][-1]["counts"], "an answer of this length is not over before its abort"
