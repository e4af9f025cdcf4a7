"""What clients say of drafts and are told of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.errors import RequestError
from kog_dist.gateway.openai.accounting import predicted_tokens, timings
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.rpc.messages import Done, FinishReason, Generate
from kog_dist.rpc.shown import statistics
from kog_dist.speculation import Speculation
from kog_dist.workers.coordinator.model_folder import ModelFolder
from tests.unit.test_exact_limits import SPEC

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "def area(radius):\n    return 3 * radius ** 2\n"


def planned(served: ServedModel, **fields: Any) -> Generate:
    return plan_chat({**CHAT, **fields}, served).generates[0]


@pytest.mark.parametrize("content", [TEXT, [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]])
def test_a_prediction_goes_to_the_engine_as_ids(base_model: ServedModel, content: Any) -> None:
    assert base_model.tokenizer is not None
    generate = planned(base_model, prediction={"type": "content", "content": content})
    assert tuple(generate.prediction_ids or ()) == tuple(base_model.tokenizer.encode(TEXT, add_special_tokens=False))


def test_no_prediction_is_too_long_or_refused(base_model: ServedModel) -> None:
    long = planned(base_model, prediction={"type": "content", "content": "x y " * 100_000})
    assert len(long.prediction_ids or ()) == base_model.max_context
    for odd in (None, "text", 5, {}, {"type": "content"}, {"type": "content", "content": 7}, {"type": "content", "content": ""}):
        assert planned(base_model, prediction=odd).prediction_ids is None


def test_speculate_is_one_of_three(base_model: ServedModel) -> None:
    assert planned(base_model).speculate is None
    for value in Speculation:
        assert planned(base_model, speculate=value.value).speculate is value
        generate = plan_completion({"prompt": "x", "speculate": value.value}, base_model).generates[0]
        assert generate.speculate is value
    with pytest.raises(ApiError, match="speculate"):
        planned(base_model, speculate="eagle")


def test_an_engine_without_drafts_says_so() -> None:
    """What is asked for by name is refused; `auto`, and a prediction, mean nothing there."""
    model = ModelFolder("tiny", Path("tiny"), SPEC, None, (0,))
    for speculate in (None, Speculation.AUTO, Speculation.OFF):
        assert not model.admit(Generate("a", prompt_ids=(1, 2), speculate=speculate, prediction_ids=(1,))).drafts
    with pytest.raises(RequestError, match=r"needs an engine that has drafts, and this one has none: .*; leave it out"):
        model.admit(Generate("a", prompt_ids=(1, 2), speculate=Speculation.LOOKUP))


@pytest.mark.parametrize("default", Speculation)
@pytest.mark.parametrize("asked", [None, *Speculation])
def test_a_request_decides_for_itself(default: Speculation, asked: Speculation | None) -> None:
    model = replace(ModelFolder("tiny", Path("tiny"), SPEC, None, (0,)), speculate=default)
    drafts = model.admit(Generate("a", prompt_ids=(1, 2), speculate=asked)).drafts
    assert drafts is ((asked or default) is not Speculation.OFF)


def test_a_prediction_is_used_as_far_as_it_can_be() -> None:
    model = replace(ModelFolder("tiny", Path("tiny"), SPEC, None, (0,)), speculate=Speculation.AUTO)

    def admitted(*ids: int) -> list[int]:
        return list(model.admit(Generate("a", prompt_ids=(1, 2), prediction_ids=ids)).prediction)

    assert admitted(3, 4) == [3, 4]
    assert admitted(3, SPEC.vocab_size, 4) == [3]
    assert admitted(-1, 4) == []
    assert len(admitted(*[5] * (SPEC.max_context + 1))) == SPEC.max_context


def test_drafts_are_counted() -> None:
    done = Done(
        "a", FinishReason.STOP, 10, 5, 0.0, 1.0, num_drafted_tokens=8, num_accepted_tokens=3, num_drafted_predictions=5,
        num_accepted_predictions=2,
    )  # fmt: skip
    without = Done("b", FinishReason.STOP, 10, 5, 0.0, 1.0)
    told = timings([done, without])
    assert (told["draft_n"], told["draft_n_accepted"]) == (8, 3)
    assert predicted_tokens([done]) == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 3}
    assert "3 of 8 drafted tokens right" in statistics(done)
    assert "draft_n" not in timings([without])
    assert predicted_tokens([without]) == {}
    assert "drafted" not in statistics(without)
