"""What waits, of several clients that take turns: one with much to ask delays another one by one thing at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from itertools import zip_longest
from typing import Final, Generic, TypeVar, cast

_NOBODY: Final = object()  # in the place of a client who has less than others

Item = TypeVar("Item")


class Rounds(Generic[Item]):
    """Of each client first come, first served; who has had a turn stands behind all others who wait."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[Item]] = {}  # whose turn is next comes first

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Item]:
        """In the order of their turns, if nothing else comes."""
        if not self._lines:  # asked between any two tokens
            return iter(())
        rounds = zip_longest(*self._lines.values(), fillvalue=_NOBODY)
        return (cast(Item, item) for turns in rounds for item in turns if item is not _NOBODY)

    def num_of(self, client: Hashable) -> int:
        """How much of one client waits."""
        return len(self._lines.get(client, ()))

    def add(self, client: Hashable, item: Item) -> None:
        """At the end of the client's line; a client that had none comes last."""
        self._lines.setdefault(client, deque()).append(item)

    def add_first(self, client: Hashable, item: Item) -> None:
        """Before all others: it has had its turn, and must have it again."""
        line = self._lines.pop(client, None) or deque[Item]()
        line.appendleft(item)
        self._lines = {client: line, **self._lines}

    def pop(self) -> Item:
        """Take out what is next."""
        client = next(iter(self._lines))
        item = self._lines[client][0]
        self.take(client, item)
        return item

    def take(self, client: Hashable, item: Item) -> None:
        """Take out what has its turn now, whether it was next or not: the client's others stand behind those of all."""
        line = self._lines.pop(client)
        line.remove(item)
        if line:
            self._lines[client] = line

    def remove(self, client: Hashable, item: Item) -> bool:
        """Take out what nobody wants any more; whether it was there. The client keeps its place."""
        line = self._lines.get(client)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[client]
        return True

    def clear(self) -> None:
        """Nothing waits any more."""
        self._lines.clear()
