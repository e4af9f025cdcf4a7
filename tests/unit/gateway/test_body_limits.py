"""What one body may cost: its values are counted before it is read, one complaint is enough, and clients take turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pydantic
import pytest

from kog_dist.gateway import body_work
from kog_dist.gateway.openai import body as body_module
from kog_dist.gateway.openai.body_counts import MAX_CONTAINERS, MAX_ITEMS, MAX_MEMBERS, check_counts
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.planning import encode_prompt
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.turns import NoTurn, Turns
from kog_dist.model.tokenizer import Tokenizer
from tests.unit.gateway.scripted_engine import DEMO, WAIT_S


def served() -> ServedModel:
    return ServedModel("demo", (), 4096, 2048, Tokenizer.from_folder(DEMO), None, 0)


@pytest.mark.parametrize(
    ("raw", "wrong"),
    [
        (b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]", None),
        (b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"[]]", "arrays and objects"),
        (b"[" + b"{}," * (MAX_CONTAINERS - 1) + b"{}]", "arrays and objects"),
        (b"[" + b"1," * MAX_ITEMS + b"1]", None),
        (b"[" + b"1," * (MAX_ITEMS + 1) + b"1]", "values"),
        (b"{" + b'"":0,' * (MAX_MEMBERS - 1) + b'"":0}', None),
        (b"{" + b'"":0,' * MAX_MEMBERS + b'"":0}', "members of objects"),
        (b"[" + b'"",' * (2 * MAX_ITEMS) + b'""]', "texts"),
        (b'"' + b"[{,:" * MAX_ITEMS + b'"', None),  # all of it in one text
        (b'"' + rb"[\\\"[\\" * MAX_CONTAINERS + b'"', None),
        (rb'["\\\\\\",' + b"[]," * MAX_CONTAINERS + b"]", "arrays and objects"),  # an escaped backslash does not hold a text open
    ],
)  # fmt: skip
def test_a_body_of_too_many_values_is_refused_before_it_is_read(raw: bytes, wrong: str | None) -> None:
    if wrong is None:
        check_counts(raw)
        return
    with pytest.raises(ApiError, match=wrong) as refused:
        check_counts(raw)
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "q"}] * 20_000}]}),
        ("/v1/chat/completions", {"messages": [{f"k{field}": 0 for field in range(30)}] * 4096}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "q"}] * 20_000}]}),
        ("/v1/completions", {"prompt": [-1] * 262_144}),
        ("/detokenize", {"tokens": [-1] * 262_144}),
    ],
)
def test_of_many_wrong_values_only_the_first_is_looked_at(monkeypatch: pytest.MonkeyPatch, path: str, body: Any) -> None:
    numbers = []
    explain = body_module._first_problem

    def count(error: pydantic.ValidationError, *rest: Any) -> ApiError:
        numbers.append(error.error_count())
        return explain(error, *rest)

    monkeypatch.setattr(body_module, "_first_problem", count)
    with pytest.raises(ApiError):
        body_work.read(path, json.dumps(body).encode(), served())
    assert len(numbers) == 1
    assert numbers[0] < 100


def test_an_object_of_too_many_members_is_refused() -> None:
    body = {"prompt": "x", "logit_bias": {f"a{place}": 0 for place in range(4097)}}
    with pytest.raises(ApiError, match="an object has 4097 members"):
        body_work.read("/v1/completions", json.dumps(body).encode(), served())


def test_a_text_that_cannot_fit_is_not_tokenized_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    asked = served()
    encode = Tokenizer.encode

    def measured(self: Tokenizer, text: str, **options: bool) -> Sequence[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", measured)
    with pytest.raises(ApiError, match="over") as refused:
        encode_prompt("def add(a, b): " * 10_000, asked, "prompt")
    assert refused.value.code == "context_length_exceeded"
    assert lengths == [8 * 4095]


def test_clients_take_turns() -> None:
    order: list[str] = []

    async def ask(turns: Turns, client: str) -> None:
        async with turns.of(client):
            order.append(client)
            await asyncio.sleep(0)

    async def scenario() -> None:
        turns = Turns(most=8, most_of_one=8, wait_s=WAIT_S)
        await asyncio.gather(*(ask(turns, client) for client in "aaaabc"))
        assert not len(turns)

    asyncio.run(scenario())
    assert "".join(order) == "aabcaa"


def test_several_have_a_turn_at_once() -> None:
    running: list[str] = []
    seen: list[str] = []

    async def ask(turns: Turns, client: str) -> None:
        async with turns.of(client):
            running.append(client)
            seen.append("".join(running))
            await asyncio.sleep(0)
            running.remove(client)

    async def scenario() -> None:
        turns = Turns(most=8, most_of_one=8, wait_s=WAIT_S, num_at_once=2)
        for _ in range(2):  # both are free again
            await asyncio.gather(*(ask(turns, client) for client in "aaaabc"))

    asyncio.run(scenario())
    assert max(map(len, seen)) == 2
    assert [names[-1] for names in seen] == list("aaabca") * 2


def test_those_who_wait_are_bounded_and_leave_nothing_behind() -> None:
    async def ask(turns: Turns, client: str) -> str:
        async with turns.of(client):
            return client

    async def scenario() -> None:
        turns = Turns(most=2, most_of_one=1, wait_s=WAIT_S)
        async with turns.of("first"):
            gone, stays = (asyncio.create_task(ask(turns, client)) for client in "ab")
            await asyncio.sleep(0)
            for client in "ac":  # one waits of a already, and two wait of all
                with pytest.raises(NoTurn):
                    await ask(turns, client)
            gone.cancel()
            await asyncio.wait([gone])
            assert len(turns) == 1
        assert await stays == "b"
        assert await ask(turns, "d") == "d"

    asyncio.run(scenario())


def test_a_client_has_its_own_bound_where_there_is_room_for_others() -> None:
    async def scenario() -> None:
        turns = Turns(most=3, most_of_one=1, wait_s=WAIT_S)

        async def ask(client: str) -> str:
            async with turns.of(client):
                return client

        async with turns.of("a"):
            waiting = [asyncio.create_task(ask(client)) for client in "ab"]
            await asyncio.sleep(0)
            with pytest.raises(NoTurn):
                await ask("a")
            waiting.append(asyncio.create_task(ask("c")))
            await asyncio.sleep(0)
            assert len(turns) == 3
        assert await asyncio.gather(*waiting) == ["a", "b", "c"]

    asyncio.run(scenario())


def test_nobody_waits_for_longer_than_the_limit() -> None:
    async def scenario() -> None:
        turns = Turns(most=2, most_of_one=1, wait_s=0.01)
        async with turns.of("x"):
            with pytest.raises(NoTurn):
                async with turns.of("y"):
                    pass
            assert not len(turns)
        async with turns.of("y"):
            pass

    asyncio.run(scenario())
