"""The body of a request, read with bounds that do not trust what the client says about it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request

from kog_dist.gateway.content_encoding import decoded
from kog_dist.gateway.openai.errors import INVALID_REQUEST, SERVER, ApiError
from kog_dist.gateway.protocols import Protocol, protocol_of

if TYPE_CHECKING:
    from kog_dist.gateway.service import Service


@contextlib.asynccontextmanager
async def received(request: Request, service: Service) -> AsyncIterator[bytes]:
    """The body; it counts against what all bodies may have together until the context is left.

    Raises ApiError: 415 for what is declared as something else than JSON, or has an encoding that is not read here, 413, 408, or
    503 when too much is being read already. Ollama takes JSON however it is declared, and its documents show `curl -d` alone.
    """
    service.bridge.deliver()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_declared = media_type in ("application/json", "")
    if not is_declared and protocol_of(request.url.path) is not Protocol.OLLAMA:  # forms of other sites were refused before this
        raise ApiError(
            415,
            INVALID_REQUEST,
            "unsupported_media_type",
            None,
            f"the body is declared as {media_type[:60]!a}; send JSON with the header Content-Type: application/json",
        )
    most = service.limits.body_bytes
    if request.headers.get("content-length", "0").isdigit() and int(request.headers.get("content-length", "0")[:18]) > most:
        raise _too_large(most)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(service.limits.body_s):
            async for chunk in decoded(request.stream(), request.headers.get("content-encoding", "")):
                num_bytes += len(chunk)
                service.bodies_bytes += len(chunk)
                chunks.append(chunk)
                if num_bytes > most:
                    raise _too_large(most)
                if service.bodies_bytes > service.limits.bodies_bytes:
                    raise ApiError(503, SERVER, "too_busy", None, "too many large requests are being read; try again", 1.0)
        yield b"".join(chunks)
    except TimeoutError:
        limit_s = service.limits.body_s
        raise ApiError(408, INVALID_REQUEST, "timeout", None, f"the body was not complete after {limit_s:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, INVALID_REQUEST, "client_closed", None, "the client closed the connection") from None
    finally:
        service.bodies_bytes -= num_bytes


def _too_large(most: int) -> ApiError:
    return ApiError(413, INVALID_REQUEST, "request_too_large", None, f"the body has more than {most} bytes ({most >> 20} MiB)")
