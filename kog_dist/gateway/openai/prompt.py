"""Messages to a prompt: by the model's chat template, or as plain text where it has none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.gateway.openai.chat_request import ChatMessage
from kog_dist.gateway.openai.errors import ApiError, invalid
from kog_dist.gateway.openai.planning import encode_prompt
from kog_dist.gateway.openai.served import ServedModel

_EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt"}


def prompt_ids(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], served: ServedModel, param: str = "messages",
    *, variables: Mapping[str, Any] | None = None, begins_with: str = "", scope: str | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Token ids of the conversation, up to where the answer begins. Raises ApiError 400 naming the message that is wrong.

    `variables`: further ones of the chat template. `begins_with`: of the answer, what is decided before it. `scope`: the
    request's `cache_salt`.
    """
    for name in variables or ():
        if name in _OWN_VARIABLES or name.endswith("_token"):
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {name} is given by the request or the model itself")
    if variables and served.chat_template is None:
        raise invalid("chat_template_kwargs", "this model has no chat template", "no_chat_template")
    plain = [_plain_message(message, f"{param}[{idx}]") for idx, message in enumerate(messages)]
    if served.chat_template is None or served.tokenizer is None:
        return encode_prompt(joined_text(plain), served, param, add_special_tokens=True)
    if served.has_channels:
        plain = [_with_thinking(message) for message in plain]
    try:
        text = served.chat_template.render(plain, tools=tools or None, variables=variables)
    except RequestError as error:
        raise invalid(param, str(error), error.code) from None
    except CheckpointError as error:
        raise ApiError(500, "server_error", "chat_template_unusable", None, str(error)) from None
    return encode_prompt(text + begins_with, served, param, add_special_tokens=False, chat_scope=scope or "")


def _with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as gpt-oss's template wants it: reasoning has another name, and before calls it has all of the text."""
    thought = "\n".join(filter(None, (message.get("reasoning_content"), message["content"] if message.get("tool_calls") else "")))
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if not thought:
        return changed
    return {**changed, "thinking": thought, **({"content": ""} if message.get("tool_calls") else {})}


def effort_of(effort: object, served: ServedModel) -> dict[str, str]:
    """The variable of gpt-oss's template for an effort that a request asks for; nothing of other models and other words."""
    word = _EFFORTS.get(effort) if isinstance(effort, str) else None
    return {"reasoning_effort": word} if served.has_channels and word is not None else {}


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
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())


def _plain_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """The message as chat templates expect it: text content, `system` for `developer`, arguments as an object."""
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text_of(message),
    }
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(f"{where}.content", f"{where}.content is missing")
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{where}.tool_calls", f"{where}: only an assistant's message has tool_calls")
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_object(call.function.arguments, f"{where}.tool_calls[{idx}].function.arguments"),
                },
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


def arguments_object(text: str, where: str) -> dict[str, Any]:
    """What an earlier call was given. Raises ApiError 400 unless it is a JSON object."""
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid(where, f"{where} must be a JSON object, as text")
    return parsed
