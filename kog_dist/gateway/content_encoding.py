"""Bodies that clients have compressed: decoded piece by piece, never more of it at once than one piece."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Final

from kog_dist.gateway.openai.errors import INVALID_REQUEST, ApiError, invalid

PIECE_BYTES: Final = 1 << 18  # what a thread decodes before the bound on bodies is looked at again
_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's words for the two formats


async def decoded(chunks: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """The chunks of a body as they were before `encoding`, a Content-Encoding, which may be empty.

    Raises ApiError: 415 for an encoding that is not read here, 400 for bytes that are none of it.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        async for chunk in chunks:
            yield chunk
        return
    if name not in _WINDOWS:
        raise ApiError(
            415,
            INVALID_REQUEST,
            "unsupported_content_encoding",
            None,
            f"the body is encoded as {encoding[:60]!a}; send it plain, or with gzip or deflate",
        )
    decoder = zlib.decompressobj(_WINDOWS[name])
    async for chunk in chunks:
        rest, is_full = chunk, False
        while rest or is_full:  # of input that is used up the output may still be waiting
            if rest and decoder.eof:
                raise _broken(name)
            try:
                piece = await asyncio.to_thread(decoder.decompress, rest, PIECE_BYTES)
            except zlib.error:
                raise _broken(name) from None
            rest, is_full = decoder.unconsumed_tail or decoder.unused_data, len(piece) == PIECE_BYTES
            yield piece
    if not decoder.eof:
        raise _broken(name)


def _broken(name: str) -> ApiError:
    return invalid(None, f"the body is declared as {name}, and is not, or not all of it")
