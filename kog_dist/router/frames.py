"""Frames on their way through a router: another request id, everything else as it came.

A token passes here in 4 us; checking every field of the event, as both ends do, would take ten times as long.
"""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]

from kog_dist.rpc.messages import MAGIC, MAX_ARRAY, MAX_MESSAGE_BYTES, MAX_PROMPT_IDS, PROTOCOL_VERSION, BadMessage

_HEAD = MAGIC + bytes((PROTOCOL_VERSION,))
_TOKENS_HEAD = _HEAD + bytes(msgpack.packb(["tokens", None]))[:-1]


def is_tokens(frame: bytes) -> bool:
    """Whether a frame is a `tokens` event of this protocol version."""
    return frame.startswith(_TOKENS_HEAD)


def read_tokens(frame: bytes) -> dict[str, Any]:
    """The fields of a `tokens` event; those that a router uses have their types. Raises BadMessage."""
    try:
        tag, body = _unpack(frame)
        kinds = {"request_id": str, "token_ids": list, "text": str, "stamps_s": list}
        if tag == "tokens" and isinstance(body, dict) and all(isinstance(body[name], kind) for name, kind in kinds.items()):
            return body
    except (ValueError, TypeError, KeyError, RecursionError, msgpack.UnpackException):
        pass
    raise BadMessage("a tokens event cannot be read")


def write_tokens(body: dict[str, Any], request_id: str, waited_s: float) -> bytes:
    """The frame for the client: its own request id, and stamps that count from its own request. Raises BadMessage."""
    body["request_id"] = request_id
    if body["stamps_s"]:
        try:
            body["stamps_s"] = [stamp_s + waited_s for stamp_s in body["stamps_s"]]
        except TypeError:
            raise BadMessage("a tokens event has stamps that are no numbers") from None
    return _HEAD + bytes(msgpack.packb(["tokens", body]))


def with_fields(frame: bytes, **fields: Any) -> bytes:
    """A message that was checked when it came, with other values for some fields."""
    tag, body = _unpack(frame)
    return _HEAD + bytes(msgpack.packb([tag, {**body, **fields}]))


def _unpack(frame: bytes) -> Any:
    return msgpack.unpackb(
        memoryview(frame)[len(_HEAD) :],
        max_ext_len=0,
        max_bin_len=4 * MAX_PROMPT_IDS,
        max_map_len=64,
        max_array_len=MAX_ARRAY,
        max_str_len=MAX_MESSAGE_BYTES,
    )
