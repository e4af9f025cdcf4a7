"""The only code that turns messages into bytes and back."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from kog_dist import __version__
from kog_dist.rpc.messages.checks import CHECKS, ID, TAG_OF, BadMessage
from kog_dist.rpc.messages.codes import ErrorCode
from kog_dist.rpc.messages.events import EVENTS, Event, Tokens
from kog_dist.rpc.messages.limits import (
    MAGIC,
    MAX_ARRAY,
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_MESSAGE_BYTES,
    MAX_PROMPT_IDS,
    PROTOCOL_VERSION,
)
from kog_dist.rpc.messages.requests import REQUESTS, Request, sampling_on_the_wire
from kog_dist.rpc.plain_tokens import PlainTokens
from kog_dist.sampling_params import SamplingParams

Message: TypeAlias = Request | Event

_HEAD = MAGIC + bytes((PROTOCOL_VERSION,))
_GENERATE_HEAD = _HEAD + bytes(msgpack.packb(["generate", None]))[:-1]
_PLAIN_TOKENS = PlainTokens(_HEAD, ID)
_REQUEST_TYPES = frozenset(REQUESTS.values())  # they are sent without what has its default; events are whole
_FIELD_NAMES = {cls: frozenset(name for name, *_ in checks) for cls, checks in CHECKS.items()}


@functools.cache
def build_hash() -> str:
    """Version and a hash of the protocol's source: equal on both sides when they come from the same build."""
    folder = resources.files("kog_dist.rpc")
    sources = [
        resources.files("kog_dist") / "sampling_params.py",
        folder / "fields.py",
        *sorted((folder / "messages").iterdir(), key=lambda source: source.name),
    ]
    digest = hashlib.sha256()
    for source in sources:
        if source.name.endswith(".py"):
            digest.update(source.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def encode(message: Message) -> bytes:
    """The frame of a message. Raises BadMessage if it is larger than MAX_MESSAGE_BYTES."""
    if type(message) is Tokens and message.is_plain:
        plain = _PLAIN_TOKENS.pack(message.request_id, message.index, message.token_ids[0], message.text)
        if plain is not None:
            return plain
    checks, is_whole = CHECKS[type(message)], type(message) not in _REQUEST_TYPES
    body = {name: value for name, _, default in checks if (value := getattr(message, name)) is not default or is_whole}
    frame: bytes = _HEAD + msgpack.packb([TAG_OF[type(message)], body], default=_packable)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadMessage(
            f"{TAG_OF[type(message)]}: the message has {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are allowed",
            request_id=body.get("request_id"),
        )
    return frame


def _packable(value: Any) -> object:
    """What msgpack does not know: ids of a prompt, and sampling parameters."""
    return sampling_on_the_wire(value) if isinstance(value, SamplingParams) else value.tobytes()


def decode_request(frame: bytes) -> Request:
    """What a client sent. Raises BadMessage, and nothing else, for anything that is not a request of this protocol version."""
    message: Request = _decode(frame, REQUESTS, "client", "engine")
    return message


def looks_like_generate(frame: bytes) -> bool:
    """Whether a frame begins as `encode` lets a `Generate` begin. Takes no time; the rest of it may be anything."""
    return frame.startswith(_GENERATE_HEAD)


def decode_event(frame: bytes) -> Event:
    """What the coordinator sent. Raises BadMessage, and nothing else, like `decode_request`."""
    if (plain := _PLAIN_TOKENS.unpack(frame)) is not None:
        return Tokens.one(*plain)
    message: Event = _decode(frame, EVENTS, "engine", "client")
    return message


def _decode(frame: bytes, known: Mapping[str, type[Any]], sender: str, receiver: str) -> Any:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"the message has {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
    if frame[:3] != MAGIC or len(frame) < 4:
        raise BadMessage(f"the message does not start with KOG and a version byte: not a kog_dist {sender}")
    if frame[3] != PROTOCOL_VERSION:
        raise BadMessage(
            f"the {sender} speaks protocol version {frame[3]}, this {receiver} speaks version {PROTOCOL_VERSION}; "
            f"use the same kog_dist release on both sides",
            ErrorCode.PROTOCOL_VERSION,
        )
    tag, body = _unpack(frame[4:])
    cls = known.get(tag)
    if cls is None:
        raise BadMessage(f"unknown tag {tag[:40]!a}; known: {', '.join(known)}", request_id=_readable_id(body))
    if not body.keys() <= _FIELD_NAMES[cls]:
        unknown = min(body.keys() - _FIELD_NAMES[cls])
        raise BadMessage(f"{tag}: unknown field {unknown[:40]!a}", request_id=_readable_id(body))
    try:
        return cls(**body)
    except BadMessage as error:
        error.request_id = _readable_id(body)
        raise
    except TypeError:
        missing = [name for name, *_ in CHECKS[cls] if name not in body]
        raise BadMessage(f"{tag}: fields are missing, among {', '.join(missing)}", request_id=_readable_id(body)) from None


def _unpack(packed: bytes) -> tuple[str, dict[str, Any]]:
    num_containers = 0

    def count() -> None:
        nonlocal num_containers
        num_containers += 1
        if num_containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")

    def pairs_to_dict(pairs: list[tuple[object, object]]) -> dict[object, object]:
        count()
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a field is given twice")
        return unique

    def keep_list(items: list[Any]) -> list[object]:
        count()
        return items

    try:
        unpacked = msgpack.unpackb(
            packed,
            object_pairs_hook=pairs_to_dict,
            list_hook=keep_list,
            max_ext_len=0,
            max_bin_len=4 * MAX_PROMPT_IDS,
            max_map_len=MAX_FIELDS,
            max_array_len=MAX_ARRAY,
            max_str_len=MAX_MESSAGE_BYTES,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(f"the message is not msgpack within the limits: {type(error).__name__} {str(error)[:100]!a}") from None
    if not (isinstance(unpacked, list) and len(unpacked) == 2):
        raise BadMessage("the message must be an array of two: tag and map of fields")
    tag, body = unpacked
    if not isinstance(tag, str) or not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise BadMessage("the message must be an array of two: tag (text) and map of fields (text keys)")
    return tag, body


def _readable_id(body: Mapping[str, object]) -> str | None:
    try:
        request_id: str = ID(body.get("request_id"))
    except ValueError:
        return None
    return request_id
