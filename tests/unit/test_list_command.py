"""`kog-client list`: an engine that answers, one that does not, and none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.errors import LaunchError
from kog_dist.rpc import list_command
from kog_dist.rpc.list_command import list_engines
from kog_dist.rpc.messages import EngineState
from kog_dist.runtime.instance import Instance

REPORT = SimpleNamespace(
    instance="a", state=EngineState.READY, model="tiny\x1b[2J", world_size=2, uptime_s=7.2, replica_names=(),
)  # fmt: skip


class PlayedClient:
    """Knows one engine."""

    def __init__(self, access: Any, **_settings: Any) -> None:
        if "/a/" not in access.address:
            raise LaunchError("no engine listens there")

    def __enter__(self) -> PlayedClient:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def status(self) -> Any:
        return REPORT


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's instances."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(list_command, "Client", PlayedClient)
    made = tmp_path / "kog"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def engines(root: Path) -> Iterator[None]:
    with closing(Instance.acquire("a")) as answering, closing(Instance.acquire("b")):
        (answering.folder / "http.json").write_text('{"url": "http://127.0.0.1:8000", "pid": 1, "serves": true}')
        yield


def test_none_is_no_failure(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_engines(as_json=False) == 0
    assert capsys.readouterr().out == "no engine of this user runs here; start one with kog-launch\n"


def test_one_that_does_not_answer_hides_no_other(engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_engines(as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: ready, tiny\\x1b[2J on 2 ranks, up 7 s, http://127.0.0.1:8000",
        "b: does not answer: no engine listens there",
    ]


def test_programs_get_an_object_for_each(engines: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_engines(as_json=True) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["name"], first["url"]) == ("a", "http://127.0.0.1:8000")
    assert (second["name"], second["url"]) == ("b", None)
