"""`kog-launch --http-socket`: HTTP for one user of the machine."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, until

READY_S, CLEAN_S = 60.0, 30.0
FLEET = ("--replicas=1", "--max-replicas=1", "--min-replicas=1")


@pytest.mark.parametrize(("end", "extra"), [(signal.SIGTERM, ()), (signal.SIGKILL, ()), (signal.SIGKILL, FLEET)])
def test_a_socket_file_serves_and_goes_with_its_launcher(
    session: EngineSession, demo_model: Path, end: signal.Signals, extra: tuple[str, ...]
) -> None:
    path = session.folder / "http" / "http.sock"
    arguments = (str(demo_model), "--http", "--ranks=1", "--device=cpu", f"--http-socket={path}", *extra)
    launcher = session.launch(*arguments)
    until(lambda: "ready after" in session.output(stream="out") or launcher.poll() is not None, READY_S, session.output)
    assert f", unix:{path}, ready after" in session.output(stream="out"), session.output()
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=20.0) as client:
        answer = client.post("/v1/completions", json={"prompt": "x = ", "max_tokens": 3})
        assert (answer.status_code, client.get("/readyz").json()["state"]) == (200, "ready")
    if end is signal.SIGTERM:
        asked = ["--completion", "--max-tokens=3", "x = "]
        for service in (f"--url=unix:{path}", "--instance=engine"):
            chat = session.run("kog_dist.chat.cli", [service, *asked])
            assert chat.returncode == 0, chat.stderr
            assert chat.stdout
        refused = session.run("kog_dist.launch.cli", [*arguments, "--instance=other"])
        assert refused.returncode == 3
        assert f"cannot listen on {path}: it is in use by process {launcher.pid} (" in refused.stderr
    launcher.send_signal(end)
    launcher.wait(timeout=20)
    until(lambda: not path.exists() and not session.leftovers(), CLEAN_S, lambda: f"left: {path} {session.leftovers()}")
