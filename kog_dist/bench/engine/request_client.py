"""One client of an engine that stamps all it is told: for benchmarks of whole requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

from kog_dist.errors import KogError
from kog_dist.records import dataclass
from kog_dist.rpc.connection import Connection
from kog_dist.rpc.messages import Accepted, Cancel, Done, Error, Generate, Tokens
from kog_dist.rpc.transport import Access
from kog_dist.sampling_params import DEFAULTS, SamplingParams
from kog_dist.speculation import Speculation

SILENCE_S = 30.0  # the engine speaks about every 250 ms
_CONNECT_S = 20.0
_numbers = itertools.count()


@dataclass(slots=True)
class TimedAnswer:
    """What came of one request. Moments are seconds on the monotonic clock, when `receive` had returned with the event."""

    request_id: str
    sent_s: float  # just before the message was encoded and sent
    accepted_s: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # moment, tokens so far
    text: str = ""
    end: Done | Error | None = None
    end_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from before the request was sent to its first token in this process."""
        return 1e3 * (self.arrivals[0][0] - self.sent_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first by the time between the first and the last, as this process received them; None if all came at
        once, as `Done.tokens_per_s`.
        """
        (first_s, first), (last_s, last) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    @property
    def done(self) -> Done:
        """The end of a request that went well. Raises KogError for another one."""
        if not isinstance(self.end, Done):
            raise KogError(f"request {self.request_id} ended with {self.end}")
        return self.end


class RequestClient:
    """A connection for one thread. Every wait is bounded by SILENCE_S."""

    def __init__(self, access: Access) -> None:
        self._connection = Connection(access)
        self._connection.wait_connected(time.monotonic() + _CONNECT_S, patient=False)
        self._answers: dict[str, TimedAnswer] = {}

    def send(self, prompt_ids: Sequence[int], **options: Any) -> TimedAnswer:
        """Ask, for plain decoding if `options` say nothing else; the answer fills while `follow` runs.

        The message is made, and its values checked, before its time begins.
        """
        given = {"ignore_eos": True, "speculate": Speculation.OFF, **options}
        sampling = SamplingParams(**{name: given.pop(name) for name in [*given] if name in DEFAULTS})
        message = Generate(f"request-{next(_numbers)}", prompt_ids=tuple(prompt_ids), sampling=sampling, **given)
        answer = self._answers[message.request_id] = TimedAnswer(message.request_id, time.monotonic())
        self._connection.send(message)
        return answer

    def cancel(self, answer: TimedAnswer) -> float:
        """Ask for the end of a request; the moment just before."""
        begin_s = time.monotonic()
        self._connection.send(Cancel(answer.request_id))
        return begin_s

    def follow(self, condition: Callable[[], bool], until_s: float | None = None) -> None:
        """Take events until `condition` is true, or the moment `until_s`. Raises KogError if the engine falls silent."""
        silent_s = time.monotonic() + SILENCE_S
        while not condition():
            event = self._connection.receive(silent_s if until_s is None else min(silent_s, until_s))
            now_s = time.monotonic()
            if event is None:
                if until_s is not None and now_s >= until_s:
                    return
                raise KogError(f"the engine has said nothing for {SILENCE_S:g} s")
            silent_s = now_s + SILENCE_S
            answer = self._answers.get(str(getattr(event, "request_id", None)))
            if answer is None:
                continue
            if isinstance(event, Accepted):
                answer.accepted_s = now_s
            elif isinstance(event, Tokens) and event.token_ids:
                answer.arrivals.append((now_s, answer.num_tokens + len(event.token_ids)))
            elif isinstance(event, Done | Error) and answer.end is None:
                answer.end, answer.end_s = event, now_s
            if isinstance(event, Tokens):
                answer.text += event.text

    def ask(self, prompt_ids: Sequence[int], **options: object) -> TimedAnswer:
        """A whole answer. Raises KogError if it does not go well."""
        answer = self.send(prompt_ids, **options)
        self.follow(lambda: answer.end is not None)
        del self._answers[answer.request_id]
        assert answer.done
        return answer

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
