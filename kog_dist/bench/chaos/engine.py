"""An engine that faults are done to: started as users start it, with HTTP, in one of two layouts; and the right answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from kog_dist.bench.chaos.clients import Asking, Question, ask
from kog_dist.bench.chaos.table import DRAIN_S, HELPERS, STALL_S, Cell, Layout
from kog_dist.bench.engine.session import EngineSession, TimedOut, until
from kog_dist.bench.fakes.tiny_model import TINY, write_tiny_model
from kog_dist.errors import KogError, LaunchError
from kog_dist.gateway.body_reader import SMALL_BYTES
from kog_dist.rpc.client import Client
from kog_dist.rpc.transport import Access
from kog_dist.runtime.http_file import HttpFile

SHORT, CONSTRAINED = Question("abc", 1500), Question("abc", 1500, regex="[a-z]{1490}")
LONG = (Question("This is read for a while. " * 40, 40), Question("So is this, and nothing of it is kept. " * 27, 40))
DRAINED, PROBE, CONSTRAINED_PROBE = Question("abcd", 400), Question("ab", 12), Question("ab", 40, regex="[a-z]{12}")
QUESTIONS = (SHORT, CONSTRAINED, *LONG, DRAINED, PROBE, CONSTRAINED_PROBE)
_START_S, _END_S, _ANSWER_S = 90.0, 20.0, 60.0
_MOST_RESTARTS = 3  # after which a launcher gives up, and is right to


def write_model(folder: Path) -> None:
    """A model that decodes in a millisecond, with a chat template and room for long answers."""
    write_tiny_model(folder, replace(TINY, max_context=4096))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}", encoding="utf-8"
    )


class ChaosEngine:
    """One launcher and what it starts; used until a fault ends it, or it has restarted something three times.

    `parallel`: requests that an engine decodes together.
    """

    def __init__(self, layout: Layout, model: Path, ranks: int, parallel: int, startup_s: float = _START_S) -> None:
        self.layout, self.parallel, self.restarts = layout, parallel, Counter[str]()
        self.session = EngineSession()
        shape = [f"--ranks={ranks}"] if layout is Layout.SINGLE else ["--replicas=2", "--ranks=1"]
        self.launcher: subprocess.Popen[bytes] = self.session.launch(
            str(model),
            "--device=cpu",
            *shape,
            "--http",
            "--port=0",
            f"--parallel={parallel}",
            f"--kv-caches={parallel}",
            f"--stall-timeout={STALL_S:g}",
            f"--startup-timeout={startup_s:g}",
            f"--shutdown-timeout={DRAIN_S:g}",
        )

    # ---- being ready ----
    def wait_ready(self) -> None:
        """Until it has said so. Raises LaunchError if it ends instead."""
        until(lambda: self._is_ready() or self.launcher.poll() is not None, _START_S, self.session.output)
        if self.launcher.poll() is not None:
            raise LaunchError(f"it ended before it was ready: {self.session.output()}")

    def _is_ready(self) -> bool:
        return "ready after" in self.session.output(stream="out")

    @property
    def access(self) -> Access:
        """Of its RPC."""
        return Access.from_folder(self.session.instance_folder)

    @property
    def url(self) -> str:
        """Of its HTTP."""
        said = HttpFile.read(self.session.instance_folder)
        if said is None:
            raise LaunchError("the gateway has not said where it answers")
        return said.url

    def ask(self, question: Question, *, over_http: bool) -> Asking:
        """A client that asks now."""
        return ask(question, self.access, self.url if over_http else None)

    def answers(self, question: Question, *, over_http: bool) -> bool:
        """Whether a short request is answered."""
        try:
            asking = self.ask(question, over_http=over_http)
        except (OSError, KogError, ValueError):
            return False
        asking.join(_ANSWER_S)
        return asking.log.how == "done"

    def is_whole(self) -> bool:
        """Whether everything that belongs to it serves."""
        if self.layout is Layout.SINGLE:
            return True
        try:
            with Client(self.access, connect_timeout_s=1.0) as client:
                states = client.status().replica_states
        except KogError:
            return False
        return len(states) == 2 and set(states) == {"ready"}

    def runs(self) -> bool:
        """Whether a request runs."""
        with contextlib.suppress(KogError), Client(self.access, connect_timeout_s=1.0) as client:
            return client.status().running is not None
        return False

    def call_for(self, cell: Cell) -> None:
        """See to it that a process which is started on demand is there."""
        if cell.role in HELPERS and cell.role not in self.session.processes():
            self.uses(cell.role)

    def uses(self, role: str) -> bool:
        """Whether what needs this process is answered."""
        if role == "template process":
            return self._posts("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 1})
        if role == "body process":
            return self._posts("/tokenize", {"prompt": "ab"}, padding=SMALL_BYTES)
        return self.answers(CONSTRAINED_PROBE, over_http=False)

    def _posts(self, path: str, body: Mapping[str, object], padding: int = 0) -> bool:
        """Whether a request has 200. `padding`: blanks behind its body."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(body) + " " * padding, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        return response.status == 200

    # ---- its end ----
    def is_worn(self, cell: Cell) -> bool:
        """Whether another restart of what the cell is about would be one too many."""
        return self.restarts[self.component(cell)] >= _MOST_RESTARTS

    @staticmethod
    def component(cell: Cell) -> str:
        """What is started again after a fault: a whole engine, or a process."""
        role = cell.role.rpartition(" of ")[2]
        return "engine" if role == "coordinator" or role.startswith("rank ") else role

    def retire(self) -> list[str]:
        """Stop it as its user would; what was not as it should be."""
        self.launcher.send_signal(signal.SIGTERM)
        found = []
        try:
            if code := self.launcher.wait(_END_S):
                found.append(f"it was told to stop and ended with {code}: {self.session.output().strip()[-600:]}")
            until(lambda: not self.session.leftovers(), _END_S, lambda: f"left behind: {self.session.leftovers()}")
        except (subprocess.TimeoutExpired, TimedOut) as error:
            found.append(str(error))
        self.session.close()
        return found

    def resume(self, pid: int) -> None:
        """Continue a process that nobody has ended, and should not have."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def right_answers(model: Path) -> Mapping[Question, tuple[list[int], str]]:
    """Tokens and text of every question, from an engine of one rank to which nothing is done."""
    engine = ChaosEngine(Layout.SINGLE, model, ranks=1, parallel=1)
    try:
        engine.wait_ready()
        answers = {}
        for question in QUESTIONS:
            asking = engine.ask(question, over_http=False)
            asking.join(_ANSWER_S)
            if asking.log.how != "done":
                raise LaunchError(f"the right answer to {question} cannot be had: {asking.log.how}")
            answers[question] = (asking.log.token_ids, asking.log.text)
        engine.retire()
        return answers
    finally:
        engine.session.close()


class Lateness:
    """How late this process itself is woken: on an overloaded machine a violation may be the judge's own."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []

    def watch(self) -> None:
        """For a thread of its own: note by how much each sleep was too long."""
        while True:
            begin_s = time.monotonic()
            time.sleep(0.02)
            now_s = time.monotonic()
            self.samples.append((now_s, now_s - begin_s - 0.02))

    def worst_s(self, since_s: float) -> float:
        """The worst since a moment."""
        found = 0.0
        for at_s, late_s in reversed(self.samples):
            if at_s < since_s:
                break
            found = max(found, late_s)
        return found
