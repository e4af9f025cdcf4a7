"""The coordinator's end of structured output: asks whether a grammar can be used, and has masks made for the request that runs.

Nothing here waits. A check that takes too long costs the client a refusal and the checker its life; the runner, which works for
the request that decodes, is not touched by it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

from kog_dist.errors import RequestError
from kog_dist.rpc.messages import ErrorCode
from kog_dist.runtime import python_child
from kog_dist.runtime.control import ControlPage
from kog_dist.workers.grammar.compiler import Constraint
from kog_dist.workers.grammar.process import MAX_PACKET_BYTES, GrammarArgs, check_message, run_message

CHECK_TIMEOUT_S = 3.0  # of one grammar; hard ones take about 1 s
START_TIMEOUT_S = 30.0  # of a process: reading a large vocabulary takes seconds
END_TIMEOUT_S = 1.0
SILENT_S = 1.0  # a request waits no longer for a mask, which takes some milliseconds; the first one is compiled before: above
MAX_ASKERS = 16

Asker = TypeVar("Asker")


class Verdict(NamedTuple, Generic[Asker]):
    """Whether the grammar that `asker` waits for can be used: `refusal` says why not, None that it can."""

    asker: Asker
    refusal: str | None


class GrammarProcess:
    """One child process and the socket to it. Never blocks but to end it."""

    def __init__(self, model: Path, control_fd: int) -> None:
        """Raises OSError if there is no process or no file to be had."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments = GrammarArgs(str(model), control_fd, theirs.fileno(), os.getpid())
        try:
            self._child = subprocess.Popen(
                python_child.command("kog_dist.workers.grammar.process", arguments.to_json()),
                pass_fds=(control_fd, theirs.fileno()), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = ours
        self.is_ready = False
        self._begin_s = time.monotonic()

    def send(self, message: dict[str, Any]) -> None:
        """Ask for something; the process takes one thing at a time. What a dead process is asked, nobody hears."""
        try:
            self.channel.send(msgpack.packb(message))
        except (BlockingIOError, ConnectionError):
            self._child.kill()  # it is dead, or does not read: `receive` says so next

    def receive(self) -> list[dict[str, Any]] | None:
        """What it has answered; None if it has ended, or was not ready in time."""
        messages: list[dict[str, Any]] = []
        try:
            while packet := self.channel.recv(MAX_PACKET_BYTES):
                messages.append(msgpack.unpackb(packet))
                self.is_ready = True  # its first word
            return messages or None
        except BlockingIOError:
            late = not self.is_ready and time.monotonic() - self._begin_s > START_TIMEOUT_S
            return None if late else messages
        except ConnectionError:
            return None

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP), and nobody has continued it."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it has ended
            return False

    def end(self) -> None:
        """Kill it and let go of it."""
        self._child.kill()
        self._child.wait(END_TIMEOUT_S)
        self.channel.close()


@dataclass
class _Pending(Generic[Asker]):
    asker: Asker
    constraint: Constraint


