"""Readers are generators that get symbols, one by one, and give back the first one that is not theirs.

So a reader looks like the grammar of what it reads, and how the answer was cut makes no difference to it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Final, Protocol, TypeAlias

from kog_dist.gateway.reading.tags import Symbol

Machine: TypeAlias = Generator[None, Symbol, Symbol]


class Sink(Protocol):
    """Where readers put what they have found."""

    functions: Mapping[str, Mapping[str, object]]  # parameters by name: what may be called

    def text(self, text: str) -> None:
        """Content."""

    def reason(self, text: str) -> None:
        """A part of a thought."""

    def call(self, name: str) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """More of its arguments."""

    def called(self) -> None:
        """The call is complete."""


def shown(symbol: Symbol) -> str:
    """The text of a symbol."""
    return symbol if isinstance(symbol, str) else symbol.text


class _Deaf:
    """Takes everything and keeps nothing."""

    functions: Mapping[str, Mapping[str, object]] = {}

    def take(self, text: str = "") -> None:
        """What any reader has found."""

    text = reason = call = arguments = called = take


DEAF: Final[Sink] = _Deaf()


def quoted(sink: Sink, machine: Machine, symbol: Symbol) -> Machine:
    """Let a machine that was made with `symbol` read what is its own; all of that is text. So nothing within it is a call."""
    try:
        next(machine)
        while True:
            sink.text(shown(symbol))
            symbol = yield
            machine.send(symbol)
    except StopIteration as stop:
        last: Symbol = stop.value
        return last
