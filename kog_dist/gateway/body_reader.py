"""Bodies are read where they hold nobody up: small ones in a thread, others in a process, one after another.

To read JSON keeps the interpreter's lock: 4 MiB of `[],` took 0.3 s, in which no stream had a token. A small body, by its bytes
and by how many arrays and objects it has, takes a few milliseconds at most, and less than the way to the process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from kog_dist import python_child
from kog_dist.gateway import body_work
from kog_dist.gateway.body_process import LENGTH, BodyArgs, question
from kog_dist.gateway.openai.errors import INVALID_REQUEST, SERVER, ApiError
from kog_dist.gateway.openai.packing import unpacked, unpacked_error
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel

SMALL_BYTES: Final = 16 << 10
SMALL_CONTAINERS: Final = 256  # arrays and objects
READ_S: Final = 10.0  # of one body; 4 MiB of the worst kind take about one
END_S: Final = 1.0
_RECEIVE_BYTES: Final = 1 << 18


class BodyReader:
    """For one gateway, on its event loop. The process is started with the first body that needs it, and again when it is lost."""

    def __init__(self, model: str | None) -> None:
        """`model`: folder of the checkpoint, whose tokenizer and chat template the process reads, too."""
        self._model = model
        self._child: _Child | None = None
        self._turn = asyncio.Lock()
        self.num_outside = 0  # bodies that were read in the process

    async def read(self, path: str, raw: bytes, served: ServedModel) -> Planned | bytes:
        """See body_work.read."""
        if is_small(raw):
            return await asyncio.to_thread(body_work.read, path, raw, served)
        async with self._turn:
            self.num_outside += 1
            answer = await self._ask(question(path, served), raw)
        if "error" in answer:
            raise unpacked_error(answer["error"])
        if "mistake" in answer:
            raise RuntimeError(f"in the process that reads bodies: {answer['mistake']}")
        if "answer" in answer:
            found: bytes = answer["answer"]
            return found
        return unpacked(answer["generates"], answer["reply"], served.tokenizer)

    async def _ask(self, head: bytes, raw: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(READ_S):
                self._child = child = self._child or _Child(self._model)
                return await child.ask(head, raw)
        except (_Lost, TimeoutError):
            reason = f"the body takes more than {READ_S:g} s or too much memory to read; simplify it"
            raise ApiError(400, INVALID_REQUEST, "body_too_complex", None, reason) from None
        except OSError as error:
            reason = f"the process that reads large bodies could not be started ({error.strerror}); try again"
            raise ApiError(503, SERVER, "too_busy", None, reason, 1.0) from None
        finally:
            if self._child is not None and not self._child.is_idle:  # whatever the reason: its next answer would be the wrong one
                self.close()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.end()
            self._child = None


def is_small(raw: bytes) -> bool:
    """Whether a body is read so fast that nobody notices."""
    return len(raw) <= SMALL_BYTES and raw.count(b"{") + raw.count(b"[") <= SMALL_CONTAINERS


class _Lost(Exception):
    """The process has ended."""


class _Child:
    def __init__(self, model: str | None) -> None:
        """Start it. Raises OSError if there is no process or no file to be had."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel.setblocking(False)
        self.is_idle = True  # what it was asked was answered
        arguments = BodyArgs(model, theirs.fileno(), os.getpid())
        try:
            self._process = subprocess.Popen(
                python_child.command("kog_dist.gateway.body_process", arguments.to_json()),
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    async def ask(self, head: bytes, raw: bytes) -> dict[str, Any]:
        """Its answer. Raises _Lost."""
        self.is_idle = False
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._channel, LENGTH.pack(len(head)) + head + LENGTH.pack(len(raw)))
            await loop.sock_sendall(self._channel, raw)
            (num_bytes,) = LENGTH.unpack(await self._received(LENGTH.size))
            answer: dict[str, Any] = msgpack.unpackb(await self._received(num_bytes), max_bin_len=num_bytes)
        except ConnectionError:
            raise _Lost from None
        self.is_idle = True
        return answer

    async def _received(self, num_bytes: int) -> bytes:
        loop, pieces = asyncio.get_running_loop(), bytearray()
        while len(pieces) < num_bytes:
            piece = await loop.sock_recv(self._channel, min(_RECEIVE_BYTES, num_bytes - len(pieces)))
            if not piece:
                raise _Lost
            pieces += piece
        return bytes(pieces)

    def end(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait(END_S)
