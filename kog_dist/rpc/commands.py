"""What the commands of `kog-client` do. `kog-launch --prompt` runs `generate` as a child process."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError, KogError, LaunchError, RequestError, RequestFailed
from kog_dist.quoting import Verbatim, json_text
from kog_dist.records import dataclass
from kog_dist.rpc.client import CONNECT_TIMEOUT_S, Client, StreamEvent
from kog_dist.rpc.messages import Accepted, Alive, Done, ErrorCode, PrefillProgress, Tokens
from kog_dist.rpc.output import OutputError, check_stdout, progress_line, write_error, write_out
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.rpc.shown import describe, statistics
from kog_dist.rpc.transport import Access
from kog_dist.runtime.stages import STAGES

READY_TIMEOUT_S = 3600.0  # the launcher's own start-up limit comes first
EXIT_INTERRUPTED = 130
_TIMINGS = ("queue_s", "prefill_s", "ttft_s", "total_s", "itl_p50_s", "itl_p99_s", "tokens_per_s")
_SHOWN = {"\n", "\t"}  # of the control characters; a terminal obeys the others


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine to talk to."""

    instance: str | None = None
    endpoint: str | None = None
    key_file: Path | None = None

    def access(self) -> Access:
        """How to reach it. Raises ConfigError for flags that contradict each other, LaunchError if the key file is unusable."""
        if self.instance is not None and self.endpoint is not None:
            raise ConfigError("--instance and --endpoint exclude each other")
        if self.key_file is not None:
            if self.instance is not None:
                raise ConfigError("--key-file goes with --endpoint, or alone; --instance finds the socket file by itself")
            access = Access.from_file(self.key_file)
            if self.endpoint is not None:  # the engine may be reached under another address, through a tunnel for instance
                return Access(self.endpoint, access.server_public, access.client_public, access.client_secret)
            return access
        if self.endpoint is not None:
            if not self.endpoint.startswith("ipc://"):
                raise ConfigError(
                    f"--endpoint {self.endpoint!r} must be ipc://PATH, or tcp://HOST:PORT with --key-file {ACCESS_NAME}"
                )
            return Access(self.endpoint)
        return Access.of_instance("default" if self.instance is None else self.instance)


@dataclass(slots=True)
class _Answer:
    """What has arrived of an answer."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    stamps_s: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    done: Done | None = None

    def add(self, event: StreamEvent) -> None:
        if isinstance(event, Tokens):
            self.text.append(event.text)
            self.token_ids += event.token_ids
            self.stamps_s += event.stamps_s
            self.digests += event.digests
            self.logprobs += _logprobs_of(event)
        elif isinstance(event, Done):
            self.done = event


def generate(
    target: EngineChoice, request: PromptRequest, *, timeout_s: float | None, wait_ready: bool, for_launcher: bool = False
) -> int:
    """Decode one prompt and print it. Returns the exit code; Ctrl-C cancels the request and gives 130.

    `for_launcher`: of kog-launch, which says itself why an engine did not start. Raises OutputError if standard output takes
    nothing.
    """
    answer, as_json = _Answer(), request.as_json
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # kog-launch starts this process with SIGINT ignored
        check_stdout()
        _check_timeout(timeout_s)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with _connect(target, timeout_s, wait_ready=wait_ready) as client:
            left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
            if wait_ready:
                client.wait_ready(left_s if left_s is not None else READY_TIMEOUT_S)
            left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
            events = client.generate(**request.keywords(), timeout_s=left_s)
            show = _ignore if as_json else _text_printer(client.welcome.has_tokenizer)
            with progress_line(enabled=not as_json) as progress:
                _follow(events, answer, show, progress)
    except KeyboardInterrupt:
        return _print_failure("cancelled", "the request was cancelled", EXIT_INTERRUPTED, answer, as_json)
    except BrokenPipeError:  # whoever read the answer has enough
        return 0
    except OutputError:
        raise
    except KogError as error:
        if for_launcher and _code_of(error) == ErrorCode.STARTUP_FAILED:
            return error.exit_code
        retry_after_s = error.retry_after_s if isinstance(error, RequestError) else None
        return _print_failure(_code_of(error), str(error), error.exit_code, answer, as_json, retry_after_s)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is complete or given up; a late Ctrl-C has nothing to end
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    assert answer.done is not None, "generate ends with Done or raises"
    try:
        write_out(json_text(_as_object(answer, answer.done, request)) + "\n" if as_json else "\n")
    except BrokenPipeError:
        return 0
    if not as_json:
        write_error(statistics(answer.done))
        if request.logit_digests:
            write_error("\n".join(answer.digests))
        for token in answer.logprobs:
            top = " ".join(f"{other['token_id']}:{other['logprob']:.4f}" for other in token["top"])
            write_error(f"{token['token_id']} logprob {token['logprob']:.4f}{', best ' if top else ''}{top}")
    return 0


def ask(target: EngineChoice, verb: str, request_id: str | None = None, *, as_json: bool, timeout_s: float | None) -> int:
    """`status`, `cancel` or `drain`; prints the engine's report. Returns the exit code, or raises OutputError."""
    try:
        check_stdout()
        _check_timeout(timeout_s)
        with _connect(target, timeout_s, greet=False) as client:
            if verb == "cancel":
                report = client.cancel(request_id or _only_running(client))
            else:
                report = client.drain() if verb == "drain" else client.status()
        write_out((json_text(asdict(report)) if as_json else describe(report)) + "\n")
    except BrokenPipeError:
        return 0
    except OutputError:
        raise
    except KogError as error:
        return _print_failure(_code_of(error), str(error), error.exit_code, _Answer(), as_json)
    return 0


