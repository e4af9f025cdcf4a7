"""A stream among many clients: its tokens go out between their requests, not after all of them."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import zmq

from kog_dist.gateway.engine import EngineBridge
from kog_dist.gateway.line import Line
from kog_dist.gateway.logs import Log
from kog_dist.gateway.readiness import Readiness
from kog_dist.rpc.messages import Error, ErrorCode, Event, Generate, Tokens
from kog_dist.rpc.transport import Access
from tests.unit.gateway.scripted_engine import WAIT_S, ScriptedEngine


async def deliver_while_the_loop_is_busy(engine: ScriptedEngine) -> tuple[int, int]:
    """Tokens that were heard before the event loop was held up, and after `deliver` was called in the middle of that."""
    heard: list[Event] = []
    log = Log(io.StringIO())
    bridge = EngineBridge(lambda: Access.from_folder(engine.folder), Readiness(), log, on_welcome=lambda _welcome: None)
    try:
        bridge.submit("client", (Generate("one", prompt_ids=(1,)),), (heard.append,))
        deadline_s = time.monotonic() + WAIT_S
        received = await asyncio.to_thread(engine.next_request)
        received.accept()
        received.say("a")
        while not any(isinstance(event, Tokens) for event in heard):
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.001)
        before = len(heard)
        received.say("b")
        while len(heard) == before and time.monotonic() < deadline_s:  # the loop has no turn in here
            bridge.deliver()
        return before, len(heard)
    finally:
        bridge.close()
        log.close()


def test_tokens_are_delivered_though_the_loop_is_busy(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    engine = ScriptedEngine(tmp_path)
    try:
        assert asyncio.run(deliver_while_the_loop_is_busy(engine)) == (2, 3)
    finally:
        engine.stop()


async def fail_one_of_two(engine: ScriptedEngine) -> tuple[list[Event], list[Event], int]:
    heard: tuple[list[Event], list[Event]] = ([], [])
    with zmq.Context[zmq.Socket[bytes]]() as context:
        line = Line(context, Access.from_folder(engine.folder), on_event=lambda _: None, on_lost=lambda _, __: None)
        try:
            for request_id, events in zip(("one", "two"), heard, strict=True):
                line.generate(Generate(request_id, prompt_ids=(1,)), events.append)
            line.fail("one", ErrorCode.ENGINE_LOST, "silent for 15 s")
            await asyncio.to_thread(engine.wait_cancelled, "one")
            return *heard, len(line)
        finally:
            line.close()


def test_a_request_that_is_given_up_ends_at_once_and_alone(tmp_path: Path) -> None:
    """Its client hears why, the engine that nobody wants it any more."""
    tmp_path.chmod(0o700)
    engine = ScriptedEngine(tmp_path)
    try:
        one, two, left = asyncio.run(fail_one_of_two(engine))
    finally:
        engine.stop()
    assert [(event.code, event.message) for event in one if isinstance(event, Error)] == [
        (ErrorCode.ENGINE_LOST, "silent for 15 s")
    ]
    assert (len(one), two, left) == (1, [], 1)
