"""One row of the table, played: bring an engine to the point, do the fault, and judge by client logs and exit codes alone."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import field

from kog_dist.bench.chaos.clients import Asking, ClientLog, Question
from kog_dist.bench.chaos.engine import CONSTRAINED, DRAINED, LONG, PROBE, SHORT, ChaosEngine
from kog_dist.bench.chaos.table import CLEAN_S, DRAIN_S, HELPERS, KILLED_S, READY_LIMIT_S, Cell, Harm, Layout, Promise
from kog_dist.bench.engine.injection import FaultKind, Injected, Point, fault_of_process, find
from kog_dist.bench.engine.session import TimedOut, until
from kog_dist.errors import KogError, LaunchError
from kog_dist.records import dataclass

Answers = Mapping[Question, tuple[list[int], str]]
_POINT_S, _PROGRESS_S, _READ_S, _HANG_S = 60.0, 5.0, 40.0, 25.0
_SETTLED_S, _MORE_EVENTS = 0.1, 5  # what comes later than that after a fault was not on its way before
_CUT = 5  # the launcher's code when the drain's time limit ended a request
_STARTS_AGAIN = "; starting generation "
_TOLD = frozenset({"draining", "drain_timeout", "shutdown", "status 503", "done"})  # ends of requests in a drain


@dataclass
class Played:
    """What came of a cell: seconds until clients had their error, nothing was left, all served again; and what was wrong."""

    cell: Cell
    error_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # what clients were told whose requests were lost
    clean_s: float | None = None
    ready_s: float | None = None
    violations: list[str] = field(default_factory=list)
    false_aborts: list[str] = field(default_factory=list)


class CellRun:
    """Plays one cell on an engine. `slack_s` is added to every limit: how late this process was, or a machine may be."""

    def __init__(self, engine: ChaosEngine, cell: Cell, answers: Answers, chance: random.Random, slack_s: float = 0.0) -> None:
        self.engine, self.cell, self.answers, self.chance = engine, cell, answers, chance
        self.promise: Promise = cell.promise
        self.slack_s = slack_s
        self.played = Played(cell)
        self._clients: list[Asking] = []

    def play(self) -> Played:
        """Bring it about and judge it. Raises KogError and TimedOut if the engine cannot be brought to the point."""
        if self.cell.point is not Point.LOAD:
            self.engine.wait_ready()
            self.engine.call_for(self.cell)
        pid = find(self.engine.session, self.cell.role)
        if self.cell.point is not Point.LOAD:
            self._bring_to_point()
        try:
            injected = fault_of_process(pid, self.cell.kind, self.chance)
        except LaunchError:
            if self.cell.point is not Point.DRAIN:
                raise
            now_s = time.monotonic()  # it had drained before its fault
            injected = Injected(pid, now_s, now_s)
        if self.promise.codes and not self._goes_on():
            self._judge_end(injected)
        else:
            self._judge_going_on(injected)
        self._check_answers()
        return self.played

    # ---- before the fault ----
    def _bring_to_point(self) -> None:
        point, is_http_first = self.cell.point, self.cell.role in ("gateway", "body process", "template process")
        if point is Point.IDLE:
            return
        is_asked_to_stop = (self.cell.role, self.cell.kind) == ("launcher", FaultKind.TERM)
        question = (
            DRAINED if is_asked_to_stop else {Point.PREFILL: self.chance.choice(LONG), Point.DRAIN: DRAINED}.get(point, SHORT)
        )
        together = self.engine.parallel - 1  # that decode already when the first one comes
        others = [self._other(number, is_http_first) for number in range(together)]
        first = self.engine.ask(
            CONSTRAINED if self.cell.needs_grammar and point is not Point.PREFILL else question, over_http=is_http_first
        )
        self._clients = [first, *others]
        if point is Point.PREFILL:
            until(
                lambda: first.log.ends or first.log.is_reading_prompt or (is_http_first and self.engine.runs()),
                _POINT_S,
                self._said,
            )
        else:
            wanted = self.chance.randrange(1, 40)
            until(lambda: first.log.ends or first.log.num_events >= wanted, _POINT_S, self._said)
        if not together and (self.engine.layout is Layout.REPLICAS or point is not Point.DRAIN):  # one engine would refuse it
            self._clients.append(self._other(0, is_http_first, waits=self.engine.layout is Layout.SINGLE))
        self._note_early_ends()
        if point is Point.DRAIN:
            self.engine.launcher.send_signal(signal.SIGTERM)
            until(lambda: "draining" in self.engine.session.output(stream="out"), _POINT_S, self._said)

    def _other(self, number: int, is_http_first: bool, *, waits: bool = False) -> Asking:
        """A client besides the first, whose answer has begun unless it `waits` for the first one's end."""
        other = self.engine.ask(DRAINED if self.cell.point is Point.DRAIN else SHORT, over_http=is_http_first == bool(number % 2))
        if not waits:
            until(lambda: other.log.ends or other.log.num_events, _POINT_S, self._said)
        return other

    def _said(self) -> str:
        return self.engine.session.output().strip()[-600:]

    def _note_early_ends(self) -> None:
        for client in self._clients:
            if client.log.is_harmed and client.log.ends:
                self.played.false_aborts.append(f"before any fault a request ended with {client.log.how}; {self._said()}")

    # ---- after it ----
    def _may_be_harmed(self, client: Asking) -> bool:
        match self.promise.harm:
            case Harm.ALL | Harm.ONE:
                return True
            case Harm.HTTP:
                return client.log.is_http
            case Harm.GRAMMAR:
                return client.log.question.regex is not None
        return False

    def _goes_on(self) -> bool:
        """Whether a launcher that may do either starts again what was lost."""
        if not self.promise.may_go_on:
            return False
        engine = self.engine
        with contextlib.suppress(TimedOut):  # then it does neither, which is found
            until(lambda: engine.launcher.poll() is not None or _STARTS_AGAIN in self._said(), _HANG_S, self._said)
        return engine.launcher.poll() is None and _STARTS_AGAIN in self._said()

    def _judge_end(self, injected: Injected) -> None:
        """The launcher ends: every client has its end in time, the code is right, and nothing is left."""
        asked_for = self.cell.point is Point.DRAIN or (self.cell.role, self.cell.kind) == ("launcher", FaultKind.TERM)
        for client in self._clients:
            client.join(_HANG_S)
            self._judge_client_end(client, injected, asked_for=asked_for)
        try:
            until(lambda: self.engine.launcher.poll() is not None, _HANG_S, lambda: "the launcher has not ended")
            until(lambda: not self.engine.session.leftovers(), _HANG_S, lambda: f"left: {self.engine.session.leftovers()}")
        except TimedOut as error:
            self._violate(f"{error}; {self._said()}")
            return
        self.played.clean_s = time.monotonic() - injected.begin_s
        code = self.engine.launcher.returncode
        is_cut = asked_for and any(client.log.how == "drain_timeout" for client in self._clients)
        if code not in self.promise.codes | ({_CUT} if is_cut else set()):
            self._violate(f"the launcher ended with {code}, not {sorted(self.promise.codes)}: {self._said()}")
        drain_s = DRAIN_S if asked_for else 0.0
        self._limit("nothing was left", self.played.clean_s, max(drain_s, self.promise.limit_s) + CLEAN_S)

    def _judge_client_end(self, client: Asking, injected: Injected, *, asked_for: bool) -> None:
        log = client.log
        if client.is_alive():
            self._violate(f"a client hung for {_HANG_S:g} s")
            return
        if not log.is_harmed:
            return
        end_s = log.ends[0][0] - injected.begin_s
        if asked_for and log.how in _TOLD:
            self._limit(f"a drain ended a request ({log.how})", end_s, DRAIN_S + max(self.promise.limit_s, KILLED_S))
            return
        if not self._may_be_harmed(client):
            self.played.false_aborts.append(f"a request ended with {log.how}; {self._said()}")
        elif log.how not in self.cell.ends:
            self._violate(f"a client was told {log.how}, not {sorted(self.cell.ends)}; {self._said()}")
        self.played.error_s.append(end_s)
        self.played.ends.append(log.how)
        self._limit(f"a client had its end ({log.how})", end_s, self.promise.limit_s)

    def _judge_going_on(self, injected: Injected) -> None:
        """The launcher goes on: clients go on or have their end in time, and new requests are answered."""
        time.sleep(_SETTLED_S)
        before = [client.log.num_events for client in self._clients]
        had_begun = [client.log.num_events > 0 or index == 0 for index, client in enumerate(self._clients)]
        limit_s = _READ_S if self.cell.point is Point.PREFILL else max(_PROGRESS_S, self.promise.limit_s + _PROGRESS_S)
        for client, count, begun in zip(self._clients, before, had_begun, strict=True):
            must_end = self._may_be_harmed(client) and self.promise.harm not in (Harm.ONE, Harm.GRAMMAR)
            if must_end:
                client.join(_HANG_S)
            elif begun:
                with contextlib.suppress(TimedOut):
                    until(lambda log=client.log, n=count: log.ends or log.num_events >= n + _MORE_EVENTS, limit_s, str)  # type: ignore[misc]
                if not client.log.ends and client.log.num_events < count + _MORE_EVENTS:
                    self._violate(f"a stream stood still for {limit_s:g} s; {self._said()}")
        self._let_go(injected)
        if self.cell.role in HELPERS:
            self._judge_helper()
        self._judge_ready(injected)

    def _judge_helper(self) -> None:
        """What needs the process is answered, and not late: it was replaced."""
        begin_s = time.monotonic()
        if self.engine.uses(self.cell.role):
            self._limit("a request that needs it was answered", time.monotonic() - begin_s, self.cell.answer_s)
        else:
            self._violate(f"a request that needs it was not answered; {self._said()}")

    def _let_go(self, injected: Injected) -> None:
        for client in self._clients:
            client.leave()
        harmed = 0
        for client in self._clients:
            client.join(_HANG_S)
            harmed += client.log.is_harmed
            self._judge_client_end(client, injected, asked_for=False)
        if self.promise.harm is Harm.ONE and harmed > max(1, len(self._clients) // 2):
            self.played.false_aborts.append(f"{harmed} requests were lost with one replica; {self._said()}")

    def _judge_ready(self, injected: Injected) -> None:
        engine, begin_s = self.engine, injected.begin_s
        try:
            if self.cell.point is Point.LOAD:
                engine.wait_ready()
            has_waited = (
                engine.launcher.poll() is None and not self._serves()
            )  # else the time until here was that of streams that went on
            until(lambda: engine.launcher.poll() is not None or self._serves(), READY_LIMIT_S + self.slack_s, self._said)
        except (TimedOut, KogError) as error:
            self._violate(f"not serving again: {error}")
            return
        finally:
            engine.resume(injected.pid)
        if engine.launcher.poll() is not None:
            kind = self.played.violations if self.promise.harm is not Harm.NONE else self.played.false_aborts
            kind.append(f"the launcher ended with {engine.launcher.returncode}: {self._said()}")
            return
        if self.promise.harm is not Harm.NONE or self.cell.role == "reaper":
            engine.restarts[engine.component(self.cell)] += 1
            self.played.ready_s = time.monotonic() - begin_s
            if has_waited and self.cell.point is not Point.LOAD:
                self._limit("all served again", self.played.ready_s, self.promise.limit_s + self.promise.ready_s)

    def _serves(self) -> bool:
        both = self.engine.answers(PROBE, over_http=False) and self.engine.answers(PROBE, over_http=True)
        if not both and self.promise.harm is Harm.NONE:
            self.played.false_aborts.append(f"a request after it was not answered; {self._said()}")
        return both and self.engine.is_whole()

    # ---- answers ----
    def _check_answers(self) -> None:
        """Every stream is a prefix of the right answer, whole if it says so, with exactly one end."""
        for client in self._clients:
            log = client.log
            token_ids, text = self.answers[log.question]
            is_whole = log.how == "done" and not log.has_left
            if not log.is_http and log.token_ids != (token_ids if is_whole else token_ids[: len(log.token_ids)]):
                self._violate("a stream has wrong tokens")
            if not _is_right(log, text, is_whole=is_whole):
                self._violate(f"a stream has wrong text: it ends with {log.text[-20:]!r} after {len(log.text)} characters")
            if len(log.ends) != 1 and not (log.has_left and len(log.ends) <= 1):
                self._violate(f"a stream has {len(log.ends)} ends: {log.ends}")
            self.played.violations += log.problems
            if log.how == "silence":
                self._violate("a client heard nothing until it gave up")

    def _limit(self, what: str, took_s: float, limit_s: float) -> None:
        if took_s > limit_s + self.slack_s:
            self._violate(f"{what} after {took_s:.2f} s, promised are {limit_s:.2f} s")

    def _violate(self, sentence: str) -> None:
        self.played.violations.append(sentence)


def _is_right(log: ClientLog, text: str, *, is_whole: bool) -> bool:
    """Whether this is the answer, or how it begins. What a cancel cuts may end in the middle of a character."""
    if is_whole or not log.has_left:
        return log.text == (text if is_whole else text[: len(log.text)])
    cut = log.text.removesuffix("\N{REPLACEMENT CHARACTER}")
    return text.startswith(log.text) or (len(cut) == len(log.text) - 1 and text.startswith(cut))
