"""What all messages have in common: their fields are checked when they are made, by whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kog_dist.errors import ProtocolError
from kog_dist.rpc.fields import Check, identifier, integer, number, text
from kog_dist.rpc.messages.codes import ErrorCode
from kog_dist.rpc.messages.limits import MAX_COUNT, MAX_MESSAGE_BYTES, MAX_SECONDS

ID = identifier(64)
COUNT = integer(0, MAX_COUNT)
SECONDS = number(0.0, MAX_SECONDS)
NAME = text(0, 1024)
TEXT = text(0, MAX_MESSAGE_BYTES)

TAG_OF: dict[type[Any], str] = {}
# There is a message for each token, and to ask dataclasses for its fields takes longer than to check them.
# Of each field its name, check and default (MISSING: none). A default passes its check, so it is not checked again.
CHECKS: dict[type[Any], tuple[tuple[str, Check, Any], ...]] = {}


class BadMessage(ProtocolError):
    """Bytes that are no message of this protocol, or a message with a value that is not allowed.

    `request_id` is the request the sender meant, where that could still be read, so that an answer can name it.
    """

    def __init__(self, message: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


class Checked:
    """Checks every field on construction, so that a message that exists is a message that may be sent."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, check, default in CHECKS[type(self)]:
            value = getattr(self, name)
            if value is default:
                continue
            try:
                kept = check(value)
            except ValueError as error:
                raise BadMessage(f"{TAG_OF[type(self)]}: {name} {error}") from None
            if kept is not value:
                object.__setattr__(self, name, kept)


def tagged(classes: Mapping[str, type[Any]]) -> Mapping[str, type[Any]]:
    """The same message classes by tag; makes them known to `Checked`, without which none of them can be made."""
    for tag, cls in classes.items():
        TAG_OF[cls] = tag
        CHECKS[cls] = tuple((item.name, item.metadata["check"], item.default) for item in fields(cls))
    return classes
