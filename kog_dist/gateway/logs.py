"""The gateway's log: one line for each request to the model and each event of its own life, as JSON or readable text.

What users wrote and what the model answered stay out of it unless `with_prompts` was asked for, API keys always. A line never
holds up the event loop: a thread writes it, and when whoever reads the log does not keep up, lines are dropped and counted.
"""

from __future__ import annotations

import contextlib
import enum
import ipaddress
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields
from datetime import UTC, datetime
from typing import TextIO

from kog_dist.errors import ConfigError
from kog_dist.quoting import printable
from kog_dist.records import dataclass

FORMATS = ("text", "json")
MAX_VALUE_CHARS = 512  # of one field; what is longer is cut and says so
MAX_PROMPT_CHARS = 65536  # of a prompt or an answer, where they are wanted
MAX_PENDING_LINES = 1024
REPEATS_PER_WINDOW = 5
WINDOW_S = 10.0
MAX_KINDS = 256  # different problems whose repetitions are counted
SHOWN_QUEUE_S = 0.01  # less is not worth a word
CLIENT_GONE = 499  # as nginx has it: the client closed the connection

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,-]+")
# What a stray header or command line may carry: bearer tokens and the usual shape of API keys.
_SECRET = re.compile(r"(?i)(bearer\s+)\S+|\bsk-[A-Za-z0-9_-]{8,}")

Value = str | int | float | bool | None


class LogLevel(enum.StrEnum):
    """How urgent a line is."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What is told about a request when it has ended. None: there was no such figure. Times are seconds."""

    request_id: str
    endpoint: str
    status: int  # of the HTTP response
    client: str  # `address_class` of the peer, not its address
    stream: bool = False
    finish_reason: str | None = None
    error: str | None = None  # code of the engine or the gateway
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_generated_tokens: int | None = None
    num_drafted_tokens: int | None = None  # where there are any
    num_accepted_tokens: int | None = None  # of them those that were right
    num_reasoning_tokens: int | None = None  # of these, where there are any
    num_calls: int | None = None  # of tools, where there are any
    queue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    tokens_per_s: float | None = None
    left_out: str | None = None  # unknown fields of the request
    unseen: str | None = None  # what of it the prompt does not show
    prompt: str | None = None  # these two are of the first choice, and written only with `with_prompts`
    answer: str | None = None

    def sentence(self) -> str:
        """For somebody who watches: what was asked, how fast it was answered, how it ended."""
        cached = f" ({self.num_cached_tokens:,} cached)" if self.num_cached_tokens else ""
        queue_ms = f"{self.queue_s * 1e3:,.0f}" if self.queue_s and self.queue_s >= SHOWN_QUEUE_S else ""
        queue = f" ({queue_ms} in the queue)" if queue_ms else ""
        thought = f" ({self.num_reasoning_tokens:,} of thought)" if self.num_reasoning_tokens else ""
        plural = "token" if self.num_prompt_tokens == 1 else "tokens"
        parts = [
            f"{self.num_prompt_tokens:,} prompt {plural}{cached}" if self.num_prompt_tokens is not None else None,
            f"{self.num_generated_tokens:,} generated{thought}" if self.num_generated_tokens else None,
            f"{self.num_calls} call{'s' if self.num_calls > 1 else ''}" if self.num_calls else None,
            f"first after {self.ttft_s * 1e3:,.0f} ms{queue}" if self.ttft_s is not None else None,
            f"{queue_ms} ms in the queue" if queue_ms and self.ttft_s is None else None,
            f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s else None,
            f"{self.num_accepted_tokens:,} of {self.num_drafted_tokens:,} drafts right" if self.num_drafted_tokens else None,
            f"unknown fields left out: {self.left_out}" if self.left_out else None,
            f"not in the prompt: {self.unseen}" if self.unseen else None,
            self.error or self.finish_reason or ("the client has gone" if self.status == CLIENT_GONE else None),
        ]
        told = ", ".join(part for part in parts if part)
        return f"{self.endpoint} {self.status}{': ' if told else ''}{told}"


_PRIVATE_FIELDS = frozenset({"prompt", "answer"})
_LINE_FIELDS = tuple(field.name for field in fields(RequestLine))


def address_class(host: str | None) -> str:
    """Where a client is, without saying who: `loopback`, `private`, `public`, or `local` where there is no address."""
    try:
        address = ipaddress.ip_address((host or "").split("%", 1)[0])
    except ValueError:
        return "local"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else "private" if address.is_private else "public"


