"""Messages to a prompt: by the model's chat template, or as plain text where it has none."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.gateway.openai.body import check_nesting
from kog_dist.gateway.openai.chat_request import ChatMessage
from kog_dist.gateway.openai.errors import ApiError, invalid
from kog_dist.gateway.openai.planning import encode_prompt
from kog_dist.gateway.openai.served import ChatRenderer, ServedModel
from kog_dist.gateway.openai.unseen import MOST_NAMED, unseen_fields
from kog_dist.model.chat_template import RenderedChat, continued
from kog_dist.model.template_trials import as_parts, with_text_arguments
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass
from kog_dist.strict_json import parse_json

_MAX_ARGUMENTS = 1 << 17  # values of one call
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Token ids of a conversation. `unseen`: paths of what was sent and is not in it."""

    ids: tuple[int, ...]
    unseen: tuple[str, ...] = ()


class Ending(enum.Enum):
    """Where a prompt ends: where an answer begins, behind the last message, or within it, so that the answer goes on with it."""

    ANSWER = enum.auto()
    MESSAGE = enum.auto()
    CONTINUED = enum.auto()

    @classmethod
    def of(cls, add_generation_prompt: bool | None, continue_final_message: bool | None) -> Ending:
        """By vLLM's two fields. Raises ApiError if they contradict each other."""
        if continue_final_message and add_generation_prompt:
            reason = "continue_final_message and add_generation_prompt exclude each other; the last message is continued or ended"
            raise invalid("continue_final_message", reason)
        if continue_final_message:
            return cls.CONTINUED
        return cls.MESSAGE if add_generation_prompt is False else cls.ANSWER


def prompt_of(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, object]],
    served: ServedModel,
    param: str = "messages",
    *,
    variables: Mapping[str, object] | None = None,
    ending: Ending = Ending.ANSWER,
    is_enforced: bool = False,
    scope: str | None = None,
) -> ChatPrompt:
    """The conversation up to where the answer begins. Raises ApiError 400 naming the message that is wrong.

    `variables`: further ones of the chat template. `is_enforced`: a grammar follows, with a header of its own. `scope`: the
    request's `cache_salt`.
    """
    for name in variables or ():
        if name in _OWN_VARIABLES or name.endswith("_token"):
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {name} is given by the request or the model itself")
    if variables and served.chat_template is None:
        raise invalid("chat_template_kwargs", "this model has no chat template", "no_chat_template")
    if ending is not Ending.MESSAGE and (messages[-1].prefix or messages[-1].partial):
        ending = Ending.CONTINUED
    if ending is Ending.CONTINUED:
        _check_continued(messages, param, is_enforced)
    plain = [_plain_message(message, f"{param}[{idx}]") for idx, message in enumerate(messages)]
    template = served.chat_template
    if template is None or served.tokenizer is None:
        literally = Tokenizer.encode if served.obeys_special_tokens else Tokenizer.encode_literally
        return ChatPrompt(encode_prompt(joined_text(plain), served, param, literally), ("tools",) if tools else ())
    if served.has_channels:
        plain = [_with_thinking(message) for message in plain]
    try:
        shown = [_in_form(message, given, template) for message, given in zip(plain, messages, strict=True)]
        text, unseen = _rendered(template, shown, tools, param, ending, variables or {})
    except RequestError as error:
        raise invalid(param, str(error), error.code) from None
    except CheckpointError as error:
        raise ApiError(500, "server_error", "chat_template_unusable", None, str(error)) from None
    foreign = () if served.obeys_special_tokens else text.request_runs

    def encode(tokenizer: Tokenizer, prompt: str) -> Sequence[int]:
        return tokenizer.encode_chat(prompt, scope or "", foreign)

    return ChatPrompt(encode_prompt(text, served, param, encode), unseen)


def _check_continued(messages: Sequence[ChatMessage], param: str, is_enforced: bool) -> None:
    last = messages[-1]
    if last.role != "assistant" or last.content is None or last.tool_calls:
        where = f"{param}[{len(messages) - 1}]"
        raise invalid(where, f"continue_final_message: {where} must be an assistant's message with content and without calls")
    if is_enforced:
        raise invalid("continue_final_message", "continue_final_message excludes tools that must be called and response_format")


def _in_form(message: dict[str, object], given: ChatMessage, template: ChatRenderer) -> dict[str, object]:
    """The message as the template shows it: its content as a text or in parts, arguments of calls as an object or a text."""
    if template.facts.takes_text_arguments:
        message = with_text_arguments(message)
    role, content = message["role"], message["content"]
    if role in template.facts.reads_parts and isinstance(given.content, list) and content == _text_of(given):
        return {**message, "content": [{"type": "text", "text": part.text} for part in given.content]}
    return {**message, "content": as_parts(content)} if role in template.facts.takes_parts else message


