"""Clients that post bodies which are work to read: `python -m tests.e2e.large_bodies PORT COUNT KIND`, each one after another.

A process of its own, so that what it costs is not counted as the gateway's. At SIGTERM prints the statuses as one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from kog_dist.gateway.limits import MAX_BODY_BYTES

SMALL_BYTES = 15_000
NICE = 10  # hostile clients take the processor from others as little as possible
CODE = re.compile(rb'"code": ?"([a-z_]+)"')


def _filled(head: str, item: str, tail: str, num_bytes: int = MAX_BODY_BYTES) -> bytes:
    room = num_bytes - len(head) - len(item.rstrip(",")) - len(tail)
    return (head + item * (room // len(item)) + item.rstrip(",") + tail).encode()


def _chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "default", "messages": messages, **fields}).encode()


TEXT = {"type": "text", "text": "word " * 40}
# What a body is of, and where it goes.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists": ("/v1/completions", lambda: _filled('{"prompt":[', "[],", "]}")),
    "ids": ("/v1/completions", lambda: _filled('{"prompt":[', "17,", "]}")),
    "allowed ids": ("/v1/completions", lambda: json.dumps({"prompt": list(range(100, 8000)) * 8}).encode()),
    "text": ("/v1/completions", lambda: _filled('{"prompt":"', "def add(a, b): ", '"}')),
    "allowed text": ("/v1/completions", lambda: _filled('{"prompt":"', "def add(a, b): ", '"}', 500_000)),
    "nested": ("/v1/completions", lambda: b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}"),
    "keys": (
        "/v1/responses",
        lambda: ("{" + ",".join(f'"{place:07}":0' for place in range(MAX_BODY_BYTES // 12 - 1)) + "}").encode(),
    ),
    "floats": ("/v1/chat/completions", lambda: _filled('{"messages":[', "1.0000001e-5,", "]}")),
    "objects": ("/v1/chat/completions", lambda: _filled('{"messages":[', "{},", "]}")),
    "escapes": ("/v1/completions", lambda: _filled('{"prompt":"', "\\ud83d\\ude00", '"}')),
    "messages": ("/v1/chat/completions", lambda: _chat([{"role": "user", "content": "word " * 180}] * 4096)),
    "items": ("/v1/responses", lambda: json.dumps({"input": [{"role": "user", "content": "word"}] * 4096}).encode()),
    "turns": ("/v1/messages", lambda: _chat([{"role": "user", "content": [TEXT] * 4}] * 4096, max_tokens=1)),
    "blocks": ("/v1/messages", lambda: _filled('{"system":[', '{"type":"text","text":"x"},', "]}")),
    "lines": ("/api/chat", lambda: _chat([{"role": "user", "content": "word " * 180}] * 4096)),
    "tokenize": ("/tokenize", lambda: _filled('{"prompt":"', "def add(a, b): ", '"}', 1 << 20)),
    "detokenize": ("/detokenize", lambda: json.dumps({"tokens": list(range(100, 4196)) * 16}).encode()),
    "small lists": ("/v1/completions", lambda: _filled('{"prompt":[', "[],", "]}", SMALL_BYTES)),
    "small ids": ("/v1/completions", lambda: _filled('{"prompt":[', "17,", "]}", SMALL_BYTES)),
    "small objects": ("/v1/chat/completions", lambda: _filled('{"messages":[', "{},", "]}", SMALL_BYTES)),
    "small items": ("/v1/responses", lambda: _filled('{"input":[', '{"role":"user","content":"x"},', "]}", SMALL_BYTES)),
    "small text": ("/tokenize", lambda: _filled('{"prompt":"', "def add(a, b): ", '"}', SMALL_BYTES)),
    "chunks": ("/v1/completions", lambda: b""),  # of one byte each
    "headers": ("/v1/completions", lambda: b""),
}


def request_of(kind: str) -> bytes:
    """The bytes of a request that closes its connection."""
    path, make = BODIES[kind]
    body = make()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n".encode()
    if kind == "chunks":
        return head + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (MAX_BODY_BYTES // 8) + b"0\r\n\r\n"
    if kind == "headers":
        return head + b"a:b\r\n" * 6000 + b"content-length: 2\r\n\r\n{}"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def outcome(answer: bytes) -> str:
    """The status, and the code of an error."""
    if not answer:
        return "closed"
    code = CODE.search(answer)
    return answer[9:12].decode() + (f" {code[1].decode()}" if code is not None else "")


async def client(port: int, request: bytes, statuses: Counter[str]) -> None:
    """Post, read the status, begin again."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                writer.write(request)
                statuses[outcome(await reader.read())] += 1
        except OSError:  # refused before all was sent
            statuses["closed"] += 1


async def main(port: int, count: int, kind: str) -> None:
    os.nice(NICE)
    statuses: Counter[str] = Counter()
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    request = request_of(kind)
    clients = [asyncio.create_task(client(port, request, statuses)) for _ in range(count)]
    print("begun", flush=True)
    await is_over.wait()
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    print(json.dumps(statuses))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
