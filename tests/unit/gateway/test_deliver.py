"""A stream among many clients: its tokens go out between their requests, not after all of them."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

from kog_dist.gateway.engine import EngineBridge
from kog_dist.gateway.logs import Log
from kog_dist.gateway.readiness import Readiness
from kog_dist.rpc.messages import Event, Generate, Tokens
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
