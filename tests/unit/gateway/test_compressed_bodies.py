"""Bodies that clients have compressed."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kog_dist.gateway.content_encoding import PIECE_BYTES, decoded
from kog_dist.gateway.limits import MAX_BODY_BYTES
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.rpc.messages import FinishReason
from tests.unit.gateway.scripted_engine import JSON, RunningGateway, ScriptedEngine

BODY = json.dumps({"prompt": "x", "max_tokens": 3}).encode()
ZIPPED = gzip.compress(BODY, mtime=0)


def read(raw: bytes, encoding: str, chunk_bytes: int = 1000) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(raw), chunk_bytes):
            yield raw[begin : begin + chunk_bytes]

    async def all_of_it() -> bytes:
        return b"".join([piece async for piece in decoded(chunks(), encoding)])

    return asyncio.run(all_of_it())


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 1_000_000])
def test_what_was_compressed_is_decoded(num_bytes: int) -> None:
    raw = bytes(num_bytes // 2) + random.Random(num_bytes).randbytes(num_bytes - num_bytes // 2)
    for chunk_bytes in (7919, 1 << 20):
        assert read(gzip.compress(raw), "gzip", chunk_bytes) == raw
        assert read(zlib.compress(raw), "Deflate ", chunk_bytes) == raw
        assert read(raw, "", chunk_bytes) == read(raw, "identity", chunk_bytes) == raw
    assert read(gzip.compress(bytes(num_bytes)), "x-gzip", 13) == bytes(num_bytes)


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        (BODY, "gzip"), (ZIPPED[:-9], "gzip"), (ZIPPED + b"x", "gzip"), (ZIPPED, "deflate"), (ZIPPED * 2, "gzip"), (b"", "gzip"),
        (zlib.compress(BODY), "gzip"),
    ],
    ids=["plain", "cut", "longer", "other", "twice", "empty", "deflated"],
)  # fmt: skip
def test_what_is_not_what_it_is_declared_as(raw: bytes, encoding: str) -> None:
    with pytest.raises(ApiError, match=f"declared as {encoding}") as caught:
        read(raw, encoding)
    assert caught.value.status == 400


def test_other_encodings_are_named() -> None:
    for encoding in ("br", "zstd", "gzip, gzip", "\x1b"):
        with pytest.raises(ApiError, match="gzip or deflate") as caught:
            read(BODY, encoding)
        assert (caught.value.status, caught.value.message.isprintable()) == (415, True)


@pytest.fixture
def answering(engine: ScriptedEngine) -> ScriptedEngine:
    engine.on_generate = lambda received: received.finish(FinishReason.STOP)
    return engine


def test_a_service_takes_them(running: RunningGateway, http: httpx.Client, answering: ScriptedEngine) -> None:
    for encoding, raw in (("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))):
        answer = http.post("/v1/completions", content=raw, headers={**JSON, "content-encoding": encoding})
        assert answer.status_code == 200, answer.text
    assert answering.received[0].message.max_tokens == 3
    refused: Any = http.post("/v1/completions", content=BODY, headers={**JSON, "content-encoding": "br"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert running.service.bodies_bytes == 0


def test_little_that_becomes_much_is_bounded(running: RunningGateway, http: httpx.Client) -> None:
    bomb = gzip.compress(b" " * (MAX_BODY_BYTES + 1))
    assert len(bomb) < 10_000
    refused = http.post("/v1/completions", content=bomb, headers={**JSON, "content-encoding": "gzip"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
    assert running.service.bodies_bytes == 0
