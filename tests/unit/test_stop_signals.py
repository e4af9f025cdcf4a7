"""Which signals stop a launcher, and that none is lost."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator

import pytest

from kog_dist.launch.signals import STOPPING, StopSignals


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN], ids=["plain", "all ignored by whoever started it"])
def begun_with(request: pytest.FixtureRequest) -> Iterator[signal.Handlers]:
    before = {signum: signal.signal(signum, request.param) for signum in STOPPING}
    yield request.param
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_signals_are_counted_and_end_a_wait(begun_with: signal.Handlers) -> None:
    with StopSignals() as signals:
        for count, signum in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 1):
            signal.raise_signal(signum)
            assert (signals.count, signals.last) == (count, signum)
            assert select.select([signals.wakeup_fd], [], [], 0)[0]
            signals.clear_wakeup()
            assert not select.select([signals.wakeup_fd], [], [], 0)[0]
    assert [signal.getsignal(signum) for signum in STOPPING] == [begun_with] * len(STOPPING)


def test_under_nohup_the_end_of_the_terminal_stops_nothing(begun_with: signal.Handlers) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        assert signals.count == (begun_with is not signal.SIG_IGN)
