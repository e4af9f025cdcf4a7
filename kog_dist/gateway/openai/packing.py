"""A planned request as bytes and back, for a request that was read in another process: RPC messages and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

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


def packed(planned: Planned) -> dict[str, Any]:
    """What `unpacked` takes, by its names. Raises ApiError for a request that no RPC message can carry."""
    try:
        generates = [encode(message) for message in planned.generates]
    except BadMessage as error:
        raise invalid(None, str(error)) from None
    told = {"left_out": planned.left_out, "unseen": planned.unseen}
    return {"generates": generates, "reply": json.dumps(_recipe(planned.reply)).encode(), "told": told}


def unpacked(
    generates: Sequence[bytes], reply: bytes, told: Mapping[str, Sequence[str]], tokenizer: Tokenizer | None
) -> Planned:  # fmt: skip
    """The inverse. `tokenizer`: of the served model, for the names of tokens."""
    recipe: dict[str, Any] = json.loads(reply)
    left_out, unseen = tuple(told["left_out"]), tuple(told["unseen"])
    names = TokenNames(tokenizer) if recipe.get("has_names") else None
    messages = tuple(_generate(frame) for frame in generates)
    if "is_chat" in recipe:
        use, ids = _tool_use(recipe["use"]), messages[0].prompt_ids or ()
        told_in_lines = OllamaReply(
            recipe["model"], use, tokenizer, ids, stream=recipe["stream"], is_chat=recipe["is_chat"]
        )  # fmt: skip
        return Planned(messages, recipe["stream"], told_in_lines, left_out, unseen)
    if "model" in recipe:
        use, ids = _tool_use(recipe["use"]), messages[0].prompt_ids or ()
        message = MessageReply(recipe["id"], recipe["model"], use, tokenizer, ids, stream=recipe["stream"])
        return Planned(messages, recipe["stream"], message, left_out, unseen)
    if "outline" in recipe:
        use, ids = _tool_use(recipe["use"]), messages[0].prompt_ids or ()
        made: Reply = ResponseReply(recipe["outline"], use, names, tokenizer, ids, stream=recipe["stream"])
        return Planned(messages, recipe["stream"], made, left_out, unseen)
    form = ReplyForm(**{**recipe["form"], "stamp": Stamp(**recipe["form"]["stamp"])})
    if "use" in recipe:
        made = ChatReply(form, _tool_use(recipe["use"]), names, tokenizer, messages[0].prompt_ids or ())
    else:
        made = CompletionReply(form, names, [Echo(**echo) for echo in recipe["echoes"]])
    return Planned(messages, form.stream, made, left_out, unseen)


def packed_error(error: ApiError) -> bytes:
    """An ApiError as JSON."""
    return json.dumps([error.status, error.type, error.code, error.param, error.message, error.retry_after_s]).encode()


def unpacked_error(packed: bytes) -> ApiError:
    """The inverse."""
    return ApiError(*json.loads(packed))


def _recipe(reply: Reply) -> dict[str, Any]:
    """What a new reply is made of; nothing has been handed to this one yet."""
    if isinstance(reply, ResponseReply):
        use, names = _parts(reply.use), reply.names is not None
        return {"outline": reply.outline, "use": use, "has_names": names, "stream": reply.stream}
    if isinstance(reply, OllamaReply):
        return {"model": reply.model, "use": _parts(reply.use), "stream": reply.stream, "is_chat": reply.is_chat}
    if isinstance(reply, MessageReply):
        return {"id": reply.id, "model": reply.model, "use": _parts(reply.use), "stream": reply.stream}
    assert isinstance(reply, ChatReply | CompletionReply)
    recipe = {"form": asdict(reply.form), "has_names": reply.has_names}
    if isinstance(reply, ChatReply):
        return recipe | {"use": _parts(reply.use)}
    return recipe | {"echoes": [asdict(echo) for echo in reply.echoes]}


def _parts(use: ToolUse) -> dict[str, Any]:
    """Of the tools only what the answer is read by."""
    return {"bare": use.bare, "reading": asdict(use.reading)}


def _tool_use(parts: dict[str, Any]) -> ToolUse:
    reading = Reading(**{**parts["reading"], "style": Style(**parts["reading"]["style"])})
    return ToolUse(bare=tuple(parts["bare"]), reading=reading)


def _generate(frame: bytes) -> Generate:
    message = decode_request(frame)
    assert isinstance(message, Generate), "nothing else was packed"
    return message
