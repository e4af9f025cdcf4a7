"""The RPC protocol: one frozen dataclass per verb and per event, and the only code that turns them into bytes and back.

A message is one zmq frame: the three bytes `KOG`, one byte with the protocol version, then msgpack of
`[tag, {field: value}]`. Values are null, booleans, integers, finite floats, text, or arrays of one of these; nothing nests
deeper.
Everything unknown is refused: tags, fields, types, extension types. Fields with a default may be left out.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, TypeAlias

import msgpack  # type: ignore[import-untyped]

from kog_dist import __version__
from kog_dist.errors import ProtocolError
from kog_dist.rpc.fields import (
    MAX_LOGIT_BIAS,
    Check,
    any_number,
    array,
    check_shaping,
    check_temperature,
    checked,
    choice,
    flag,
    identifier,
    integer,
    integers,
    number,
    optional,
    text,
)
from kog_dist.rpc.plain_tokens import PlainTokens

MAGIC = b"KOG"
PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 1 << 20  # all frames of a message together
MAX_ARRAY = 1 << 16  # longest array: token ids of one prompt
MAX_CONTAINERS = 64  # lists and maps in one message; stops a small message from growing into a large heap
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_SCHEMA_BYTES = 1 << 16
MAX_REGEX_BYTES = 1 << 12
MAX_SEED = 2**63 - 1
MAX_COUNT = 2**53  # counters and sizes: exact in every language's numbers
MAX_SECONDS = 1e9
MAX_FLOAT32 = float.fromhex("0x1.fffffep+127")
LEAST_DEADLINE_S = 0.001

_HEAD = MAGIC + bytes((PROTOCOL_VERSION,))
_ID = identifier(64)
_PLAIN_TOKENS = PlainTokens(_HEAD, _ID)
_COUNT = integer(0, MAX_COUNT)
_ANY_INTEGERS = -(2**63), 2**63 - 1
_ANY_INTEGER = integer(*_ANY_INTEGERS)  # the message's own check, or the model, says which are allowed
_LOGPROB = number(-MAX_FLOAT32, 0.0)
_TOKEN_ID = integer(0, 2**31 - 1)
_SECONDS = number(0.0, MAX_SECONDS)
_NAME = text(0, 1024)
_TEXT = text(0, MAX_MESSAGE_BYTES)
_DIGEST = text(64, 64)
_NONE: tuple[Any, ...] = ()


class ErrorCode(enum.StrEnum):
    """What went wrong, stable and machine-readable. The first group refuses a request, the second ends one that was accepted."""

    PROTOCOL_ERROR = "protocol_error"
    PROTOCOL_VERSION = "protocol_version"
    INVALID_REQUEST = "invalid_request"
    NO_TOKENIZER = "no_tokenizer"
    TOKEN_ID_OUT_OF_RANGE = "token_id_out_of_range"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    QUEUE_FULL = "queue_full"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    DRAINING = "draining"
    DUPLICATE_REQUEST_ID = "duplicate_request_id"
    UNKNOWN_REQUEST = "unknown_request"
    INVALID_CONSTRAINT = "invalid_constraint"

    RANK_FAILED = "rank_failed"
    STARTUP_FAILED = "startup_failed"
    NUMERICAL_FAULT = "numerical_fault"
    CONSTRAINT_FAILED = "constraint_failed"
    ENGINE_LOST = "engine_lost"
    DRAIN_TIMEOUT = "drain_timeout"
    SHUTDOWN = "shutdown"
    SLOW_READER = "slow_reader"
    INTERNAL_ERROR = "internal_error"


class FinishReason(enum.StrEnum):
    """Why a request that went well has ended."""

    STOP = "stop"  # end-of-sequence token or stop string
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the request's own time limit passed while it was running


class EngineState(enum.StrEnum):
    """What the engine can do now."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_STATE = choice(EngineState)
_FINISH = choice(FinishReason)
_CODE = choice(ErrorCode)


