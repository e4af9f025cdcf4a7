"""The coordinator's end of structured output, with real grammar processes."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.rpc.messages import ErrorCode
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.wait import Deadline
from kog_dist.system.stopped_child import STOPPED_S
from kog_dist.workers.grammar import service as service_module
from kog_dist.workers.grammar.checks import CHECK_TIMEOUT_S
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind
from kog_dist.workers.grammar.service import SILENT_S, GrammarService, Verdict
from tests.living_children import living_children

from .conftest import EOS_ID, PATIENCE_S, VOCAB_SIZE, write_model

BOMB = json.dumps({"allOf": [{"type": "string", "pattern": f"[a-z]{{{count},5000}}"} for count in range(600)]})
GOOD, BAD = Constraint(ConstraintKind.REGEX, "[ab]{3}"), Constraint(ConstraintKind.REGEX, "(a")


class Clock:
    """Time as the service sees it; `skip` jumps ahead."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(1, 64, vocab_size=VOCAB_SIZE)
    yield page
    page.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, control: ControlPage, clock: Clock) -> Iterator[GrammarService[str]]:
    write_model(tmp_path / "model", max_context=64, with_tokenizer=True)
    made: GrammarService[str] = GrammarService(tmp_path / "model", control, clock=clock)
    yield made
    made.close()
    assert children() == []


def children() -> list[psutil.Process]:
    """Grammar processes of this test, the checker last started last."""
    found = living_children("kog_dist.workers.grammar.process", "kog_dist.workers.grammar.ahead")
    return sorted(found, key=lambda child: (child.create_time(), child.pid))  # pids begin anew at their end


def hurry(processes: Sequence[psutil.Process]) -> None:
    """Let threads of the least priority have a core beside others' work, where this user may; not those that serve."""
    for process in processes:
        for thread in process.threads():
            if thread.id != process.pid:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread.id, 0)


def suspend(process: psutil.Process) -> None:
    """Stop it, for whoever looks next."""
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        pass


def verdicts(service: GrammarService[str], count: int, meanwhile: Callable[[], object] = bool) -> list[Verdict[str]]:
    deadline = Deadline.after(PATIENCE_S)
    found: list[Verdict[str]] = []
    while len(found) < count:
        assert not deadline.expired(), f"only {found} came"
        meanwhile()
        found += service.verdicts()
        time.sleep(0.002)
    return found


def mask_of(control: ControlPage, epoch: int) -> set[int]:
    deadline = Deadline.after(PATIENCE_S)
    while (mask := control.masks.get(epoch)) is None:
        assert not deadline.expired(), f"mask {epoch} did not come"
        time.sleep(0.001)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=VOCAB_SIZE, bitorder="little")).tolist())


