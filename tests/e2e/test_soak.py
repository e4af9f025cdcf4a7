"""A few hundred mixed requests on two ranks, each stream compared with its replay; and that the comparison can find something."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.engine.soak import LONG_BLOCKS, MORE_RSS_KB, SoakedEngine, soak
from kog_dist.bench.engine.soak_client import Record
from kog_dist.bench.engine.soak_replay import compare, compare_rounded
from kog_dist.bench.engine.soak_requests import Fate, RequestMix, SoakRequest
from kog_dist.bench.fakes.tiny_model import write_tiny_model
from kog_dist.rpc.messages import Accepted, Alive, Done, Error, ErrorCode, FinishReason, Generate, Tokens

DONE = Done("r", FinishReason.LENGTH, 1, 3, 0.0, 1.0)


@pytest.mark.timeout(300)  # seconds, but for a loaded machine
def test_mixed_requests_leave_no_wrong_stream_and_nothing_behind() -> None:
    figures = soak(SoakedEngine.tiny(), 200, ranks=2, num_clients=4, seed=5)
    assert figures["findings"] == []
    assert figures["replayed"] > 50
    assert figures["cached_tokens"] > 100
    for end in ("length", "stop", "cancelled", "deadline_exceeded", "vanished", "token_id_out_of_range"):
        assert figures["ends"].get(end, 0) > 0, f"no request ended with {end}: {figures['ends']}"
    assert {"coordinator", "rank 0", "rank 1", "launcher"} <= set(figures["growth"])


@pytest.mark.timeout(300)  # seconds, but for a loaded machine
def test_long_prompts_with_room_for_few_kept_prefixes() -> None:
    figures = soak(SoakedEngine.long(1, 80), 120, ranks=1, num_clients=3, seed=2)
    assert figures["findings"] == []
    assert figures["replayed"] > 20
    assert 0 < figures["cached_tokens"] < figures["prompt_tokens"]
    assert figures["kept_blocks"] == LONG_BLOCKS, "the pool is full, so that what comes takes the room of something else"
    assert figures["prompt_tokens"] > 60 * 80, "prompts are longer than a block"


LEAK_BYTES = 96 * 1024
LEAK = f"""
import sys
if "kog_dist.workers.coordinator.process" in sys.orig_argv:
    from kog_dist.workers.coordinator.admission import Admission

    take, kept = Admission.take, []

    def leaking(*arguments):
        kept.append(b"x" * {LEAK_BYTES})
        return take(*arguments)

    Admission.take = leaking
