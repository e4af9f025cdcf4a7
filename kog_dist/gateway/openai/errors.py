"""Errors as OpenAI's clients expect them, and which of them an engine's error is."""

from __future__ import annotations

from typing import Final

from kog_dist.errors import KogError
from kog_dist.rpc.messages import Error, ErrorCode

INVALID_REQUEST: Final = "invalid_request_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"

ERROR_SCHEMA: Final[dict[str, object]] = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "description": "One sentence: the cause and what to do."},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": ["string", "null"], "description": "Stable; docs/http.md lists them."},
            },
        }
    },
}

# Clients of OpenAI repeat what ended with 408, 409, 429 or 5xx: only what may go well the second time has such a status.
_STATUS_OF: Final[dict[ErrorCode, tuple[int, str]]] = {
    ErrorCode.PROTOCOL_ERROR: (500, SERVER),  # the gateway's own mistake
    ErrorCode.PROTOCOL_VERSION: (500, SERVER),
    ErrorCode.INVALID_REQUEST: (400, INVALID_REQUEST),
    ErrorCode.NO_TOKENIZER: (400, INVALID_REQUEST),
    ErrorCode.TOKEN_ID_OUT_OF_RANGE: (400, INVALID_REQUEST),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, INVALID_REQUEST),
    ErrorCode.QUEUE_FULL: (429, RATE_LIMIT),
    ErrorCode.DEADLINE_EXCEEDED: (504, SERVER),
    ErrorCode.DRAINING: (503, SERVER),
    ErrorCode.DUPLICATE_REQUEST_ID: (500, SERVER),  # the gateway chooses the ids
    ErrorCode.UNKNOWN_REQUEST: (404, INVALID_REQUEST),
    ErrorCode.INVALID_CONSTRAINT: (400, INVALID_REQUEST),
    ErrorCode.RANK_FAILED: (503, SERVER),
    ErrorCode.STARTUP_FAILED: (503, SERVER),
    ErrorCode.NUMERICAL_FAULT: (500, SERVER),
    ErrorCode.CONSTRAINT_FAILED: (422, INVALID_REQUEST),  # the grammar turned out too complex: it would again
    ErrorCode.ENGINE_LOST: (503, SERVER),
    ErrorCode.DRAIN_TIMEOUT: (503, SERVER),
    ErrorCode.SHUTDOWN: (503, SERVER),
    ErrorCode.SLOW_READER: (503, SERVER),
    ErrorCode.INTERNAL_ERROR: (500, SERVER),
}


class ApiError(KogError):
    """An answer of HTTP that is an error. `param` names the field that is wrong, as a path into the body, if there is one."""

    def __init__(
        self, status: int, type: str, code: str | None, param: str | None, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.message = message
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """The JSON of the answer, also of the event that ends a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400: the request is wrong, and will be wrong the next time."""
    return ApiError(400, INVALID_REQUEST, code, param, message)


def unsupported(param: str, message: str) -> ApiError:
    """A 400: OpenAI has this, we do not, and leaving it out would change the answer."""
    return ApiError(400, INVALID_REQUEST, "unsupported_parameter", param, message)


def from_rpc(error: Error) -> ApiError:
    """What HTTP says of a refusal or a failure of the engine; the code and the sentence stay the engine's."""
    status, kind = _STATUS_OF[error.code]
    return ApiError(status, kind, error.code.value, None, error.message, error.retry_after_s)


def cancelled() -> ApiError:
    """A request that someone else ended. 499 as nginx has it: no client repeats it by itself."""
    return ApiError(499, SERVER, "request_cancelled", None, "the request was cancelled before it was finished")
