"""What the gateway says of an engine that it cannot reach: whether nobody is there, or somebody who is busy."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.errors import LaunchError
from kog_dist.gateway import engine as engine_module
from kog_dist.gateway import links
from kog_dist.gateway.engine import EngineBridge
from kog_dist.gateway.logs import Log
from kog_dist.gateway.readiness import Readiness
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from tests.unit.gateway.scripted_engine import WAIT_S


@contextlib.contextmanager
def silent_engine(folder: Path, backlog: int) -> Iterator[Access]:
    """An engine that listens and takes no connection; one more than `backlog` can wait for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / SOCKET_NAME))
        listener.listen(backlog)
        yield Access.from_folder(folder)


def refusal(access: Access) -> str:
    async def connect() -> None:
        links.FileLink(access.address, lambda: None).close()

    with pytest.raises(LaunchError) as refused:
        asyncio.run(connect())
    return str(refused.value)


def test_nobody_listens(tmp_path: Path) -> None:
    assert refusal(Access.from_folder(tmp_path)).startswith("no engine listens at ipc://")


def test_an_engine_with_too_many_connections_is_busy(tmp_path: Path) -> None:
    with silent_engine(tmp_path, 0) as silent, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        first.connect(silent.address.removeprefix("ipc://"))
        assert "is busy" in refusal(silent)


def test_without_a_free_descriptor_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_args: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    loop = asyncio.new_event_loop()
    monkeypatch.setattr(socket, "socket", no_socket)

    async def connect() -> None:
        links.FileLink(Access.from_folder(tmp_path).address, lambda: None)

    with contextlib.closing(loop), pytest.raises(LaunchError, match="Too many open files"):
        loop.run_until_complete(connect())


def test_an_engine_that_has_not_answered_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "UNANSWERED_S", 0.0)

    async def reason(silent: Access) -> str:
        log = Log(io.StringIO())
        readiness = Readiness()
        bridge = EngineBridge(lambda: silent, readiness, log, on_welcome=lambda _welcome: None)
        running = asyncio.create_task(bridge.run())
        deadline_s = time.monotonic() + WAIT_S
        while (found := readiness.health().reason) == "the engine has not been reached yet":
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.001)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        log.close()
        return found

    with silent_engine(tmp_path, 128) as silent:
        assert asyncio.run(reason(silent)) == f"the engine at {silent.address} has not answered yet"


@pytest.mark.parametrize("missed_s", [0.0, 60.0])
def test_an_engine_that_is_not_found_is_in_the_log_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missed_s: float) -> None:
    """`kog-gateway` serves before its engine does, and nobody looks at /readyz who does not know that something is wrong."""
    monkeypatch.setattr(engine_module, "MISSED_S", missed_s)
    written = io.StringIO()

    async def run() -> None:
        log = Log(written)
        bridge = EngineBridge(lambda: Access.from_folder(tmp_path), Readiness(), log, on_welcome=lambda _welcome: None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(bridge.run(), 0.2)
        log.close()

    asyncio.run(run())
    assert written.getvalue().count("engine_missing") == (missed_s == 0.0)
    assert (f"no engine listens at ipc://{tmp_path}" in written.getvalue()) == (missed_s == 0.0)
