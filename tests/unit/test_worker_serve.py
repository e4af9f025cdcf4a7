"""The loop of a rank between requests."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator

import pytest

from kog_dist.decode.request import DecodeRequest, KvCopy, KvCopyKind, KvUse
from kog_dist.errors import AbortedError, ConfigError, DeviceError, LaunchError
from kog_dist.runtime.abi import WaitOp, WaitRecord
from kog_dist.runtime.control import AbortCause, ControlPage, RankState
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.wait import FutexWord
from kog_dist.workers import worker
from kog_dist.workers.intake import Intake
from kog_dist.workers.worker import live, serve


class StubEngine:
    """Answers nothing; stops the engine behind the first request."""

    def __init__(self, control: ControlPage, rouse: Callable[[], None] | None) -> None:
        self.control, self.rouse = control, rouse
        self.prompts: list[list[int]] = []
        self.copied: list[KvUse] = []

    def startup(self) -> None:
        """Nothing to do."""

    def run(self, seq: int, request: DecodeRequest, intake: Intake | None = None) -> Finish:
        self.prompts.append(list(request.prompt))
        self.control.set_abort(AbortCause.SHUTDOWN)
        return Finish.LENGTH

    def copy_blocks(self, kv: KvUse) -> None:
        self.copied.append(kv)

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPage]:
    """Idle ranks are woken twice: for nothing, then by a request."""
    page = ControlPage.create(1, 16)
    wakes = iter((False, True))

    def wait(word: FutexWord, expected: int, timeout_s: float) -> bool:
        if next(wakes):
            page.submit(DecodeRequest((1, 2), 3))
        return True

    monkeypatch.setattr(FutexWord, "wait", wait)
    yield page
    page.close()


def test_an_engine_that_can_be_roused_is_roused_between_requests(control: ControlPage) -> None:
    roused: list[int] = []
    engine = StubEngine(control, lambda: roused.append(control.doorbell()))
    with pytest.raises(AbortedError):
        serve(engine, control, 0)
    assert control.heeds_rousing()
    assert roused == [0]
    assert engine.prompts == [[1, 2]]
    assert all(control.stages_ns(0)[: RankStage.UPLOADED]), "seen and read are stamped"


def test_copies_without_an_answer_are_made_and_done(monkeypatch: pytest.MonkeyPatch) -> None:
    control, kept = ControlPage.create(1, 16), KvUse(0, 0, 0, (KvCopy(KvCopyKind.SAVE, 3, 0), KvCopy(KvCopyKind.MOVE, 3, 5)))
    monkeypatch.setattr(FutexWord, "wait", lambda *_: True)
    control.submit(DecodeRequest((0,), 1, kv=kept, only_copies=True))
    control.submit(DecodeRequest((1, 2), 3))
    engine = StubEngine(control, None)
    with pytest.raises(AbortedError):
        serve(engine, control, 0)
    assert engine.copied == [kept]
    assert engine.prompts == [[1, 2]]
    assert control.all_read(2)
    control.close()


def test_an_engine_that_shares_its_core_is_not(control: ControlPage) -> None:
    engine = StubEngine(control, None)
    with pytest.raises(AbortedError):
        serve(engine, control, 0)
    assert not control.heeds_rousing()
    assert engine.prompts == [[1, 2]]


class FailingEngine(StubEngine):
    """Raises in the middle of its start. `seen`: what the control page said when it was closed."""

    def __init__(self, control: ControlPage, error: Exception) -> None:
        super().__init__(control, None)
        self.error, self.seen = error, list[tuple[RankState, bool]]()

    def startup(self) -> None:
        raise self.error

    def close(self) -> None:
        self.seen.append((self.control.state(0), bool(self.control.abort_requests())))


RECORD = WaitRecord(0, WaitOp.COLLECT, 1, 0, 1, 8, 7, 6, 10**9)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (DeviceError(RECORD), (RankState.FAILED, True)),
        (LaunchError("no room"), (RankState.FAILED, False)),
        (MemoryError(), (RankState.FAILED, False)),
        (AbortedError("the engine is being stopped"), (RankState.STARTING, False)),
    ],
)
def test_a_rank_says_that_it_failed_before_it_gives_anything_back(error: Exception, seen: tuple[RankState, bool]) -> None:
    page = ControlPage.create(1, 16)
    engine = FailingEngine(page, error)
    with pytest.raises(type(error)):
        live(lambda: engine, page, 0)
    assert engine.seen == [seen]
    page.close()


def test_an_engine_that_cannot_be_made_is_a_failure() -> None:
    page = ControlPage.create(1, 16)

    def make() -> StubEngine:
        raise ConfigError("there is no engine for device 'tpu'")

    with pytest.raises(ConfigError):
        live(make, page, 0)
    assert page.state(0) is RankState.FAILED
    page.close()


def test_garbage_is_looked_for_again_behind_imports_that_fail() -> None:
    was_on = list[bool]()

    def imported() -> None:
        with worker._importing():
            was_on.append(gc.isenabled())
            importlib.import_module("kog_dist.no_such_module")

    with pytest.raises(ModuleNotFoundError):
        imported()
    assert was_on == [False]
    assert gc.isenabled()
