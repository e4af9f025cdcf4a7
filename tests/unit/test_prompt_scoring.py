"""Log-probabilities of a prompt: what ranks are asked for, what the client is told, and how such a request ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kog_dist.rpc.messages import (
    Accepted,
    Cancel,
    Done,
    ErrorCode,
    FinishReason,
    Generate,
    PromptLogprobs,
    Tokens,
    decode_event,
    decode_request,
    encode,
)
from kog_dist.rpc.messages.checks import BadMessage
from kog_dist.runtime.ring import Finish
from kog_dist.sampling_params import SamplingParams
from tests.unit.hand_turned import CONTEXT, PEERS, HandTurned, answer_of

A, B, _ = PEERS
WORD, WORD_IDS = "aab", [1, 1, 2]
TWO = SamplingParams(logprobs=2)


def ask(engine: HandTurned, prompt: str = WORD, **fields: Any) -> None:
    engine.ask(A, "a1", prompt, **{"prompt_logprobs": True, "sampling": TWO, **fields})


def events(engine: HandTurned, kind: type[Any]) -> list[Any]:
    return [event for event in engine.events("a1") if isinstance(event, kind)]


def scored(engine: HandTurned) -> list[tuple[int, int, float]]:
    """Place, id and log-probability of each token, as told."""
    return [
        (event.index + i, token_id, event.logprobs[i])
        for event in events(engine, PromptLogprobs)
        for i, token_id in enumerate(event.token_ids)
    ]


def test_each_token_but_the_first_is_reported_before_the_answer(engine: HandTurned) -> None:
    ask(engine, max_tokens=2)
    engine.decode()
    assert scored(engine) == [(1, 1, -0.5), (2, 2, -1.0)]
    assert [event.top_ids for event in events(engine, PromptLogprobs)] == [(0, 1), (0, 1)]
    kinds = [type(event) for event in engine.events("a1")]
    assert kinds == [Accepted, PromptLogprobs, PromptLogprobs, Tokens, Tokens, Done]
    told = [token_id for event in events(engine, Tokens) for token_id in event.token_ids]
    assert told == answer_of(WORD_IDS)[:2], "the same answer as without"
    (done,) = events(engine, Done)
    assert (done.num_prompt_tokens, done.num_cached_tokens, done.num_generated_tokens) == (3, 0, 2)


def test_the_answer_goes_on_behind_what_was_scored(engine: HandTurned) -> None:
    ask(engine, max_tokens=1)
    engine.decode()
    first, second = engine.ranks.uses
    assert (list(first.prompt), first.max_tokens, first.kv.num_cached, first.stop_ids) == ([1], 2, 0, ())
    assert (list(second.prompt), second.max_tokens, second.kv.num_cached, second.stop_ids) == (WORD_IDS, 1, 2, (0,))


def test_tokens_that_are_cached_are_scored_all_the_same(engine: HandTurned) -> None:
    engine.ask(B, "b1", WORD, max_tokens=1)
    ask(engine, max_tokens=1)
    engine.decode()
    assert len(scored(engine)) == 2


def test_an_end_token_in_the_prompt_ends_nothing(engine: HandTurned) -> None:
    engine.ask(A, "a1", None, prompt_ids=[1, 0, 2], prompt_logprobs=True, sampling=TWO, max_tokens=1)
    engine.decode()
    assert [token_id for _, token_id, _ in scored(engine)] == [0, 2]
    assert events(engine, Done)[0].num_generated_tokens == 1


def test_without_an_answer_it_ends_with_the_prompt(engine: HandTurned) -> None:
    ask(engine, max_tokens=0)
    engine.decode()
    (done,) = events(engine, Done)
    assert (done.finish_reason, done.num_generated_tokens, done.ttft_s, len(scored(engine))) == (FinishReason.LENGTH, 0, None, 2)
    assert len(engine.ranks.uses) == 1
    engine.ask(B, "b1", max_tokens=1)
    engine.decode()
    assert isinstance(engine.events("b1")[-1], Done), "the ranks are free"


def test_a_prompt_of_one_token_has_nothing_to_report(engine: HandTurned) -> None:
    ask(engine, "a", max_tokens=1)
    engine.decode()
    assert [type(event) for event in engine.events("a1")] == [Accepted, Tokens, Done]
    ask(engine, "a", max_tokens=0)
    assert engine.events("a1")[-1].code is ErrorCode.INVALID_REQUEST
    assert "nothing to do" in engine.events("a1")[-1].message


def test_a_long_text_is_read_first(engine: HandTurned) -> None:
    engine.texts.longest_at_once = 2
    ask(engine, max_tokens=0)
    engine.texts.read()
    engine.decode()
    assert len(scored(engine)) == 2


def test_the_longest_prompt_is_scored_to_its_end(engine: HandTurned) -> None:
    ask(engine, "ab" * (CONTEXT // 2 - 1) + "a", max_tokens=1)
    engine.decode(CONTEXT + 1)
    assert len(scored(engine)) == CONTEXT - 2
    assert isinstance(engine.events("a1")[-1], Done)


def test_a_mask_is_there_one_token_early_and_is_written_again_if_it_is_lost(engine: HandTurned) -> None:
    ask(engine, "aabab", max_tokens=0)
    masks, epoch = engine.control.masks, engine.control.read_request(1).mask_epoch
    for index in range(3):
        assert masks.get(epoch + index) is not None
        assert masks.get(epoch + index + 1) is not None
        engine.decode(1)
    masks.put(epoch + 3 + 2, np.array([7], np.uint32))  # as by a process that was stopped during an earlier request
    assert masks.get(epoch + 3) is None
    engine.coordinator.turn()
    engine.decode(1)
    assert [token_id for _, token_id, _ in scored(engine)] == [1, 2, 1, 2]


def test_a_cancel_and_a_deadline_end_it_while_the_prompt_is_scored(engine: HandTurned) -> None:
    for reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
        engine.wire.delivered.clear()
        ask(engine, max_tokens=1, deadline_s=0.5)
        engine.decode(1)
        if reason is FinishReason.CANCELLED:
            engine.wire.inbox.append((A, Cancel("a1")))
        else:
            engine.pass_ms(500)
        engine.coordinator.turn()
        assert events(engine, Done)[0].finish_reason is reason
        engine.decode(1)
        assert not engine.coordinator._slots.busy


@pytest.mark.parametrize("is_faulty", [True, False], ids=["not finite", "mask lost"])
def test_a_fault_names_the_token(engine: HandTurned, is_faulty: bool) -> None:
    ask(engine, max_tokens=1)
    engine.decode(1)
    if not is_faulty:
        epoch = engine.control.read_request(1).mask_epoch
        engine.control.masks.put(epoch + 1 + 2, np.array([7], np.uint32))
    engine.ranks.decode(1, is_faulty=is_faulty)
    engine.coordinator.turn()
    error = engine.events("a1")[-1]
    assert error.code is (ErrorCode.NUMERICAL_FAULT if is_faulty else ErrorCode.INTERNAL_ERROR)
    assert "token 2 of the prompt" in error.message
    assert not engine.coordinator.requests.running


def test_a_client_that_goes_meanwhile_frees_the_ranks(engine: HandTurned) -> None:
    ask(engine, max_tokens=1)
    engine.wire.gone.add(A)
    engine.decode(2)
    assert not engine.coordinator.requests.running
    assert engine.control.ring.get(1, 1) is not None
    assert engine.control.ring.get(1, 1).finish is Finish.CANCELLED  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens must be from 1"),
        ({"prompt_logprobs": True}, "prompt_logprobs needs logprobs"),
        ({"prompt_logprobs": True, "sampling": TWO, "regex": "a"}, "prompt_logprobs and regex exclude each other"),
        ({"prompt_logprobs": True, "sampling": TWO, "json_schema": "{}"}, "prompt_logprobs and json_schema exclude each other"),
    ],
)
def test_what_a_message_may_not_ask_for(fields: Any, complaint: str) -> None:
    with pytest.raises(BadMessage, match=complaint):
        Generate("id", "x", **fields)


def test_the_messages_survive_the_wire() -> None:
    wish = Generate("id", "x", prompt_logprobs=True, sampling=TWO, max_tokens=0)
    assert decode_request(encode(wish)) == wish
    found = PromptLogprobs("id", 1, (5,), (-0.5,), (5, 6), (-0.5, -1.0))
    assert decode_event(encode(found)) == found
