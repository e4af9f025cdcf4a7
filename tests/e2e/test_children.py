"""What every process of an engine is started with: no module from the working directory, no core dumps, no more rights."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.engine.session import EngineSession
from kog_dist.rpc.messages import Done
from tests.e2e.children import is_hardened, plant
from tests.e2e.http_engine import http_engine

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
MODULES = {
    "kog_dist.launch.cli", "kog_dist.workers.coordinator.process", "kog_dist.workers.worker", "kog_dist.gateway.process",
    "kog_dist.model.template_sandbox", "kog_dist.workers.grammar.process",
}  # fmt: skip


@pytest.fixture
def hostile(session: EngineSession, tmp_path: Path) -> Iterator[EngineSession]:
    """A session whose commands start where hostile modules lie; none of them was imported at the end."""
    session.cwd = tmp_path
    marker = plant(tmp_path)
    yield session
    assert not marker.exists(), f"imported from the working directory: {marker.read_text().split()}"


@pytest.mark.parametrize(("module", "arguments"), [("launch.cli", ["--check"]), ("doctor.cli", [])])
def test_a_command_imports_nothing_from_where_it_is_started(hostile: EngineSession, module: str, arguments: list[str]) -> None:
    done = hostile.run(f"kog_dist.{module}", arguments)
    assert done.returncode == 0, done.stderr


def test_an_engine_imports_nothing_from_where_it_is_started_and_gives_no_rights(
    hostile: EngineSession, demo_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model, ignore=shutil.ignore_patterns("manifest.json"))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with http_engine(hostile, str(model), "--ranks=2", "--device=cpu") as engine, hostile.connect() as client:
        events = list(client.generate("x = ", max_tokens=8, json_schema=SCHEMA, timeout_s=60.0))
        assert isinstance(events[-1], Done)
        launcher = psutil.Process(engine.launcher.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        started = {word for process in processes for word in process.cmdline() if word.startswith("kog_dist.")}
        assert started == MODULES
        for process in processes:
            assert is_hardened(process.pid), process.cmdline()
        engine.launcher.send_signal(signal.SIGTERM)
        assert engine.launcher.wait(timeout=20) == 0
