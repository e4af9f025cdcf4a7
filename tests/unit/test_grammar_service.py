"""Whose grammar is checked when, and what clients are told of a checker that is lost: with processes that do nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.rpc.messages import ErrorCode
from kog_dist.runtime.control import ControlPage
from kog_dist.workers.grammar.checks import LONG_S, SHORT_S
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind
from kog_dist.workers.grammar.service import HUNG_S, GrammarService, Verdict

GOOD = Constraint(ConstraintKind.REGEX, "a")
AGAIN = "regex cannot be checked now: {}; try again later"


class FakeWatch:
    """Of a process that is stopped when the test says so."""

    stopped = False

    def is_lost(self) -> bool:
        """See StopWatch."""
        return self.stopped


class FakeProcess:
    """Keeps what it is asked, and answers when told."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.asked: list[dict[str, Any]] = []
        self.said: list[dict[str, Any]] | None = []
        self.is_ready, self.is_ended, self.watch, self.pid = is_ready, False, FakeWatch(), 1
        self.is_ahead = self.has_no_processor = False

    def is_slow(self) -> bool:
        return self.is_ahead and not self.is_ready and self.has_no_processor

    def send(self, message: dict[str, Any]) -> None:
        self.asked.append(message)

    def receive(self) -> list[dict[str, Any]] | None:
        said = self.said
        self.said = said and []
        return said

    def end(self) -> None:
        self.is_ended = True

    def answer(self, index: int, end: str = "known", reason: str | None = None) -> None:
        """To the question at this place."""
        assert self.said is not None
        self.said.append({"checked": self.asked[index]["check"], "end": end, "reason": reason})


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.is_ready = 0.0, True
        self.num_files = 100
        self.checkers: list[FakeProcess] = []
        self.runners: list[FakeProcess] = []
        control = cast(ControlPage, SimpleNamespace(rings=[None]))
        self.service: GrammarService[str] = GrammarService(Path(), control, clock=lambda: self.now_s)
        monkeypatch.setattr(self.service, "_start", self._start)

    def _start(self, *, checks: bool, is_ahead: bool = False) -> FakeProcess:
        if self.num_files == 0:
            raise OSError("no file is left")
        made = FakeProcess(is_ready=self.is_ready or not checks)
        made.is_ahead = is_ahead
        (self.checkers if checks else self.runners).append(made)
        return made

    @property
    def checker(self) -> FakeProcess:
        return self.checkers[-1]

    def texts(self) -> list[str]:
        """What the checker was asked for, in its order."""
        return [message["text"] for message in self.checker.asked]

    def ask(self, name: str) -> None:
        """`a1`: the first of client a."""
        self.service.ask(name, name[0], Constraint(ConstraintKind.REGEX, name))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_clients_take_turns_and_each_has_one_question_put(world: World) -> None:
    for name in ("a1", "a2", "a3", "b1", "c1"):
        world.ask(name)
    assert world.service.askers == ["a1", "b1", "c1", "a2", "a3"]
    assert world.service.verdicts() == []
    for place, name in enumerate(["a1", "b1", "c1", "a2", "a3"]):
        assert world.texts() == ["a1", "b1", "c1", "a2", "a3"][: place + 1]
        world.checker.answer(place)
        assert world.service.verdicts() == [Verdict(name, None)]
        world.service.verdicts()


def test_what_takes_long_is_put_again_beside_the_short_ones(world: World) -> None:
    for name in ("a1", "a2", "b1"):
        world.ask(name)
    world.service.verdicts()
    world.checker.answer(0, "late")
    assert world.service.verdicts() == []
    assert world.texts() == ["a1", "b1", "a1"]
    assert [message["cpu_s"] for message in world.checker.asked] == [SHORT_S, SHORT_S, LONG_S]
    assert world.service.askers == ["b1", "a2", "a1"]
    world.checker.answer(1)
    world.checker.answer(2, "late", "regex cannot be used: too long")
    assert world.service.verdicts() == [Verdict("b1", None), Verdict("a1", "regex cannot be used: too long")]


def test_a_check_that_nobody_waits_for_keeps_its_turn_until_it_ends(world: World) -> None:
    """Else whoever asks and goes again and again would have as many checks at once."""
    for name in ("a1", "a2", "b1"):
        world.ask(name)
    world.service.verdicts()
    world.service.forget("a1")
    world.service.forget("a2")
    assert (world.service.verdicts(), world.service.askers, world.texts()) == ([], ["b1"], ["a1"])
    world.checker.answer(0, "late")
    assert (world.service.verdicts(), world.texts()) == ([], ["a1", "b1"])
    world.checker.answer(1)
    assert world.service.verdicts() == [Verdict("b1", None)]


