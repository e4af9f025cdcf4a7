"""Answers over HTTP are the same with drafts and without: stop strings within what was accepted, echo, choices, grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.e2e.http_engine import HttpEngine, http_engine

CODE = "def area(width, height):\n    return width * height\n\n\ndef area(width, height):\n    return"
MOST, LIMIT_S = 40, 120.0
SCHEMA = {
    "type": "object", "required": ["full_name", "kind"], "additionalProperties": False,
    "properties": {"full_name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["customer", "employee"]}},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 5},
    "choices": {"temperature": 0.7, "seed": 3, "n": 3},
    "echo with log-probabilities": {"echo": True, "logprobs": 2},
    "filters and penalties": {
        "temperature": 0.9, "seed": 2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1,
        "frequency_penalty": 0.3, "min_tokens": 5,
    },
    "a bias": {"logit_bias": {"200": 2.5}},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "a schema, drawn": {
        "temperature": 1.0, "seed": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    "a few tokens": {"max_tokens": 7},
    "past the end": {"ignore_eos": True},
}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest, demo_model: Path) -> Iterator[HttpEngine]:
    for last in (False, False, True):
        with (
            engine_session() as session,
            http_engine(session, str(demo_model), "--device=cpu", f"--ranks={request.param}") as made,
        ):
            made.http.timeout = LIMIT_S
            if last or drafts_pay(made):
                yield made
                return


def drafts_pay(engine: HttpEngine) -> bool:
    """Whether this engine drafts: what passes cost is measured at its start, and beside other work too much may be found."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": CODE}], "max_tokens": MOST, "temperature": 0.0}
    text = asked(engine, "/v1/chat/completions", body, "off")["choices"][0]["message"]["content"]
    asking = {**body, "prediction": {"type": "content", "content": text}}
    return drafts_of(asked(engine, "/v1/chat/completions", asking, "auto"))[1] > MOST // 2


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """All of an answer but its name, its times, and what became of its prediction."""
    kept = {name: value for name, value in answer.items() if name not in ("id", "created", "timings", "usage")}
    return kept | {"tokens": answer["usage"]["completion_tokens"]}


def drafts_of(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["timings"].get("draft_n", 0), answer["timings"].get("draft_n_accepted", 0)


def asked(engine: HttpEngine, path: str, body: dict[str, Any], speculate: str) -> dict[str, Any]:
    response = engine.http.post(path, json={**body, "model": "default", "speculate": speculate})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_text_goes_on_as_it_does(name: str, engine: HttpEngine) -> None:
    body = {"prompt": CODE, "max_tokens": MOST, "temperature": 0.0, **CASES[name]}
    plain = asked(engine, "/v1/completions", body, "off")
    assert drafts_of(plain) == (0, 0)
    first = plain["choices"][0]["text"].removeprefix(CODE)
    quoting = {**body, "prompt": CODE + first + "\n" + CODE}  # what comes next may be what came
    for asking in (body, quoting):
        without, with_drafts = (asked(engine, "/v1/completions", asking, how) for how in ("off", "lookup"))
        assert said(with_drafts) == said(without)
    if "schema" in name:
        assert drafts_of(asked(engine, "/v1/completions", body, "auto"))[1] > 3, "what the schema forces"
    texts = [choice["text"].removeprefix(CODE) for choice in plain["choices"]]
    if all(len(text) > 12 for text in texts):
        for begin in (3, 6, 10):  # a stop string in the middle of anything
            stopping = {**body, "stop": [texts[0][begin : begin + 2]]}
            without, with_drafts = (asked(engine, "/v1/completions", stopping, how) for how in ("off", "lookup"))
            assert said(with_drafts) == said(without)


def test_a_prediction_may_be_right_wrong_and_anything_between(engine: HttpEngine) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": CODE}], "max_tokens": MOST, "temperature": 0.0}
    plain = asked(engine, "/v1/chat/completions", body, "off")
    text = plain["choices"][0]["message"]["content"]
    counts = {}
    for name, predicted in (("right", text), ("wrong", text[::-1]), ("edited", text[:20] + "xyz" + text[24:])):
        asking = {**body, "prediction": {"type": "content", "content": predicted}}
        found = asked(engine, "/v1/chat/completions", asking, "auto")
        assert said(found) == said(plain), name
        counts[name] = drafts_of(found)
        stopping = {**asking, "stop": [text[8:10]]}
        assert said(asked(engine, "/v1/chat/completions", stopping, "auto")) == said(
            asked(engine, "/v1/chat/completions", stopping, "off")
        )
    assert counts["right"][1] > MOST // 2
    assert counts["right"][1] > counts["wrong"][1]


def test_what_was_answered_before_is_drafted_for_who_may_know_of_it(engine: HttpEngine) -> None:
    """Of the same `cache_salt`, from the first token on, with `auto` alone, and never as OpenAI's prediction."""
    body: dict[str, Any] = {"prompt": CODE[::-1], "max_tokens": MOST, "temperature": 0.0, "ignore_eos": True}
    plain = asked(engine, "/v1/completions", {**body, "cache_salt": "a"}, "off")
    again, looked_up, of_others = (
        asked(engine, "/v1/completions", {**body, "cache_salt": salt}, how)
        for salt, how in (("a", "auto"), ("a", "lookup"), ("b", "lookup"))
    )
    assert said(again) == said(looked_up) == said(of_others) == said(plain)
    assert drafts_of(again)[1] > drafts_of(looked_up)[1] + MOST // 4
    assert drafts_of(looked_up) == drafts_of(of_others)
    assert not again["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens")
    fresh = asked(engine, "/v1/completions", {**body, "cache_salt": "c"}, "auto")
    assert said(fresh) == said(plain)
    assert drafts_of(fresh) == drafts_of(of_others)


def test_a_stream_says_the_same(engine: HttpEngine) -> None:
    """Chunks may have several tokens then, and all together are the answer."""
    body = {"prompt": CODE * 2, "max_tokens": MOST, "temperature": 0.0, "model": "default"}
    plain = asked(engine, "/v1/completions", body, "off")
    text = ""
    with engine.http.stream("POST", "/v1/completions", json={**body, "speculate": "auto", "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text == plain["choices"][0]["text"]
