"""What one client may cost. docs/http.md lists these."""

from __future__ import annotations

from typing import Final

from kog_dist.records import dataclass

MAX_BODY_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the HTTP service; tests make them small."""

    body_bytes: int = MAX_BODY_BYTES
    bodies_bytes: int = 64 << 20  # of all bodies that are being read or answered together
    body_s: float = 15.0  # until a request's body must be there
    head_s: float = 10.0  # until a request's line and headers must be there, from the connection or its first byte
    keep_alive_s: float = 30.0  # of a connection between two requests
    stall_s: float = 10.0  # of a client that reads nothing of what is ready for it; then the connection is cut
    unread_s: float = 1.0  # and `unread_bytes`: what a client may still send after a refusal that came before its request's end
    unread_bytes: int = 8 << 20
    connections: int = 1000
    head_bytes: int = 32 << 10
    head_lines: int = 256  # more take milliseconds to parse
    small_chunks: int = 128  # of one body, before its chunks must have `chunk_bytes` on average: each takes as long as 1 KiB
    chunk_bytes: int = 32
    buffer_bytes: int = 256 << 10  # of a stream, that wait because the client does not read fast enough
    accept_s: float = 2.0  # until a stream answers 200, though the engine has not said yet whether it takes the request
    keepalive_s: float = 2.0  # of silence, after which a stream has a comment


LIMITS: Final = Limits()
