"""A machine that has no core left is no fault: nobody is killed for being slow."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Tokens

NUM_SPINNERS, SECONDS, NUM_TOKENS = 8, 60.0, 200
END_S = 30.0

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]


@contextlib.contextmanager
def spinners(count: int) -> Iterator[None]:
    """Processes that never sleep, several for each core."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            spinner = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(spinner.kill)
        yield


def answer(client: Client) -> list[int]:
    events = client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_TOKENS, ignore_eos=True)
    return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]


def test_nobody_is_lost_while_others_take_all_cores(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--stall-timeout=1", "--http", "--port=0")
    with session.connect() as client:
        right, before = answer(client), session.processes()
        num_answers, end_s = 0, time.monotonic() + SECONDS
        with spinners(NUM_SPINNERS):
            while time.monotonic() < end_s:
                assert answer(client) == right
                num_answers += 1
        assert session.processes() == before, session.output()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(END_S) == 0, session.output()
    print(f"\n{num_answers} answers of {NUM_TOKENS} tokens in {SECONDS:g} s beside {NUM_SPINNERS} spinners")