"""


@pytest.mark.timeout(300)  # seconds, but for a loaded machine
def test_a_leak_of_a_little_more_than_what_is_allowed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = 90
    num_measured = num_requests - round(0.2 * num_requests)
    assert MORE_RSS_KB < LEAK_BYTES // 1024 * num_measured < 1.4 * MORE_RSS_KB
    (tmp_path / "sitecustomize.py").write_text(LEAK, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    figures = soak(SoakedEngine.tiny(), num_requests, ranks=1, num_clients=3, seed=3)
    [finding] = figures["findings"]
    assert re.fullmatch(r"coordinator has \d+ more rss_kb", finding)


def record(fate: Fate = Fate.COMPLETE, end: Done | Error | None = DONE, ids: tuple[int, ...] = (5, 6, 7)) -> Record:
    found = Record(SoakRequest(Generate("r", prompt_ids=(1,)), fate))
    found.take(Accepted("r", 0, 1, 3))
    found.take(Tokens("r", 0, ids, "text", (), logprobs=(-0.5,) * len(ids)))
    if end is not None:
        found.take(end)
    return found


def test_what_differs_from_the_replay_is_found() -> None:
    assert compare(record(), record()) == []
    assert compare(record(Fate.DISCONNECT, None, (5, 6)), record()) == []
    assert "token_ids" in compare(record(Fate.DISCONNECT, None, (5, 7)), record())[0]
    assert "token_ids" in compare(record(ids=(5, 6)), record())[0], "a whole answer is not a beginning"
    other = record()
    other.text = "other"
    assert "text" in compare(record(), other)[0]
    assert "finished with" in compare(record(end=replace(DONE, finish_reason=FinishReason.STOP)), record())[0]
    assert "the replay ended with" in compare(record(), record(Fate.DISCONNECT, None))[0]


class Scripted:
    """Answers like an engine that says 5, 6, 7, 8 behind any prompt that ends with 1, and goes on from any of them."""

    best = (5, 6, 7, 8)

    def __init__(self, second_best: dict[int, float]) -> None:
        self.second_best = second_best  # log-probabilities beside the best one's -1

    def ask(self, requests: Sequence[SoakRequest]) -> list[Record]:
        (planned,) = requests
        message = planned.message
        assert message.prompt_ids is not None
        assert message.max_tokens is not None
        begun = len(message.prompt_ids) - 1
        ids = self.best[begun : begun + message.max_tokens]
        made = record(end=replace(DONE, num_generated_tokens=len(ids)), ids=ids)
        made.top = [(ids[0], -1.0), *self.second_best.items()]
        return [made]


def test_behind_rounded_positions_only_a_tie_may_differ() -> None:
    def compared(ids: tuple[int, ...], second_best: dict[int, float]) -> tuple[list[str], int]:
        replayer: Any = Scripted(second_best)
        message = Generate("r", prompt_ids=(1,), max_tokens=4)
        found = record(end=replace(DONE, num_generated_tokens=4), ids=ids)
        found.planned = SoakRequest(message, Fate.COMPLETE)
        (replay,) = replayer.ask([found.planned])
        return compare_rounded(found, replay, replayer)

    assert compared((5, 6, 7, 8), {}) == ([], 0)
    assert compared((5, 9, 7, 8), {9: -1.001}) == ([], 1)
    assert compared((5, 9, 7, 9), {9: -1.001}) == ([], 2)
    assert "token 1 is 9" in compared((5, 9, 7, 8), {9: -1.5})[0][0]
    assert "token 1 is 9" in compared((5, 9, 7, 8), {3: -1.001})[0][0], "it is not among the best"


@pytest.mark.parametrize(
    ("fate", "events", "words"),
    [
        (Fate.COMPLETE, [Tokens("r", 0, (5,), "", ())], "before it was accepted"),
        (Fate.COMPLETE, [Accepted("r", 0, 1, 3), Accepted("r", 0, 1, 3)], "accepted twice"),
        (Fate.COMPLETE, [Accepted("r", 0, 1, 3), Tokens("r", 1, (5,), "", ())], "tokens begin at 1, 0 had come"),
        (Fate.COMPLETE, [Accepted("r", 0, 1, 3), DONE], "done says 3 tokens, 0 came"),
        (
            Fate.COMPLETE,
            [Accepted("r", 0, 1, 3), replace(DONE, num_generated_tokens=0), Alive("r", 0)],
            "after the terminal event",
        ),
        (Fate.COMPLETE, [Error(ErrorCode.RANK_FAILED, "gone", "r")], "ended with rank_failed"),
        (Fate.COMPLETE, [Error(ErrorCode.QUEUE_FULL, "full", "r")], "with retry_after_s None"),
        (Fate.COMPLETE, [Accepted("r", 0, 1, 3), replace(DONE, finish_reason=FinishReason.CANCELLED)], "ended with cancelled"),
        (Fate.REFUSED, [Accepted("r", 0, 1, 3), DONE], "a request to refused"),
    ],
)
def test_events_that_must_not_be_are_found(
    fate: Fate, events: list[Accepted | Alive | Tokens | Done | Error], words: str
) -> None:
    found = Record(SoakRequest(Generate("r", prompt_ids=(1,)), fate, code=ErrorCode.INVALID_REQUEST))
    for event in events:
        found.take(event)
    assert any(words in finding for finding in found.findings), found.findings


def test_the_mix_is_repeatable(tmp_path: Path) -> None:
    spec = write_tiny_model(tmp_path / "model")
    first, second, other = (RequestMix(spec, seed) for seed in (1, 1, 2))
    planned = [first.next() for _ in range(300)]
    assert planned == [second.next() for _ in range(300)]
    assert planned != [other.next() for _ in range(300)]
    assert {one.fate for one in planned} == set(Fate)
    longest = max(len(one.message.prompt or "") for one in planned)
    assert len(planned[1].message.prompt or "") == longest, "what takes most memory comes before processes are measured"
    rounded = RequestMix(spec, 1, kept_is_exact=False)
    asked = [one.message for one in (rounded.next() for _ in range(300)) if one.fate is not Fate.REFUSED]
    reusing = [message for message in asked if message.reuse_kv]
    assert len(reusing) > 20
    assert all(
        message.sampling.temperature == 0 and not message.logit_digests and message.prompt_ids is not None for message in reusing
    )
