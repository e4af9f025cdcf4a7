"""The way of a shaped request: flags, the coordinator's check, what ranks are told, and the events with log-probabilities."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.ring import Finish, TokenEntry
from kog_dist.decode.sampling import Shaping, TokenLogprobs
from kog_dist.errors import ConfigError, RequestError
from kog_dist.launch.request import PromptRequest
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.messages import ErrorCode, Generate
from kog_dist.rpc.shaping_options import ShapingOptions
from kog_dist.workers import served_model
from kog_dist.workers.served_model import ServedModel
from kog_dist.workers.streams import RequestStream

SPEC = ModelSpec(
    hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=4, intermediate_size=16, vocab_size=50, max_context=40, num_lanes=4
)
MODEL = ServedModel("tiny", Path("tiny"), SPEC, None, (0,))
OPTIONS = ShapingOptions(
    top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=0.25,
    logit_bias=("7=-2.5", "9=1"), min_tokens=4, logprobs=2,
)  # fmt: skip
SHAPING = Shaping(3, 0.5, 0.1, 1.5, -0.5, 0.25, ((7, -2.5), (9, 1.0)), 4)


def message(**changes: Any) -> Generate:
    return Generate("a", prompt_ids=(1, 2), **changes)


def test_a_request_arrives_at_the_ranks_as_it_was_sent() -> None:
    given = OPTIONS.keywords()
    bias = given.pop("logit_bias")
    request = MODEL.admit(message(**given, logit_bias_ids=tuple(bias), logit_biases=tuple(bias.values())))
    assert (request.shaping, request.logprobs) == (SHAPING, 2)
    assert request.is_shaped
    assert not MODEL.admit(message()).is_shaped
    assert MODEL.admit(message(logprobs=0)).is_shaped, "log-probabilities need all logits"
    assert not MODEL.admit(message(top_p=0.5)).is_shaped, "greedy decoding needs no filter"


@pytest.mark.parametrize(
    ("changes", "code", "finding"),
    [
        ({"logit_bias_ids": (50,), "logit_biases": (1.0,)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE, "logit_bias names id 50"),
        ({"logit_bias_ids": (-1,), "logit_biases": (1.0,)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE, "logit_bias names id -1"),
        ({"min_tokens": 6, "max_tokens": 5}, ErrorCode.INVALID_REQUEST, "min_tokens is 6 and max_tokens 5"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(changes: dict[str, Any], code: ErrorCode, finding: str) -> None:
    with pytest.raises(RequestError, match=finding) as caught:
        MODEL.admit(message(**changes))
    assert caught.value.code == code


@pytest.mark.parametrize("count", [1, served_model._FEW_IDS, served_model._FEW_IDS + 1])
@pytest.mark.parametrize(("last", "is_id"), [(49, True), (50, False), (-1, False), (2**32, False)])
def test_an_id_that_the_model_does_not_have_is_refused_by_its_place(count: int, last: int, is_id: bool) -> None:
    model = ServedModel("tiny", Path("tiny"), replace(SPEC, max_context=400), None, (0,))
    asked = Generate("a", prompt_ids=(*[1] * (count - 1), last))
    if is_id:
        assert model.admit(asked).prompt[-1] == last
        return
    with pytest.raises(RequestError, match=rf"prompt_ids\[{count - 1}\] is {last}, the vocabulary has ids 0 to 49") as caught:
        model.admit(asked)
    assert caught.value.code == ErrorCode.TOKEN_ID_OUT_OF_RANGE


def test_every_flag_reaches_the_client_of_kog_launch() -> None:
    given = set()
    grammars: tuple[dict[str, Any], ...] = ({"json_schema": "{}"}, {"regex": "a*"})  # one or the other
    for grammar in grammars:
        request = PromptRequest.from_flags(
            prompt=None, prompt_ids="1", max_tokens=None, temperature=None, seed=None, stop=(), ignore_eos=False, json=True,
            logit_digests=False, shaping=replace(OPTIONS, **grammar),
        )  # fmt: skip
        assert request is not None
        arguments = request.client_arguments()
        given |= {argument.partition("=")[0] for argument in arguments}
        assert arguments.count("--logit-bias=7=-2.5") == arguments.count("--logit-bias=9=1") == 1
    assert given >= {f"--{item.name.replace('_', '-')}" for item in fields(ShapingOptions)}


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"top_p": 0.0}, "^--top-p must be between"), ({"repetition_penalty": -1.0}, "^--repetition-penalty must be between"),
        ({"logprobs": 21}, "^--logprobs must be between"), ({"logit_bias": ("5:1",)}, "^--logit-bias must be ID=BIAS"),
        ({"logit_bias": ("5=x",)}, "^--logit-bias must be ID=BIAS"), ({"logit_bias": ("5=1", "5=2")}, "names a token twice"),
        ({"logit_bias": ("5=nan",)}, "^--logit-bias must be between"),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense_are_refused_by_name(options: dict[str, Any], finding: str) -> None:
    with pytest.raises(ConfigError, match=finding):
        ShapingOptions(**options).keywords()


def test_events_carry_the_log_probabilities_of_their_tokens() -> None:
    request = DecodeRequest((1, 2), 10, logprobs=2)
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
