"""Errors as Ollama's clients expect them."""

from __future__ import annotations

from typing import Final

from kog_dist.gateway.openai.errors import ApiError

ERROR_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {"error": {"type": "string", "description": "One sentence: the cause and what to do."}},
}


def error_body(error: ApiError) -> dict[str, object]:
    """The JSON of an answer that is an error, also of the line that ends a stream."""
    return {"error": error.message}