class BadMessage(ProtocolError):
    """Bytes that are no message of this protocol, or a message with a value that is not allowed.

    `request_id` is the request the sender meant, where that could still be read, so that an answer can name it.
    """

    def __init__(self, message: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR, request_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.request_id = request_id


class _Checked:
    """Checks every field on construction, so that a message that exists is a message that may be sent."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS[type(self)]:
            value = getattr(self, name)
            try:
                kept = check(value)
            except ValueError as error:
                raise BadMessage(f"{_TAG_OF[type(self)]}: {name} {error}") from None
            if kept is not value:
                object.__setattr__(self, name, kept)


# ---- client -> coordinator ----
@dataclass(frozen=True, slots=True)
class Hello(_Checked):
    """Asks who is there; answered by `Welcome`. Optional: every message carries the protocol version."""

    build: str = checked(_NAME, default="")


@dataclass(frozen=True, slots=True)
class Generate(_Checked):
    """Decode one prompt. `request_id` is chosen by the client and names the request from any connection.

    `deadline_s` counts from the reception by the coordinator. `reuse_kv` false: prefill the whole prompt, as for a measurement.
    """

    request_id: str = checked(_ID)
    prompt: str | None = checked(optional(_TEXT), default=None)
    prompt_ids: tuple[int, ...] | None = checked(optional(integers(*_ANY_INTEGERS, MAX_ARRAY)), default=None)
    max_tokens: int | None = checked(optional(integer(1, 2**31 - 1)), default=None)  # None: what fits, at most 256
    temperature: float = checked(any_number, default=0.0)
    seed: int = checked(integer(0, MAX_SEED), default=0)
    stop: tuple[str, ...] = checked(array(text(1, MAX_STOP_BYTES), MAX_STOP_STRINGS), default=())
    ignore_eos: bool = checked(flag, default=False)
    logit_digests: bool = checked(flag, default=False)
    stamps: bool = checked(flag, default=False)
    deadline_s: float | None = checked(optional(number(LEAST_DEADLINE_S, MAX_SECONDS)), default=None)
    reuse_kv: bool = checked(flag, default=True)
    conversation: str | None = checked(optional(_ID), default=None)  # shared by requests that extend one another
    top_k: int = checked(_ANY_INTEGER, default=0)  # limits of what follows: fields.SHAPING_LIMITS; meaning: docs/sampling.md
    top_p: float = checked(any_number, default=1.0)
    min_p: float = checked(any_number, default=0.0)
    repetition_penalty: float = checked(any_number, default=1.0)
    presence_penalty: float = checked(any_number, default=0.0)
    frequency_penalty: float = checked(any_number, default=0.0)
    logit_bias_ids: tuple[int, ...] = checked(array(_ANY_INTEGER, MAX_LOGIT_BIAS), default=())
    logit_biases: tuple[float, ...] = checked(array(any_number, MAX_LOGIT_BIAS), default=())
    min_tokens: int = checked(_ANY_INTEGER, default=0)
    logprobs: int | None = checked(optional(_ANY_INTEGER), default=None)  # alternatives of each token; None: not even its own
    json_schema: str | None = checked(optional(text(1, MAX_SCHEMA_BYTES)), default=None)  # the answer is JSON that satisfies it
    regex: str | None = checked(optional(text(1, MAX_REGEX_BYTES)), default=None)  # the answer, as a whole, matches it

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if (self.prompt is None) == (self.prompt_ids is None):
            raise BadMessage("generate: give either prompt or prompt_ids", ErrorCode.INVALID_REQUEST)
        if len(self.logit_bias_ids) != len(self.logit_biases):
            found = f"{len(self.logit_bias_ids)} logit_bias_ids and {len(self.logit_biases)} logit_biases"
            raise BadMessage(f"generate: there are {found}; they belong together", ErrorCode.INVALID_REQUEST)
        if self.json_schema is not None and self.regex is not None:
            raise BadMessage("generate: json_schema and regex exclude each other", ErrorCode.INVALID_REQUEST)
        try:
            check_temperature(self.temperature)
            check_shaping({item.name: getattr(self, item.name) for item in fields(self)}, self.logit_bias)
        except ValueError as error:
            raise BadMessage(f"generate: {error}", ErrorCode.INVALID_REQUEST) from None

    @property
    def logit_bias(self) -> tuple[tuple[int, float], ...]:
        """(id, bias) pairs."""
        return tuple(zip(self.logit_bias_ids, self.logit_biases, strict=True))


@dataclass(frozen=True, slots=True)
class Cancel(_Checked):
    """End a request; its own client gets `Done` with `cancelled`. Answered by `StatusReport`."""

    request_id: str = checked(_ID)


@dataclass(frozen=True, slots=True)
class Status(_Checked):
    """Asks for a `StatusReport`."""


@dataclass(frozen=True, slots=True)
class Drain(_Checked):
    """Finish the running request, refuse the others, then stop the engine. Answered by `StatusReport`."""


# ---- coordinator -> client ----
@dataclass(frozen=True, slots=True)
class Welcome(_Checked):
    """Who serves here. `max_context` counts prompt and answer together, in tokens."""

    build: str = checked(_NAME)
    instance: str = checked(_NAME)
    model: str = checked(_NAME)
    state: EngineState = checked(_STATE)  # noqa: RUF009
    world_size: int = checked(_COUNT)
    max_context: int = checked(_COUNT)
    vocab_size: int = checked(_COUNT)
    has_tokenizer: bool = checked(flag)


@dataclass(frozen=True, slots=True)
class Accepted(_Checked):
    """The request waits or runs; from here on it ends in exactly one `Done` or `Error`."""

    request_id: str = checked(_ID)
    queue_position: int = checked(_COUNT)  # 0 = next, or decoding at once
    num_prompt_tokens: int = checked(_COUNT)
    max_tokens: int = checked(_COUNT)


@dataclass(frozen=True, slots=True)
class Alive(_Checked):
    """The request is not forgotten. Sent when its place in the queue has changed, and after 250 ms in which nothing else was."""

    request_id: str = checked(_ID)
    queue_position: int = checked(_COUNT)


@dataclass(frozen=True, slots=True)
class Prefill(_Checked):
    """The ranks read the prompt: `position` of its tokens are in the KV cache. At most one in 100 ms; none for short prompts."""

    request_id: str = checked(_ID)
    position: int = checked(_COUNT)
    num_prompt_tokens: int = checked(_COUNT)


@dataclass(slots=True)  # not frozen like the others: there is one for each token, and to make it would take ten times as long
class Tokens(_Checked):
    """Tokens `index`, `index + 1`, ... and the text that became certain with them.

    `text` may lag behind `token_ids`: a character split over tokens and what may become a stop string are held back. An event
    may have text and no tokens. `stamps_s`: when the engine produced each token, in seconds after the request's reception, if the
    request asked for `stamps`, else empty.
    `digests`: SHA-256 (hex) of each step's float32 logits when the request asked for them, else empty.
    `logprobs`: the tokens' log-probabilities when the request asked for them, else empty. `top_ids` and `top_logprobs`: of the
    most likely tokens in the place of each, best first, as many for each token.
    """

    request_id: str = checked(_ID)
    index: int = checked(_COUNT)
    token_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY))
    text: str = checked(_TEXT)
    stamps_s: tuple[float, ...] = checked(array(_SECONDS, MAX_ARRAY))
    digests: tuple[str, ...] = checked(array(_DIGEST, MAX_ARRAY), default=())
    logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY), default=())
    top_ids: tuple[int, ...] = checked(array(_TOKEN_ID, MAX_ARRAY), default=())
    top_logprobs: tuple[float, ...] = checked(array(_LOGPROB, MAX_ARRAY), default=())

    @classmethod
    def one(cls, request_id: str, index: int, token_id: int, text: str) -> Tokens:
        """An event of one token and its text, and nothing else. The values are not checked: the caller knows them."""
        event = cls.__new__(cls)
        event.request_id, event.index, event.token_ids, event.text = request_id, index, (token_id,), text
        event.stamps_s = event.digests = event.logprobs = event.top_ids = event.top_logprobs = _NONE
        return event

    @property
    def is_plain(self) -> bool:
        """Whether there is one token, and nothing is said of it but its text: so it is with almost every token."""
        return (
            self.stamps_s is _NONE and self.digests is _NONE and self.logprobs is _NONE and self.top_ids is _NONE
            and self.top_logprobs is _NONE and type(self.token_ids) is tuple and len(self.token_ids) == 1
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Done(_Checked):
    """The request ended well. Times are None where there was no such moment; workers/timings.py defines them."""

    request_id: str = checked(_ID)
    finish_reason: FinishReason = checked(_FINISH)  # noqa: RUF009
    num_prompt_tokens: int = checked(_COUNT)
    num_generated_tokens: int = checked(_COUNT)
    queue_s: float = checked(_SECONDS)
    total_s: float = checked(_SECONDS)
    prefill_s: float | None = checked(optional(_SECONDS), default=None)
    ttft_s: float | None = checked(optional(_SECONDS), default=None)
    itl_p50_s: float | None = checked(optional(_SECONDS), default=None)
    itl_p99_s: float | None = checked(optional(_SECONDS), default=None)
    tokens_per_s: float | None = checked(optional(number(0.0, 1e12)), default=None)
    num_cached_tokens: int = checked(_COUNT, default=0)  # of the prompt, which were not prefilled again


@dataclass(frozen=True, slots=True)
class Error(_Checked):
    """A refusal, or the end of a request without its answer. No `request_id`: it could not be read.

    `retry_after_s`, with `queue_full`: an estimate of when there will be room.
    """

    code: ErrorCode = checked(_CODE)  # noqa: RUF009
    message: str = checked(text(1, 16384))
    request_id: str | None = checked(optional(_ID), default=None)
    retry_after_s: float | None = checked(optional(_SECONDS), default=None)


@dataclass(frozen=True, slots=True)
class StatusReport(_Checked):
    """The engine's state and counters since its start. Waiting requests are listed in the order in which they will run.

    `running_position`: tokens of the running request that are in the KV cache; below `running_prompt_tokens` it is prefilling.
    `epochs_waited`, `waited_s`: how often and how long each rank has waited for peers; None for ranks that do not count it.
    """

    state: EngineState = checked(_STATE)  # noqa: RUF009
    instance: str = checked(_NAME)
    model: str = checked(_NAME)
    build: str = checked(_NAME)
    pid: int = checked(_COUNT)
    world_size: int = checked(_COUNT)
    rank_states: tuple[str, ...] = checked(array(_NAME, 4096))
    beat_ages_s: tuple[float, ...] = checked(array(_SECONDS, 4096))
    uptime_s: float = checked(_SECONDS)
    running: str | None = checked(optional(_ID))
    waiting: tuple[str, ...] = checked(array(_ID, 4096))
    queue_limit: int = checked(_COUNT)
    num_completed: int = checked(_COUNT)
    num_cancelled: int = checked(_COUNT)
    num_failed: int = checked(_COUNT)
    num_refused: int = checked(_COUNT)
    num_dropped_clients: int = checked(_COUNT)
    num_bad_messages: int = checked(_COUNT)
    num_tokens: int = checked(_COUNT)
    replica_names: tuple[str, ...] = checked(array(_NAME, 4096), default=())  # of a router; the next three are in this order
    replica_states: tuple[str, ...] = checked(array(_NAME, 4096), default=())  # with the reason, where it is not in use
    replica_addresses: tuple[str, ...] = checked(array(_NAME, 4096), default=())
    replica_running: tuple[str, ...] = checked(array(_NAME, 4096), default=())  # request id, empty when idle
    client_queue_limit: int = checked(_COUNT, default=0)  # of the waiting requests of one connection
    num_expired: int = checked(_COUNT, default=0)  # requests that their own deadline ended; not counted elsewhere
    running_position: int = checked(_COUNT, default=0)
    running_prompt_tokens: int = checked(_COUNT, default=0)
    rank_places: tuple[str, ...] = checked(array(_NAME, 4096), default=())  # device and CPUs of each rank
    epochs_waited: tuple[int | None, ...] = checked(array(optional(_COUNT), 4096), default=())
    waited_s: tuple[float | None, ...] = checked(array(optional(_SECONDS), 4096), default=())


Request: TypeAlias = Hello | Generate | Cancel | Status | Drain
Event: TypeAlias = Welcome | Accepted | Alive | Prefill | Tokens | Done | Error | StatusReport
Message: TypeAlias = Request | Event

REQUESTS: Mapping[str, type[Any]] = {"hello": Hello, "generate": Generate, "cancel": Cancel, "status": Status, "drain": Drain}
EVENTS: Mapping[str, type[Any]] = {
    "welcome": Welcome, "accepted": Accepted, "alive": Alive, "prefill": Prefill, "tokens": Tokens, "done": Done, "error": Error,
    "status_report": StatusReport,
}  # fmt: skip
_TAG_OF = {cls: tag for tags in (REQUESTS, EVENTS) for tag, cls in tags.items()}
# There is a message for each token, and to ask dataclasses for its fields takes longer than to check them.
_CHECKS: Mapping[type[Any], tuple[tuple[str, Check], ...]] = {
    cls: tuple((item.name, item.metadata["check"]) for item in fields(cls)) for cls in _TAG_OF
}
_FIELD_NAMES = {cls: frozenset(name for name, _ in checks) for cls, checks in _CHECKS.items()}


@functools.cache
def build_hash() -> str:
    """Version and a hash of the protocol's source: equal on both sides when they come from the same build."""
    digest = hashlib.sha256()
    for name in ("fields.py", "messages.py"):
        digest.update(resources.files("kog_dist.rpc").joinpath(name).read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def encode(message: Message) -> bytes:
    """The frame of a message. Raises BadMessage if it is larger than MAX_MESSAGE_BYTES."""
    if type(message) is Tokens and message.is_plain:
        plain = _PLAIN_TOKENS.pack(message.request_id, message.index, message.token_ids[0], message.text)
        if plain is not None:
            return plain
    body = {name: getattr(message, name) for name, _ in _CHECKS[type(message)]}
    frame: bytes = _HEAD + msgpack.packb([_TAG_OF[type(message)], body])
    if len(frame) > MAX_MESSAGE_BYTES:
        raise BadMessage(
            f"{_TAG_OF[type(message)]}: the message has {len(frame)} bytes, at most {MAX_MESSAGE_BYTES} are allowed",
            request_id=body.get("request_id"),
        )
    return frame


def decode_request(frame: bytes) -> Request:
    """What a client sent. Raises BadMessage, and nothing else, for anything that is not a request of this protocol version."""
    message: Request = _decode(frame, REQUESTS, "client", "engine")
    return message


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
        missing = [name for name, _ in _CHECKS[cls] if name not in body]
        raise BadMessage(f"{tag}: fields are missing, among {', '.join(missing)}", request_id=_readable_id(body)) from None


def _unpack(packed: bytes) -> tuple[str, dict[str, Any]]:
    num_containers = 0

    def count() -> None:
        nonlocal num_containers
        num_containers += 1
        if num_containers > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")

    def pairs_to_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        count()
        unique = dict(pairs)
        if len(unique) != len(pairs):
            raise ValueError("a field is given twice")
        return unique

    def keep_list(items: list[Any]) -> list[Any]:
        count()
        return items

    try:
        unpacked = msgpack.unpackb(
            packed, object_pairs_hook=pairs_to_dict, list_hook=keep_list, max_ext_len=0, max_bin_len=0, max_map_len=32,
            max_array_len=MAX_ARRAY, max_str_len=MAX_MESSAGE_BYTES,
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise BadMessage(f"the message is not msgpack within the limits: {type(error).__name__} {str(error)[:100]!a}") from None
    if not (isinstance(unpacked, list) and len(unpacked) == 2):
        raise BadMessage("the message must be an array of two: tag and map of fields")
    tag, body = unpacked
    if not isinstance(tag, str) or not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise BadMessage("the message must be an array of two: tag (text) and map of fields (text keys)")
    return tag, body


def _readable_id(body: Mapping[str, Any]) -> str | None:
    try:
        request_id: str = _ID(body.get("request_id"))
    except ValueError:
        return None
    return request_id
