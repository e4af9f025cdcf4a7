"""The way of the sampling parameters: flags, the coordinator's check, what ranks are told, and events with log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import ConfigError, RequestError
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.messages import ErrorCode, Generate
from kog_dist.rpc.messages.codec import decode_request, encode
from kog_dist.rpc.prompt_request import PromptRequest, sampling_of
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.sampling_params import DEFAULTS, SamplingParams
from kog_dist.workers.coordinator import model_folder
from kog_dist.workers.coordinator.model_folder import ModelFolder
from kog_dist.workers.coordinator.streams import RequestStream

SPEC = ModelSpec(
    hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=4, intermediate_size=16, vocab_size=50, max_context=40, num_lanes=4
)
MODEL = ModelFolder("tiny", Path("tiny"), SPEC, None, (0,))
FLAGS = {
    "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25,
    "logit_bias": ["7=-2.5", "9=1"], "min_tokens": 4, "logprobs": 2, "temperature": None, "seed": None,
}  # fmt: skip
SAMPLING = SamplingParams(
    top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25,
    logit_bias=((7, -2.5), (9, 1.0)), min_tokens=4, logprobs=2,
)  # fmt: skip


def message(max_tokens: int | None = None, **parameters: Any) -> Generate:
    return Generate("a", prompt_ids=(1, 2), max_tokens=max_tokens, sampling=SamplingParams(**parameters))


def test_a_request_arrives_at_the_ranks_as_it_was_sent() -> None:
    sent = encode(Generate("a", prompt_ids=(1, 2), sampling=sampling_of(FLAGS)))
    received = decode_request(sent)
    assert isinstance(received, Generate)
    request = MODEL.admit(received)
    assert request.sampling == SAMPLING
    assert request.needs_all_logits
    assert not MODEL.admit(message()).needs_all_logits
    assert MODEL.admit(message(logprobs=0)).needs_all_logits, "log-probabilities need all logits"
    assert not MODEL.admit(message(top_p=0.5)).needs_all_logits, "greedy decoding needs no filter"


@pytest.mark.parametrize(
    ("changes", "code", "finding"),
    [
        ({"logit_bias": ((50, 1.0),)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE, "logit_bias names id 50"),
        ({"logit_bias": ((-1, 1.0),)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE, "logit_bias names id -1"),
        ({"min_tokens": 6, "max_tokens": 5}, ErrorCode.INVALID_REQUEST, "min_tokens is 6 and max_tokens 5"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(changes: dict[str, Any], code: ErrorCode, finding: str) -> None:
    with pytest.raises(RequestError, match=finding) as caught:
        MODEL.admit(message(**changes))
    assert caught.value.code == code


@pytest.mark.parametrize("count", [1, model_folder._FEW_IDS, model_folder._FEW_IDS + 1])
@pytest.mark.parametrize(("last", "is_id"), [(49, True), (50, False), (-1, False), (2**32, False)])
def test_an_id_that_the_model_does_not_have_is_refused_by_its_place(count: int, last: int, is_id: bool) -> None:
    model = ModelFolder("tiny", Path("tiny"), replace(SPEC, max_context=400), None, (0,))
    asked = Generate("a", prompt_ids=(*[1] * (count - 1), last))
    if is_id:
        assert model.admit(asked).prompt[-1] == last
        return
    with pytest.raises(RequestError, match=rf"prompt_ids\[{count - 1}\] is {last}, the vocabulary has ids 0 to 49") as caught:
        model.admit(asked)
    assert caught.value.code == ErrorCode.TOKEN_ID_OUT_OF_RANGE


def test_every_flag_reaches_the_client_of_kog_launch() -> None:
    assert FLAGS.keys() == DEFAULTS.keys(), "a parameter without a flag"
    grammars: tuple[dict[str, Any], ...] = ({"json_schema": "{}"}, {"regex": "a*"})  # one or the other
    for grammar in grammars:
        request = PromptRequest(prompt_ids=(1,), sampling=sampling_of(FLAGS), as_json=True, stop=("x", "\ud800"), **grammar)
        assert PromptRequest.read(request.write()) == request
    with pytest.raises(ConfigError, match="exclude each other"):
        PromptRequest(prompt_ids=(1,), json_schema="{}", regex="a*")


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"top_p": 0.0}, "^--top-p must be between"), ({"repetition_penalty": -1.0}, "^--repetition-penalty must be between"),
        ({"logprobs": 21}, "^--logprobs must be between"), ({"logit_bias": ("5:1",)}, "^--logit-bias must be ID=BIAS"),
        ({"logit_bias": ("5=x",)}, "^--logit-bias must be ID=BIAS"), ({"logit_bias": ("5=1", "5=2")}, "names an id twice"),
        ({"logit_bias": ("5=nan",)}, "^--logit-bias must be between"),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense_are_refused_by_name(options: dict[str, Any], finding: str) -> None:
    with pytest.raises(ConfigError, match=finding):
        sampling_of(options)


def test_events_carry_the_log_probabilities_of_their_tokens() -> None:
    request = DecodeRequest((1, 2), 10, SamplingParams(logprobs=2))
    stream = RequestStream(b"peer", message(logprobs=2), request, None, 0)
    entries = [
        TokenEntry(1, index, 5 + index, 1, None, Finish.NONE, TokenLogprobs(-0.5 - index, (5, 6), (-0.5, -1.5)))
        for index in range(3)
    ]
    event, reason = stream.take(entries)
    assert reason is None
    assert event is not None
    assert event.token_ids == (5, 6, 7)
    assert event.logprobs == (-0.5, -1.5, -2.5)
    assert event.top_ids == (5, 6) * 3
    assert event.top_logprobs == (-0.5, -1.5) * 3
