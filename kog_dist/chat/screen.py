"""What a person sees: the answer as it comes, and on a terminal one line at its bottom with the speed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from kog_dist.chat.service import Piece
from kog_dist.quoting import Verbatim, quoted
from kog_dist.records import dataclass
from kog_dist.rpc.output import write_error

_FRAME_S: Final = 0.016  # text is written once per frame of a screen, not once per token
_LINE_EVERY_S: Final = 0.1
_SHOWN_QUEUE_MS: Final = 10.0  # less is not worth a word
_SHOWN: Final = {"\n", "\t"}  # of the control characters; a terminal obeys the others
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@dataclass
class Meter:
    """The speed of one answer, as its reader sees it. Moments are seconds of the monotonic clock."""

    begin_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    is_exact: bool = False  # counted by the service, not by chunks
    num_prompt_tokens: int | None = None
    num_before: int | None = None
    prompt_read: tuple[int, int] | None = None
    queue_ms: float | None = None
    drafts: tuple[int, int] | None = None
    is_thinking: bool = False

    def take(self, piece: Piece, now_s: float) -> None:
        """Count a piece."""
        has_text = bool(piece.text or piece.reasoning)
        if has_text:
            self.is_thinking = not piece.text
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        if piece.num_tokens is not None:
            self.num_tokens, self.is_exact = piece.num_tokens, True
        elif has_text and not self.is_exact:
            self.num_tokens += 1
        self.num_prompt_tokens = self.num_prompt_tokens if piece.num_prompt_tokens is None else piece.num_prompt_tokens
        self.num_before = self.num_before if piece.num_before is None else piece.num_before
        self.prompt_read = self.prompt_read if piece.prompt_read is None else piece.prompt_read
        self.queue_ms = self.queue_ms if piece.queue_ms is None else piece.queue_ms
        self.drafts = self.drafts if piece.drafts is None else piece.drafts

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first one."""
        if self.first_s is None or self.last_s <= self.first_s or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / (self.last_s - self.first_s)

    def line(self, now_s: float, num_ranks: int | None) -> str:
        """The rate line."""
        ranks = [] if num_ranks is None else [f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"]
        if self.first_s is None:
            what = f"waiting, {self.num_before} before this one" if self.num_before else "waiting for the first token"
            if self.prompt_read is not None:
                what = "reading the prompt, {} of {} tokens".format(*self.prompt_read)
            return ", ".join([f"{what}, {now_s - self.begin_s:.1f} s", *ranks])
        about = "" if self.is_exact else "about "
        rate = [] if self.rate is None else [f"{about}{self.rate:.0f} tokens/s"]
        first = f"first after {(self.first_s - self.begin_s) * 1e3:.0f} ms"
        if self.queue_ms is not None and self.queue_ms >= _SHOWN_QUEUE_MS:
            first += f" ({self.queue_ms:.0f} in the queue)"
        thinking = ["thinking"] if self.is_thinking else []
        drafts = [] if self.drafts is None else ["{} of {} drafts right".format(*self.drafts)]
        return ", ".join([*thinking, *rate, f"{about if not rate else ''}{self.num_tokens} tokens", first, *drafts, *ranks])


class Screen:
    """Standard output, and the bottom line of a terminal while an answer comes. Colours only where they are wanted."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._is_plain = not self.is_terminal or bool(os.environ.get("NO_COLOR"))
        self._pending: list[Verbatim] = []
        self._flushed_s = self._line_s = 0.0
        self._num_rows = 0
        self._thought_s: float | None = None  # when a thought began that is going on

    @contextlib.contextmanager
    def answer(self) -> Iterator[None]:
        """An answer comes: keep the bottom row for the rate line, and give it back afterwards, whatever happens."""
        self._num_rows = shutil.get_terminal_size().lines if self.is_terminal else 0
        if self._num_rows > 3:  # scroll only what is above the last row (DECSTBM)
            self._out(Verbatim(f"\n\x1b7\x1b[1;{self._num_rows - 1}r\x1b8\x1b[1A"))
        try:
            yield
        finally:
            self._fold_thought(now(), "\n")
            self.flush()
            if self._num_rows > 3:
                self._out(Verbatim(f"\x1b7\x1b[r\x1b[{self._num_rows};1H\x1b[2K\x1b8"))
            self._num_rows = 0

    def write(self, piece: Piece, now_s: float) -> None:
        """Text of the answer; shown with the next frame. On a terminal also how long a thought before it was, folded."""
        if piece.reasoning and self.is_terminal and self._thought_s is None:
            self._thought_s = now_s
        if piece.text:
            self._fold_thought(now_s, "\n\n")
            self._pending.append(_harmless(piece.text) if self.is_terminal else Verbatim(piece.text))
        if now_s - self._flushed_s >= _FRAME_S:
            self.flush()
            self._flushed_s = now_s

    def _fold_thought(self, now_s: float, end: str) -> None:
        if self._thought_s is not None:
            took_s, self._thought_s = now_s - self._thought_s, None
            self._pending += [self.dim(f"[thought for {took_s:.1f} s; /thought shows it]"), Verbatim(end)]

    def flush(self) -> None:
        """Show what is pending."""
        if self._pending:
            text = Verbatim("".join(self._pending))
            self._pending.clear()
            self._out(text)

    def rate_line(self, line: str, now_s: float) -> None:
        """Show the line at the bottom, a few times a second."""
        if self._num_rows > 3 and now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            width = shutil.get_terminal_size().columns
            self._out(Verbatim(f"\x1b7\x1b[{self._num_rows};1H\x1b[2K{self.dim(line[: width - 1])}\x1b8"))

    def say(self, text: str) -> None:
        """Something that is not part of an answer, on standard error."""
        write_error(self.dim(text))

    def dim(self, text: str) -> Verbatim:
        """Less conspicuous, and quoted."""
        return Verbatim(quoted(text) if self._is_plain else f"{_DIM}{quoted(text)}{_PLAIN}")

    def _out(self, text: Verbatim) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _harmless(text: str) -> Verbatim:
    """What a model writes must not steer the terminal."""
    if text.isprintable():
        return Verbatim(text)
    return Verbatim("".join(c if c in _SHOWN or c.isprintable() or c == " " else "\N{REPLACEMENT CHARACTER}" for c in text))


def now() -> float:
    """Seconds of the clock that meters use."""
    return time.monotonic()


def summary(meter: Meter, finish_reason: str | None, num_ranks: int | None) -> str:
    """The line after an answer."""
    parts: list[Any] = [meter.line(meter.last_s, num_ranks)]
    if meter.num_prompt_tokens is not None:
        parts.insert(0, f"{meter.num_prompt_tokens} prompt tokens")
    if finish_reason not in (None, "stop"):
        parts.append({"length": "cut off at the most tokens allowed"}.get(str(finish_reason), str(finish_reason)))
    return f"[{', '.join(parts)}]"
