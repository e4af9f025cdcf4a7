"""Chat templates of a model folder, rendered in a child process with limits on time, memory and output; killed if need be."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError, KogError, RequestError
from kog_dist.model.manifest import Manifest, read_json, read_small_file
from kog_dist.model.tokenizer import TOKENIZER_CONFIG_NAME
from kog_dist.quoting import short
from kog_dist.runtime import python_child

TEMPLATE_NAME = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 2**20
_START_S = 10.0  # for the child to start on a busy machine; not a bound on templates
_GRACE_S = 0.4  # after its own alarm the child is killed from outside
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one render. Memory is all address space of the child, which needs about 40 MiB of it to start."""

    seconds: float = 1.0
    max_characters: int = 2 * 2**20
    memory_bytes: int = 256 * 2**20


class ChatTemplate:
    """A template with the child process that renders it. The child starts with the first use, and again after it was killed.

    `render` may be called from any thread; calls take turns. Close it when done.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, limits: RenderLimits | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate | None:
        """The folder's template, None if it has none: chat_template.jinja, else `chat_template` of tokenizer_config.json.

        Raises CheckpointError naming the file that is wrong. The template itself is looked at by `check`.
        """
        manifest = Manifest.from_folder(folder)
        raw = read_small_file(folder, TEMPLATE_NAME, manifest)
        if raw is None:
            path = folder / TOKENIZER_CONFIG_NAME
            source = _default_template((read_json(folder, TOKENIZER_CONFIG_NAME, manifest) or {}).get("chat_template"), path)
        else:
            path = folder / TEMPLATE_NAME
            try:
                source = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path} is not UTF-8: {error}") from None
        if source is None:
            return None
        if len(source) > _MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{path}: the chat template has {len(source)} characters; at most {_MAX_TEMPLATE_BYTES} are accepted"
            )
        return cls(source, special_tokens)

    def check(self) -> None:
        """Start the child and compile the template. Raises CheckpointError if it is no valid template or exceeds the limits."""
        with self._turn:
            self._start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Special tokens stand in it as text: encode it with `add_special_tokens=False`.
        `variables`: further ones, which templates may look at; none of them replaces what is given in any case.

        Raises RequestError: `chat_rejected` if the template refuses the messages, `chat_template_failed` if it breaks on them,
        `chat_template_limit` if it exceeds a limit. CheckpointError if the template cannot be used at all.
        """
        given = {
            **(variables or {}),
            **self._special_tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            line = json.dumps(given, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError("invalid_messages", f"the messages cannot be expressed as JSON: {error}") from None
        with self._turn:
            self._start()
            kind, text = self._exchange(line, self._limits.seconds + _GRACE_S)
        if kind == "text":
            return text
        if kind == "raised":
            raise RequestError("chat_rejected", f"the chat template refuses the conversation: {text}")
        if kind == "limit":
            raise RequestError("chat_template_limit", f"rendering the chat template was stopped: {text}")
        raise RequestError("chat_template_failed", f"the chat template failed on this conversation: {text}")

    def close(self) -> None:
        """End the child, if there is one. The template can be used again all the same."""
        with self._turn:
            self._stop()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- the child; the caller holds the turn ----
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
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        limits = self._limits
        settings = {"seconds": limits.seconds, "max_characters": limits.max_characters, "memory_bytes": limits.memory_bytes}
        kind, text = self._exchange(json.dumps(settings).encode() + b"\n", _START_S)
        if kind != "ready":
            self._stop()
            raise CheckpointError(f"the process that renders chat templates did not start: {text}")
        kind, text = self._exchange(json.dumps({"template": self.source}).encode() + b"\n", limits.seconds + _GRACE_S)
        if kind != "text":
            self._stop()
            raise CheckpointError(f"the model's chat template cannot be used: {text}")

    def _exchange(self, line: bytes, seconds: float) -> tuple[str, str]:
        """Send a line, await one; a child that does not answer in time, or ends, is reaped and its answer is a `limit`."""
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
            events = dict(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
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
            if len(answer) > 12 * self._limits.max_characters + 4096:  # 12: the longest a character can be in JSON
                self._stop()
                return "limit", "its process answered without end"
        try:
            ((kind, text),) = json.loads(answer).items()
        except (ValueError, AttributeError):  # only a template that broke out could make it so: believe nothing
            self._stop()
            return "failed", "its process gave an answer that is none"
        return str(kind), str(text)

    def _cause_of_death(self) -> str:
        child = self._child
        self._stop()
        if child is not None and child.returncode == -14:  # SIGALRM
            return f"it took more than {self._limits.seconds} s"
        return f"its process ended with status {child.returncode if child is not None else None}"

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.kill()
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            raise KogError(f"the process {child.pid} that renders chat templates cannot be killed") from None


def render(
    source: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str] | None = None, **options: Any
) -> str:
    """Render once and end the child again; see ChatTemplate.render for `options` and errors."""
    with ChatTemplate(source, special_tokens) as template:
        return template.render(messages, **options)


def _default_template(value: Any, path: Path) -> str | None:
    """The template in tokenizer_config.json: a string, or the one named `default` of a list of {name, template}."""
    if value is None:
        return None
    if isinstance(value, str):
        return value
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("template"), str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of objects with name and template")
        named[entry["name"]] = entry["template"]
    if "default" not in named:
        raise CheckpointError(
            f"{path}: chat_template has no entry named 'default', only {short(', '.join(named), 200) if named else 'none'}"
        )
    return named["default"]
