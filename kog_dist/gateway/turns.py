"""One at a time; the clients that wait take turns, so that one with many requests delays another by one of them at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable


class NoTurn(Exception):
    """Too many wait, or it took too long."""


class Turns:
    """On one event loop. What is waited for is bounded in number, by client too, and in time."""

    def __init__(self, *, most: int, most_of_one: int, wait_s: float) -> None:
        self._most, self._most_of_one, self._wait_s = most, most_of_one, wait_s
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # whose turn is next comes first
        self._is_taken = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def of(self, client: Hashable) -> AsyncIterator[None]:
        """A turn of `client`. Raises NoTurn."""
        if self._is_taken:
            await self._wait(client)
        self._is_taken = True
        try:
            yield
        finally:
            self._next()

    async def _wait(self, client: Hashable) -> None:
        own = self._waiting.get(client, ())
        if len(self) >= self._most or len(own) >= self._most_of_one:
            raise NoTurn
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # it came at the same moment: the next one has it
                self._next()
            else:
                self._forget(client, turn)
            if isinstance(error, TimeoutError):
                raise NoTurn from None
            raise

    def _next(self) -> None:
        """Hand the turn on; it stays taken if somebody waits."""
        self._is_taken = bool(self._waiting)
        if self._waiting:
            client = next(iter(self._waiting))
            own = self._waiting.pop(client)
            own.popleft().set_result(None)
            if own:
                self._waiting[client] = own  # behind the others

    def _forget(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        own = self._waiting[client]
        own.remove(turn)
        if not own:
            del self._waiting[client]
