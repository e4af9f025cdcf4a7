"""What a body is read for: by path, from its bytes to what the endpoint needs. Without an event loop or HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from kog_dist.gateway import tokens
from kog_dist.gateway.anthropic.messages import count_tokens, plan_messages
from kog_dist.gateway.ollama import facts
from kog_dist.gateway.ollama import plans as ollama
from kog_dist.gateway.openai.body import read_body
from kog_dist.gateway.openai.chat import plan_chat
from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.completion_request import CompletionRequest
from kog_dist.gateway.openai.completions import plan_completion
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.responses import plan_response
from kog_dist.gateway.openai.served import ServedModel

Plan: TypeAlias = Callable[[object, ServedModel, str], Planned | dict[str, object]]
Work: TypeAlias = Callable[[object, ServedModel], dict[str, object]]
PLANS: Final[Mapping[str, Plan]] = {
    "/v1/chat/completions": plan_chat,
    "/v1/completions": plan_completion,
    "/v1/responses": plan_response,
    "/v1/messages": plan_messages,
    "/api/chat": ollama.plan_chat,
    "/api/generate": ollama.plan_generate,
}
TOKENS: Final[Mapping[str, Work]] = {
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/v1/messages/count_tokens": count_tokens,
    "/api/show": facts.show,
}


def prepare() -> None:
    """Build what most requests are read with, so that the first of them need not wait for it. Others are built when they come."""
    for model in (ChatRequest, CompletionRequest):
        model.model_rebuild()


def read(path: str, raw: bytes, served: ServedModel, key_scope: str = "") -> Planned | bytes:
    """A planned request, or the JSON of an answer that needs no engine. Raises ApiError. `key_scope`: see `planning.asked`."""
    body = read_body(raw)
    found = PLANS[path](body, served, key_scope) if path in PLANS else TOKENS[path](body, served)
    return found if isinstance(found, Planned) else as_json(found)


def as_json(body: object) -> bytes:
    """JSON of an answer; text that is no valid Unicode cannot break it."""
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
