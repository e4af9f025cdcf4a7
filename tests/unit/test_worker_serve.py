"""The loop of a rank between requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kog_dist.control import AbortCause, ControlPage
from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.ring import Finish
from kog_dist.errors import AbortedError
from kog_dist.stages import RankStage
from kog_dist.wait import FutexWord
from kog_dist.workers.worker import serve


class StubEngine:
    """Answers nothing; stops the engine behind the first request."""

    def __init__(self, control: ControlPage, rouse: Callable[[], None] | None) -> None:
        self.control, self.rouse = control, rouse
        self.prompts: list[list[int]] = []

    def startup(self) -> None:
        """Nothing to do."""

    def run(self, seq: int, request: DecodeRequest) -> Finish:
        self.prompts.append(list(request.prompt))
        self.control.set_abort(AbortCause.SHUTDOWN)
        return Finish.LENGTH

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


def test_an_engine_that_shares_its_core_is_not(control: ControlPage) -> None:
    engine = StubEngine(control, None)
    with pytest.raises(AbortedError):
        serve(engine, control, 0)
    assert not control.heeds_rousing()
    assert engine.prompts == [[1, 2]]
