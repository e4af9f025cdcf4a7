"""A synchronous client of a running engine. Every wait has a deadline; a lost engine is one error, at once.

with Client(Access.from_folder(folder)) as client:
    for event in client.generate(prompt="def add(a, b):"):
        ...
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from kog_dist.errors import ProtocolError, RequestError, RequestFailed
from kog_dist.rpc.connection import Connection
from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    BadMessage,
    Cancel,
    Done,
    Drain,
    EngineState,
    Error,
    ErrorCode,
    Event,
    Generate,
    Hello,
    PrefillProgress,
    PromptLogprobs,
    Request,
    Status,
    StatusReport,
    Tokens,
    Welcome,
    build_hash,
)
from kog_dist.rpc.transport import Access
from kog_dist.sampling_params import GREEDY, SamplingParams
from kog_dist.speculation import Speculation

CONNECT_TIMEOUT_S = 5.0
SILENCE_TIMEOUT_S = 10.0  # the engine says something about four times a second while a request is not finished
ANSWER_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 1.0
STATUS_TIMEOUT_S = 1.0  # of an engine that has not answered a greeting
_READY_POLL_S = 0.02

Answer = TypeVar("Answer", Welcome, StatusReport)
StreamEvent: TypeAlias = Accepted | Alive | PrefillProgress | PromptLogprobs | Tokens | Done


class DeadlineExceeded(RequestFailed):
    """The caller's own time limit was reached. `code` is `timeout`."""

    exit_code = 5

    def __init__(self, message: str) -> None:
        super().__init__("timeout", message)