@pytest.mark.parametrize(("stops", "how"), [(False, "ended"), (True, "was stopped for 1 s")])
def test_a_checker_that_is_lost_is_replaced_and_asked_the_same_once(world: World, stops: bool, how: str) -> None:
    world.ask("a1")
    world.ask("b1")
    world.service.verdicts()
    for _ in range(2):
        assert world.texts() == ["a1"]
        if stops:
            world.checker.watch.stopped = True
        else:
            world.checker.said = None
        lost, found = world.checker, world.service.verdicts()
        assert lost.is_ended
    told = AGAIN.format(f"the process that checks it {how}")
    assert found == [Verdict("a1", told, ErrorCode.CONSTRAINT_FAILED)]
    assert world.service.verdicts() == []
    assert world.texts() == ["b1"]


def test_a_checker_that_never_starts_is_tried_twice_for_each_question(world: World) -> None:
    world.is_ready = False
    world.ask("a1")
    found = []
    for _ in range(4):
        found += world.service.verdicts()
        if world.checkers:
            world.checker.said = None
    assert found == [Verdict("a1", AGAIN.format("the process that checks it ended"), ErrorCode.CONSTRAINT_FAILED)]
    assert len(world.checkers) == 2


def test_what_was_lost_within_the_checker_is_told_so(world: World) -> None:
    world.ask("a1")
    world.service.verdicts()
    world.checker.answer(0, "lost", "its process was ended 2 times")
    assert world.service.verdicts() == [Verdict("a1", AGAIN.format("its process was ended 2 times"), ErrorCode.CONSTRAINT_FAILED)]


def test_a_checker_that_hangs_is_replaced_and_all_put_again(world: World) -> None:
    world.ask("a1")
    world.service.verdicts()
    world.checker.answer(0, "late")
    world.ask("b1")
    world.service.verdicts()
    assert world.texts() == ["a1", "b1", "a1"]
    world.now_s = HUNG_S
    assert world.service.verdicts() == []
    assert len(world.checkers) == 1
    world.now_s += 0.1
    assert world.service.verdicts() == []
    assert (len(world.checkers), world.texts()) == (2, ["b1", "a1"])
    world.checker.answer(0)
    assert world.service.verdicts() == [Verdict("b1", None)]
    world.now_s += HUNG_S + 0.1
    told = AGAIN.format("the process that checks it has not answered for 4 s")
    assert world.service.verdicts() == [Verdict("a1", told, ErrorCode.CONSTRAINT_FAILED)]


def test_a_runner_that_is_stopped_while_nobody_needs_a_mask_is_replaced(world: World) -> None:
    world.ask("a1")
    world.service.verdicts()
    runner = cast(FakeProcess, world.service.runners[0].process)
    runner.watch.stopped = True
    world.service.verdicts()
    assert runner.is_ended
    assert world.service.runners[0].loss == "was silent for 1.00 s"


# ---- before anybody asks ----
def test_processes_are_started_ahead_one_after_the_other(world: World) -> None:
    world.is_ready = False
    assert world.service.start_ahead()
    assert world.service.start_ahead(), "the first one reads its vocabulary"
    assert (len(world.checkers), len(world.runners)) == (1, 0)
    world.checker.is_ready = True
    assert not world.service.start_ahead()
    assert [process.is_ahead for process in (*world.checkers, *world.runners)] == [True, True]
    world.ask("a1")
    world.service.verdicts()
    assert world.texts() == ["a1"], "at once"
    assert (len(world.checkers), len(world.runners)) == (1, 1)


def test_what_is_there_is_not_started_again(world: World) -> None:
    world.ask("a1")
    world.service.verdicts()
    assert world.service.start_ahead()
    assert not world.service.start_ahead()
    assert (len(world.checkers), len(world.runners)) == (1, 1)


def test_one_that_ends_ahead_is_not_started_again_before_it_is_needed(world: World) -> None:
    world.is_ready = False
    assert world.service.start_ahead()
    world.checker.said = None
    assert world.service.verdicts() == []
    assert not world.service.start_ahead()
    assert (len(world.checkers), len(world.runners)) == (1, 0)


def test_where_no_process_can_be_had_nothing_happens_ahead(world: World) -> None:
    world.num_files = 0
    assert not world.service.start_ahead()
    assert not world.checkers


@pytest.mark.parametrize("has_no_processor", [True, False])
def test_a_question_does_not_wait_for_one_that_has_no_processor(world: World, has_no_processor: bool) -> None:
    world.is_ready = False
    world.service.start_ahead()
    (ahead,) = world.checkers
    ahead.has_no_processor = has_no_processor
    world.is_ready = True
    world.ask("a1")
    world.service.verdicts()
    assert ahead.is_ended is has_no_processor
    assert [process.is_ahead for process in world.checkers] == ([True, False] if has_no_processor else [True])
