"""3,000 mutants of bodies: what changes no answer gives the same one; what would change it is never taken in silence."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kog_dist.gateway.openai.body import read_body
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.peer_fields import HARMLESS, REFUSED_EVERYWHERE
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from tests.fuzz.json_mutation import mutate_json

NUM_MUTANTS = 250  # of each body and kind
Body = dict[str, Any]
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

BODIES: dict[str, tuple[Callable[..., Planned], Body]] = {
    "an agent's chat": (plan_chat, {
        "model": "demo", "temperature": 0.5, "seed": 7, "max_tokens": 20, "top_p": 0.9, "stop": ["END"], "stream": True, "n": 2,
        "stream_options": {"include_usage": True}, "parallel_tool_calls": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "In Bonn."}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "assistant", "content": "Rain.", "reasoning_content": "rain means rain"},
            {"role": "user", "content": "And tomorrow?", "name": "ann"}],
        "tools": [
            {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": _PARAMETERS}},
            {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {"zone": {}}}}}],
        "tool_choice": "auto"}),
    "a chat with a schema": (plan_chat, {
        "model": "demo", "temperature": 0, "max_completion_tokens": 20, "logprobs": True, "top_logprobs": 2,
        "logit_bias": {"5": 1.5},
        "messages": [{"role": "developer", "content": "JSON."}, {"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": _PARAMETERS}}}),
    "a completion": (plan_completion, {
        "model": "demo", "prompt": ["def f(", "class A"], "max_tokens": 5, "temperature": 1.0, "seed": 7,
        "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": 0.5,
        "echo": True, "logprobs": 1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}),
    "a response": (plan_response, {
        "model": "demo", "instructions": "Be brief.", "max_output_tokens": 20, "top_k": 5, "temperature": 0.2, "seed": 7,
        "stream": True,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"}],
        "tools": [{"type": "function", "name": "weather", "description": "d", "parameters": _PARAMETERS}],
        "tool_choice": {"type": "function", "name": "weather"}, "text": {"format": {"type": "text"}}}),
}  # fmt: skip


def shown(planned: Planned) -> Any:
    """All that the answer and its form depend on, but for random names."""
    plain = [
        [message.prompt_ids, message.max_tokens, message.stop, message.ignore_eos, message.json_schema, message.prompt_logprobs,
         message.sampling.given() | ({"seed": 0} if not message.sampling.temperature else {})]
        for message in planned.generates
    ]  # fmt: skip
    return plain, planned.stream, getattr(getattr(planned.reply, "form", None), "include_usage", None)


def objects_of(body: Body) -> Iterator[Body]:
    """The objects whose fields are ours: not those that a schema, arguments or a template's variables consist of."""
    yield body
    for key, value in body.items():
        if key in ("parameters", "schema", "logit_bias", "chat_template_kwargs"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from objects_of(item)


# ---- what changes nothing ----
def _add_unknown(body: Body, chance: random.Random) -> str:
    name = "x" + "".join(chance.choice("jkqvwxz_") for _ in range(chance.randint(3, 20))) + "q"
    chance.choice(list(objects_of(body)))[name] = chance.choice([None, True, 5, "text", [1], {"a": {"b": []}}, ""])
    return name


def _add_harmless(body: Body, chance: random.Random) -> str:
    while True:
        name, place = chance.choice(sorted(HARMLESS)), chance.choice(list(objects_of(body)))
        if name not in place and not (name in ("id", "cache_control", "encrypted_content", "usage") or "tool" in name):
            place[name] = chance.choice([None, True, 5, "text", {"type": "x"}])
            return name


def _add_null(body: Body, chance: random.Random) -> str:
    place = chance.choice(list(objects_of(body)))
    name = misspelt(chance.choice([known for known in sorted(place) if len(known) > 1]), chance)
    if name not in place:
        place[name] = None
    return ""


def _add_neutral(body: Body, chance: random.Random) -> str:
    name = chance.choice(sorted(REFUSED_EVERYWHERE.keys() - {"suffix"}))
    body[name] = chance.choice(REFUSED_EVERYWHERE[name].harmless)
    return ""


def _reorder(body: Body, chance: random.Random) -> str:
    for place in list(objects_of(body)):
        members = list(place.items())
        chance.shuffle(members)
        place.clear()
        place.update(members)
    return ""


def _add_what_counts_for_nothing(body: Body, chance: random.Random) -> str:
    body |= {
        name: chance.choice(["x", 5, None, {}]) for name in chance.sample(["metadata", "store", "service_tier", "priority"], 2)
    }
    return ""


# ---- what would change the answer ----
_COUNTING = frozenset(
    """temperature max_tokens max_completion_tokens max_output_tokens top_p min_p messages prompt input instructions tools stop
    stream_options response_format logit_bias frequency_penalty presence_penalty repetition_penalty min_tokens ignore_eos
    content tool_calls arguments parameters description reasoning_content json_schema schema include_usage echo logprobs
    chat_template_kwargs tool_choice top_logprobs""".split()
)


def misspelt(name: str, chance: random.Random) -> str:
    at = chance.randrange(max(1, len(name) - 1))
    letters = list(name)
    kind = chance.randrange(4)
    if kind == 0:
        letters[at], letters[at + 1] = letters[at + 1], letters[at]
    elif kind == 1:
        del letters[at]
    elif kind == 2:
        letters.insert(at, chance.choice("aeiou"))
    else:
        letters = list(re.sub("_(.)", lambda found: found[1].upper(), name)) if "_" in name else [name[0].upper(), *name[1:]]
    return "".join(letters)


def _misspell(body: Body, chance: random.Random) -> str:
    while True:
        place = chance.choice(list(objects_of(body)))
        names = sorted(_COUNTING & place.keys())
        if not names:
            continue
        name = chance.choice(names)
        wrong = misspelt(name, chance)
        if wrong not in place and place[name] is not None:
            place[wrong] = place.pop(name)
            return name


def _add_of_a_peer(body: Body, chance: random.Random) -> str:
    counting = [name for name, refusal in sorted(REFUSED_EVERYWHERE.items()) if not refusal.counts_with]
    name = chance.choice([name for name in counting if name not in body and name != "suffix"])
    refusal = REFUSED_EVERYWHERE[name]
    while True:
        value = chance.choice([0.3, 7, -3, "something", ["x"], {"x": 1}, {"temperature": 1}])
        if value not in refusal.harmless:
            body[name] = value
            return name


def _wrong_type(body: Body, chance: random.Random) -> str:
    while True:
        place = chance.choice(list(objects_of(body)))
        name = chance.choice(sorted(_COUNTING & place.keys()) or [""])
        if name and place[name] is not None and name != "description":
            place[name] = chance.choice([3.5, True] if not isinstance(place[name], bool | float | int) else ["1", [1], {"a": 1}])
            return name


HARMLESS_CHANGES = (_add_unknown, _add_harmless, _add_null, _add_neutral, _reorder, _add_what_counts_for_nothing)
CHANGES_OF_THE_ANSWER = (_misspell, _add_of_a_peer, _wrong_type)


def mutants(name: str, changes: Sequence[Callable[[Body, random.Random], str]]) -> Iterator[tuple[Body, str, str]]:
    chance = random.Random(f"{name} {[change.__name__ for change in changes]}")
    for _ in range(NUM_MUTANTS):
        body, change = copy.deepcopy(BODIES[name][1]), chance.choice(changes)
        yield body, change.__name__, change(body, chance)


@pytest.fixture(params=BODIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_changes_no_answer_is_taken(name: str, tagged_model: ServedModel) -> None:
    plan, base = BODIES[name]
    wanted = shown(plan(base, tagged_model))
    for body, change, field in mutants(name, HARMLESS_CHANGES):
        planned = plan(read_body(json.dumps(body).encode()), tagged_model)
        assert shown(planned) == wanted, (change, field, body)
        assert not field or any(path.endswith(field) for path in planned.left_out), (change, field, planned.left_out)


def test_what_would_change_the_answer_is_refused_by_name(name: str, tagged_model: ServedModel) -> None:
    plan, base = BODIES[name]
    for body, change, field in mutants(name, CHANGES_OF_THE_ANSWER):
        assert body != base
        try:
            plan(read_body(json.dumps(body).encode()), tagged_model)
        except ApiError as found:
            error = found
        else:
            pytest.fail(f"taken: {change}, {field}, {body}")
        assert error.status == 400, (change, field)
        assert error.param, (change, field)
        assert field in error.message or change == "_misspell", (change, field, error.message)


# Places where this or that other value gives the same answer.
_COUNTS_FOR_NOTHING = re.compile(
    r"metadata|user|model|parallel_tool_calls|temperature|text|text\.format"  # a temperature of 1e-5 is 0
    r"|tool_choice|response_format\.json_schema\.(name|strict)|input\[\]\.(type|call_id)"
    r"|messages\[\]\.(name|reasoning_content|tool_call_id|tool_calls\[\]\.(id|type))"  # no part of this template
)


def changed_paths(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two documents differ, without places in lists."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from changed_paths(one.get(key), other.get(key), f"{path}.{key}".removeprefix("."))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            yield from changed_paths(left, right, f"{path}[]")
    elif one != other or isinstance(one, bool) != isinstance(other, bool):
        yield path


def test_nothing_is_dropped_in_silence(name: str, tagged_model: ServedModel) -> None:
    """Any change is refused, or gives another answer, or is named as left out, or is where nothing counts."""
    plan, base = BODIES[name]
    wanted, chance, raw = shown(plan(base, tagged_model)), random.Random(name), json.dumps(base).encode()
    num_taken = 0
    for _ in range(NUM_MUTANTS):
        mutant = mutate_json(raw, chance)
        assert mutant is not None
        body, planned, error = planned_or_refused(plan, mutant, tagged_model)
        if planned is None:
            assert error is not None
            assert error.status in (400, 404)
            assert error.message.isprintable()
            assert len(error.message) < 600
            continue
        num_taken += 1
        if shown(planned) == wanted and not planned.left_out:
            for path in changed_paths(base, body):
                assert _COUNTS_FOR_NOTHING.fullmatch(path), (path, mutant)
    assert num_taken > NUM_MUTANTS // 20


def planned_or_refused(plan: Any, raw: bytes, served: ServedModel) -> tuple[Any, Planned | None, ApiError | None]:
    try:
        body = read_body(raw)
        return body, plan(body, served), None
    except ApiError as error:
        return None, None, error


def test_there_are_three_thousand() -> None:
    assert NUM_MUTANTS * len(BODIES) * 3 >= 3000
