"""The checker's work: each constraint is compiled in a child of its own, forked when the vocabulary is read, which may die of it.

So one that takes too long costs nobody but its client: the next one finds the checker ready.
"""

from __future__ import annotations

import enum
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import Any, Final, NoReturn

import msgpack  # type: ignore[import-untyped]

from kog_dist.records import dataclass
from kog_dist.system.parent_death import die_with_parent
from kog_dist.system.stopped_child import LOOK_EVERY_S, StopWatch
from kog_dist.workers.grammar.compiler import Constraint, GrammarCompiler

SHORT_S, LONG_S = 0.1, 1.0  # of processor time. Nearly all take less than the first; those of 64 KiB without a bomb 0.8 s at most
CHECK_TIMEOUT_S: Final = 3.0  # of any, on a machine whose processors are taken
MAX_PACKET_BYTES: Final = 1 << 17  # a schema of the longest kind, and the rest of its message
_OUT_OF_MEMORY: Final = 70  # exit code
_MOST_TRIES: Final = 2  # of a child that somebody else ended or stopped


class CheckEnd(enum.StrEnum):
    """How a check ended."""

    KNOWN = "known"  # it can be used, or there is a reason why not
    LATE = "late"  # there is none but that it would have taken longer
    LOST = "lost"  # nothing was found out


def check_message(number: int, constraint: Constraint, cpu_s: float) -> dict[str, object]:
    """Asks the checker, which may use `cpu_s`; it answers `{"checked": number, "end": CheckEnd, "reason": text or None}`.

    The reason is what its client is told; of a check that was lost, why it was.
    """
    return {"check": number, **constraint.as_message(), "cpu_s": cpu_s}


@dataclass
class _Checker:
    """One check. `message`: what was asked."""

    message: dict[str, object]
    pid: int
    pidfd: int
    watch: StopWatch
    num_tries: int
    until_s: float
    is_late: bool = False


class Checks:
    """Serves the coordinator's questions, all of them at once: it asks no more than a short one and a long one."""

    def __init__(self, channel: socket.socket, compiler: GrammarCompiler) -> None:
        self._channel, self._compiler = channel, compiler
        self._children: dict[int, _Checker] = {}  # by pidfd

    def serve(self) -> None:
        """Until the coordinator closes its end."""
        gc.freeze()  # the children share what is there
        while self.turn():
            pass

    def turn(self) -> bool:
        """Wait until there is something to do, and do it; False once the coordinator has closed its end."""
        timeout_s = LOOK_EVERY_S if self._children else None
        watched: list[socket.socket | int] = [self._channel, *self._children]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        for child in list(self._children.values()):
            if child.pidfd in ready:
                self._ended(child)
            elif time.monotonic() > child.until_s and not child.watch.is_stopped:
                child.is_late = True
                os.kill(child.pid, signal.SIGKILL)
            elif child.watch.is_lost():
                os.kill(child.pid, signal.SIGKILL)
        packet = self._channel.recv(MAX_PACKET_BYTES) if self._channel in ready else None
        if packet:
            self._begin(msgpack.unpackb(packet), num_tries=1)
        return packet != b""

    def _begin(self, message: dict[str, Any], num_tries: int) -> None:
        parent_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(message, CheckEnd.LOST, f"the engine could start no process for it ({error.strerror})")
            return
        if pid == 0:
            self._check(message, parent_pid)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = _Checker(message, pid, pidfd, StopWatch(pid), num_tries, time.monotonic() + CHECK_TIMEOUT_S)

    def _check(self, message: dict[str, Any], parent_pid: int) -> NoReturn:
        """The child's life."""
        code = 1
        try:
            if die_with_parent(parent_pid):
                signal.setitimer(signal.ITIMER_PROF, message["cpu_s"])  # SIGPROF ends this process
                reason = self._compiler.why_not(Constraint.of_message(message))
                signal.setitimer(signal.ITIMER_PROF, 0)
                self._answer(message, CheckEnd.KNOWN, reason)
                code = 0
        except MemoryError:
            code = _OUT_OF_MEMORY
        except BaseException as error:  # a defect; its traceback might have the client's text
            print(f"grammar process: {type(error).__name__} in a check", file=sys.stderr, flush=True)
        finally:
            os._exit(code)

    def _ended(self, child: _Checker) -> None:
        """It has answered, or its end is the answer."""
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        del self._children[child.pidfd]
        code, message = os.waitstatus_to_exitcode(status), child.message
        kind = message["kind"]
        if code == -signal.SIGPROF:
            reason = f"{kind} cannot be used: to compile it takes more than {message['cpu_s']:g} s of processor time; simplify it"
            self._answer(message, CheckEnd.LATE, reason)
        elif child.is_late:
            reason = f"{kind} cannot be used: it was not compiled within {CHECK_TIMEOUT_S:g} s"
            self._answer(message, CheckEnd.LATE, reason)
        elif code in (-signal.SIGKILL, -signal.SIGTERM) and child.num_tries < _MOST_TRIES:
            self._begin(message, child.num_tries + 1)
        elif code in (-signal.SIGKILL, -signal.SIGTERM):
            self._answer(message, CheckEnd.LOST, f"its process was ended {_MOST_TRIES} times")
        elif code:
            why = "it needs too much memory" if code in (_OUT_OF_MEMORY, -signal.SIGABRT) else f"its process ended with {code}"
            self._answer(message, CheckEnd.KNOWN, f"{kind} cannot be used: {why}; simplify it")

    def _answer(self, message: dict[str, object], end: CheckEnd, reason: str | None) -> None:
        self._channel.send(msgpack.packb({"checked": message["check"], "end": end.value, "reason": reason}))