def test_processes_that_were_started_ahead_serve_with_ordinary_priority(
    service: GrammarService[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(service_module, "SLOW_S", PATIENCE_S)
    deadline = Deadline.after(PATIENCE_S)
    while service.start_ahead():
        assert service.verdicts() == []
        assert not deadline.expired()
        hurry(children())
        time.sleep(0.002)
    started = children()
    assert [child.nice() for child in started] == [psutil.Process().nice()] * 2, "that of the thread which serves"
    service.ask("a", "client", GOOD)
    assert verdicts(service, 1, meanwhile=lambda: hurry(started)) == [Verdict("a", None)], "the runner is prepared, too"
    assert children() == started


def test_grammars_are_checked_and_followed(service: GrammarService[str], control: ControlPage) -> None:
    """Verdicts in the order of asking; then a mask for each token, from the processes' own reading of the ring."""
    service.ask("one", "a", GOOD)
    service.ask("two", "a", BAD)
    service.ask("three", "a", Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "boolean"}'))
    assert service.askers == ["one", "two", "three"]
    found = verdicts(service, 3)
    assert [verdict.asker for verdict in found] == ["one", "two", "three"]
    assert (found[0].refusal, found[2].refusal) == (None, None)
    assert found[1].refusal is not None
    assert "unclosed group" in found[1].refusal
    assert service.askers == []
    for text in (b"aba", b"bb"):  # to its end, and one that ends early
        epoch = service.reserve_epochs(10)
        seq = control.submit(DecodeRequest((1,), 10, mask_epoch=epoch))
        service.runners[0].run(seq, epoch, GOOD)
        for index, token_id in enumerate(text):
            assert mask_of(control, epoch + index) == {ord("a"), ord("b")}
            is_last = text == b"bb" and index == 1
            control.ring.put(seq, index, token_id, 1, None, Finish.LENGTH if is_last else Finish.NONE)
        if text == b"aba":
            assert mask_of(control, epoch + 3) == {EOS_ID}
            control.ring.put(seq, 3, EOS_ID, 1, None, Finish.STOP)
    assert service.reserve_epochs(1) > 20, "no epoch is used twice"


def test_a_checker_that_dies_costs_nothing(service: GrammarService[str]) -> None:
    service.ask("one", "a", GOOD)
    verdicts(service, 1)
    runner, checker = children()
    checker.suspend()
    service.ask("two", "a", GOOD)
    service.verdicts()  # puts the question
    service.ask("three", "a", GOOD)
    checker.kill()
    assert verdicts(service, 2) == [Verdict("two", None), Verdict("three", None)]
    assert runner.is_running(), "the runner has nothing to do with it"
    assert service.runners[0].num_lost == 0


def test_a_stopped_checker_is_replaced_and_its_question_put_again(
    service: GrammarService[str], clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    service.ask("one", "a", GOOD)
    verdicts(service, 1)
    service.ask("two", "a", GOOD)
    service.verdicts()
    checker = children()[-1]
    suspend(checker)
    assert service.verdicts() == []
    clock.skipped_s += STOPPED_S
    assert verdicts(service, 1) == [Verdict("two", None)]
    assert f"grammar process {checker.pid} was stopped and is replaced" in capfd.readouterr().err
    assert checker not in children()


def test_one_client_with_bombs_makes_another_wait_for_a_short_check_of_one(service: GrammarService[str]) -> None:
    """What takes longer than a short check goes on behind all others, and the process survives what is too much for it."""
    service._long.cpu_s = 0.2
    service.ask("warm", "a", GOOD)
    verdicts(service, 1)
    before = children()
    for number in range(3):
        service.ask(f"bomb {number}", "a", Constraint(ConstraintKind.JSON_SCHEMA, BOMB))
    service.ask("other", "b", GOOD)
    found = verdicts(service, 4)
    assert found[0] == Verdict("other", None)
    assert [verdict.asker for verdict in found[1:]] == ["bomb 0", "bomb 1", "bomb 2"]
    for verdict in found[1:]:
        assert verdict.refusal is not None
        assert ("more than 0.2 s of processor time" in verdict.refusal) or ("not compiled within 3 s" in verdict.refusal)  # busy
        assert verdict.code is ErrorCode.INVALID_CONSTRAINT
    assert children() == before


def test_those_who_do_not_want_to_know_are_not_told(service: GrammarService[str]) -> None:
    service.ask("one", "a", GOOD)
    service.ask("two", "a", BAD)
    verdicts(service, 1)
    service.verdicts()  # the second question is put
    service.forget("two")
    service.ask("three", "a", GOOD)
    assert verdicts(service, 1) == [Verdict("three", None)]


def test_a_runner_that_dies_is_counted_and_replaced(service: GrammarService[str], control: ControlPage) -> None:
    service.ask("one", "a", GOOD)
    verdicts(service, 1)
    children()[0].kill()
    deadline = Deadline.after(PATIENCE_S)
    while service.runners[0].num_lost == 0:
        assert not deadline.expired()
        service.verdicts()
        time.sleep(0.002)
    epoch = service.reserve_epochs(5)
    seq = control.submit(DecodeRequest((1,), 5, mask_epoch=epoch))
    service.runners[0].run(seq, epoch, GOOD)
    assert mask_of(control, epoch) == {ord("a"), ord("b")}


def follow(service: GrammarService[str], control: ControlPage) -> tuple[int, int]:
    """Start a request and see its first mask. Returns its number and the mask's epoch."""
    service.ask("one", "a", GOOD)
    verdicts(service, 1)
    epoch = service.reserve_epochs(5)
    seq = control.submit(DecodeRequest((1,), 5, mask_epoch=epoch))
    service.runners[0].run(seq, epoch, GOOD)
    service.runners[0].wants(epoch)
    assert mask_of(control, epoch) == {ord("a"), ord("b")}
    return seq, epoch


def test_a_stopped_runner_is_replaced_once_its_mask_is_late(
    service: GrammarService[str], control: ControlPage, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    seq, epoch = follow(service, control)
    runner = children()[0]
    runner.suspend()
    clock.skipped_s += 10
    assert (service.verdicts(), service.runners[0].num_lost) == ([], 0), "the mask that is needed is there"
    control.ring.put(seq, 0, ord("a"), 1, None, Finish.NONE)
    service.runners[0].wants(epoch + 1)
    assert (service.verdicts(), service.runners[0].num_lost) == ([], 0)
    clock.skipped_s += SILENT_S
    assert (service.verdicts(), service.runners[0].num_lost) == ([], 1)
    assert service.runners[0].loss.startswith("was silent for 1.0")
    assert f"grammar process {runner.pid} was silent" in capfd.readouterr().err
    assert runner not in children()
    follow(service, control)


def test_a_runner_that_is_not_stopped_has_time_to_compile_but_not_to_hang(
    service: GrammarService[str], control: ControlPage, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(service_module.GrammarProcess, "is_stopped", lambda _self: False)  # it hangs where it is
    seq, epoch = follow(service, control)
    children()[0].suspend()
    control.ring.put(seq, 0, ord("a"), 1, None, Finish.NONE)
    service.runners[0].wants(epoch + 1)
    for skipped_s, num_lost in ((0.9 * SILENT_S, 0), (0.2 * SILENT_S, 1)):
        clock.skipped_s += skipped_s
        assert (service.verdicts(), service.runners[0].num_lost) == ([], num_lost)
    service.runners[0].wants(None)  # the request is over
    service.ask("two", "a", GOOD)
    verdicts(service, 1)
    epoch = service.reserve_epochs(5)
    children()[1].suspend()  # the new runner: the checker is older
    service.runners[0].run(control.submit(DecodeRequest((1,), 5, mask_epoch=epoch)), epoch, GOOD)
    service.runners[0].wants(epoch)
    for skipped_s, num_lost in ((0.9 * CHECK_TIMEOUT_S, 1), (0.2 * CHECK_TIMEOUT_S, 2)):
        clock.skipped_s += skipped_s
        assert (service.verdicts(), service.runners[0].num_lost) == ([], num_lost)


def test_a_runner_that_was_stopped_while_it_had_nothing_to_do_is_replaced_at_once(
    service: GrammarService[str], control: ControlPage
) -> None:  # fmt: skip
    service.ask("one", "a", GOOD)
    verdicts(service, 1)
    runner = children()[0]
    runner.suspend()
    while runner.status() != psutil.STATUS_STOPPED:
        pass
    epoch = service.reserve_epochs(5)
    service.runners[0].run(control.submit(DecodeRequest((1,), 5, mask_epoch=epoch)), epoch, GOOD)
    assert mask_of(control, epoch) == {ord("a"), ord("b")}
    assert (service.verdicts(), service.runners[0].num_lost) == ([], 0)


def test_an_engine_without_a_process_to_spare_refuses_and_goes_on(
    service: GrammarService[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def start(*, checks: bool) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(service, "_start", start)
        service.ask("one", "a", GOOD)
        ((asker, refusal, _),) = service.verdicts()
        assert asker == "one"
        assert refusal == (
            "regex cannot be checked now: the engine could start no process for it (Too many open files); try again later"
        )
        service.runners[0].run(1, 1, GOOD)
        assert (service.verdicts(), service.runners[0].num_lost) == ([], 1), "its request cannot go on"
        assert (service.verdicts(), service.runners[0].num_lost) == ([], 1)
    service.ask("two", "a", GOOD)
    assert verdicts(service, 1) == [Verdict("two", None)]
