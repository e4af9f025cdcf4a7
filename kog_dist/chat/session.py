"""`kog-chat` at work: questions from a terminal, one after the other, or one from a pipe."""

from __future__ import annotations

import contextlib
import sys
from contextlib import closing
from pathlib import Path
from typing import Final

from kog_dist.chat import history
from kog_dist.chat.conversation import Again, Conversation
from kog_dist.chat.interrupts import Interrupts
from kog_dist.chat.screen import Meter, Screen, now, summary
from kog_dist.chat.service import ChatService, ServiceFacts
from kog_dist.errors import ConfigError, KogError
from kog_dist.foreign_file import read_file
from kog_dist.records import dataclass
from kog_dist.rpc.output import OutputError, not_written, silence

EXIT_INTERRUPTED: Final = 130
MAX_PIPED_BYTES: Final = 1 << 22
MAX_KEY_FILE_BYTES: Final = 1 << 12
_PROMPT: Final = "> "


@dataclass
class ChatTurn:
    """What came of one question."""

    text: str
    meter: Meter
    finish_reason: str | None = None
    is_cancelled: bool = False
    error: KogError | None = None


class ChatSession:
    """One service, one conversation, one screen."""

    def __init__(self, service: ChatService, facts: ServiceFacts, conversation: Conversation, screen: Screen) -> None:
        self._service, self._facts, self._conversation, self._screen = service, facts, conversation, screen
        self._interrupts = Interrupts()

    def ask(self, prompt: str, *, shows_rate: bool = True) -> ChatTurn:
        """Send a question and show the answer as it comes. Ctrl-C ends the answer: its connection closes, the engine stops.

        `self._interrupts` must be entered.
        """
        path, body = self._conversation.request(prompt, counts_tokens=self._facts.num_ranks is not None)
        answer, screen = ChatTurn("", Meter(now())), self._screen
        parts: list[str] = []
        thoughts: list[str] = []
        try:
            with screen.answer(), self._interrupts.may_end(), closing(self._service.stream(path, body)) as pieces:
                for piece in pieces:
                    now_s = now()
                    answer.meter.take(piece, now_s)
                    answer.finish_reason = piece.finish_reason or answer.finish_reason
                    parts.append(piece.text)
                    thoughts.append(piece.reasoning)
                    screen.write(piece, now_s)
                    if shows_rate:
                        screen.rate_line(answer.meter.line(now_s, self._facts.num_ranks), now_s)
        except KeyboardInterrupt:
            answer.is_cancelled = True
        except OSError as error:
            raise _no_output(error) from None
        except KogError as error:
            answer.error = error
        answer.text, self._conversation.last_thought = "".join(parts), "".join(thoughts)
        return answer

    # ---- on a terminal ----
    def talk(self) -> int:
        """Questions and commands until Ctrl-D. Returns the exit code."""
        history.begin(self._conversation.completions)
        facts = self._facts
        ranks = f" on {facts.num_ranks} rank{'s' if facts.num_ranks > 1 else ''}" if facts.num_ranks else ""
        mode = "continues what you write" if self._conversation.is_completion else "answers"
        own = f", at {facts.own_sampling} unless you say otherwise" if facts.own_sampling else ""
        self._screen.say(f"{facts.model}{ranks} at {self._service.url} {mode}{own}; /help lists commands, Ctrl-D ends")
        with self._interrupts:
            while self._goes_on():
                pass
        return 0

    def _goes_on(self) -> bool:
        """Do what the next line says; False if that ends it all."""
        try:
            with self._interrupts.may_end():
                line = _read_line()
                said = self._conversation.command(line) if line.startswith("/") else Again(line)
            if isinstance(said, str):
                self._screen.say(said)
            elif said.prompt.strip():
                self._turn(said.prompt)
        except EOFError:
            self._screen.say("")
            return False
        except KeyboardInterrupt:
            self._screen.say("\n(Ctrl-D ends kog-chat)")
        except OutputError:
            raise
        except KogError as error:
            self._screen.say(f"kog-chat: {error}")
        return True

    def _turn(self, prompt: str) -> None:
        answer = self.ask(prompt)
        end = "" if answer.text.endswith("\n") or not answer.text else "\n"
        sys.stdout.write(end)
        sys.stdout.flush()
        if answer.error is not None:
            self._screen.say(f"kog-chat: {answer.error}")
        elif answer.is_cancelled:
            self._screen.say("[cancelled]")
        meter = answer.meter
        first_s = None if meter.first_s is None else meter.first_s - meter.begin_s
        self._conversation.stats.count(meter.num_tokens, first_s, meter.last_s - (meter.first_s or 0.0))
        if answer.meter.first_s is not None:
            self._screen.say(summary(answer.meter, answer.finish_reason, self._facts.num_ranks))
        if not self._conversation.is_completion:
            self._conversation.add(prompt, answer.text)

    # ---- from a pipe, or with --prompt ----
    def answer_once(self, prompt: str, *, quiet: bool) -> int:
        """The answer alone on standard output, its speed on standard error. Returns the exit code."""
        with self._interrupts:
            answer = self.ask(prompt)
        if answer.text and not answer.text.endswith("\n"):
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write("\n")
                sys.stdout.flush()
        if answer.error is not None:
            raise answer.error
        if answer.is_cancelled:
            return EXIT_INTERRUPTED
        if not quiet:
            self._screen.say(summary(answer.meter, answer.finish_reason, self._facts.num_ranks))
        return 0


def _read_line() -> str:
    """A line of input, with those that it goes on in. Raises EOFError at Ctrl-D."""
    line = input(_PROMPT)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(". ")
    return line


def piped_prompt() -> str:
    """All of standard input. Raises ConfigError if it is no text, or too much of it."""
    raw = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(raw) > MAX_PIPED_BYTES:
        raise ConfigError(f"standard input has more than {MAX_PIPED_BYTES >> 20} MiB, which fits no context; send less")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ConfigError("standard input is empty; write a prompt to it, or start kog-chat on a terminal")
    return text


def _no_output(error: OSError) -> KogError:
    silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return BrokenOutput("the reader of standard output has enough")
    return not_written(error)


class BrokenOutput(OutputError):
    """Standard output was closed by its reader, as `head` does: no failure, but the end."""


def read_key_file(path: Path) -> str:
    """The key in a file, without blanks around it. Raises ConfigError if it cannot be read."""
    try:
        return read_file(path, MAX_KEY_FILE_BYTES).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key file {path} is not ASCII text") from None
