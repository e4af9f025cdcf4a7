"""Chat templates of a model folder, rendered in a child process with limits on time, memory and output; killed if need be."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.template_files import template_sources
from kog_dist.model.template_trials import TemplateFacts, facts_of
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.system import killed_child, python_child
from kog_dist.system.stopped_child import LOOK_EVERY_S, STOPPED_S, StopWatch

Run: TypeAlias = tuple[int, int]  # of characters: where it begins, and where it has ended

_START_S = 10.0  # for the child to start on a busy machine; not a bound on templates
_ANSWER_S = 10.0  # for a child that gets a core seldom; what it takes of one is limited in itself
_CLOSE_S = 2.0
_MOST_TRIES = 2  # of a child that is lost


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one render. `seconds`: of a core. Memory is all address space of the child, which needs about 40 MiB of it to
    start.
    """

    seconds: float = 1.0
    max_characters: int = 2 * 2**20
    memory_bytes: int = 256 * 2**20


class RenderedChat(str):
    """The text of a prompt. `request_runs`: where characters came with the request; told where special tokens depend on that."""

    __slots__ = ("request_runs",)
    request_runs: Sequence[Run]

    def __new__(cls, text: str, request_runs: Sequence[Run] = ()) -> RenderedChat:  # noqa: D102 - see the class
        made = super().__new__(cls, text)
        made.request_runs = tuple(request_runs)
        return made

    def cut(self, length: int) -> RenderedChat:
        """Its first characters."""
        return RenderedChat(self[:length], [(begin, min(end, length)) for begin, end in self.request_runs if begin < length])


