"""Bodies are read where they hold nobody up: small ones in threads, others in a process, one at a time; clients take turns.

To read JSON keeps the interpreter's lock: 4 MiB of `[],` took 0.3 s, in which no stream had a token. A small body, by its bytes
and by how many arrays and objects it has, takes a few milliseconds at most, and less than the way to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Hashable
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from kog_dist.gateway import body_work
from kog_dist.gateway.body_process import CPU_S, LENGTH, OUT_OF_MEMORY, BodyArgs, question
from kog_dist.gateway.openai.errors import INVALID_REQUEST, SERVER, ApiError
from kog_dist.gateway.openai.reply import Planned
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.packing import unpacked, unpacked_error
from kog_dist.gateway.turns import NoTurn, Turns
from kog_dist.system import killed_child, python_child
from kog_dist.system.stopped_child import LOOK_EVERY_S, StopWatch

SMALL_BYTES: Final = 16 << 10
SMALL_CONTAINERS: Final = 256  # arrays and objects
READ_S: Final = 10.0  # of one body, with the start of the process; its own limit is CPU_S
SMALL_AT_ONCE: Final = 2  # small bodies: each waits for the interpreter's lock, and the streams with it
WAITING, WAITING_OF_ONE = 64, 8  # large bodies that wait for their turn
SMALL_WAITING, SMALL_WAITING_OF_ONE = 1024, 256
WAIT_S: Final = 10.0
END_S: Final = 1.0
_COMPLEX: Final = frozenset({-signal.SIGPROF, -signal.SIGABRT, OUT_OF_MEMORY})  # ends that are the body's fault
_RECEIVE_BYTES: Final = 1 << 18


class BodyReader:
    """For one gateway, on its event loop. The process is started with the first body that needs it, and again when it is lost."""

    def __init__(self, model: str | None) -> None:
        """`model`: folder of the checkpoint, whose tokenizer and chat template the process reads, too."""
        self._model = model
        self._child: _Child | None = None
        self._turns = Turns(most=WAITING, most_of_one=WAITING_OF_ONE, wait_s=WAIT_S)
        self._small_turns = Turns(most=SMALL_WAITING, most_of_one=SMALL_WAITING_OF_ONE, wait_s=WAIT_S, num_at_once=SMALL_AT_ONCE)
        self._ending: set[asyncio.Task[int | None]] = set()  # processes that were killed
        self.num_outside = 0  # bodies that were read in the process

    async def read(self, path: str, raw: bytes, served: ServedModel, client: Hashable, key_scope: str) -> Planned | bytes:
        """See body_work.read. `client`: whose turn it takes."""
        small = is_small(raw)
        turns, size, most = (self._small_turns, "small", SMALL_WAITING) if small else (self._turns, "large", WAITING)
        try:
            async with turns.of(client):
                if small:
                    return await asyncio.to_thread(body_work.read, path, raw, served, key_scope)
                self.num_outside += 1
                answer = await self._ask(question(path, served, key_scope), raw)
        except NoTurn:
            raise _busy(f"{len(turns)} {size} bodies wait to be read, at most {most} or {WAIT_S:g} s; try again") from None
        if "error" in answer:
            raise unpacked_error(answer["error"])
        if "mistake" in answer:
            raise RuntimeError(f"in the process that reads bodies: {answer['mistake']}")
        if "answer" in answer:
            found: bytes = answer["answer"]
            return found
        return unpacked(answer["generates"], answer["reply"], answer["told"], served.tokenizer)

    async def _ask(self, head: bytes, raw: bytes) -> dict[str, Any]:
        for _ in range(2):  # a process that somebody killed or stopped is replaced
            try:
                async with asyncio.timeout(READ_S):
                    self._child = child = self._child or _Child(self._model)
                    return await child.ask(head, raw)
            except _ReaderLost:
                if await child.exit_code() in _COMPLEX:
                    reason = f"the body takes more than {CPU_S:g} s or too much memory to read; simplify it"
                    raise ApiError(400, INVALID_REQUEST, "body_too_complex", None, reason) from None
            except TimeoutError:
                raise _busy(f"a large body was not read within {READ_S:g} s; try again") from None
            except OSError as error:
                reason = f"the process that reads large bodies could not be started ({error.strerror}); try again"
                raise _busy(reason) from None
            finally:
                if self._child is not None and not self._child.is_idle:  # its next answer would be the wrong one
                    lost, self._child = self._child, None
                    lost.kill()
                    self._ending.add(task := asyncio.create_task(lost.exit_code()))
                    task.add_done_callback(self._ending.discard)
        raise _busy("the process that reads large bodies was lost twice; try again")

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.end()
            self._child = None


def is_small(raw: bytes) -> bool:
    """Whether a body is read so fast that nobody notices."""
    return len(raw) <= SMALL_BYTES and raw.count(b"{") + raw.count(b"[") <= SMALL_CONTAINERS


class _ReaderLost(Exception):
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
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._watch = StopWatch(self._process.pid)

    async def ask(self, head: bytes, raw: bytes) -> dict[str, object]:
        """Its answer. Raises _ReaderLost if it has ended, or was stopped and is killed for it."""
        self.is_idle = False
        exchange = asyncio.ensure_future(self._exchange(head, raw))
        try:
            while not (await asyncio.wait([exchange], timeout=LOOK_EVERY_S))[0]:
                if self._watch.is_lost():
                    self._process.kill()  # so that the exchange ends
            answer = exchange.result()
        finally:
            exchange.cancel()
        self.is_idle = True
        return answer

    async def _exchange(self, head: bytes, raw: bytes) -> dict[str, object]:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self._channel, LENGTH.pack(len(head)) + head + LENGTH.pack(len(raw)))
            await loop.sock_sendall(self._channel, raw)
            (num_bytes,) = LENGTH.unpack(await self._received(LENGTH.size))
            answer: dict[str, object] = msgpack.unpackb(await self._received(num_bytes), max_bin_len=num_bytes)
        except ConnectionError:
            raise _ReaderLost from None
        return answer

    async def _received(self, num_bytes: int) -> bytes:
        loop, pieces = asyncio.get_running_loop(), bytearray()
        while len(pieces) < num_bytes:
            piece = await loop.sock_recv(self._channel, min(_RECEIVE_BYTES, num_bytes - len(pieces)))
            if not piece:
                raise _ReaderLost
            pieces += piece
        return bytes(pieces)

    def kill(self) -> None:
        """End it; `exit_code` waits for that."""
        self._channel.close()
        self._process.kill()

    async def exit_code(self) -> int | None:
        """How it ended, once it has; None if it does not. To wait for a process that had much memory holds up nobody."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, END_S)
        return None

    def end(self) -> None:
        self._channel.close()
        killed_child.kill(self._process)


def _busy(reason: str) -> ApiError:
    return ApiError(503, SERVER, "too_busy", None, reason, 1.0)
