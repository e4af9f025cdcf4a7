"""The words of the protocol: why something failed, why an answer ended, and what an engine is doing."""

from __future__ import annotations

import enum


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