class ChatTemplate:
    """A template with the child process that renders it. The child starts with the first use, and again after it was killed.

    `render` may be called from any thread; calls take turns. Close it when done.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
        *,
        tool_source: str | None = None,
        specials: Sequence[str] = (),
        everything: bool = False,
    ) -> None:
        """`tool_source`: the template where there are tools, if it is another one. `specials`: texts of the special tokens; of a
        prompt that has some it is known which came with the request. `everything`: other texts may become some (see Marks).
        """
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._special_tokens, self._specials, self._everything = dict(special_tokens or {}), tuple(specials), everything
        self._limits = limits or RenderLimits()
        self._variables: frozenset[str] = frozenset()
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
        """The folder's template, None if it has none: chat_template.jinja, else `chat_template` of tokenizer_config.json.

        Raises CheckpointError naming the file that is wrong. The template itself is looked at by `check`.
        """
        sources = template_sources(folder)
        if sources is None:
            return None
        if tokenizer is None:
            return cls(sources.default, tool_source=sources.tool_use)
        return cls(
            sources.default,
            tokenizer.special_tokens,
            tool_source=sources.tool_use,
            specials=tokenizer.special_texts,
            everything=tokenizer.normalizes_specials,
        )

    def check(self) -> None:
        """Start the child and compile the template. Raises CheckpointError if it is no valid template or exceeds the limits."""
        with self._turn:
            self._asked(None)

    @cached_property
    def facts(self) -> TemplateFacts:
        """What it does with content as a text and as parts, and with tools. Raises CheckpointError if it cannot be used."""
        self.check()
        return facts_of(self.render, self._variables)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """The prompt text of a conversation. Special tokens stand in it as text: encode it with `add_special_tokens=False`.
        `variables`: further ones, which templates may look at; none of them replaces what is given in any case.

        Raises RequestError: `chat_rejected` if the template refuses the messages, `chat_template_failed` if it breaks on them,
        `chat_template_limit` if it exceeds a limit. CheckpointError if the template cannot be used at all.
        """
        own = {**self._special_tokens, "add_generation_prompt": add_generation_prompt}
        given = {
            **{name: value for name, value in (variables or {}).items() if name not in own},
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
        }
        request = {"name": "default" if tools is None else "tools", "given": given, "own": own}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("invalid_messages", f"the messages cannot be expressed as JSON: {error}") from None
        with self._turn:
            kind, answer = self._asked(line)
        if kind == "text":
            text, runs = answer
            return RenderedChat(text, [(begin, end) for begin, end in runs])
        if kind == "raised":
            raise RequestError("chat_rejected", f"the chat template refuses the conversation: {answer}")
        if kind == "limit":
            raise RequestError("chat_template_limit", f"rendering the chat template was stopped: {answer}")
        raise RequestError("chat_template_failed", f"the chat template failed on this conversation: {answer}")

    def close(self) -> None:
        """End the child, if there is one. The template can be used again all the same."""
        with self._turn:
            self._stop()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- the child; the caller holds the turn ----
    def _asked(self, line: bytes | None) -> tuple[str, Any]:
        """Start the child if need be, and have it answer. One that somebody else has ended or stopped is replaced, once."""
        reason = ""
        for _ in range(_MOST_TRIES):
            try:
                self._start()
                return ("ready", "") if line is None else self._exchange(line, _ANSWER_S)
            except _Lost as lost:
                reason = str(lost)
        raise CheckpointError(f"the process that renders chat templates {reason}, {_MOST_TRIES} times; try again")

    def _start(self) -> None:
        """Make sure that a child with the compiled template is there."""
        if self._child is not None and self._child.poll() is None:
            return
        self._stop()
        try:
            self._child = subprocess.Popen(
                python_child.command("kog_dist.model.template_sandbox"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONIOENCODING": "utf-8"},  # no secrets
                bufsize=0,
            )
        except OSError as error:
            raise CheckpointError(f"the process that renders chat templates cannot be started: {error}") from None
        self._watch = StopWatch(self._child.pid)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        limits = self._limits
        settings = {**asdict(limits), "specials": self._specials, "everything": self._everything}
        kind, answer = self._exchange(json.dumps(settings).encode() + b"\n", _START_S)
        if kind != "ready":
            self._stop()
            raise CheckpointError(f"the process that renders chat templates did not start: {answer}")
        for name, source in (("default", self.source), ("tools", self.tool_source)):
            line = json.dumps({"name": name, "source": source}).encode() + b"\n"
            kind, answer = self._exchange(line, _ANSWER_S)
            if kind != "text":
                self._stop()
                raise CheckpointError(f"the model's chat template cannot be used: {answer}")
            self._variables |= frozenset(answer)

    def _exchange(self, line: bytes, seconds: float) -> tuple[str, Any]:
        """Send a line, await one; a child that does not answer in time, or ends, is reaped and its answer is a `limit`.

        Raises _Lost if that is not the template's fault.
        """
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        into, out = self._child.stdin.fileno(), self._child.stdout.fileno()
        deadline = time.monotonic() + seconds
        answer, unsent = bytearray(), memoryview(line)
        poller = select.poll()
        poller.register(out, select.POLLIN)
        poller.register(into, select.POLLOUT)
        while not answer.endswith(b"\n"):
            events = dict(poller.poll(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic())) * 1000))
            if self._watch.is_lost():
                self._stop()
                raise _Lost(f"was stopped for {STOPPED_S:g} s")
            if time.monotonic() > deadline and not events and not self._watch.is_stopped:
                self._stop()
                return "limit", f"no answer within {seconds:.1f} s"
            if into in events and unsent:
                with contextlib.suppress(BrokenPipeError, BlockingIOError):  # a broken pipe shows as the end of the output
                    unsent = unsent[os.write(into, unsent) :]
                if not unsent:
                    poller.unregister(into)
            if out in events:
                received = os.read(out, 2**16)
                if not received:
                    return "limit", self._cause_of_death()
                answer += received
            if (
                len(answer) > 24 * self._limits.max_characters + 4096
            ):  # a character has 12 in JSON at most, and a run around it 12
                self._stop()
                return "limit", "its process answered without end"
        try:
            ((kind, told),) = json.loads(answer).items()
        except (ValueError, AttributeError):  # only a template that broke out could make it so: believe nothing
            self._stop()
            return "failed", "its process gave an answer that is none"
        return str(kind), told

    def _cause_of_death(self) -> str:
        """Of a child that has closed its output."""
        assert self._child is not None
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(_CLOSE_S)
        self._stop()
        if code == -signal.SIGPROF:
            return f"it took more than {self._limits.seconds} s"
        if code in (None, -signal.SIGKILL, -signal.SIGTERM):
            raise _Lost("was ended by somebody else")
        return f"its process ended with status {code}"

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        killed_child.kill(child)
        child.stdin.close()
        child.stdout.close()


class _Lost(Exception):
    """The child was ended or stopped by somebody else; the text says how."""


def continued(
    render: Callable[[Sequence[Mapping[str, object]]], RenderedChat], messages: Sequence[Mapping[str, object]]
) -> RenderedChat:
    """The prompt up to where the content of the last message ends, so that an answer goes on with it. What the template strips of
    its end is not there. `render`: without a beginning of an answer. Raises what it raises, and RequestError `chat_rejected` if
    the prompt does not show that end.
    """
    mark = f"{secrets.token_hex(8)} "  # the blank shows whether the template strips
    last: dict[str, Any] = dict(messages[-1])
    if isinstance(last["content"], str):
        last["content"] += mark
    else:
        *parts, part = last["content"]
        last["content"] = [*parts, {**part, "text": part["text"] + mark}]
    text = render([*messages[:-1], last])
    place = text.rfind(mark.strip())
    if place < 0:
        raise RequestError("chat_rejected", "the chat template does not show the end of the last message: it cannot be continued")
    return text.cut(place if text.startswith(mark, place) else len(text[:place].rstrip()))


def render(
    source: str, messages: Sequence[Mapping[str, object]], special_tokens: Mapping[str, str] | None = None, **options: Any
) -> str:
    """Render once and end the child again; see ChatTemplate.render for `options` and errors."""
    with ChatTemplate(source, special_tokens) as template:
        return template.render(messages, **options)
