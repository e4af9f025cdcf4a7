"""Structured output of the demo model, as a user of a running engine sees it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.engine.session import EngineSession, running, until
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.sampling import Sampler
from kog_dist.errors import RequestError, RequestFailed
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind, GrammarCompiler

PROMPT = "config = "
ROW = {"type": "array", "maxItems": 2, "items": {"type": "boolean"}}
SCHEMAS = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"], "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "green", 3]}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"type": "array", "maxItems": 3, "items": ROW}},
    },
}  # fmt: skip
REGEXES = ["[a-z]{3,8}@[a-z]{2,9}\\.(com|org)", "(GET|POST) /[a-z/]{1,20}", "v[0-9]+\\.[0-9]{1,2}"]


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[tuple[EngineSession, Client]]:
    with running(str(demo_model), "--device=cpu", "--ranks=4") as made:
        yield made


def answer(client: Client, **keywords: Any) -> tuple[str, list[int], str]:
    """Text, ids and finish reason."""
    events = list(client.generate(PROMPT, timeout_s=60.0, max_tokens=120, **keywords))
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert isinstance(events[-1], Done)
    ids = [token_id for event in tokens for token_id in event.token_ids]
    return "".join(event.text for event in tokens), ids, events[-1].finish_reason.value


def check(name: str, value: Any) -> None:
    if name == "person":
        assert set(value) == {"name", "age"}
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 150
    elif name == "list":
        assert 2 <= len(value) <= 4
        assert set(value) <= {"red", "green", 3}
    else:
        assert all(type(item) is bool for row in value["a"] for item in row)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_satisfy_their_schema(engine: tuple[EngineSession, Client], name: str) -> None:
    _, client = engine
    for sampling in ({}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}):
        text, _, reason = answer(client, json_schema=json.dumps(SCHEMAS[name]), **sampling)
        assert reason == "stop"
        check(name, json.loads(text))


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_match_their_regular_expression(engine: tuple[EngineSession, Client], regex: str) -> None:
    _, client = engine
    text, _, reason = answer(client, regex=regex, temperature=0.8, seed=3)
    assert reason == "stop"
    assert re.fullmatch(regex, text)


def test_tokens_are_those_of_one_rank_with_the_same_masks(engine: tuple[EngineSession, Client], demo_model: Path) -> None:
    """The replay: one interpreter, the grammar in this process, no shared memory in between."""
    _, client = engine
    regex, sampling = REGEXES[0], SamplingParams(1.1, seed=12)
    text, ids, _ = answer(client, regex=regex, temperature=1.1, seed=12, presence_penalty=0.5)
    assert re.fullmatch(regex, text)
    checkpoint, tokenizer = open_checkpoint(demo_model), Tokenizer.from_folder(demo_model)
    assert tokenizer is not None
    spec = checkpoint.spec
    plan = make_plan(spec, 1)
    interpreter = Interpreter(plan, 0, checkpoint.rank_weights(plan.ranks[0].lanes), None, kv_dtype="bfloat16")
    matcher = GrammarCompiler(tokenizer, spec.vocab_size).compile(Constraint(ConstraintKind.REGEX, regex))
    prompt = tokenizer.encode(PROMPT)
    shaper = Sampler(spec.vocab_size, prompt, replace(sampling, presence_penalty=0.5), tokenizer.eos_ids)
    for position, token_id in enumerate(prompt[:-1]):
        interpreter.step(token_id, position, None)
    token_id, replayed = prompt[-1], []
    for position in range(len(prompt) - 1, len(prompt) - 1 + len(ids)):
        output = interpreter.step(
            token_id,
            position,
            sampling,
            gather_logits=True,
            choose=partial(shaper.choose, mask=matcher.mask()),
        )
        token_id = output.token_id
        shaper.accept(token_id)
        matcher.accept(token_id)
        replayed.append(token_id)
    assert replayed == ids


def test_bad_grammars_and_those_that_ask_for_too_much(engine: tuple[EngineSession, Client]) -> None:
    _, client = engine
    with pytest.raises(RequestError, match="regex cannot be used") as refused:
        answer(client, regex="(a")
    assert refused.value.code == "invalid_constraint"
    many = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(1500)}}
    with pytest.raises(RequestError, match="things may come next") as refused:
        answer(client, json_schema=json.dumps(many))
    assert refused.value.code == "invalid_constraint"
    text, _, _ = answer(client, regex="yes|no")
    assert text in ("yes", "no")


def test_a_killed_grammar_process_harms_one_request_at_most(engine: tuple[EngineSession, Client]) -> None:
    session, client = engine
    answer(client, regex="a")
    before = [pid for pid, command, _ in session._marked() if "kog_dist.workers.grammar.process" in command]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(before) & {pid for pid, *_ in session._marked()}, 10.0, lambda: "killed processes remain")
    assert client.status().state.value == "ready"
    with contextlib.suppress(RequestError):  # it may have gone to the process that was just dying: the one that is harmed
        assert answer(client, regex="b")[0] == "b"
    assert answer(client, regex="b")[0] == "b"


def test_nothing_is_left(demo_model: Path) -> None:
    """The coordinator is killed while a grammar is followed: its grammar processes go with it."""
    with running(str(demo_model), "--device=cpu", "--ranks=1") as (session, client):
        events = client.generate(PROMPT, regex="[a-z ]{2000}", max_tokens=1500)
        while not isinstance(next(events), Tokens):
            pass
        grammar = [pid for pid, command, _ in session._marked() if "kog_dist.workers.grammar.process" in command]
        assert len(grammar) == 2
        os.kill(max(grammar), signal.SIGSTOP)  # one that cannot see the end of its socket
        os.kill(session.processes()["coordinator"], signal.SIGKILL)
        until(lambda: not session.survivors(), 10.0, lambda: str(session.survivors()))
        with pytest.raises(RequestFailed):
            list(events)
