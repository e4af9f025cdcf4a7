"""Errors as Anthropic's clients expect them."""

from __future__ import annotations

import re
from typing import Any, Final

from kog_dist.gateway.openai.errors import INVALID_REQUEST, ApiError
from kog_dist.rpc.messages import ErrorCode

_LENGTHS: Final = re.compile(r"the prompt has (?:over )?(\d+) tokens, at most (\d+) ")
_API_ERROR: Final = "api_error"
_TYPES: Final = {
    400: INVALID_REQUEST,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ERROR_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "required": ["type", "error"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "additionalProperties": False,
            "properties": {
                "type": {"enum": sorted({*_TYPES.values(), _API_ERROR})},
                "message": {"type": "string", "description": "One sentence: the cause and what to do."},
            },
        },
    },
}


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an answer that is an error, also of the event that ends a stream."""
    kind = _TYPES.get(error.status, INVALID_REQUEST if error.status < 500 else _API_ERROR)
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: ApiError) -> str:
    """Its own sentence, but for a prompt that is too long: Claude Code looks for Anthropic's words, and shortens it then."""
    if error.code != ErrorCode.CONTEXT_LENGTH_EXCEEDED.value:
        return error.message
    found = _LENGTHS.match(error.message)
    return f"prompt is too long: {error.message if found is None else f'{found[1]} tokens > {found[2]} maximum'}"
