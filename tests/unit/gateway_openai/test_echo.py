"""`echo` and `suffix` of text completions: what the engine is asked for, and what the answer has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import packed, unpacked
from kog_dist.model.tokenizer import Tokenizer
from tests.unit.gateway_openai.engine_script import data_of, play
from tests.unit.test_tokenizer import library_like

PROMPT = "def add(a, b):"
SCORED = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 1}


def choices_of(body: dict[str, Any], served: ServedModel, pieces: list[str]) -> list[Any]:
    planned = plan_completion(body, served)
    assert play(planned, pieces) == b""
    choices: list[Any] = planned.reply.whole()["choices"]
    return choices


def test_the_prompt_is_repeated(base_model: ServedModel) -> None:
    body = {"prompt": [PROMPT, "x ="], "echo": True, "n": 2}
    planned = plan_completion(body, base_model)
    assert not any(message.prompt_logprobs for message in planned.generates), "nobody asks for log-probabilities"
    texts = [choice["text"] for choice in choices_of(body, base_model, ["a", "b"])]
    assert texts == [PROMPT + "ab", PROMPT + "ab", "x =ab", "x =ab"]


def test_token_ids_are_repeated_as_text(base_model: ServedModel) -> None:
    assert base_model.tokenizer is not None
    ids = base_model.tokenizer.encode(PROMPT)
    assert choices_of({"prompt": [ids], "echo": True}, base_model, ["a"])[0]["text"] == PROMPT + "a"
    nameless = dataclasses.replace(base_model, tokenizer=None)
    assert choices_of({"prompt": ids, "echo": True}, nameless, [""])[0]["text"] == ""


def test_tokens_of_the_prompt_have_log_probabilities_but_the_first(base_model: ServedModel) -> None:
    (message,) = plan_completion(SCORED, base_model).generates
    assert (message.prompt_logprobs, message.sampling.logprobs, message.max_tokens) == (True, 2, 1)
    ids = message.prompt_ids or ()
    (choice,) = choices_of(SCORED, base_model, ["\n"])
    found = choice["logprobs"]
    assert found["token_logprobs"] == [None, *(-0.125 * idx for idx in range(1, len(ids))), -0.5]
    assert found["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in found["top_logprobs"][1:])
    *tokens, _ = found["tokens"]
    *offsets, last = found["text_offset"]
    assert ("".join(tokens), last) == (PROMPT, len(PROMPT))
    assert all(PROMPT[begin:].startswith(token) for begin, token in zip(offsets, tokens, strict=True))


def test_a_prompt_may_be_scored_without_an_answer(base_model: ServedModel) -> None:
    (choice,) = choices_of({**SCORED, "max_tokens": 0}, base_model, [])
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == len(plan_completion(SCORED, base_model).generates[0].prompt_ids or ())
    plain = {"prompt": PROMPT, "echo": True, "max_tokens": 0}
    assert plan_completion(plain, base_model).generates[0].prompt_logprobs, "else the engine had nothing to do"
    (choice,) = choices_of(plain, base_model, [])
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)


USAGE = {"stream_options": {"continuous_usage_stats": True}}


@pytest.mark.parametrize("fields", [{}, {"logprobs": None}, {"max_tokens": 0}, USAGE])
def test_a_stream_says_the_same(base_model: ServedModel, fields: dict[str, Any]) -> None:
    body = {**SCORED, **fields}
    pieces = [] if fields.get("max_tokens") == 0 else ["a", "b"]
    (expected,) = choices_of({name: body[name] for name in body if name != "stream_options"}, base_model, pieces)
    chunks = [chunk["choices"][0] for chunk in data_of(play(plan_completion({**body, "stream": True}, base_model), pieces))[:-1]]
    assert chunks[0]["text"] == PROMPT, "all of it comes first"
    assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
    told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    assert bool(told) is (expected["logprobs"] is not None)
    for name, values in (expected["logprobs"] or {}).items():
        assert [value for one in told for value in one[name]] == values


def test_it_survives_the_way_from_the_body_process(base_model: ServedModel) -> None:
    planned = plan_completion({**SCORED, "stream": True}, base_model)
    again = unpacked(**packed(planned), tokenizer=base_model.tokenizer)
    assert play(again, ["a"]) == play(planned, ["a"])


def test_a_gateway_without_a_tokenizer_scores_token_ids_only(base_model: ServedModel) -> None:
    bare = dataclasses.replace(base_model, tokenizer=None, engine_takes_text=True)
    assert choices_of({**SCORED, "prompt": [5, 6]}, bare, [""])[0]["logprobs"]["tokens"][0] == "token_id:5"
    with pytest.raises(ApiError, match="needs token ids here"):
        plan_completion(SCORED, bare)
    assert plan_completion({"prompt": "x", "echo": True}, bare).generates[0].prompt == "x"


# ---- suffix ----
def with_tokens(served: ServedModel, tokenizer: Tokenizer, *marks: str) -> ServedModel:
    library = tokenizer._library.from_str(tokenizer._library.to_str())
    library.add_special_tokens(list(marks))
    return dataclasses.replace(served, tokenizer=Tokenizer(library.to_str()), vocab_size=served.vocab_size + len(marks))


@pytest.mark.parametrize("names", ["<|fim_{}|>", "<fim_{}>"])
def test_the_middle_is_asked_for_as_the_model_learnt_it(base_model: ServedModel, names: str) -> None:
    marks = [names.format(part) for part in ("prefix", "suffix", "middle")]
    assert base_model.tokenizer is not None
    served = with_tokens(base_model, base_model.tokenizer, *marks)
    tokenizer = served.tokenizer
    assert tokenizer is not None
    (message,) = plan_completion({"prompt": "def f(x):\n", "suffix": "\n    return y"}, served).generates
    assert list(message.prompt_ids or ()) == tokenizer.encode(f"{marks[0]}def f(x):\n{marks[1]}\n    return y{marks[2]}")
    (message,) = plan_completion({"prompt": "", "suffix": "x"}, served).generates
    assert [tokenizer.id_of(mark) for mark in marks[:2]] == list((message.prompt_ids or ())[:2]), "nothing stands before it"


def test_the_middle_of_sentencepiece_has_no_blanks_of_its_own(base_model: ServedModel) -> None:
    served = with_tokens(base_model, Tokenizer(library_like("byte-fallback").to_str()), "▁<PRE>", "▁<SUF>", "▁<MID>")
    tokenizer = served.tokenizer
    assert tokenizer is not None
    (message,) = plan_completion({"prompt": "def x", "suffix": "x(y)"}, served).generates
    assert [tokenizer._library.id_to_token(token_id) for token_id in message.prompt_ids or ()] == [
        "<s>", "▁<PRE>", "def", "▁x", "▁<SUF>", "x", "(", "y", ")", "▁<MID>",
    ]  # fmt: skip


def test_other_models_say_that_they_cannot(base_model: ServedModel) -> None:
    with pytest.raises(ApiError, match="demo has no tokens for filling in the middle") as caught:
        plan_completion({"prompt": "x", "suffix": "y"}, base_model)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "suffix")
    assert plan_completion({"prompt": "x", "suffix": ""}, base_model).generates
    assert base_model.tokenizer is not None
    served = with_tokens(base_model, base_model.tokenizer, "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    for body, complaint in (
        ({"prompt": [5], "suffix": "y"}, "as text, not as token ids"),
        ({"prompt": "x", "suffix": "y", "echo": True}, "echo and suffix exclude each other"),
        ({"prompt": "x", "suffix": "y" * 200_000}, "bytes, at most"),
        ({"prompt": "x " * 1024, "suffix": "y " * 1024}, "leave room for an answer"),
    ):
        with pytest.raises(ApiError, match=complaint):
            plan_completion(body, served)
