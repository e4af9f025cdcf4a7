"""What /openapi.json says: request models, error bodies and streams, for each path."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel

from kog_dist.gateway.openai.chat_request import ChatRequest
from kog_dist.gateway.openai.completion_request import CompletionRequest
from kog_dist.gateway.openai.responses_request import ResponsesRequest
from kog_dist.gateway.tokens import DetokenizeRequest, TokenizeRequest

ABOUT: Final = "OpenAI's API and the state of a kog_dist engine. docs/http.md and docs/openai.md explain it."
_REF: Final = "#/components/schemas/{model}"
_ERROR: Final = {"$ref": "#/components/schemas/Error"}

ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "One sentence: the cause and what to do."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"], "description": "Stable; docs/http.md lists them."},
            },
        }
    },
}
HEALTH_SCHEMA: Final[dict[str, Any]] = {
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
    400: "the body is wrong; `param` names the field", 404: "there is no such model", 408: "the body came too slowly",
    413: "the body is too large", 415: "the body is not declared as JSON",
}  # fmt: skip
_OF_ENGINE: Final = {
    422: "the grammar is too complex to be followed", 429: "the queue is full; see Retry-After",
    503: "the engine is loading, draining or lost; see Retry-After", 504: "the request's own time limit passed while it waited",
}  # fmt: skip

_ANSWERS: Final[dict[str, tuple[type[BaseModel], str]]] = {
    "/v1/chat/completions": (ChatRequest, "The next message of a conversation"),
    "/v1/completions": (CompletionRequest, "How a text goes on"),
    "/v1/responses": (ResponsesRequest, "An answer, in the form of OpenAI's newest API"),
}
_TOKENS: Final[dict[str, tuple[type[BaseModel], str, dict[str, Any]]]] = {
    "/tokenize": (
        TokenizeRequest, "Token ids of a text",
        {
            "type": "object", "required": ["count", "max_model_len", "tokens", "token_strs"],
            "properties": {
                "count": {"type": "integer"}, "max_model_len": {"type": "integer"},
                "tokens": {"type": "array", "items": {"type": "integer"}},
                "token_strs": {"type": ["array", "null"], "items": {"type": "string"}},
            },
        },
    ),
    "/detokenize": (
        DetokenizeRequest, "The text of token ids",
        {"type": "object", "required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
    ),
}  # fmt: skip
_GETS: Final[dict[str, tuple[str, str, Any]]] = {
    "/v1/models": ("The model that is served", "application/json", {"type": "object"}),
    "/v1/models/{name}": ("The same, by a name it has", "application/json", {"type": "object"}),
    "/livez": ("Whether this process answers", "application/json", {"type": "object"}),
    "/readyz": ("Whether requests are taken, and why not", "application/json", HEALTH_SCHEMA),
    "/health": ("The same as /readyz", "application/json", HEALTH_SCHEMA),
    "/metrics": ("For Prometheus", "text/plain", {"type": "string"}),
    "/kog/info": ("Model, ranks, speed", "application/json", {"type": "object"}),
    "/": ("The playground", "text/html", {"type": "string"}),
    "/static/{name}": ("Its files", "*/*", {}),
}
_MODELS: Final = tuple(found[0] for table in (_ANSWERS, _TOKENS) for found in table.values())


def of(path: str) -> dict[str, Any]:
    """What FastAPI's `add_api_route` is told about a path besides its endpoint."""
    described: dict[str, Any] = {"response_model": None, "operation_id": path.strip("/").replace("/", "_") or "index"}
    if path in _ANSWERS:
        model, summary = _ANSWERS[path]
        ok = {
            "description": "The answer: one JSON object, or with `stream` server-sent events",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
        errors = _ANYWHERE | _WITH_BODY | _OF_ENGINE
        return described | {"summary": summary, "openapi_extra": _takes(model), "responses": {200: ok} | _errors(errors)}
    if path in _TOKENS:
        model, summary, schema = _TOKENS[path]
        ok = {"description": summary, "content": {"application/json": {"schema": schema}}}
        errors = _ANYWHERE | _WITH_BODY | {503: "the engine has not said yet what it serves"}
        return described | {"summary": summary, "openapi_extra": _takes(model), "responses": {200: ok} | _errors(errors)}
    summary, media_type, schema = _GETS[path]
    responses: dict[int, Any] = {200: {"description": summary, "content": {media_type: {"schema": schema}}}} | _errors(_ANYWHERE)
    if schema is HEALTH_SCHEMA:
        responses[503] = {"description": "Requests are refused", "content": {"application/json": {"schema": HEALTH_SCHEMA}}}
    elif path.startswith("/v1/models"):
        responses |= _errors({503: "the engine has not said yet what it serves"})
    if "{name}" in path:
        responses |= _errors({404: "there is none of that name"})
    if path in ("/", "/static/{name}"):
        responses[304] = {"description": "You have it"}
    return described | {"summary": summary, "responses": responses}


def _takes(model: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _errors(reasons: dict[int, str]) -> dict[int, Any]:
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": reason, "content": content} for status, reason in reasons.items()}


def describe(app: FastAPI) -> None:
    """Let the document know the request models and the error body, which FastAPI does not see."""
    made = app.openapi

    def document() -> dict[str, Any]:
        schema = made()
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        if "Error" not in schemas:
            for model in _MODELS:
                found = model.model_json_schema(ref_template=_REF)
                schemas.update(found.pop("$defs", {}))
                schemas[model.__name__] = found
            schemas["Error"] = ERROR_SCHEMA
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"] = {
                        status: found for status, found in operation["responses"].items() if not _is_theirs(found)
                    }
        return schema

    app.openapi = document  # type: ignore[method-assign]


def _is_theirs(response: dict[str, Any]) -> bool:
    """FastAPI's own 422, whose body no client gets here."""
    return "HTTPValidationError" in str(response)