class GrammarService(Generic[Asker]):
    """Two grammar processes, started when they are first needed. An asker is whatever wants to know (a request's stream).

    `num_runners_lost`: a request that had its masks from a runner that is lost cannot go on; the next one finds a new runner.
    `loss`: what became of the last of them.
    """

    def __init__(self, model: Path, control: ControlPage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._control, self._clock = model, control, clock
        self._checker: GrammarProcess | None = None
        self._runner: GrammarProcess | None = None
        self._pending: deque[_Pending[Asker]] = deque()
        self._asked_s: float | None = None  # when the first of them was put to the checker
        self._number = 0  # of that question
        self._next_epoch = 1
        self._has_no_runner = False  # for the request that wants one: `verdicts` counts it as lost
        self.num_runners_lost = 0
        self.loss = ""
        self._first_epoch = 0  # of the request that `run` was told of last
        self._wanted_epoch: int | None = None
        self._wanted_s = 0.0

    @property
    def askers(self) -> list[Asker]:
        """Those who wait for a verdict, in their order."""
        return [pending.asker for pending in self._pending]

    @property
    def fds(self) -> list[int]:
        """What becomes readable when a process has something to say."""
        return [process.channel.fileno() for process in (self._checker, self._runner) if process is not None]

    def ask(self, asker: Asker, constraint: Constraint) -> None:
        """Have a grammar checked; `verdicts` will name the asker. Raises RequestError when too many wait for that."""
        if len(self._pending) >= MAX_ASKERS:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{MAX_ASKERS} grammars are waiting to be checked already; try again later")
        self._pending.append(_Pending(asker, constraint))

    def forget(self, asker: Asker) -> None:
        """The asker does not want to know any more. A question that was put already is answered into the void."""
        for place, pending in enumerate(self._pending):
            if pending.asker is asker:
                if place == 0:
                    self._asked_s = None
                del self._pending[place]
                return

    def verdicts(self) -> list[Verdict[Asker]]:
        """What was found out since the last call; also keeps the processes going while they are needed."""
        self._hear_runner()
        found = self._hear_checker()
        if self._pending and not found:
            try:
                self._runner = self._runner or self._start()
                self._checker = self._checker or self._start()
            except OSError as error:
                return [self._answered(_no_process(self._pending[0].constraint, error))]
            if self._asked_s is None and self._checker.is_ready and self._runner.is_ready:
                self._number += 1
                self._asked_s = self._clock()
                self._checker.send(check_message(self._number, self._pending[0].constraint))
        return found

    def wants(self, epoch: int | None) -> None:
        """Which mask rank 0 needs next, None if the running request has no grammar. A runner that does not write it is lost."""
        if epoch != self._wanted_epoch:
            self._wanted_epoch, self._wanted_s = epoch, self._clock()

    def _hear_runner(self) -> None:
        if self._has_no_runner:
            self._has_no_runner = False
            self.num_runners_lost, self.loss = self.num_runners_lost + 1, "could not be started"
        if self._runner is None:
            return
        if self._runner.receive() is None:
            self.loss = "ended"
        elif self._owes_mask():
            self.loss = f"was silent for {self._clock() - self._wanted_s:.2f} s"
            print(f"grammar process {self._runner.pid} {self.loss} and is replaced", file=sys.stderr, flush=True)
        else:
            return
        self._runner.end()
        self._runner = None
        self.num_runners_lost += 1

    def _owes_mask(self) -> bool:
        """Whether a mask that is needed has not come for too long."""
        assert self._runner is not None
        epoch, now_s = self._wanted_epoch, self._clock()
        if epoch is None or now_s - self._wanted_s <= SILENT_S or self._control.masks.get(epoch) is not None:
            return False
        if self._runner.is_stopped():
            return True
        if not self._runner.is_ready:  # that has a limit of its own
            self._wanted_s = now_s
        return now_s - self._wanted_s > (CHECK_TIMEOUT_S if epoch == self._first_epoch else SILENT_S)

    def _hear_checker(self) -> list[Verdict[Asker]]:
        if self._checker is None:
            return []
        answers = self._checker.receive()
        if answers is None:
            return self._lost("its process ended")
        if self._asked_s is not None and self._clock() - self._asked_s > CHECK_TIMEOUT_S:
            return self._lost(f"it was not compiled within {CHECK_TIMEOUT_S:g} s")
        is_wanted = self._asked_s is not None
        return [self._answered(answer["error"]) for answer in answers if is_wanted and answer.get("checked") == self._number]

    def reserve_epochs(self, max_tokens: int) -> int:
        """Epoch of the first of `max_tokens` masks that no other request uses."""
        first = self._next_epoch
        self._next_epoch += max_tokens
        return first

    def run(self, seq: int, mask_epoch: int, constraint: Constraint) -> None:
        """Have the masks of request `seq` made, which the ranks have been given."""
        self._first_epoch = mask_epoch
        if self._runner is not None and self._runner.is_stopped():
            self._runner.end()
            self._runner = None
        try:
            self._runner = self._runner or self._start()
        except OSError:
            self._has_no_runner = True
            return
        self._runner.send(run_message(seq, mask_epoch, constraint))

    def close(self) -> None:
        """End the processes."""
        for process in (self._checker, self._runner):
            if process is not None:
                process.end()
        self._checker = self._runner = None

    def _start(self) -> GrammarProcess:
        return GrammarProcess(self._model, self._control.fd)

    def _answered(self, error: str | None) -> Verdict[Asker]:
        self._asked_s = None
        return Verdict(self._pending.popleft().asker, error)

    def _lost(self, reason: str) -> list[Verdict[Asker]]:
        """The checker is of no use any more: the grammar that it had is refused, or the first one if it never started."""
        assert self._checker is not None
        was_ready = self._checker.is_ready
        self._checker.end()
        self._checker = None
        if self._asked_s is None and was_ready:
            return []
        kind = self._pending[0].constraint.kind
        return [self._answered(f"{kind} cannot be used: {reason}")]


def _no_process(constraint: Constraint, error: OSError) -> str:
    return (
        f"{constraint.kind} cannot be checked now: the engine could start no process for it ({error.strerror}); try again later"
    )
