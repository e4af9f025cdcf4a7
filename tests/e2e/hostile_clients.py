"""Clients that read slowly, say half of what they should, or vanish: `python -m tests.e2e.hostile_clients PORT COUNT`.

A process of its own, so that what it costs is not counted as the gateway's. At SIGTERM prints what it did as one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import sys
from collections import Counter
from typing import Any

PAUSE_S = 4.0  # mean time between two acts of a client
USER = [{"role": "user", "content": "x = "}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x = ", "max_tokens": 400, "stream": True},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 400, "stream": True},
    "/v1/responses": {"input": "x = ", "max_output_tokens": 400, "stream": True},
    "/v1/messages": {"model": "default", "messages": USER, "max_tokens": 400, "stream": True},
    "/api/chat": {"model": "default", "messages": USER, "options": {"num_predict": 400}},
    "/api/generate": {"model": "default", "prompt": "x = ", "options": {"num_predict": 400}},
}
HEAD = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


def request_of(path: str) -> bytes:
    body = json.dumps(BODIES[path]).encode()
    return HEAD.format(path, len(body)).encode() + body


REQUESTS = tuple(map(request_of, BODIES))


async def act(port: int, done: Counter[str]) -> None:
    """One thing that a client should not do."""
    kind = random.choice(("vanish", "vanish_reading", "never_read", "half_head", "half_body", "garbage"))
    request = random.choice(REQUESTS)
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    with connection, contextlib.suppress(OSError):
        async with asyncio.timeout(5.0):
            await loop.sock_connect(connection, ("127.0.0.1", port))
        sent = {"half_head": request[:40], "half_body": request[:-5], "garbage": random.randbytes(200)}.get(kind, request)
        await loop.sock_sendall(connection, sent)
        if kind == "vanish_reading":
            async with asyncio.timeout(5.0):
                await loop.sock_recv(connection, 500)
        elif kind != "vanish":
            await asyncio.sleep(random.uniform(0.5, 6.0))
    done[kind] += 1


async def client(port: int, done: Counter[str]) -> None:
    while True:
        await asyncio.sleep(random.uniform(0, 2 * PAUSE_S))
        with contextlib.suppress(TimeoutError):
            await act(port, done)


async def main(port: int, count: int) -> None:
    random.seed(1)
    done: Counter[str] = Counter()
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    clients = [asyncio.create_task(client(port, done)) for _ in range(count)]
    await is_over.wait()
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    print(json.dumps(done))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
