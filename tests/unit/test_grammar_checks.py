"""The checker: whatever becomes of a check, its client is told, and the next one finds the checker as it was."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import pytest

from kog_dist.system import stopped_child
from kog_dist.workers.grammar import checks
from kog_dist.workers.grammar.checks import MAX_PACKET_BYTES, Checks, check_message
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind, GrammarCompiler

DEADLINE_S = 30.0


def burn() -> None:
    while True:
        pass


def out_of_memory() -> None:
    raise MemoryError


def defect() -> None:
    raise RuntimeError("a text of the client")


def abort() -> None:
    faulthandler.disable()  # of pytest
    os.abort()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_once() -> None:
    """In the first child alone: what it leaves behind is a file."""
    try:
        os.close(os.open("was-stopped", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    stop()


DEEDS: dict[str, Callable[[], object]] = {
    "good": lambda: None, "burn": burn, "memory": out_of_memory, "defect": defect, "abort": abort, "stop once": stop_once,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "stop": stop,
    "sleep": lambda: time.sleep(DEADLINE_S),
}  # fmt: skip


class Compiler:
    """Does what the constraint is named after."""

    def why_not(self, constraint: Constraint) -> str | None:
        """See GrammarCompiler."""
        DEEDS.get(constraint.text, lambda: None)()
        return "regex cannot be used: it is bad" if constraint.text == "bad" else None


class Coordinator:
    """Asks a checker that runs in this process."""

    def __init__(self) -> None:
        self.channel, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self.checks = Checks(self.theirs, cast(GrammarCompiler, Compiler()))
        self.number = 0

    def ask(self, text: str, cpu_s: float = 0.05) -> int:
        self.number += 1
        self.channel.send(msgpack.packb(check_message(self.number, Constraint(ConstraintKind.REGEX, text), cpu_s)))
        assert self.checks.turn()
        return self.number

    def answers(self, count: int) -> dict[int, tuple[str, str | None]]:
        found: dict[int, tuple[str, str | None]] = {}
        deadline_s = time.monotonic() + DEADLINE_S
        while len(found) < count:
            assert time.monotonic() < deadline_s
            assert self.checks.turn()
            try:
                answer: dict[str, Any] = msgpack.unpackb(self.channel.recv(MAX_PACKET_BYTES))
            except BlockingIOError:
                continue
            found[answer["checked"]] = answer["end"], answer["reason"]
        return found


@pytest.fixture
def coordinator(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.chdir(tmp_path)
    made = Coordinator()
    yield made
    made.channel.close()
    while made.checks.turn():
        pass
    made.theirs.close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("good", ("known", None)),
        ("bad", ("known", "regex cannot be used: it is bad")),
        ("burn", ("late", "regex cannot be used: to compile it takes more than 0.05 s of processor time; simplify it")),
        ("memory", ("known", "regex cannot be used: it needs too much memory; simplify it")),
        ("abort", ("known", "regex cannot be used: it needs too much memory; simplify it")),
        ("defect", ("known", "regex cannot be used: its process ended with 1; simplify it")),
        ("kill", ("lost", "its process was ended 2 times")),
    ],
)
def test_its_client_is_told_what_became_of_it(
    coordinator: Coordinator, text: str, answer: tuple[str, str | None], capfd: pytest.CaptureFixture[str]
) -> None:
    first = coordinator.ask(text)
    assert coordinator.answers(1) == {first: answer}
    assert "of the client" not in capfd.readouterr().err
    second = coordinator.ask("good")
    assert coordinator.answers(1) == {second: ("known", None)}


def test_a_short_one_does_not_wait_for_a_long_one(coordinator: Coordinator) -> None:
    long, short = coordinator.ask("burn", 0.5), coordinator.ask("good")
    assert list(coordinator.answers(2)) == [short, long]


def test_one_that_has_no_processor_is_late_too(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 0.1)
    number = coordinator.ask("sleep")
    assert coordinator.answers(1) == {number: ("late", "regex cannot be used: it was not compiled within 0.1 s")}


@pytest.mark.parametrize(
    ("text", "answer"), [("stop once", ("known", None)), ("stop", ("lost", "its process was ended 2 times"))]
)
def test_a_child_that_is_stopped_is_ended_and_its_question_put_again_once(
    coordinator: Coordinator, text: str, answer: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopped_child, "STOPPED_S", 0.05)
    number = coordinator.ask(text)
    assert coordinator.answers(1) == {number: answer}
