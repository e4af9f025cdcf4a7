"""The clients of `kog-bench soak`: they ask, cancel, vanish, and write down what they were told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field

from kog_dist.bench.engine.soak_requests import Fate, SoakRequest
from kog_dist.errors import RequestFailed
from kog_dist.records import dataclass
from kog_dist.rpc.connection import Connection
from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Error,
    ErrorCode,
    FinishReason,
    PrefillProgress,
    StatusReport,
    Tokens,
)
from kog_dist.rpc.transport import Access

SILENCE_S = 30.0  # the engine speaks about every 250 ms; more is a stuck queue
_CONNECT_S = 20.0


@dataclass(slots=True)
class Record:
    """What a client was told of one request. `end` is None for a client that vanished."""

    planned: SoakRequest
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    digests: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[int, float]] = field(default_factory=list)  # alternatives: id, log-probability
    end: Done | Error | None = None
    num_places: int = 0  # different places in the queue that it was told
    is_accepted: bool = False
    has_acted: bool = False
    findings: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the answer came to its own end."""
        return isinstance(self.end, Done) and self.end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    def take(self, event: Accepted | Alive | PrefillProgress | Tokens | Done | Error) -> None:
        """Note an event; what must not be is noted as a finding."""
        if self.end is not None:
            raced = self.has_acted and isinstance(event, Error) and event.code is ErrorCode.UNKNOWN_REQUEST
            if not raced:  # it had ended before the cancel came
                self._find(f"{type(event).__name__} after the terminal event")
        elif isinstance(event, Done | Error):
            self.end = event
            self._check_end(event)
        elif isinstance(event, Tokens):
            if event.index != len(self.token_ids):
                self._find(f"tokens begin at {event.index}, {len(self.token_ids)} had come")
            self.token_ids += event.token_ids
            self.text += event.text
            self.digests += event.digests
            self.logprobs += event.logprobs
            self.top += zip(event.top_ids, event.top_logprobs, strict=True)
        elif isinstance(event, Accepted) and self.is_accepted:
            self._find("accepted twice")
        if not self.is_accepted and isinstance(event, PrefillProgress | Tokens | Done):
            self._find(f"{type(event).__name__} before it was accepted")
        self.is_accepted = self.is_accepted or isinstance(event, Accepted)
        self.num_places += isinstance(event, Accepted | Alive)

    def _check_end(self, end: Done | Error) -> None:
        fate, code = self.planned.fate, self.planned.code
        if isinstance(end, Error):
            allowed = {code, ErrorCode.QUEUE_FULL}
            if fate is Fate.DEADLINE:
                allowed.add(ErrorCode.DEADLINE_EXCEEDED)
            if end.code not in allowed:
                self._find(f"ended with {end.code}: {end.message}")
            if (end.code is ErrorCode.QUEUE_FULL) != (end.retry_after_s is not None):
                self._find(f"{end.code} with retry_after_s {end.retry_after_s}")
            return
        if end.num_generated_tokens != len(self.token_ids):
            self._find(f"done says {end.num_generated_tokens} tokens, {len(self.token_ids)} came")
        expected = {
            FinishReason.CANCELLED: fate is Fate.CANCEL,
            FinishReason.DEADLINE: fate is Fate.DEADLINE,
        }
        if fate is Fate.REFUSED or not expected.get(end.finish_reason, True):
            self._find(f"a request to {fate.value} ended with {end.finish_reason}")

    def _find(self, text: str) -> None:
        self.findings.append(f"{self.planned.message.request_id}: {text}")


class SoakClient:
    """One client; it gets a new connection after it has vanished."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._connection = self._connect()

    def _connect(self) -> Connection:
        connection = Connection(self._access)
        connection.wait_connected(time.monotonic() + _CONNECT_S, patient=False)
        return connection

    def ask(self, requests: Sequence[SoakRequest]) -> list[Record]:
        """Send requests all at once and follow them to their ends. Never raises for what an engine does: that is a finding."""
        records = {planned.message.request_id: Record(planned) for planned in requests}
        for planned in requests:
            self._connection.send(planned.message)
        try:
            self._follow(records)
        except RequestFailed as error:
            for record in records.values():
                if record.end is None:
                    record.findings.append(f"{record.planned.message.request_id}: {error}")
        return list(records.values())

    def _follow(self, records: dict[str, Record]) -> None:
        silent_at_s = time.monotonic() + SILENCE_S
        while any(record.end is None for record in records.values()):
            event = self._connection.receive(silent_at_s)
            if event is None:
                raise RequestFailed("stuck", f"the engine has said nothing for {SILENCE_S:g} s")
            silent_at_s = time.monotonic() + SILENCE_S
            if isinstance(event, Accepted | Alive | PrefillProgress | Tokens | Done | Error) and event.request_id in records:
                record = records[str(event.request_id)]
                record.take(event)
                if self._acts_now(record):
                    record.has_acted = True
                    if record.planned.fate is Fate.DISCONNECT:
                        self._connection.close()
                        self._connection = self._connect()
                        return
                    self._connection.send(Cancel(record.planned.message.request_id))
            elif not isinstance(event, StatusReport | Error):
                raise RequestFailed("stray", f"an event of no request of this client came: {event}")

    def _acts_now(self, record: Record) -> bool:
        planned = record.planned
        is_due = planned.fate in (Fate.CANCEL, Fate.DISCONNECT) and len(record.token_ids) >= planned.after
        return is_due and record.is_accepted and record.end is None and not record.has_acted

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
