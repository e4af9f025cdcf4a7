"""A few at a time; the clients that wait take turns, so that one with many requests delays another by one of them at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from kog_dist.runtime.rounds import Rounds


class NoTurn(Exception):
    """Too many wait, or it took too long."""


class Turns:
    """On one event loop. What is waited for is bounded in number, by client too, and in time."""

    def __init__(self, *, most: int, most_of_one: int, wait_s: float, num_at_once: int = 1) -> None:
        """`most` may wait while `num_at_once` have their turn."""
        self._most, self._most_of_one, self._wait_s = most, most_of_one, wait_s
        self._waiting = Rounds[asyncio.Future[None]]()
        self._num_free = num_at_once

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def of(self, client: Hashable) -> AsyncIterator[None]:
        """A turn of `client`. Raises NoTurn."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._next()

    async def _wait(self, client: Hashable) -> None:
        if len(self) >= self._most or self._waiting.num_of(client) >= self._most_of_one:
            raise NoTurn
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(client, turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # it came at the same moment: the next one has it
                self._next()
            else:
                self._waiting.remove(client, turn)
            if isinstance(error, TimeoutError):
                raise NoTurn from None
            raise

    def _next(self) -> None:
        """Hand the turn on, to whoever waits."""
        if len(self._waiting):
            self._waiting.pop().set_result(None)
        else:
            self._num_free += 1
