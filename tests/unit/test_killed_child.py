"""Whoever kills a child does not wait for its end."""

from __future__ import annotations

import subprocess
import threading
from typing import Any, cast

from kog_dist.runtime.wait import Deadline, WaitResult, wait
from kog_dist.system import killed_child


class Child:
    """One that ends when it gets a core."""

    pid = 7

    def __init__(self) -> None:
        self.was_killed, self.has_core, self.was_reaped = False, threading.Event(), threading.Event()

    def kill(self) -> None:
        self.was_killed = True

    def wait(self) -> int:
        self.has_core.wait()
        self.was_reaped.set()
        return -9


def test_a_child_that_gets_no_core_to_end_on_holds_nobody_up() -> None:
    child = Child()
    killed_child.kill(cast(Any, child))
    assert child.was_killed
    assert not child.was_reaped.is_set()
    child.has_core.set()
    assert child.was_reaped.wait(20)


def test_nothing_is_left_of_a_real_child() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        killed_child.kill(child)
        reaped = wait(lambda: child.returncode is not None, aborted=lambda: False, deadline=Deadline.after(20.0), sleep_s=0.01)
        assert reaped is WaitResult.OK
        assert child.returncode == -9
