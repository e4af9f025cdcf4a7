"""Exact limits of what describes a model and of what is made of it: the last value that is taken, the first that is refused."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist import model_limits
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import LARGEST_VOCAB, make_plan
from kog_dist.decode.plan.validate import validate
from kog_dist.decode.sampling.processors import fixed_top_p, lowest_distance, select
from kog_dist.errors import ConfigError, PlanError, RequestError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.model_limits import MAX_LAYERS
from kog_dist.rpc.messages import ErrorCode, Generate
from kog_dist.sampling_params import GREEDY, SamplingParams
from kog_dist.workers.coordinator.model_folder import MAX_BYTES_PER_TOKEN, ModelFolder

SPEC = ModelSpec(
    hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=16, vocab_size=50, max_context=40, num_lanes=2
)  # fmt: skip


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"num_layers": 1}, {"num_layers": 0}),
        ({"num_kv_heads": 2}, {"num_kv_heads": 0}),
        ({"num_heads": 8}, {"num_heads": 0}),
        ({"intermediate_size": 2}, {"intermediate_size": 0}),
        ({"num_lanes": 1}, {"num_lanes": 0}),
        ({"num_layers": MAX_LAYERS}, {"num_layers": MAX_LAYERS + 1}),
        ({"vocab_size": 1}, {"vocab_size": 0}),
        ({"max_context": 1}, {"max_context": 0}),
        ({"delay": 0}, {"delay": -1}),
        ({"sliding_window": 1}, {"sliding_window": 0}),
        ({"sliding_window": 1, "window_layers": (0, 1)}, {"sliding_window": 1, "window_layers": (0, 2)}),
        ({"sliding_window": 1, "window_layers": (0, 1)}, {"sliding_window": 1, "window_layers": (-1, 1)}),
        ({"sliding_window": 1, "window_layers": (0, 1)}, {"sliding_window": 1, "window_layers": (1, 0)}),
        ({"sliding_window": 1, "window_layers": (0,)}, {"sliding_window": 1, "window_layers": (0, 0)}),
        ({"num_lanes": 4}, {"num_lanes": 3}),
        (
            {"num_lanes": 2, "num_heads": 6, "num_kv_heads": 6, "intermediate_size": 12, "hidden_size": 24},
            {"num_lanes": 6, "num_heads": 6, "num_kv_heads": 6, "intermediate_size": 12, "hidden_size": 24},
        ),
        ({"norm_eps": 1e-12}, {"norm_eps": 0.99e-12}),
        ({"norm_eps": 0.1}, {"norm_eps": 0.101}),
        ({"norm_eps": 1e-5}, {"norm_eps": float("nan")}),
        ({"rope_theta": 10.0}, {"rope_theta": 9.99}),
        ({"rope_theta": 1e12}, {"rope_theta": 1.01e12}),
        ({"rope_theta": 1e4}, {"rope_theta": float("nan")}),
        ({"hidden_size": 8}, {"hidden_size": 4}),  # a head of one value has no pair to turn
        ({"head_type": HeadType.VOCAB_PARALLEL}, {"head_type": HeadType.VOCAB_PARALLEL, "vocab_size": 51}),
    ],
)
def test_a_spec_takes_its_limits_and_nothing_beyond(good: dict[str, Any], bad: dict[str, Any]) -> None:
    replace(SPEC, **good)
    with pytest.raises(ConfigError):
        replace(SPEC, **bad)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ((1.0, 1.0, 4.0, 1), (0.99, 1.0, 4.0, 1)),
        ((1.0, 1.0, 4.0, 1), (1.0, 1.0, 4.0, 0)),
        ((1.0, 1e-3, 4.0, 1), (1.0, 0.99e-3, 4.0, 1)),
        ((1.0, 1.0, 16384.0, 1), (1.0, 1.0, 16385.0, 1)),
        ((16384.0, 1.0, 4.0, 1), (16385.0, 1.0, 4.0, 1)),
        ((1.0, 1.0, 1.01, 1), (1.0, 1.0, 1.0, 1)),
    ],
)
def test_rope_scaling_takes_its_limits(good: Any, bad: Any) -> None:
    Llama3Scaling(*good)
    with pytest.raises(ConfigError):
        Llama3Scaling(*bad)


def test_slices_of_the_vocabulary_share_the_rest() -> None:
    spec = replace(SPEC, vocab_size=51)
    assert [spec.vocab_slice(lane) for lane in range(2)] == [(0, 26), (26, 51)]
    with pytest.raises(ConfigError, match="2 lanes cannot be spread over 0 ranks"):
        spec.lanes_of_rank(0, 0)


# ---- plans ----
def test_token_ids_of_a_plan_are_exact_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_limits, "MAX_VOCAB_SIZE", LARGEST_VOCAB + 1)  # a model folder has a smaller one
    assert int(np.float32(LARGEST_VOCAB - 1)) == LARGEST_VOCAB - 1
    assert int(np.float32(LARGEST_VOCAB)) == int(np.float32(LARGEST_VOCAB + 1)), "the next one is not"
    make_plan(replace(SPEC, vocab_size=LARGEST_VOCAB), 1)
    with pytest.raises(ConfigError, match="token ids must stay below 16777216"):
        make_plan(replace(SPEC, vocab_size=LARGEST_VOCAB + 1), 1)


def test_a_mailbox_has_the_slots_of_two_tokens_at_most() -> None:
    plan = make_plan(SPEC, 2)
    for box in plan.mailboxes:
        most = 2 * box.per_token
        for num_slots, finding in ((most, False), (most + 1, True), (0, True)):
            boxes = tuple(replace(other, num_slots=num_slots) if other is box else other for other in plan.mailboxes)
            found = validate(replace(plan, mailboxes=boxes))
            wanted = f"mailbox {box.name} has {num_slots} slots for {box.per_token} messages a token; use 1 to {most}"
            assert (wanted in found) is finding, found


# ---- the interpreter's cache ----
def test_a_cache_goes_on_behind_what_it_holds_and_no_further(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, SPEC, random_tensors(SPEC, seed=3))
    weights = open_checkpoint(folder).rank_weights(range(2))
    model = Interpreter(make_plan(SPEC, 1), 0, weights, None, num_kv_caches=2)
    for position in range(5):
        model.step(7, position, GREEDY)
    assert model.num_positions == 5
    model.use_cache(1, 0, 5)
    assert model.num_positions == 5
    model.use_cache(1, 0, 3)
    model.step(9, 3, GREEDY)
    assert model.num_positions == 4, "a cache that was cut holds what was written behind the cut"
    for cache, source, num_positions, finding in (
        (0, 0, 6, "holds 5 positions, asked for 6"), (0, 1, 5, "holds 4 positions, asked for 5"), (0, 0, -1, "asked for -1"),
        (2, 0, 1, "there are 2 KV caches, asked for 2 and 0"), (0, 2, 1, "asked for 0 and 2"), (-1, 0, 1, "asked for -1"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=finding):
            model.use_cache(cache, source, num_positions)
    model.step(7, 4, GREEDY)  # the one that is used is still the one before
    assert model.num_positions == 5
    model.step(7, 1, GREEDY)
    assert model.num_positions == 2, "a step back drops what came later"
    for position in range(2, 5):
        model.step(7, position, GREEDY)
    with pytest.raises(PlanError, match="position 7 cannot follow: the KV cache holds 5 positions"):
        model.step(7, 7, GREEDY)


# ---- requests to a model ----
MODEL = ModelFolder("tiny", Path("tiny"), SPEC, None, (0,))


def code_of(message: Generate) -> ErrorCode | None:
    try:
        MODEL.admit(message)
    except RequestError as error:
        return ErrorCode(error.code)
    return None


@pytest.mark.parametrize(
    ("good", "bad", "code"),
    [
        ({"prompt_ids": (1,) * 39}, {"prompt_ids": (1,) * 40}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt_ids": (1,) * 30, "max_tokens": 10}, {"prompt_ids": (1,) * 30, "max_tokens": 11},
         ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        ({"prompt_ids": (1,)}, {"prompt_ids": ()}, ErrorCode.INVALID_REQUEST),
        ({"prompt_ids": (0, 49)}, {"prompt_ids": (0, 50)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE),
        ({"prompt_ids": (0, 49)}, {"prompt_ids": (0, -1)}, ErrorCode.TOKEN_ID_OUT_OF_RANGE),
        ({"prompt_ids": (1,), "sampling": SamplingParams(logit_bias=((49, 1.0),))},
         {"prompt_ids": (1,), "sampling": SamplingParams(logit_bias=((50, 1.0),))}, ErrorCode.TOKEN_ID_OUT_OF_RANGE),
        ({"prompt_ids": (1,), "max_tokens": 5, "sampling": SamplingParams(min_tokens=5)},
         {"prompt_ids": (1,), "max_tokens": 5, "sampling": SamplingParams(min_tokens=6)}, ErrorCode.INVALID_REQUEST),
    ],
)  # fmt: skip
def test_a_request_may_have_what_the_model_has_and_no_more(good: dict[str, Any], bad: dict[str, Any], code: ErrorCode) -> None:
    assert code_of(Generate("a", **good)) is None
    assert code_of(Generate("a", **bad)) is code


@pytest.mark.parametrize("num_ids", [256, 257])
def test_many_ids_have_the_same_limit_as_few(num_ids: int) -> None:
    """Another way finds the largest of more than 256."""
    model = replace(MODEL, spec=replace(SPEC, max_context=1000))
    for last, is_good in ((49, True), (50, False)):
        message = Generate("a", prompt_ids=array("I", [*[1] * (num_ids - 1), last]))
        if is_good:
            assert len(model.admit(message).prompt) == num_ids
        else:
            with pytest.raises(RequestError, match=rf"prompt_ids\[{num_ids - 1}\] is 50, the vocabulary has ids 0 to 49"):
                model.admit(message)


def test_an_answer_has_the_room_that_is_left_when_nobody_says_how_long() -> None:
    assert MODEL.admit(Generate("a", prompt_ids=(1,) * 38)).max_tokens == 2
    roomy = replace(MODEL, spec=replace(SPEC, max_context=1000))
    assert roomy.admit(Generate("a", prompt_ids=(1,))).max_tokens == 256


def test_a_text_that_could_not_fit_is_not_read() -> None:
    class Reader:
        def encode(self, text: str) -> list[int]:
            return [1]

    model: Any = replace(MODEL, tokenizer=Reader())  # type: ignore[arg-type]
    most = MAX_BYTES_PER_TOKEN * SPEC.max_context
    assert len(model.admit(Generate("a", prompt="x" * most)).prompt) == 1
    with pytest.raises(RequestError, match=f"the prompt has {most + 1} bytes, at most {most} can fit 40 tokens"):
        model.admit(Generate("a", prompt="x" * (most + 1)))


# ---- filters ----
def test_min_p_keeps_a_token_at_the_very_limit() -> None:
    limit = lowest_distance(0.25)
    x = np.array([0.0, limit, np.nextafter(limit, np.float32(-np.inf))], np.float32)
    assert select(x, SamplingParams(min_p=0.25)).tolist() == [0, 1]
    assert select(x, SamplingParams(min_p=1.0)).tolist() == [0], "the best one always stays"


def test_top_p_stops_before_the_token_at_which_enough_mass_has_come() -> None:
    equal = np.zeros(4, np.float32)
    for top_p, num_kept in ((0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (1e-6, 1)):
        assert len(select(equal, SamplingParams(top_p=top_p))) == num_kept, top_p
    assert fixed_top_p(0.5) == 1 << 63


@pytest.mark.parametrize(("top_k", "kept"), [(1, [0]), (2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])])
def test_top_k_breaks_ties_by_id(top_k: int, kept: list[int]) -> None:
    x = np.array([3.0, 1.0, 2.0, 1.0], np.float32)
    assert sorted(select(x, SamplingParams(top_k=top_k)).tolist()) == kept
