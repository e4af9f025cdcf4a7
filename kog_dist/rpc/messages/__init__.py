"""The RPC protocol: one frozen dataclass per verb (requests) and per event (events, status); codec makes bytes of them and back.

A message is one zmq frame: the three bytes `KOG`, one byte with the protocol version, then msgpack of
`[tag, {field: value}]`. Values are null, booleans, integers, finite floats, text, or arrays of one of these; the ids of a
prompt may be bytes. Nothing nests deeper.
Everything unknown is refused: tags, fields, types, extension types. Fields with a default may be left out.
"""

from __future__ import annotations

from kog_dist.rpc.messages.checks import BadMessage
from kog_dist.rpc.messages.codec import Message, build_hash, decode_event, decode_request, encode, looks_like_generate
from kog_dist.rpc.messages.codes import EngineState, ErrorCode, FinishReason
from kog_dist.rpc.messages.events import (
    EVENTS,
    Accepted,
    Alive,
    Done,
    Error,
    Event,
    PrefillProgress,
    PromptLogprobs,
    Tokens,
    Welcome,
)
from kog_dist.rpc.messages.limits import (
    MAGIC,
    MAX_ARRAY,
    MAX_FLOAT32,
    MAX_MESSAGE_BYTES,
    MAX_PROMPT_IDS,
    MAX_SCHEMA_BYTES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    PROTOCOL_VERSION,
)
from kog_dist.rpc.messages.requests import REQUESTS, Cancel, Drain, Generate, Hello, Request, Status
from kog_dist.rpc.messages.status import StatusReport

__all__ = [
    "EVENTS",
    "MAGIC",
    "MAX_ARRAY",
    "MAX_FLOAT32",
    "MAX_MESSAGE_BYTES",
    "MAX_PROMPT_IDS",
    "MAX_SCHEMA_BYTES",
    "MAX_STOP_BYTES",
    "MAX_STOP_STRINGS",
    "PROTOCOL_VERSION",
    "REQUESTS",
    "Accepted",
    "Alive",
    "BadMessage",
    "Cancel",
    "Done",
    "Drain",
    "EngineState",
    "Error",
    "ErrorCode",
    "Event",
    "FinishReason",
    "Generate",
    "Hello",
    "Message",
    "PrefillProgress",
    "PromptLogprobs",
    "Request",
    "Status",
    "StatusReport",
    "Tokens",
    "Welcome",
    "build_hash",
    "decode_event",
    "decode_request",
    "encode",
    "looks_like_generate",
]