class RepeatBound:
    """Lets the first few of equal problems through in each window, and counts the others."""

    def __init__(self, limit: int = REPEATS_PER_WINDOW, window_s: float = WINDOW_S) -> None:
        self._limit, self._window_s = limit, window_s
        self._seen: dict[str, tuple[float, int]] = {}  # kind -> start of its window, how many since

    def admit(self, kind: str, now_s: float) -> int | None:
        """None: not this one. Else how many were left out in the window that has just ended."""
        if kind not in self._seen and len(self._seen) >= MAX_KINDS:
            kind = "other"
        start_s, count = self._seen.get(kind, (now_s, 0))
        left_out = 0
        if now_s - start_s >= self._window_s:
            start_s, left_out, count = now_s, max(0, count - self._limit), 0
        self._seen[kind] = (start_s, count + 1)
        return left_out if count < self._limit else None


class LineWriter:
    """A thread that writes lines to a stream. `put` never waits."""

    def __init__(self, stream: TextIO, *, max_pending: int = MAX_PENDING_LINES) -> None:
        self._stream = stream
        self._max_pending = max_pending
        self._pending: deque[str] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="log writer", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Write this line soon, or count it as dropped."""
        with self._changed:
            if self._closing or len(self._pending) >= self._max_pending:
                self.num_dropped += 1
                return
            self._pending.append(line)
            self._changed.notify()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is pending, but wait for a stuck reader no longer than `timeout_s`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closing:
                    self._changed.wait()
                lines = list(self._pending)
                self._pending.clear()
                if not lines:
                    return
            with contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe costs the log, not the service
                self._stream.write("".join(line + "\n" for line in lines))
                self._stream.flush()


class Log:
    """Lines about requests, events and problems. `secrets` are replaced wherever they would appear."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        log_format: str = "text",
        with_prompts: bool = False,
        secrets: Iterable[str] = (),
        terminal: TextIO | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError for an unknown format. Without a stream: standard error. `terminal`: also has a sentence about each
        request."""
        if log_format not in FORMATS:
            raise ConfigError(f"log_format must be {' or '.join(FORMATS)}, got {log_format!r}")
        self._as_json = log_format == "json"
        self.with_prompts = with_prompts
        self._secrets = sorted(filter(None, secrets), key=len, reverse=True)  # one may be the beginning of another
        self._wall_clock, self._clock = wall_clock, clock
        self._bound = RepeatBound()
        self._writer = LineWriter(stream if stream is not None else sys.stderr)
        self._terminal = None if terminal is None else LineWriter(terminal)

    @property
    def num_dropped(self) -> int:
        """Lines that nobody read in time."""
        return self._writer.num_dropped

    def request(self, line: RequestLine) -> None:
        """A request has ended."""
        values = {name: getattr(line, name) for name in _LINE_FIELDS if self.with_prompts or name not in _PRIVATE_FIELDS}
        if self._terminal is not None:
            moment = datetime.fromtimestamp(self._wall_clock()).astimezone()
            self._terminal.put(f"{moment:%H:%M:%S} {printable(line.sentence())}")
        level = LogLevel.ERROR if line.status >= 500 else LogLevel.INFO
        self._write(level, "request", {name: value for name, value in values.items() if value is not None})

    def event(self, name: str, **values: Value) -> None:
        """Something happened in the life of the gateway or its engine."""
        self._write(LogLevel.INFO, name, values)

    def problem(self, kind: str, message: str, *, level: LogLevel = LogLevel.WARNING, **values: Value) -> None:
        """Something went wrong. Of equal kinds at most five are written in ten seconds; the next line counts the others.

        `kind` is a word of the program, never made from what a client sent.
        """
        left_out = self._bound.admit(kind, self._clock())
        if left_out is None:
            return
        counted: dict[str, Value] = {"left_out": left_out} if left_out else {}
        self._write(level, kind, {"message": message, **values, **counted})

    def close(self) -> None:
        """Write what is pending; at most one second."""
        if self._writer.num_dropped:
            self.event("log_lines_dropped", count=self._writer.num_dropped)
        self._writer.close()
        if self._terminal is not None:
            self._terminal.close()

    def _write(self, level: LogLevel, event: str, values: dict[str, Value]) -> None:
        moment = datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        shown = {
            name: self._shown(value, MAX_PROMPT_CHARS if name in _PRIVATE_FIELDS else MAX_VALUE_CHARS)
            for name, value in values.items()
            if value is not None
        }
        if self._as_json:
            self._writer.put(json.dumps({"time": moment, "level": str(level), "event": event, **shown}))
            return
        words = " ".join(f"{name}={_quoted(value)}" for name, value in shown.items())
        self._writer.put(f"{moment} {level:<7} {event}{' ' if words else ''}{words}")

    def _shown(self, value: Value, most_chars: int) -> Value:
        """The value without secrets, and not too long."""
        if isinstance(value, float):
            return round(value, 6)
        if not isinstance(value, str):
            return value
        for secret in self._secrets:
            value = value.replace(secret, "[secret]")
        value = _SECRET.sub(r"\1[secret]", value)
        return value if len(value) <= most_chars else f"{value[:most_chars]}... ({len(value)} characters)"


def _quoted(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", json.dumps(text, ensure_ascii=False))