def _rendered(
    template: ChatRenderer,
    messages: Sequence[dict[str, object]],
    tools: Sequence[Mapping[str, object]],
    param: str,
    ending: Ending,
    variables: Mapping[str, object],
) -> tuple[RenderedChat, tuple[str, ...]]:
    """The prompt, and what it does not show. A template that breaks on arguments that are no object gets those calls as text."""

    def render(messages: Sequence[dict[str, object]], tools: Sequence[Mapping[str, object]]) -> RenderedChat:
        def of(messages: Sequence[Mapping[str, object]]) -> RenderedChat:
            begins = ending is Ending.ANSWER
            return template.render(messages, tools=tools or None, add_generation_prompt=begins, variables=variables)

        return continued(of, messages) if ending is Ending.CONTINUED else of(messages)

    try:
        text = render(messages, tools)
    except RequestError:
        as_text = [_with_broken_calls_as_text(message) for message in messages]
        if as_text == messages:
            raise
        messages = as_text
        text = render(messages, tools)
    unseen = [f"chat_template_kwargs.{name}" for name in variables if name not in template.facts.variables]
    if tools and not template.facts.shows_tools and _is_same(render, messages, text):
        unseen, tools = [*unseen, "tools"], ()
    return text, tuple([*unseen, *unseen_fields(messages, tools, text, param)][:MOST_NAMED])


def _is_same(render: Callable[..., str], messages: Sequence[dict[str, object]], text: str) -> bool:
    """Whether the prompt is the same without tools."""
    try:
        return render(messages, ()) == text
    except RequestError:
        return False


def _with_broken_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message without calls whose arguments are a text; they stand at the end of its content."""
    calls = message.get("tool_calls", ())
    broken = [call["function"] for call in calls if isinstance(call["function"]["arguments"], str)]
    if not broken:
        return message
    whole = [call for call in calls if not isinstance(call["function"]["arguments"], str)]
    content = message["content"]
    said = "\n".join(f"{function['name']}({function['arguments']})" for function in broken)
    plain = {name: value for name, value in message.items() if name != "tool_calls"} | ({"tool_calls": whole} if whole else {})
    if isinstance(content, list):
        return plain | {"content": [*content, {"type": "text", "text": said}]}
    return plain | {"content": f"{content}\n{said}" if content else said}


def _with_thinking(message: Mapping[str, Any]) -> dict[str, object]:
    """The message as gpt-oss's template wants it: reasoning has another name, and before calls it has all of the text."""
    thought = "\n".join(filter(None, (message.get("reasoning_content"), message["content"] if message.get("tool_calls") else "")))
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not thought:
        return changed
    return {**changed, "thinking": thought, **({"content": ""} if message.get("tool_calls") else {})}


def beginning_of(messages: Sequence[ChatMessage]) -> list[str]:
    """The messages up to the first one of a user: what a conversation keeps while it grows."""
    beginning = []
    for message in messages:
        beginning.append(f"{message.role}:{_text_of(message)}")
        if message.role == "user":
            break
    return beginning


def joined_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation for a model that has never seen one: paragraphs, and each answer where it continued the text before it.

    So one message of a user is simply continued, and a conversation that goes on begins with what is cached.
    """
    text = ""
    for message in messages:
        said = message["content"]
        for call in message.get("tool_calls", ()):
            said += "\n" + json.dumps(call["function"], ensure_ascii=False)
        separator = "" if not text or message["role"] == "assistant" else "\n\n"
        text += separator + said
    return text


def _text_of(message: ChatMessage) -> str:
    content = message.content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    return text or message.refusal or ""


def _plain_message(message: ChatMessage, where: str) -> dict[str, object]:
    """The message as chat templates expect it: text content, `system` for `developer`, arguments as an object."""
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message),
    }
    if message.content is None and message.role not in ("assistant", "tool"):  # an empty answer, or nothing came of a call
        raise invalid(f"{where}.content", f"{where}.content is missing")
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}: only an assistant's message has tool_calls")
        plain["tool_calls"] = [
            {
                "id": call.id if call.id is not None else f"call_{idx}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for idx, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", f"{where}.tool_call_id is missing: it says which call this answers")
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _arguments(given: str | dict[str, object] | None) -> dict[str, object] | str:
    """What an earlier call was given: an object, or a text that is none, as max_tokens leaves it."""
    if isinstance(given, dict):
        return given
    try:
        parsed = parse_json((given or "{}").encode(), _MAX_ARGUMENTS)
        check_nesting(parsed)
    except (ValueError, ApiError):
        return given or ""
    return parsed if isinstance(parsed, dict) else given or ""
