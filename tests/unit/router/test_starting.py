"""What clients hear from replicas none of which has loaded its model yet."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from kog_dist.rpc.client import Client, DeadlineExceeded
from kog_dist.rpc.commands import EngineChoice, ask
from kog_dist.rpc.messages import EngineState
from kog_dist.rpc.transport import Access

from .conftest import World


@pytest.fixture
def starting(world: World) -> Iterator[World]:
    """A router that turns by itself, and a replica that says nothing."""
    world.add("r0").is_silent = True
    is_over = threading.Event()

    def turn() -> None:
        while not is_over.is_set():
            world.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    yield world
    is_over.set()
    thread.join()


def test_a_client_hears_that_they_are_starting_since_when_and_how_to_wait(starting: World) -> None:
    starting.skipped_s = 42.0
    with pytest.raises(DeadlineExceeded, match=r"has been starting for 4\d s \(r0 is connecting.*--wait-ready") as refused:
        Client(Access(starting.address), connect_timeout_s=1.0)
    assert "hangs" not in str(refused.value)


def test_status_and_drain_need_no_greeting(starting: World, capsys: pytest.CaptureFixture[str]) -> None:
    target = EngineChoice(endpoint=starting.address)
    assert ask(target, "status", as_json=True, timeout_s=None) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["state"], report["replica_names"]) == (EngineState.LOADING, ["r0"])
    assert ask(target, "status", as_json=False, timeout_s=None) == 0
    assert "fleet: loading, no model yet, up" in capsys.readouterr().out
    assert ask(target, "drain", as_json=False, timeout_s=None) == 0
    assert "fleet: draining" in capsys.readouterr().out
