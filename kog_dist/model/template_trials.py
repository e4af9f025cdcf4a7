"""What a chat template does with contents, calls and tools, seen by trial: templates are programs, and say nothing of it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final

from kog_dist.errors import RequestError
from kog_dist.records import dataclass

WORD: Final = "Kolibri"
_NAME: Final = "fetch_kolibri"
_TOOL: Final = {
    "type": "function",
    "function": {"name": _NAME, "description": "Fetch it.", "parameters": {"type": "object", "properties": {}}},
}
_NOTATION: Final = re.compile(f"""['"]text['"]: ?['"]{WORD}""")  # a list of parts written down as such is not read
_ARGUMENTS: Final = {"town": "Quito"}
_PYTHON, _JSON = str(_ARGUMENTS), json.dumps(_ARGUMENTS)
_USER: Final = {"role": "user", "content": "Hello."}
_CONTENT_ROLES: Final = ("user", "system", "assistant", "tool")  # the first one is that of all conversations


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template does. `takes_parts`: roles whose content it shows as a list of parts only; `reads_parts`: as such a list,
    too. `takes_text_arguments`: it shows arguments of calls as a JSON text only, and breaks on an object. `variables`: names that
    it looks at.
    """

    takes_parts: frozenset[str] = frozenset()
    reads_parts: frozenset[str] = frozenset()
    takes_text_arguments: bool = False
    shows_tools: bool = False
    variables: frozenset[str] = frozenset()


def as_parts(content: object) -> object:
    """Content as a list of parts, as some templates want it."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, object]:
    """The message with the arguments of its calls as JSON texts."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, **({"tool_calls": calls} if calls else {})}


def facts_of(render: Callable[..., str], variables: Set[str]) -> TemplateFacts:
    """The facts of a template. `render`: of messages and `tools`, as `ChatTemplate.render`. A trial that exceeds a limit is the
    last one: others would take as long.
    """
    takes_parts: set[str] = set()
    reads_parts: set[str] = set()
    takes_text_arguments = shows_tools = False

    def tried(role: str, in_parts: Set[str], tools: object = None) -> str:
        messages = [
            {**message, "content": as_parts(message["content"]) if message["role"] in in_parts else message["content"]}
            for message in _trial(role)
        ]
        if takes_text_arguments:
            messages = [with_text_arguments(message) for message in messages]
        return _rendered(render, messages, tools)

    with contextlib.suppress(_EndlessTrial):
        for role in _CONTENT_ROLES:
            if role == "tool" and (_NAME not in (as_object := tried(role, takes_parts)) or _PYTHON in as_object):
                takes_text_arguments = True
                takes_text_arguments = _JSON in tried(role, takes_parts)
            as_text, in_parts = tried(role, takes_parts), tried(role, takes_parts | {role})
            if WORD in in_parts and not _NOTATION.search(in_parts):
                takes_parts |= set() if WORD in as_text else {role}
                reads_parts |= {role} if as_text == in_parts or role in takes_parts else set()
        shows_tools = _NAME in tried("user", takes_parts, tools=[_TOOL])
    return TemplateFacts(frozenset(takes_parts), frozenset(reads_parts), takes_text_arguments, shows_tools, frozenset(variables))


class _EndlessTrial(Exception):
    """A trial exceeded a limit."""


def _rendered(render: Callable[..., str], messages: Sequence[Mapping[str, object]], tools: object) -> str:
    """The prompt; empty if the template refuses it."""
    try:
        return render(messages, tools=tools)
    except RequestError as error:
        if error.code == "chat_template_limit":
            raise _EndlessTrial from None
        return ""


def _trial(role: str) -> Iterator[Mapping[str, object]]:
    """A conversation with a message of this role, whose content is the word."""
    if role in ("assistant", "tool"):
        yield _USER
    if role == "tool":
        call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
        yield {"role": "assistant", "content": "", "tool_calls": [call]}
        yield {"role": "tool", "content": WORD, "tool_call_id": "call00000", "name": _NAME}
        return
    yield {"role": role, "content": WORD}
    if role != "user":
        yield _USER
