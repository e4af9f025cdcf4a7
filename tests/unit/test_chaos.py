"""The table of faults is whole, and its checker notices what is wrong."""

from __future__ import annotations

import contextlib
import json
import random
import re
import subprocess
from pathlib import Path
from typing import cast

import pytest

from kog_dist.bench.chaos.cell import CellRun
from kog_dist.bench.chaos.clients import Asking, ClientLog, Question
from kog_dist.bench.chaos.engine import ChaosEngine
from kog_dist.bench.chaos.table import ENGINE_READY_S, HELPERS, KINDS, ROLES, Cell, Harm, Layout, cells
from kog_dist.bench.engine.injection import FaultKind, Injected, Point
from kog_dist.bench.engine.session import _role, engine_session
from kog_dist.system import python_child

ROOT = Path(__file__).parents[2]
QUESTION = Question("a", 4)
ANSWER = ([1, 2, 3, 4], "wxyz")
CELL = Cell(Layout.SINGLE, "rank 0", FaultKind.KILL, Point.DECODE)


class Client:
    """A client whose log is written beforehand."""

    def __init__(self, log: ClientLog) -> None:
        self.log = log


def findings(log: ClientLog) -> list[str]:
    run = CellRun(cast(ChaosEngine, None), CELL, {QUESTION: ANSWER}, random.Random(1))
    run._clients = [cast(Asking, Client(log))]
    run._check_answers()
    return run.played.violations


def log_of(text: str, token_ids: list[int], *ends: str, is_http: bool = False) -> ClientLog:
    log = ClientLog(QUESTION, is_http)
    log.piece(text, tuple(token_ids))
    for how in ends:
        log.end(how)
    return log


def test_every_role_kind_and_point_is_in_the_table() -> None:
    found = list(cells())
    assert len(found) == len(set(found))
    assert {(cell.layout, cell.role) for cell in found} == {(layout, role) for layout in ROLES for role in ROLES[layout]}
    assert {cell.kind for cell in found} == set(KINDS)
    assert {cell.point for cell in found} == set(Point)


def test_every_child_that_processes_of_an_engine_start_is_a_role() -> None:
    """Whoever can be stopped can hang a client."""
    sources = [path for folder in ("kog_dist", "workers", "launch", "collectives") for path in (ROOT / folder).rglob("*.py")]
    started = {name for path in sources for name in re.findall(r'python_child\.command\(\s*"(kog_dist[.\w]+)"', path.read_text())}
    assert started - {"kog_dist.bench.fakes.random_model", "kog_dist.train", "kog_dist.collectives.ranks"} == {
        "kog_dist.workers.grammar.process", "kog_dist.workers.grammar.ahead", "kog_dist.gateway.body_process",
        "kog_dist.model.template_sandbox",
    }, "name the role of a new one in HELPERS, and how long it may be silent; else say here why nobody waits for it"  # fmt: skip
    commands = [python_child.command(module, json.dumps({"checks": checks})) for module in started for checks in (True, False)]
    assert set(HELPERS) <= {_role(command, {}, {}) for command in commands if "bench" not in command[-2]}


@pytest.mark.parametrize(
    ("kind", "answer_s"), [(FaultKind.KILL, 2.25), (FaultKind.TERM, 2.25), (FaultKind.STOP, 3.25), (FaultKind.PAUSE, 2.6)]
)
def test_what_needs_a_helper_is_answered_in_time(kind: FaultKind, answer_s: float) -> None:
    for role in HELPERS:
        cell = Cell(Layout.SINGLE, role, kind, Point.IDLE)
        assert cell.answer_s == pytest.approx(answer_s)
        harms = role == "grammar runner" and kind is not FaultKind.PAUSE
        assert cell.promise.harm is (Harm.GRAMMAR if harms else Harm.NONE)


def test_a_pause_below_the_stall_limit_is_no_fault() -> None:
    for cell in cells():
        if cell.kind is FaultKind.PAUSE:
            assert cell.promise.harm is Harm.NONE
            assert cell.promise.codes == ({0} if cell.point is Point.DRAIN else set())


