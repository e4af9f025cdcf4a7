"""`kog-launch` with HTTP, as its users see it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.runtime.http_file import HTTP_FILE

READY_S = 90.0
ENDED_S = 15.0


class HttpEngine:
    """A launcher whose gateway answers, and a client of it."""

    def __init__(self, session: EngineSession, launcher: subprocess.Popen[bytes], ready_s: float = READY_S) -> None:
        self.session, self.launcher = session, launcher
        until(lambda: "ready after" in self.said() or launcher.poll() is not None, ready_s, session.output)
        assert launcher.poll() is None, session.output()
        found = self.announced()
        self.url = str(found["url"])
        assert f", {self.url}, ready after" in self.said()
        self.http = httpx.Client(base_url=self.url, timeout=ENDED_S, trust_env=False)

    def said(self) -> str:
        """What the launcher has told its user so far."""
        return self.session.output(stream="out")

    def announced(self) -> dict[str, Any]:
        """http.json of the instance."""
        found: dict[str, Any] = json.loads((self.session.instance_folder / HTTP_FILE).read_text(encoding="utf-8"))
        return found

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def wait_state(self, state: str, limit_s: float = ENDED_S) -> float:
        """Until /readyz says so; the seconds it took."""

        def says() -> bool:
            try:
                return bool(self.http.get("/readyz").json()["state"] == state)
            except httpx.HTTPError:
                return False

        return until(says, limit_s, lambda: f"/readyz never said {state}")


@contextmanager
def http_engine(session: EngineSession, *arguments: str, ready_s: float = READY_S) -> Iterator[HttpEngine]:
    """Start `kog-launch --http --port 0 arguments`; the session ends what is left."""
    made = HttpEngine(session, session.launch("--http", "--port=0", *arguments), ready_s)
    with made.http:
        yield made


def texts(lines: Iterator[str]) -> Iterator[str]:
    """The pieces of text of a streamed completion; an error raises AssertionError with its body."""
    for line in lines:
        if line.startswith("data: {"):
            frame = json.loads(line[6:])
            assert "error" not in frame, frame
            yield from (choice["text"] for choice in frame["choices"])
