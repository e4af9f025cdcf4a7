"""What an agent has asked, as a file: one OpenAI message a line, in the order of the session. docs/benchmarks.md describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.service.prompts import Prompt
from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
Line = dict[str, Any]


def read_trace(path: Path) -> list[Line]:
    """The lines of a trace. Raises ConfigError for a file that is none, naming the line."""
    try:
        lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from None
    return [_line(text, f"{path} line {number}", is_first=idx == 0) for idx, (number, text) in enumerate(lines)]


def turns_of(lines: Sequence[Line], where: str) -> list[Prompt]:
    """A prompt for each answer of the recorded agent: all messages before it. Raises ConfigError if there is none."""
    tools = tuple(lines[0]["tools"]) if lines and "tools" in lines[0] else ()
    messages: list[Line] = []
    turns = []
    for line in lines[1:] if tools or (lines and "tools" in lines[0]) else lines:
        if line["role"] == "assistant":
            if not messages:
                raise ConfigError(f"trace {where} begins with an answer; it needs a message to answer before")
            turns.append(Prompt("", tuple(messages), line.get("max_tokens"), tools))
        messages.append({name: value for name, value in line.items() if name != "max_tokens"})
    if not turns:
        raise ConfigError(f"trace {where} has no message of the role assistant, so that there is nothing to ask")
    return turns


def as_text(prompt: Prompt) -> str:
    """A turn for an endpoint that takes texts: a template of our own, in which a longer session begins like a shorter one."""
    return "".join(_parts(prompt)) + "<assistant>\n"


def _parts(prompt: Prompt) -> Iterator[str]:
    if prompt.tools:
        yield f"<tools>\n{json.dumps(list(prompt.tools))}\n"
    for message in prompt.messages:
        called = json.dumps(message["tool_calls"]) + "\n" if message.get("tool_calls") else ""
        yield f"<{message['role']}>\n{message.get('content') or ''}\n{called}"


def _line(text: str, where: str, *, is_first: bool) -> Line:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise ConfigError(f"{where} must be an object: a message, or in the first line the tools")
    if is_first and set(line) == {"tools"} and isinstance(line["tools"], list):
        return line
    if line.get("role") not in ROLES:
        raise ConfigError(f"{where} must have a role of {', '.join(ROLES)}, got {line.get('role')!r}")
    max_tokens = line.get("max_tokens", 1)
    if type(max_tokens) is not int or max_tokens < 1 or (line["role"] != "assistant" and "max_tokens" in line):
        raise ConfigError(f"{where}: max_tokens must be a whole number of at least 1, of an answer, got {max_tokens!r}")
    return line