@pytest.mark.parametrize(
    "log",
    [
        log_of("wxyz", [1, 2, 3, 4], "done"),
        log_of("wx", [1, 2], "rank_failed"),
        log_of("wxyz", [], "done", is_http=True),
        log_of("w", [], "broken off", is_http=True),
    ],
)
def test_prefixes_with_one_end_are_right(log: ClientLog) -> None:
    assert findings(log) == []


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (log_of("wx", [1, 3], "rank_failed"), "a stream has wrong tokens"),
        (log_of("wxy", [1, 2, 3], "done"), "a stream has wrong tokens"),
        (log_of("wz", [], "done", is_http=True), "a stream has wrong text"),
        (log_of("wx", [1, 2]), "a stream has 0 ends: []"),
        (log_of("wxyz", [1, 2, 3, 4], "done", "done"), "a stream has 2 ends"),
        (log_of("wx", [1, 2], "silence"), "a client heard nothing until it gave up"),
    ],
)
def test_what_is_wrong_is_found(log: ClientLog, sentence: str) -> None:
    assert any(found.startswith(sentence) for found in findings(log))


def test_a_piece_after_the_end_is_found() -> None:
    log = log_of("wx", [1, 2], "rank_failed")
    log.piece("y", (3,))
    assert "a piece of the answer after the end" in findings(log)


@pytest.mark.parametrize(
    ("layout", "role", "told"),
    [
        (Layout.SINGLE, "rank 1", {"rank_failed", "status 503"}),
        (Layout.SINGLE, "coordinator", {"engine_lost", "status 503"}),
        (Layout.SINGLE, "gateway", {"broken off"}),
        (Layout.SINGLE, "grammar runner", {"constraint_failed"}),
        (Layout.REPLICAS, "rank 0 of r0", {"rank_failed", "engine_lost", "status 503"}),
        (Layout.REPLICAS, "router", {"engine_lost", "status 503"}),
    ],
)
def test_what_clients_may_be_told_depends_on_who_was_lost(layout: Layout, role: str, told: set[str]) -> None:
    assert Cell(layout, role, FaultKind.KILL, Point.DECODE).ends == told


class Ended(Client):
    """A client that was told something, so many seconds after the fault at 100 s."""

    def __init__(self, how: str, after_s: float) -> None:
        super().__init__(log_of("wx", [1, 2]))
        self.log.ends.append((100.0 + after_s, how))

    def is_alive(self) -> bool:
        """See threading.Thread."""
        return False


@pytest.mark.parametrize(
    ("how", "after_s", "asked_for", "sentence"),
    [
        ("rank_failed", 0.2, False, None),
        ("rank_failed", 0.3, False, "a client had its end (rank_failed) after 0.30 s, promised are 0.25 s"),
        ("slow_reader", 0.2, False, "a client was told slow_reader, not ['rank_failed', 'status 503']"),
        ("drain_timeout", 6.2, True, None),
        ("drain_timeout", 6.3, True, "a drain ended a request (drain_timeout) after 6.30 s, promised are 6.25 s"),
    ],
)
def test_ends_are_judged_by_code_and_time(how: str, after_s: float, asked_for: bool, sentence: str | None) -> None:
    class Silent:
        class session:  # noqa: N801
            """Says nothing."""

            output = staticmethod(lambda: "")

    run = CellRun(cast(ChaosEngine, Silent), CELL, {QUESTION: ANSWER}, random.Random(1))
    run._judge_client_end(cast(Asking, Ended(how, after_s)), Injected(1, 100.0, 100.0), asked_for=asked_for)
    assert [found.partition(";")[0] for found in run.played.violations] == ([sentence] if sentence else [])


@pytest.mark.parametrize("role", ["rank 0", "rank 1", "coordinator"])
@pytest.mark.parametrize("kind", [FaultKind.KILL, FaultKind.STOP, FaultKind.TERM])
def test_a_service_starts_its_engine_again_unless_it_drains_or_loads(role: str, kind: FaultKind) -> None:
    for point in Point:
        promise = Cell(Layout.SINGLE, role, kind, point).promise
        assert promise.harm is Harm.ALL
        assert bool(promise.codes) == (point in (Point.DRAIN, Point.LOAD))
        assert (promise.ready_s == ENGINE_READY_S) == (not promise.codes)


def test_a_child_of_the_launcher_that_is_no_program_of_its_own_yet_is_not_the_reaper(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["python", "-m", "kog_dist.launch.cli", "--instance=engine"]
    sleep = ["sleep", "60"]
    with engine_session() as session, contextlib.ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(sleep, start_new_session=leads)) for leads in (False, False, True)]
        for process in started:
            stack.callback(process.kill)
        marked = [(process.pid, command, dict[str, str]()) for process in started]
        monkeypatch.setattr(session, "_marked", lambda: iter(marked))
        assert session.processes() == {"launcher": started[0].pid, "reaper": started[2].pid}
        started[2].kill()
        started[2].wait()
        assert session.processes() == {"launcher": started[0].pid}
        monkeypatch.undo()
