"""Frames that pass a router keep everything but the request id and the stamps."""

from __future__ import annotations

import msgpack  # type: ignore[import-untyped]
import pytest

from kog_dist.router.frames import is_tokens, read_tokens, with_fields, write_tokens
from kog_dist.rpc.messages import (
    MAX_PROMPT_IDS,
    Alive,
    BadMessage,
    Done,
    FinishReason,
    Generate,
    Tokens,
    decode_event,
    decode_request,
    encode,
)
from kog_dist.sampling_params import SamplingParams

HEAD = encode(Alive("a", 0))[:4]
EVENT = Tokens("inner", 7, (5, 6), "héllo", (0.25, 0.5), ("a" * 64, "b" * 64))


def test_tokens_pass_with_the_clients_id_and_clock() -> None:
    frame = encode(EVENT)
    assert is_tokens(frame)
    passed = decode_event(write_tokens(read_tokens(frame), "outer", 1.0))
    assert passed == Tokens("outer", 7, (5, 6), "héllo", (1.25, 1.5), ("a" * 64, "b" * 64))


def test_fields_are_replaced() -> None:
    for num_ids in (1000, MAX_PROMPT_IDS):
        request = Generate("outer", prompt_ids=tuple(range(num_ids)), sampling=SamplingParams(0.5), deadline_s=9.0)
        inner = decode_request(with_fields(encode(request), request_id="inner", deadline_s=4.5))
        assert inner == Generate("inner", prompt_ids=tuple(range(num_ids)), sampling=SamplingParams(0.5), deadline_s=4.5)


def test_other_events_are_not_tokens() -> None:
    assert not is_tokens(encode(Done("a", FinishReason.STOP, 1, 1, 0.0, 0.0)))
    assert not is_tokens(b"")


@pytest.mark.parametrize(
    "body",
    [
        {"request_id": 5, "index": 0, "token_ids": [], "text": "", "stamps_s": []},
        {"request_id": "a", "index": 0, "token_ids": 3, "text": "", "stamps_s": []},
        {"request_id": "a", "index": 0, "token_ids": [], "text": None, "stamps_s": []},
        {"request_id": "a", "index": 0, "token_ids": [], "text": ""},
        [],
    ],
)
def test_damaged_tokens_are_no_tokens(body: object) -> None:
    with pytest.raises(BadMessage):
        read_tokens(HEAD + msgpack.packb(["tokens", body]))


def test_cut_off_tokens_are_no_tokens() -> None:
    frame = encode(EVENT)
    for end in range(len(HEAD) + 1, len(frame)):
        with pytest.raises(BadMessage):
            read_tokens(frame[:end])


def test_stamps_that_are_no_numbers() -> None:
    body = {"request_id": "a", "index": 0, "token_ids": [], "text": "", "stamps_s": ["x"]}
    with pytest.raises(BadMessage):
        write_tokens(read_tokens(HEAD + msgpack.packb(["tokens", body])), "b", 1.0)