class Client:
    """One connection to one engine, for one thread. It may be used until `close`, or until an engine is lost."""

    def __init__(
        self, access: Access, *, connect_timeout_s: float = CONNECT_TIMEOUT_S, patient: bool = False, greet: bool = True
    ) -> None:
        """Connect and greet. `patient`: wait for an engine that does not listen yet, at most `connect_timeout_s`.

        Replicas that are still starting answer no greeting; without `greet` they can be asked for their status.
        Raises LaunchError if there is no engine, ProtocolError if it speaks another version, DeadlineExceeded if it does not
        answer in time, with the reason where it is still starting.
        """
        deadline_s = time.monotonic() + connect_timeout_s
        self._connection = Connection(access)
        try:
            self._connection.wait_connected(deadline_s, patient=patient)
            self._welcome = self._greet(max(deadline_s, time.monotonic() + 1.0)) if greet else None
        except BaseException:
            self._connection.close()
            raise

    @classmethod
    def of_instance(cls, name: str = "default") -> Client:
        """Connect to this user's engine of that name, as given to `kog-launch --instance`. Raises like the constructor."""
        return cls(Access.of_instance(name))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def welcome(self) -> Welcome:
        """What the engine said when it was greeted."""
        assert self._welcome is not None, "connected without a greeting"
        return self._welcome

    def close(self) -> None:
        """Disconnect; the engine cancels what still runs for this client."""
        self._connection.close()

    # ---- verbs ----
    def generate(
        self, prompt: str | None = None, *, prompt_ids: Sequence[int] | None = None, max_tokens: int | None = None,
        stop: Sequence[str] = (), ignore_eos: bool = False, logit_digests: bool = False, stamps: bool = False,
        deadline_s: float | None = None, reuse_kv: bool = True, conversation: str | None = None, json_schema: str | None = None,
        regex: str | None = None, cache_salt: str | None = None, prompt_logprobs: bool = False, request_id: str | None = None,
        timeout_s: float | None = None, speculate: str | None = None, prediction_ids: Sequence[int] | None = None,
        sampling: SamplingParams = GREEDY, **parameters: Any,
    ) -> Generator[StreamEvent, None, None]:  # fmt: skip
        """Decode one prompt: yields `Accepted`, then `Alive`, `PrefillProgress` and `Tokens` as they come, last `Done`.

        Nothing is sent before the first `next`. Leaving the iterator early, Ctrl-C included, cancels the request. Raises
        RequestError when it is refused, RequestFailed when it ends without its answer (`engine_lost` when the engine is gone),
        DeadlineExceeded after `timeout_s` in this client. `deadline_s` is the engine's to keep: `deadline_exceeded` while the
        request waits, a `Done` with finish reason `deadline` once it runs. `conversation` is an id that its requests share: a
        router sends them where their beginning is cached. `parameters` replace those of `sampling` by name: `temperature=0.7,
        seed=1`; see docs/sampling.md. The whole answer satisfies `json_schema` (a text) or matches `regex` unless it ends early,
        for its length for instance. Of what earlier requests left, that of those with the same `cache_salt` is used. With
        `prompt_logprobs`, and `logprobs` of the parameters, `PromptLogprobs` come before `Tokens`. `speculate` (off, lookup or
        auto) and `prediction_ids`, what the answer may be like, change no answer: see docs/drafts.md.
        """
        try:
            message = Generate(
                request_id or secrets.token_hex(8), prompt, None if prompt_ids is None else tuple(prompt_ids), max_tokens,
                replace(sampling, **parameters) if parameters else sampling, tuple(stop), ignore_eos, logit_digests, stamps,
                deadline_s, reuse_kv, conversation, json_schema, regex, cache_salt, prompt_logprobs,
                speculate=None if speculate is None else Speculation(speculate),
                prediction_ids=None if prediction_ids is None else tuple(prediction_ids),
            )  # fmt: skip
            self._connection.send(message)
        except (BadMessage, ValueError) as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None
        yield from self._events_of(message.request_id, None if timeout_s is None else time.monotonic() + timeout_s)

    def status(self) -> StatusReport:
        """The engine's state and counters."""
        return self._ask(Status(), StatusReport)

    def cancel(self, request_id: str) -> StatusReport:
        """Cancel a request of any client. Raises RequestError if it is not waiting or running, or cannot be an id."""
        try:
            message = Cancel(request_id)
        except BadMessage as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from None
        return self._ask(message, StatusReport)

    def drain(self) -> StatusReport:
        """Let the engine finish what runs, refuse the rest and stop."""
        return self._ask(Drain(), StatusReport)

    def wait_ready(self, timeout_s: float) -> StatusReport:
        """Return when the engine can decode. Raises RequestFailed if it fails meanwhile, DeadlineExceeded after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            report = self.status()
            if report.state is EngineState.READY:
                return report
            if report.state in (EngineState.FAILED, EngineState.DRAINING):
                raise RequestFailed(ErrorCode.STARTUP_FAILED, f"the engine is {report.state.value} and will not become ready")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"the engine was still {report.state.value} after {timeout_s:g} s")
            self._next(min(deadline_s, time.monotonic() + _READY_POLL_S))

    # ---- waiting ----
    def _events_of(self, request_id: str, deadline_s: float | None) -> Generator[StreamEvent, None, None]:
        finished = accepted = False
        try:
            while not finished:
                silent_s = time.monotonic() + SILENCE_TIMEOUT_S
                event = self._next(silent_s if deadline_s is None else min(silent_s, deadline_s))
                if event is None:
                    raise self._overdue(deadline_s)
                if isinstance(event, Error) and event.request_id in (request_id, None):
                    finished = True
                    if accepted:
                        raise RequestFailed(event.code, event.message)
                    raise RequestError(event.code, event.message, event.retry_after_s)
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise self._overdue(deadline_s)
                if isinstance(event, StreamEvent) and event.request_id == request_id:
                    accepted = accepted or not isinstance(event, Alive)  # a router says that before it has asked a replica
                    finished = isinstance(event, Done)
                    yield event
        except RequestFailed as error:
            finished = finished or error.code == ErrorCode.ENGINE_LOST
            raise
        finally:
            if not finished:
                self._give_up(request_id)

    def _overdue(self, deadline_s: float | None) -> RequestFailed:
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return DeadlineExceeded("the answer was not complete within the time limit; the request was cancelled")
        return DeadlineExceeded(f"the engine has said nothing for {SILENCE_TIMEOUT_S:g} s; it hangs or was stopped")

    def _give_up(self, request_id: str) -> None:
        """Cancel, and read until the engine has confirmed, so that the connection can be used again."""
        if self._connection.closed:
            return  # the engine notices that by itself
        deadline_s = time.monotonic() + CANCEL_TIMEOUT_S
        try:
            self._connection.send(Cancel(request_id))
            while (event := self._next(deadline_s)) is not None:
                if isinstance(event, Done | Error) and event.request_id == request_id:
                    return
                if time.monotonic() >= deadline_s:
                    return  # the engine talks of other things
        except (RequestFailed, ProtocolError):
            return  # the engine is gone or no engine, and the request with it

    def _greet(self, deadline_s: float) -> Welcome:
        """Replicas say who they are once the first has loaded its model; until then their router tells what they do."""
        try:
            return self._ask(Hello(build=build_hash()), Welcome, deadline_s)
        except DeadlineExceeded:
            report = self._ask(Status(), StatusReport, time.monotonic() + STATUS_TIMEOUT_S)
            if report.state is not EngineState.LOADING:
                raise
            raise DeadlineExceeded(_still_starting(self._connection.access.address, report)) from None

    def _ask(self, message: Request, kind: type[Answer], deadline_s: float | None = None) -> Answer:
        self._connection.send(message)
        deadline_s = deadline_s if deadline_s is not None else time.monotonic() + ANSWER_TIMEOUT_S
        while (event := self._next(deadline_s)) is not None:
            if isinstance(event, kind):
                return event
            if isinstance(event, Error) and event.code is ErrorCode.PROTOCOL_VERSION:
                raise BadMessage(event.message, event.code)
            if isinstance(event, Error) and event.request_id == getattr(message, "request_id", None):
                raise RequestError(event.code, event.message)
            if time.monotonic() >= deadline_s:
                break
        raise DeadlineExceeded(f"the engine at {self._connection.access.address} did not answer in time; it hangs or was stopped")

    def _next(self, deadline_s: float) -> Event | None:
        return self._connection.receive(deadline_s)


def _still_starting(address: str, report: StatusReport) -> str:
    """Of replicas that answer no greeting yet."""
    pairs = zip(report.replica_names, report.replica_states, strict=False)
    states = ", ".join(f"{name} is {state}" for name, state in pairs) or "no replica was started yet"
    return (
        f"the engine at {address} has been starting for {report.uptime_s:.0f} s ({states}); `kog-client generate --wait-ready` "
        f"waits until it serves, `kog-client status` shows how far it is"
    )