def _only_running(client: Client) -> str:
    """The request that runs. Raises RequestError if there is none, or more than one."""
    running = client.status().all_running
    if not running:
        raise RequestError("unknown_request", "no request is running")
    if len(running) > 1:
        raise RequestError("invalid_request", f"{len(running)} requests are running: {', '.join(running)}; name one")
    return running[0]


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < READY_TIMEOUT_S * 24:  # false for NaN too
        raise ConfigError(f"--timeout must be a positive number of seconds, got {timeout_s}")


def _connect(target: EngineChoice, timeout_s: float | None, *, wait_ready: bool = False, greet: bool = True) -> Client:
    limit_s = READY_TIMEOUT_S if wait_ready else CONNECT_TIMEOUT_S
    return Client(target.access(), connect_timeout_s=min(limit_s, timeout_s or limit_s), patient=wait_ready, greet=greet)


def _logprobs_of(event: Tokens) -> list[dict[str, object]]:
    """Of each token: id and log-probability, its own and those of the alternatives."""
    if not event.logprobs:
        return []
    top = [{"token_id": i, "logprob": value} for i, value in zip(event.top_ids, event.top_logprobs, strict=True)]
    num_top = len(top) // len(event.token_ids)
    return [
        {"token_id": token_id, "logprob": value, "top": top[k * num_top : (k + 1) * num_top]}
        for k, (token_id, value) in enumerate(zip(event.token_ids, event.logprobs, strict=True))
    ]


def _follow(
    events: Generator[StreamEvent, None, None], answer: _Answer, show: Callable[[Tokens], None], progress: Callable[[str], None]
) -> None:
    with closing(events):  # leaving it cancels the request
        for event in events:
            answer.add(event)
            match event:
                case Tokens():
                    progress("")
                    show(event)
                case PrefillProgress():
                    progress(f"reading the prompt: {event.position} of {event.num_prompt_tokens} tokens")
                case Accepted() | Alive() if not answer.token_ids:
                    progress(f"waiting: {event.queue_position} before this one" if event.queue_position else "")


def _ignore(_event: Tokens) -> None:
    """--json prints nothing before the end."""


def _text_printer(has_text: bool) -> Callable[[Tokens], None]:
    is_terminal = sys.stdout.isatty()

    def show(event: Tokens) -> None:
        text = event.text if has_text else "".join(f"{token_id} " for token_id in event.token_ids)
        if is_terminal:  # what a model writes must not steer the terminal
            text = "".join(c if c in _SHOWN or (c.isprintable() or c == " ") else "\N{REPLACEMENT CHARACTER}" for c in text)
        write_out(Verbatim(text))

    return show


def _code_of(error: KogError) -> str:
    if isinstance(error, RequestError | RequestFailed):
        return str(error.code)
    names = {LaunchError: "no_engine", ConfigError: "usage"}
    return next((name for kind, name in names.items() if isinstance(error, kind)), "protocol_error")


def _print_failure(
    code: str, message: str, exit_code: int, answer: _Answer, as_json: bool, retry_after_s: float | None = None
) -> int:
    if as_json:
        error: dict[str, Any] = {"code": code, "message": message, "num_generated_tokens": len(answer.token_ids)}
        if retry_after_s is not None:
            error["retry_after_s"] = retry_after_s
        with contextlib.suppress(BrokenPipeError):
            write_out(json_text({"error": error}) + "\n")
    else:
        if answer.token_ids:
            with contextlib.suppress(BrokenPipeError, OutputError):  # the reason comes first
                write_out("\n")
        write_error(f"kog-client: {code}: {message}")
    return exit_code


def _as_object(answer: _Answer, done: Done, request: PromptRequest) -> dict[str, object]:
    timings: dict[str, object] = {name: getattr(done, name) for name in _TIMINGS}
    timings["stages_s"] = dict(zip(STAGES, done.stages_s, strict=True)) if done.stages_s else {}
    whole: dict[str, object] = {
        "request_id": done.request_id,
        "text": "".join(answer.text),
        "token_ids": answer.token_ids,
        "finish_reason": done.finish_reason.value,
        "usage": {
            "num_prompt_tokens": done.num_prompt_tokens,
            "num_cached_tokens": done.num_cached_tokens,
            "num_generated_tokens": done.num_generated_tokens,
            "num_drafted_tokens": done.num_drafted_tokens,
            "num_accepted_tokens": done.num_accepted_tokens,
        },
        "timings": timings,
    }
    if request.stamps:
        timings["stamps_s"] = answer.stamps_s
    if request.logit_digests:
        whole["logit_digests"] = answer.digests
    if request.sampling.logprobs is not None:
        whole["logprobs"] = answer.logprobs
    return whole
