"""How much JSON a body is, counted before anything is made of it: some passes over its bytes, 30 ms for the most of them."""

from __future__ import annotations

from typing import Final

from kog_dist.gateway.openai.errors import ApiError
from kog_dist.rpc.messages import MAX_ARRAY

MAX_CONTAINERS: Final = 1 << 16  # arrays and objects
MAX_MEMBERS: Final = 1 << 17  # of all objects together
MAX_ITEMS: Final = 9 * MAX_ARRAY  # of all arrays and objects: two of the longest prompts of token ids
_LEAST_BYTES: Final = MAX_CONTAINERS  # a body that has no more bytes has no more of anything
_KEPT: Final = b'"[{,:'
_OTHERS: Final = bytes(set(range(256)) - set(_KEPT))


def check_counts(raw: bytes) -> None:
    """Raise ApiError 400 for a body of more values than any request has. What is in its texts does not count."""
    if len(raw) <= _LEAST_BYTES:
        return
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)  # no escaped quote is left
    most_texts = 2 * (MAX_ITEMS + MAX_MEMBERS)  # quotes of that many values and names
    if marks.count(b'"') > most_texts:
        raise _too_complex("texts", most_texts // 2)
    outside = b"".join(marks.split(b'"')[::2])
    for what, num, most in (
        ("arrays and objects", outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS),
        ("members of objects", outside.count(b":"), MAX_MEMBERS),
        ("values", outside.count(b","), MAX_ITEMS),
    ):
        if num > most:
            raise _too_complex(what, most)


def _too_complex(what: str, most: int) -> ApiError:
    message = f"the body has more than {most} {what}; no request has so many"
    return ApiError(400, "invalid_request_error", "body_too_complex", None, message)
