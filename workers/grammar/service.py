"""The coordinator's end of structured output: asks whether a grammar can be used, and has masks made for the request that runs.

Nothing here waits. Clients take turns to have a grammar checked. A check that takes long is begun anew in a line of its own, and
one that takes too long costs its client a refusal; the runner, which works for the request that decodes, is not touched by it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

from kog_dist.records import dataclass
from kog_dist.rpc.messages import ErrorCode
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.rounds import Rounds
from kog_dist.system import killed_child, python_child
from kog_dist.system.stopped_child import STOPPED_S, StopWatch, is_stopped
from kog_dist.workers.grammar.checks import CHECK_TIMEOUT_S, LONG_S, MAX_PACKET_BYTES, SHORT_S, CheckEnd, check_message
from kog_dist.workers.grammar.compiler import Constraint
from kog_dist.workers.grammar.process import GrammarArgs, run_message

HUNG_S = CHECK_TIMEOUT_S + 1.0  # of the checker, which sees to that limit itself
START_TIMEOUT_S = 30.0  # of a process: reading a large vocabulary takes seconds
SLOW_S = 5.0  # a process that was started ahead and is not ready by then has no processor: a question starts another one
SILENT_S = STOPPED_S  # a request waits no longer for a mask, which takes milliseconds; the first is compiled before: above
_MOST_LOSSES = 1  # of the checker, with one question

Asker = TypeVar("Asker")


class Verdict(NamedTuple, Generic[Asker]):
    """Whether the grammar that `asker` waits for can be used: `refusal` says why not, None that it can; `code`: of a refusal."""

    asker: Asker
    refusal: str | None
    code: ErrorCode = ErrorCode.INVALID_CONSTRAINT


class GrammarProcess:
    """One child process and the socket to it. Never blocks."""

    def __init__(self, model: Path, control_fd: int, clock: Callable[[], float], *, checks: bool, is_ahead: bool = False) -> None:
        """The checker or the runner. `is_ahead`: before anybody needs it, so that it reads the vocabulary when nobody else wants
        the processor. Raises OSError if there is no process or no file to be had.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        text = GrammarArgs(str(model), control_fd, theirs.fileno(), os.getpid(), checks).to_json()
        ahead = python_child.command("kog_dist.workers.grammar.ahead", text)
        try:
            self._child = subprocess.Popen(
                ahead if is_ahead else python_child.command("kog_dist.workers.grammar.process", text),
                pass_fds=(control_fd, theirs.fileno()),
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = ours
        self.is_ready, self._is_ahead = False, is_ahead
        self.watch = StopWatch(self._child.pid, clock)
        self._begin_s = time.monotonic()

    def is_slow(self) -> bool:
        """Whether nobody has waited for it so far, and whoever does now should not."""
        return self._is_ahead and not self.is_ready and time.monotonic() - self._begin_s > SLOW_S

    def send(self, message: dict[str, object]) -> None:
        """Ask for something; the process takes one thing at a time. What a dead process is asked, nobody hears."""
        try:
            self.channel.send(msgpack.packb(message))
        except (BlockingIOError, ConnectionError):
            self._child.kill()  # it is dead, or does not read: `receive` says so next

    def receive(self) -> list[dict[str, object]] | None:
        """What it has answered; None if it has ended, or was not ready in time."""
        messages: list[dict[str, object]] = []
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
        """Whether it is stopped now."""
        return is_stopped(self.pid)

    def end(self) -> None:
        """Kill it and let go of it."""
        killed_child.kill(self._child)
        self.channel.close()


class MaskRunner:
    """The process that writes the masks of a decode slot, started when it is first needed.

    `num_lost`: a request that had its masks from a process that is lost cannot go on; the next one finds a new one. `loss`: what
    became of the last of them.
    """

    def __init__(self, slot: int, control: ControlPage, start: Callable[[], GrammarProcess], clock: Callable[[], float]) -> None:
        self.slot, self._control, self._start, self._clock = slot, control, start, clock
        self.process: GrammarProcess | None = None
        self.num_lost = 0
        self.loss = ""
        self._has_none = False  # for the request that wants one: `hear` counts it as lost
        self._first_epoch = 0  # of the request that `run` was told of last
        self._wanted_epoch: int | None = None
        self._wanted_s = 0.0

    @property
    def is_up(self) -> bool:
        """Whether there is a process."""
        return self.process is not None

    def wants(self, epoch: int | None) -> None:
        """Which mask rank 0 needs next, None if the slot's request has no grammar. A process that does not write it is lost."""
        if epoch != self._wanted_epoch:
            self._wanted_epoch, self._wanted_s = epoch, self._clock()

    def hear(self) -> None:
        """Let go of a process that has ended, or does not write what is needed."""
        if self._has_none:
            self._has_none = False
            self.num_lost, self.loss = self.num_lost + 1, "could not be started"
        if self.process is None:
            return
        if self.process.receive() is None:
            self.loss = "ended"
        elif self._owes_mask() or (self._wanted_epoch is None and self.process.watch.is_lost()):
            silent_s = STOPPED_S if self._wanted_epoch is None else self._clock() - self._wanted_s
            self.loss = f"was silent for {silent_s:.2f} s"
            print(f"grammar process {self.process.pid} {self.loss} and is replaced", file=sys.stderr, flush=True)
        else:
            return
        self.end()
        self.num_lost += 1

    def _owes_mask(self) -> bool:
        """Whether a mask that is needed has not come for too long."""
        assert self.process is not None
        epoch, now_s = self._wanted_epoch, self._clock()
        if epoch is None or now_s - self._wanted_s <= SILENT_S:
            return False
        if self._control.mask_slots[self.slot].get(epoch) is not None:
            return False
        if self.process.is_stopped():
            return True
        if not self.process.is_ready:  # that has a limit of its own
            self._wanted_s = now_s
        return now_s - self._wanted_s > (CHECK_TIMEOUT_S if epoch == self._first_epoch else SILENT_S)

    def run(self, seq: int, mask_epoch: int, constraint: Constraint, *, drafts: bool = False) -> None:
        """Have the masks of request `seq` made, which the ranks have been given; with `drafts` also what is forced."""
        self._first_epoch = mask_epoch
        if self.process is not None and self.process.is_stopped():
            self.end()
        try:
            self.process = self.process or self._start()
        except OSError:
            self._has_none = True
            return
        self.process.send(run_message(seq, self.slot, mask_epoch, constraint, drafts=drafts))

    def end(self) -> None:
        """End the process, if there is one; the next request that needs it has a new one."""
        if self.process is not None:
            self.process.end()
        self.process = None


@dataclass(eq=False)
class _Question(Generic[Asker]):
    asker: Asker
    client: Hashable
    constraint: Constraint
    number: int = 0  # under which the checker has it
    asked_s: float = 0.0
    is_wanted: bool = True
    num_losses: int = 0  # of the checker, while it had it


class _Desk(Generic[Asker]):
    """Questions that may take the checker `cpu_s` each: one is there, the others wait, clients in turns."""

    def __init__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s
        self.waiting = Rounds[_Question[Asker]]()
        self.asked: _Question[Asker] | None = None

    def __iter__(self) -> Iterator[_Question[Asker]]:
        """Those to which somebody wants an answer."""
        return iter([*([self.asked] if self.asked is not None and self.asked.is_wanted else []), *self.waiting])

    def forget(self, question: _Question[Asker]) -> None:
        """Nobody wants to know any more. What the checker has it goes on with, and takes nothing else meanwhile."""
        question.is_wanted = False
        self.waiting.remove(question.client, question)


class GrammarService(Generic[Asker]):
    """Grammar processes, started when they are first needed: a checker, and `runners`, one for each decode slot. An asker is
    whatever wants to know (a request's stream).
    """

    def __init__(self, model: Path, control: ControlPage, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._control, self._clock = model, control, clock
        self._checker: GrammarProcess | None = None
        self.runners = [MaskRunner(slot, control, lambda: self._start(checks=False), clock) for slot in range(len(control.rings))]
        self._short, self._long = _Desk[Asker](SHORT_S), _Desk[Asker](LONG_S)
        self._number = 0  # of the latest question
        self._next_epoch = 1
        self._num_ahead = 0  # processes that `start_ahead` has seen to

    @property
    def askers(self) -> list[Asker]:
        """Those who wait for a verdict, in the order of their turns."""
        return [question.asker for desk in (self._short, self._long) for question in desk]

    @property
    def fds(self) -> list[int]:
        """What becomes readable when a process has something to say."""
        return [process.channel.fileno() for process in self._processes()]

    def _processes(self) -> Iterator[GrammarProcess]:
        yield from (process for process in (self._checker, *(one.process for one in self.runners)) if process is not None)

    def ask(self, asker: Asker, client: Hashable, constraint: Constraint) -> None:
        """Have a grammar checked in a turn of this client; `verdicts` will name the asker."""
        self._short.waiting.add(client, _Question(asker, client, constraint))

    def forget(self, asker: Asker) -> None:
        """The asker does not want to know any more."""
        for desk in (self._short, self._long):
            for question in desk:
                if question.asker is asker:
                    desk.forget(question)

    def start_ahead(self) -> bool:
        """Start what the first grammar would wait for, one process after the other. False: there is nothing left to do."""
        if self._num_ahead == 0:
            self._checker = self._checker or self._started_ahead(checks=True)
        elif self._checker is not None and self._checker.is_ready:
            first = self.runners[0]
            first.process = first.process or self._started_ahead(checks=False)
        elif self._checker is not None:
            return True  # it is being prepared
        self._num_ahead += 1
        return self._num_ahead < 2 and self._checker is not None

    def _started_ahead(self, *, checks: bool) -> GrammarProcess | None:
        try:
            return self._start(checks=checks, is_ahead=True)
        except OSError:  # whoever needs it tries again, and says so
            return None

    def verdicts(self) -> list[Verdict[Asker]]:
        """What was found out since the last call; also keeps the processes going while they are needed."""
        for runner in self.runners:
            runner.hear()
        found, first = self._hear_checker(), self.runners[0]
        desks = [desk for desk in (self._short, self._long) if desk.asked is None and len(desk.waiting)]
        if desks and not found:
            self._end_slow()
            try:
                first.process = first.process or self._start(checks=False)
                self._checker = self._checker or self._start(checks=True)
            except OSError as error:
                question = desks[0].waiting.pop()
                return [_not_now(question, f"the engine could start no process for it ({error.strerror})")]
            if self._checker.is_ready and first.process.is_ready:
                for desk in desks:
                    self._put(desk, self._checker)
        return found

    def _end_slow(self) -> None:
        """A question is worth the time of others."""
        if self._checker is not None and self._checker.is_slow():
            self._checker.end()
            self._checker = None
        first = self.runners[0]
        if first.process is not None and first.process.is_slow():
            first.end()

    def _put(self, desk: _Desk[Asker], checker: GrammarProcess) -> None:
        """Ask the checker what is next."""
        self._number += 1
        desk.asked = question = desk.waiting.pop()
        question.number, question.asked_s = self._number, self._clock()
        checker.send(check_message(question.number, question.constraint, desk.cpu_s))

    def _hear_checker(self) -> list[Verdict[Asker]]:
        if self._checker is None:
            return []
        answers = self._checker.receive()
        if answers is None:
            return self._lost("ended")
        if self._checker.watch.is_lost():
            print(f"grammar process {self._checker.pid} was stopped and is replaced", file=sys.stderr, flush=True)
            return self._lost(f"was stopped for {STOPPED_S:g} s")
        found = [self._heard(desk, answer) for answer in answers for desk in (self._short, self._long)]
        asked_s = [desk.asked.asked_s for desk in (self._short, self._long) if desk.asked is not None]
        if asked_s and self._clock() - min(asked_s) > HUNG_S:
            found += self._lost(f"has not answered for {HUNG_S:g} s")
        return [verdict for verdict in found if verdict is not None]

    def _heard(self, desk: _Desk[Asker], answer: dict[str, Any]) -> Verdict[Asker] | None:
        """What an answer means for a desk, if it is about what was asked there."""
        question = desk.asked
        if question is None or answer.get("checked") != question.number:
            return None
        desk.asked = None
        if not question.is_wanted:
            return None
        if answer["end"] == CheckEnd.LATE and desk is self._short:
            self._long.waiting.add(question.client, question)
            return None
        if answer["end"] == CheckEnd.LOST:
            return _not_now(question, answer["reason"])
        return Verdict(question.asker, answer["reason"])

    def reserve_epochs(self, max_tokens: int) -> int:
        """Epoch of the first of `max_tokens` masks that no other request uses."""
        first = self._next_epoch
        self._next_epoch += max_tokens
        return first

    def close(self) -> None:
        """End the processes."""
        if self._checker is not None:
            self._checker.end()
        self._checker = None
        for runner in self.runners:
            runner.end()

    def _start(self, *, checks: bool, is_ahead: bool = False) -> GrammarProcess:
        return GrammarProcess(self._model, self._control.fd, self._clock, checks=checks, is_ahead=is_ahead)

    def _lost(self, how: str) -> list[Verdict[Asker]]:
        """The checker is of no use any more: another one is asked the same, once. One that never starts is asked by nobody."""
        if self._checker is None:
            return []
        self._checker.end()
        was_ready, self._checker = self._checker.is_ready, None
        found = []
        for desk in (self._short, self._long):
            question, desk.asked = desk.asked, None
            if question is None and not was_ready and len(desk.waiting):
                question = desk.waiting.pop()
            if question is None or not question.is_wanted:
                continue
            question.num_losses += 1
            if question.num_losses <= _MOST_LOSSES:
                desk.waiting.add_first(question.client, question)
            else:
                found.append(_not_now(question, f"the process that checks it {how}"))
        return found


def _not_now(question: _Question[Asker], reason: str) -> Verdict[Asker]:
    """It is not the client's fault."""
    message = f"{question.constraint.kind} cannot be checked now: {reason}; try again later"
    return Verdict(question.asker, message, ErrorCode.CONSTRAINT_FAILED)
