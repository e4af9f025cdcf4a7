"""Errors as HTTP responses: every one has the body that clients of its path expect, whoever found it."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kog_dist.gateway import documents
from kog_dist.gateway.anthropic import errors as anthropic
from kog_dist.gateway.nearest_path import nearest_path
from kog_dist.gateway.ollama import errors as ollama
from kog_dist.gateway.openai.errors import INVALID_REQUEST, SERVER, ApiError
from kog_dist.gateway.protocols import Protocol, protocol_of
from kog_dist.gateway.readiness import RETRY_AFTER_S, Health

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BODIES: Final[dict[Protocol, Callable[[ApiError], dict[str, object]]]] = {
    Protocol.OPENAI: ApiError.body,
    Protocol.ANTHROPIC: anthropic.error_body,
    Protocol.OLLAMA: ollama.error_body,
}
MISTAKE: Final = ApiError(500, SERVER, "internal_error", None, "the gateway made a mistake; its log says where")


def error_body(error: ApiError, path: str) -> bytes:
    """The JSON that clients of this path expect of an error; of an unknown path, "", OpenAI's."""
    return json.dumps(_BODIES[protocol_of(path)](error)).encode()


def error_response(error: ApiError, path: str) -> Response:
    """The response to an error."""
    return Response(error_body(error, path), error.status, error_headers(error), "application/json")


def error_headers(error: ApiError) -> dict[str, str]:
    """`Retry-After` in whole seconds where a moment is known; also in milliseconds, as OpenAI's clients understand it."""
    headers = {}
    if error.retry_after_s is not None:
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """The same for plain ASGI."""
    response = error_response(error, path)
    await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": bytes(response.body)})


def not_serving(health: Health) -> ApiError:
    """The answer to requests while the engine cannot take any."""
    return ApiError(503, SERVER, f"engine_{health.state}", None, health.reason, RETRY_AFTER_S.get(health.state, 2.0))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:100]
    if error.status_code == 404:
        near = nearest_path(path, documents.PATHS)
        hint = f"; use {near}" if near is not None else "; /openapi.json lists what there is"
        found = ApiError(404, INVALID_REQUEST, "not_found", None, f"there is nothing at {path!a}{hint}")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("allow", "")
        found = ApiError(
            405,
            INVALID_REQUEST,
            "method_not_allowed",
            None,
            f"{path!a} takes {allowed or 'other methods'}, not {request.method[:20]!a}",
        )
    else:
        found = ApiError(error.status_code, INVALID_REQUEST, None, None, str(error.detail))
    response = error_response(found, request.url.path)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def on_api_error(request: Request, error: Exception) -> Response:
    """What an endpoint refuses."""
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def on_mistake(request: Request, _error: Exception) -> Response:
    """What must not happen; the guard writes it to the log."""
    return error_response(MISTAKE, request.url.path)
