"""What /openapi.json says: request models, error bodies and streams, for each path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

from kog_dist import __version__
from kog_dist.gateway.anthropic import errors as anthropic
from kog_dist.gateway.anthropic.messages_request import CountTokensRequest, MessagesRequest
from kog_dist.gateway.ollama import errors as ollama
from kog_dist.gateway.ollama.reply import LINES
from kog_dist.gateway.ollama.requests import ChatBody, GenerateBody, ShowBody
from kog_dist.gateway.openai import errors as openai
from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.completion_request import CompletionRequest
from kog_dist.gateway.openai.reply import EVENTS
from kog_dist.gateway.openai.responses_request import ResponsesRequest
from kog_dist.gateway.protocols import Protocol, protocol_of
from kog_dist.gateway.tokens import DetokenizeRequest, TokenizeRequest

ABOUT: Final = "The APIs of OpenAI, Anthropic and Ollama, and the state of a kog_dist engine. docs/http.md explains it."
_REF: Final = "#/components/schemas/{model}"

_TEXT: Final = {"type": "string"}
# What a stream is made of.
_FRAMES: Final = {EVENTS: {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}}, LINES: {"type": "object"}}

_ERRORS: Final[dict[Protocol, tuple[str, dict[str, object]]]] = {  # names and schemas
    Protocol.OPENAI: ("Error", openai.ERROR_SCHEMA),
    Protocol.ANTHROPIC: ("AnthropicError", anthropic.ERROR_SCHEMA),
    Protocol.OLLAMA: ("OllamaError", ollama.ERROR_SCHEMA),
}
HEALTH_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "required": ["state", "reason"],
    "properties": {
        "state": {"enum": ["loading", "ready", "degraded", "draining", "failed"]},
        "reason": {"type": "string"},
    },
}
# What any path may answer: the guard, and bounds of connections and bodies.
_ANYWHERE: Final = {
    400: "no valid HTTP",
    401: "the API key is missing or wrong",
    403: "a foreign host or origin",
    500: "a mistake of ours",
}
_WITH_BODY: Final = {
    400: "the body is wrong; the message names the field",
    404: "there is no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is not declared as JSON",
}
_OF_ENGINE: Final = {
    422: "the grammar is too complex to be followed",
    429: "the queue is full; see Retry-After",
    503: "the engine is loading, draining or lost; see Retry-After",
    504: "the request's own time limit passed while it waited",
}
_UNKNOWN_YET: Final = {503: "the engine has not said yet what it serves"}

_ANSWERS: Final[dict[str, tuple[type[BaseModel], str]]] = {
    "/v1/chat/completions": (ChatRequest, "The next message of a conversation"),
    "/v1/completions": (CompletionRequest, "How a text goes on"),
    "/v1/responses": (ResponsesRequest, "An answer, in the form of OpenAI's newest API"),
    "/api/chat": (ChatBody, "The next message of a conversation, in the form of Ollama's API"),
    "/api/generate": (GenerateBody, "The answer to a prompt, in the form of Ollama's API"),
    "/v1/messages": (MessagesRequest, "The next message of a conversation, in the form of Anthropic's API"),
}
_TOKENS: Final[dict[str, tuple[type[BaseModel], str, dict[str, Any]]]] = {
    "/tokenize": (
        TokenizeRequest,
        "Token ids of a text",
        {
            "type": "object",
            "required": ["count", "max_model_len", "tokens", "token_strs"],
            "properties": {
                "count": {"type": "integer"},
                "max_model_len": {"type": "integer"},
                "tokens": {"type": "array", "items": {"type": "integer"}},
                "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
            },
        },
    ),
    "/detokenize": (
        DetokenizeRequest,
        "The text of token ids",
        {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
    ),
    "/api/show": (ShowBody, "What clients of Ollama ask of a model", {"type": "object"}),
    "/v1/messages/count_tokens": (
        CountTokensRequest,
        "How many tokens a message's prompt has",
        {"type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer"}}},
    ),
}
_GETS: Final[dict[str, tuple[str, str, Any]]] = {
    "/v1/models": ("The model that is served", "application/json", {"type": "object"}),
    "/v1/models/{name}": ("The same, by a name it has", "application/json", {"type": "object"}),
    "/tokenizer_info": ("Special tokens and chat template", "application/json", {"type": "object"}),
    "/api/tags": ("The model, in the form of Ollama's API", "application/json", {"type": "object"}),
    "/api/ps": ("The same", "application/json", {"type": "object"}),
    "/api/version": ("Of Ollama's API", "application/json", {"type": "object"}),
    "/props": ("Context, defaults and chat template, in the form of llama.cpp's server", "application/json", {"type": "object"}),
    "/slots": ("Whether each engine decodes, in that form", "application/json", {"type": "array"}),
    "/version": ("Of kog_dist", "application/json", {"type": "object"}),
    "/livez": ("Whether this process answers", "application/json", {"type": "object"}),
    "/readyz": ("Whether requests are taken, and why not", "application/json", HEALTH_SCHEMA),
    "/health": ("The same as /readyz", "application/json", HEALTH_SCHEMA),
    "/metrics": ("For Prometheus", "text/plain", {"type": "string"}),
    "/kog/info": ("Model, ranks, speed", "application/json", {"type": "object"}),
    "/openapi.json": ("This document", "application/json", {"type": "object"}),
    "/": ("The playground", "text/html", {"type": "string"}),
    "/static/{name}": ("Its files", "*/*", {}),
}
PATHS: Final = (*_ANSWERS, *_TOKENS, *_GETS)
_MODELS: Final = tuple(found[0] for table in (_ANSWERS, _TOKENS) for found in table.values())


def document() -> dict[str, Any]:
    """The OpenAPI document (version 3.1)."""
    schemas: dict[str, object] = dict(_ERRORS.values())
    for model in _MODELS:
        found = model.model_json_schema(ref_template=_REF)
        schemas |= found.pop("$defs", {})
        schemas[model.__name__] = found
    return {
        "openapi": "3.1.0",
        "info": {"title": "kog_dist", "description": ABOUT, "version": __version__},
        "paths": dict(_operations()),
        "components": {"schemas": schemas},
    }


def handler_of(path: str) -> str:
    """The template of the path that a client asked for, `other` for what is not there: a label that nobody can make up."""
    if path in _ANSWERS or path in _TOKENS or path in _GETS:
        return path
    beginning = next((template for template in _GETS if "{" in template and path.startswith(template.partition("{")[0])), None)
    return beginning or "other"


def _operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, (model, summary) in _ANSWERS.items():
        stream = LINES if protocol_of(path) is Protocol.OLLAMA else EVENTS
        content = {"application/json": {"schema": {"type": "object"}}, stream: {"schema": _FRAMES[stream]}}
        ok = {"description": "The answer: one JSON object, or a stream", "content": content}
        yield path, {"post": _operation(path, summary, ok, _WITH_BODY | _OF_ENGINE) | _takes(model)}
    for path, (model, summary, schema) in _TOKENS.items():
        ok = {"description": summary, "content": {"application/json": {"schema": schema}}}
        yield path, {"post": _operation(path, summary, ok, _WITH_BODY | _UNKNOWN_YET) | _takes(model)}
    for path, (summary, media_type, schema) in _GETS.items():
        yield path, {"get": _get(path, summary, media_type, schema)}


def _get(path: str, summary: str, media_type: str, schema: Any) -> dict[str, Any]:
    errors = _UNKNOWN_YET if path.startswith(("/v1/models", "/tokenizer_info")) else {}
    if path == "/tokenizer_info":
        errors = errors | {400: "there is no tokenizer"}
    if "{name}" in path:
        errors = errors | {404: "there is none of that name"}
    operation = _operation(path, summary, {"description": summary, "content": {media_type: {"schema": schema}}}, errors)
    if schema is HEALTH_SCHEMA:
        refused = {"description": "Requests are refused", "content": {"application/json": {"schema": HEALTH_SCHEMA}}}
        operation["responses"]["503"] = refused
    if path in ("/", "/static/{name}"):
        operation["responses"]["304"] = {"description": "You have it"}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _operation(path: str, summary: str, ok: dict[str, Any], errors: dict[int, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=_ERRORS[protocol_of(path)][0])}}}
    reasons = _ANYWHERE | errors
    responses = {"200": ok} | {str(status): {"description": reasons[status], "content": content} for status in sorted(reasons)}
    name = path.strip("/").replace("/", "_").replace("{name}", "name") or "index"
    return {"operationId": name, "summary": summary, "responses": responses}


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
