"""Answers that are messages in channels ("harmony", the format of gpt-oss).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

`analysis` is reasoning. `final`, and `commentary` to nobody, is what the user reads. A message to a function is a call of it.
The recipient may also stand before the channel.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Final

from kog_dist.gateway.reading.delta_sink import DeltaSink
from kog_dist.gateway.reading.json_calls import arguments_of, blanks
from kog_dist.gateway.reading.symbols import Machine, shown
from kog_dist.gateway.reading.tags import END, Symbol, Tag
from kog_dist.model.tokenizer import CHANNEL_ENDS

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ANALYSIS: Final = f"{CHANNEL}analysis"
MESSAGE_END: Final = "<|end|>"
_OVER: Final = frozenset({MESSAGE_END, *CHANNEL_ENDS})  # of a message
_RECIPIENT: Final = re.compile(r"to=\s*(?:functions\.)?([A-Za-z0-9_-]*)")
_REASONS: Final = re.compile(r"<\|channel\|>\s*analysis")
_MAX_HEADER: Final = 1024  # characters


class Channels:
    """Reads one answer. What has no header is content, so that a model that does without is understood as well."""

    def __init__(self, sink: DeltaSink, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within a message of the channel `analysis`."""
        self._sink, self._is_open = sink, is_open

    def run(self) -> Generator[None, Symbol, None]:
        """All of an answer."""
        symbol: Symbol = yield
        symbol = yield from self._body(symbol, ANALYSIS, 0) if self._is_open else self._first(symbol)
        while symbol is not END:
            if isinstance(symbol, Tag) and symbol.name not in _OVER:
                symbol = yield from self._header(symbol, "")
            else:
                symbol = yield  # between two messages

    def _first(self, symbol: Symbol) -> Machine:
        """The first message may have no header, or the rest of one: ` to=functions.NAME<|channel|>...`."""
        head = ""
        while isinstance(symbol, str):
            head += symbol
            symbol = yield
            if not "to=".startswith(head.lstrip()[:3]) or len(head) > _MAX_HEADER:
                self._sink.text(head)
                return (yield from self._body(symbol, ""))
        if symbol is END or symbol.name in _OVER:
            self._sink.text(head)
            return symbol
        return (yield from self._header(symbol, head))

    def _header(self, symbol: Symbol, head: str) -> Machine:
        """A header and its message. A header that was cut off is nothing."""
        while not (isinstance(symbol, Tag) and symbol.name == MESSAGE):
            if isinstance(symbol, Tag):
                if symbol is END or symbol.name in _OVER:
                    return symbol
                head = "" if symbol.name == START else head + symbol.name
            else:
                head += symbol
            symbol = yield
            if len(head) > _MAX_HEADER:
                self._sink.text(head.removeprefix(CHANNEL))
                return (yield from self._body(symbol, ""))
        begin = symbol.num_before
        return (yield from self._body((yield), head, begin))

    def _body(self, symbol: Symbol, head: str, begin: int | None = None) -> Machine:
        """A message, up to the tag behind it. `begin`: tokens before it."""
        sink, recipient = self._sink, _RECIPIENT.search(head)
        read: list[str] = []
        if recipient is not None and recipient[1] in sink.functions:
            symbol = yield from blanks(symbol, read)
            if symbol == "{" or self._is_end(symbol):
                if symbol == "{":
                    symbol = yield from arguments_of(sink, recipient[1], symbol)
                else:
                    sink.call(recipient[1])
                    sink.arguments("{}")
                sink.called()
                while not self._is_end(symbol):  # JSON ends a call; what a model says behind it is nothing
                    symbol = yield
                return symbol
        reasons = recipient is not None or _REASONS.search(head) is not None  # also what is for tools that nobody has offered
        if reasons:
            sink.think(sink.num_tokens if begin is None else begin)
        tell = sink.reason if reasons else sink.text
        tell("".join(read))
        while not self._is_end(symbol):
            tell(shown(symbol))
            sink.direct = tell
            symbol = yield
        sink.direct = None
        if reasons:
            sink.stop_thinking(symbol)
        return symbol

    def _is_end(self, symbol: Symbol) -> bool:
        return symbol is END or (isinstance(symbol, Tag) and (symbol.name in _OVER or symbol.name in (START, CHANNEL)))
