"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

from typing import Any, Final

from kog_dist.gateway.openai.errors import ApiError

_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an answer that is an error, also of the event that ends a stream."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
