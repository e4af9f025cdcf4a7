"""A planned request as bytes and back, for a request that was read in another process: RPC messages and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from kog_dist.gateway.anthropic.message_reply import MessageReply
from kog_dist.gateway.ollama.reply import OllamaReply
from kog_dist.gateway.openai.chat import ChatReply
from kog_dist.gateway.openai.chunks import ReplyForm
from kog_dist.gateway.openai.completions import CompletionReply
from kog_dist.gateway.openai.echo import Echo
from kog_dist.gateway.openai.errors import ApiError, invalid
from kog_dist.gateway.openai.logprobs import TokenNames
from kog_dist.gateway.openai.planning import Stamp
from kog_dist.gateway.openai.reply import Planned, Reply
from kog_dist.gateway.openai.responses_reply import ResponseReply
from kog_dist.gateway.openai.tools import ToolUse
from kog_dist.gateway.reading.styles import Reading, Style
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.rpc.messages import BadMessage, Generate, decode_request, encode


class PackedPlan(TypedDict):
    """What `unpacked` takes, by its names."""

    generates: list[bytes]
    reply: bytes
    told: Mapping[str, Sequence[str]]


def packed(planned: Planned) -> PackedPlan:
    """What `unpacked` makes the same of. Raises ApiError for a request that no RPC message can carry."""
    try:
        generates = [encode(message) for message in planned.generates]
    except BadMessage as error:
        raise invalid(None, str(error)) from None
    told = {"left_out": planned.left_out, "unseen": planned.unseen}
    return {"generates": generates, "reply": json.dumps(_recipe(planned.reply)).encode(), "told": told}


def unpacked(generates: Sequence[bytes], reply: bytes, told: Mapping[str, Sequence[str]], tokenizer: Tokenizer | None) -> Planned:
    """The inverse. `tokenizer`: of the served model, for the names of tokens."""
    recipe: dict[str, Any] = json.loads(reply)
    messages = tuple(_generate(frame) for frame in generates)
    made = _reply(recipe, messages[0].prompt_ids or (), tokenizer)
    return Planned(messages, recipe["stream"], made, tuple(told["left_out"]), tuple(told["unseen"]))


def packed_error(error: ApiError) -> bytes:
    """An ApiError as JSON."""
    return json.dumps([error.status, error.type, error.code, error.param, error.message, error.retry_after_s]).encode()


def unpacked_error(packed: bytes) -> ApiError:
    """The inverse."""
    return ApiError(*json.loads(packed))


def _recipe(reply: Reply) -> dict[str, object]:
    """What `_reply` makes a new one of; nothing has been handed to this one yet."""
    kind = {"kind": type(reply).__name__}
    if isinstance(reply, ChatReply | CompletionReply):
        kept = {"use": _parts(reply.use)} if isinstance(reply, ChatReply) else {"echoes": [asdict(echo) for echo in reply.echoes]}
        return {**kind, **kept, "form": asdict(reply.form), "stream": reply.form.stream, "has_names": reply.has_names}
    assert isinstance(reply, ResponseReply | OllamaReply | MessageReply), "there are no other replies"
    common = {**kind, "use": _parts(reply.use), "stream": reply.stream}
    if isinstance(reply, ResponseReply):
        return {**common, "outline": reply.outline, "has_names": reply.names is not None}
    own = {"is_chat": reply.is_chat} if isinstance(reply, OllamaReply) else {"id": reply.id}
    return {**common, **own, "model": reply.model}


def _reply(recipe: dict[str, Any], prompt_ids: Sequence[int], tokenizer: Tokenizer | None) -> Reply:
    kind, stream = recipe["kind"], recipe["stream"]
    names = TokenNames(tokenizer) if recipe.get("has_names") else None
    if kind == CompletionReply.__name__:
        return CompletionReply(_form(recipe["form"]), names, [Echo(**echo) for echo in recipe["echoes"]])
    use = _tool_use(recipe["use"])
    if kind == ChatReply.__name__:
        return ChatReply(_form(recipe["form"]), use, names, tokenizer, prompt_ids)
    if kind == ResponseReply.__name__:
        return ResponseReply(recipe["outline"], use, names, tokenizer, prompt_ids, stream=stream)
    if kind == OllamaReply.__name__:
        return OllamaReply(recipe["model"], use, tokenizer, prompt_ids, stream=stream, is_chat=recipe["is_chat"])
    return MessageReply(recipe["id"], recipe["model"], use, tokenizer, prompt_ids, stream=stream)


def _form(parts: dict[str, Any]) -> ReplyForm:
    return ReplyForm(**{**parts, "stamp": Stamp(**parts["stamp"])})


def _parts(use: ToolUse) -> dict[str, object]:
    """Of the tools only what the answer is read by."""
    return {"bare": use.bare, "reading": asdict(use.reading)}


def _tool_use(parts: dict[str, Any]) -> ToolUse:
    reading = Reading(**{**parts["reading"], "style": Style(**parts["reading"]["style"])})
    return ToolUse(bare=tuple(parts["bare"]), reading=reading)


def _generate(frame: bytes) -> Generate:
    message = decode_request(frame)
    assert isinstance(message, Generate), "nothing else was packed"
    return message
