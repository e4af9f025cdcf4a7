"""Long requests and long answers on their way through the gateway's bounded buffer, and choices that end early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kog_dist.gateway.exchange import Exchange
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.metrics import Metrics
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.rpc.messages import Event, FinishReason, Tokens
from tests.unit.gateway_openai.engine_script import data_of, events_of


class CountedCall:
    """What the bridge gives for requests that it has sent."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    def cancel(self) -> None:
        self.num_cancelled += 1


def begun(planned: Planned, limits: Limits) -> tuple[Exchange, list[Callable[[Event], None]], CountedCall]:
    exchange, sinks, call = Exchange(planned, Metrics("demo"), limits, "/v1/responses"), [], CountedCall()

    def submit(_: Any, given: Any) -> Any:
        sinks.extend(given)
        return call

    exchange.begin(submit)
    return exchange, sinks, call


async def read(exchange: Exchange) -> bytes:
    said = b""
    while frames := await exchange.next_bytes():
        said += frames
    return said


@pytest.mark.parametrize("num_tokens", [3, 30])
def test_a_long_response_is_not_taken_for_a_slow_reader(base_model: ServedModel, num_tokens: int) -> None:
    """Its end repeats the text four times. The client reads after every event."""

    async def run() -> bytes:
        planned = plan_response({"input": "x", "stream": True}, base_model)
        exchange, (sink,), call = begun(planned, Limits(buffer_bytes=4096))
        reader = asyncio.create_task(read(exchange))
        for event in events_of(planned.generates[0], ["word " * 200] * num_tokens):
            sink(event)
            for _ in range(3):  # turns of the loop: the reader is woken, and has read
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            said = await reader
        assert (exchange.refusal, call.num_cancelled) == (None, 0)
        return said

    events = data_of(asyncio.run(run()))
    assert events[-1]["type"] == "response.completed"
    assert len(events[-1]["response"]["output"][0]["content"][0]["text"]) == 1000 * num_tokens


def test_a_client_that_does_not_read_is_dropped_all_the_same(base_model: ServedModel) -> None:
    async def run() -> Exchange:
        planned = plan_response({"input": "x", "stream": True}, base_model)
        exchange, (sink,), call = begun(planned, Limits(buffer_bytes=4096))
        for event in events_of(planned.generates[0], ["word " * 200] * 9):
            sink(event)
        assert call.num_cancelled == 1
        return exchange

    refusal = asyncio.run(run()).refusal
    assert refusal is not None
    assert refusal.code == "slow_reader"


def test_a_cancelled_choice_ends_the_others(base_model: ServedModel) -> None:
    async def run() -> tuple[bytes, int]:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}
        planned = plan_chat(body, base_model)
        exchange, (first, second), call = begun(planned, Limits())
        *others, _ = events_of(planned.generates[0], ["a"])
        for event in others:
            first(event)
        second(events_of(planned.generates[1], ["b"], FinishReason.CANCELLED)[-1])
        async with asyncio.timeout(5):
            return await read(exchange), call.num_cancelled

    said, num_cancelled = asyncio.run(run())
    assert data_of(said)[-1]["error"]["code"] == "request_cancelled"
    assert num_cancelled == 1


def test_a_long_request_is_not_repeated_in_full(base_model: ServedModel) -> None:
    schema = {"type": "object", "properties": {f"field_{idx}": {"type": "string"} for idx in range(3000)}}
    tools = [{"type": "function", "name": "f", "description": "long", "parameters": schema}]
    body = {"input": "x", "instructions": "be brief", "tools": tools, "tool_choice": "none", "metadata": {"a": "b"}}
    planned = plan_response(body, base_model)
    for event in events_of(planned.generates[0], ["x"]):
        planned.reply.on_event(0, event)
    response = planned.reply.whole()
    assert response["tools"] == [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": False}]
    assert (response["instructions"], response["metadata"]) == (None, {})
    short = plan_response({**body, "tools": []}, base_model)
    for event in events_of(short.generates[0], ["x"]):
        short.reply.on_event(0, event)
    assert (short.reply.whole()["instructions"], short.reply.whole()["metadata"]) == ("be brief", {"a": "b"})


def test_who_waits_for_frames_has_them_written_at_once(base_model: ServedModel) -> None:
    """As long as the client can take them, and never before what is kept for it."""

    async def run() -> None:
        planned = plan_chat({"messages": [{"role": "user", "content": "x"}], "stream": True}, base_model)
        exchange, (sink,), _ = begun(planned, Limits())
        events = events_of(planned.generates[0], ["a", "b", "c", "d"])
        first, *more = (event for event in events if isinstance(event, Tokens))
        for event in events[: events.index(first)]:
            sink(event)
        written, takes = list[bytes](), True

        def write(frames: bytes) -> bool:
            if takes:
                written.append(frames)
            return takes

        exchange.write_now = write
        sink(first)
        assert not written, "nobody waits yet"
        assert b'"a"' in await exchange.next_bytes()
        reader = asyncio.ensure_future(exchange.next_bytes())
        await asyncio.sleep(0)
        sink(more[0])
        assert [b'"b"' in frames for frames in written] == [True]
        takes = False
        sink(more[1])
        takes = True
        sink(more[2])
        assert len(written) == 1, "kept frames come first"
        kept = await reader
        assert 0 < kept.index(b'"c"') < kept.index(b'"d"')

    asyncio.run(run())
