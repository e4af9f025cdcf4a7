"""One engine and one gateway for the tests of a module that need nothing special of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.gateway.scripted_engine import RunningGateway, ScriptedEngine, client, gateway


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("g")
    made.chmod(0o700)
    return made


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(folder)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def running(shared_engine: ScriptedEngine, folder: Path) -> Iterator[RunningGateway]:
    with gateway(shared_engine, folder) as made:
        yield made


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    """The shared engine, with nothing of the last test in it."""
    shared_engine.received.clear()
    shared_engine.cancelled.clear()
    shared_engine.on_generate = lambda _received: None
    return shared_engine


@pytest.fixture
def http(running: RunningGateway) -> Iterator[httpx.Client]:
    with client(running) as made:
        yield made
