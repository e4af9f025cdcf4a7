"""What `kog-client generate` says when the engine that it waits for does not start."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.errors import RequestFailed
from kog_dist.rpc import commands
from kog_dist.rpc.messages import ErrorCode
from kog_dist.rpc.prompt_request import PromptRequest


@pytest.mark.parametrize(("for_launcher", "said"), [(False, "kog-client: startup_failed: the engine is failed\n"), (True, "")])
def test_its_launcher_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], for_launcher: bool, said: str
) -> None:
    def wait_ready(timeout_s: float) -> None:
        raise RequestFailed(ErrorCode.STARTUP_FAILED, "the engine is failed")

    @contextmanager
    def connect(*args: Any, **options: Any) -> Iterator[Any]:
        yield SimpleNamespace(wait_ready=wait_ready)

    monkeypatch.setattr(commands, "_connect", connect)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)
    target, request = commands.EngineChoice(None, None, None), PromptRequest(prompt="a")
    code = commands.generate(target, request, timeout_s=None, wait_ready=True, for_launcher=for_launcher)
    assert code == RequestFailed(ErrorCode.STARTUP_FAILED, "").exit_code
    assert capsys.readouterr().err == said
