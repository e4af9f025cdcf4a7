"""Calls in JSON, in the forms of the families, from behind the tag that begins them; docs/answers.md shows each."""

from __future__ import annotations

import json
import re
from typing import Final

from kog_dist.gateway.reading.call_json import ARGUMENTS, Arguments, CallJson
from kog_dist.gateway.reading.json_text import BLANKS
from kog_dist.gateway.reading.symbols import DEAF, Machine, Sink, quoted, shown
from kog_dist.gateway.reading.tags import END, Symbol, Tag

_LOOSE_KEYS: Final = frozenset({"name", "type", "id", *ARGUMENTS})
_MAX_LABEL: Final = 512
_LABEL: Final = re.compile(r"\s*([A-Za-z0-9_.-]+)?\s*(?:```(?:json)?\s*)?")


def blanks(symbol: Symbol, read: list[str]) -> Machine:
    """Skip them; they are kept in `read`."""
    while isinstance(symbol, str) and symbol in BLANKS:
        read.append(symbol)
        symbol = yield
    return symbol


class JsonCalls:
    """Reads one or several objects with name and arguments. `num_calls`: how many were calls."""

    def __init__(self, sink: Sink, before: str = "", *, is_loose: bool = False) -> None:
        """`before`: what was read of it, which is text if there is no call. `is_loose`: anything could be such an object."""
        self._sink, self._read = sink, [before] if before else []
        self._keys = _LOOSE_KEYS if is_loose else None
        self.num_calls = 0

    def one_or_list(self, symbol: Symbol) -> Machine:
        """`{...}`, `{...} {...}` or `[{...}, ...]`, with blanks around."""
        symbol = yield from blanks(symbol, self._read)
        is_list = symbol == "["
        if is_list:
            self._read.append("[")
            symbol = yield from blanks((yield), self._read)
        while symbol == "{":
            symbol = yield from self._one()
            symbol = yield from blanks(symbol, self._read)
            if is_list and symbol == ",":
                self._read.append(",")
                symbol = yield from blanks((yield), self._read)
        if is_list and symbol == "]":
            self._read.append("]")
            symbol = yield
        if not self.num_calls:
            self.as_text()
        return symbol

    def one(self, symbol: Symbol) -> Machine:
        """`{...}` alone; `symbol` is its brace."""
        assert symbol == "{", "nothing else begins an object"
        symbol = yield from self._one()
        if not self.num_calls:
            self.as_text()
        return symbol

    def as_text(self) -> None:
        """What was read is no call."""
        self._sink.text("".join(self._read))
        self._read.clear()

    def _one(self) -> Machine:
        call = CallJson(self._sink.functions, self._keys)
        symbol: Symbol = "{"
        while True:
            if symbol is END or (isinstance(symbol, Tag) and not call.is_in_string):
                call.cut()
                self._tell(call)
                return symbol
            for character in shown(symbol):
                call.take(character)
            if not call.has_begun and not call.is_broken:
                self._read.append(shown(symbol))
            self._tell(call)
            if call.has_begun and call.is_over:
                self._sink.called()
            if call.is_broken:
                return symbol
            symbol = yield
            if call.is_over:
                return symbol

    def _tell(self, call: CallJson) -> None:
        for said in call.said:
            if said is None:
                self._read.clear()
                self.num_calls += 1
                self._sink.call(call.name)
            else:
                self._sink.arguments(said)
        call.said.clear()
        if call.is_other:
            self.as_text()


def arguments_of(sink: Sink, name: str, symbol: Symbol) -> Machine:
    """The arguments of a call whose name was read; `symbol` is their brace."""
    arguments = Arguments()
    sink.call(name)
    while symbol is not END and (isinstance(symbol, str) or arguments.text.is_in_string):
        given = "".join(map(arguments.take, shown(symbol)))
        if given:
            sink.arguments(given)
        if arguments.text.is_broken:
            break
        if arguments.text.is_over:
            sink.called()
            return (yield)
        symbol = yield
    sink.arguments(arguments.end())
    sink.called()
    return symbol


class MistralCalls:
    """Behind `[TOOL_CALLS]`: `[{"name": ..., "arguments": ...}, ...]`, or `NAME[ARGS]{...}`, or `NAME[CALL_ID]...[ARGS]{...}`."""

    def __init__(self, sink: Sink, before: str) -> None:
        self._sink, self._before = sink, before

    def read(self, symbol: Symbol) -> Machine:
        """Up to what is no part of a call."""
        read: list[str] = []
        symbol = yield from blanks(symbol, read)
        if symbol in ("[", "{"):
            return (yield from JsonCalls(self._sink, self._before + "".join(read)).one_or_list(symbol))
        label = ""
        while isinstance(symbol, str) and symbol not in "{\n" and len(label) < _MAX_LABEL:
            label += symbol
            symbol = yield
        read.append(label)
        while isinstance(symbol, Tag) and symbol.name in ("[CALL_ID]", "[ARGS]"):
            is_last = symbol.name == "[ARGS]"
            read.append(symbol.text)
            symbol = yield
            while isinstance(symbol, str) and symbol != "{" and len(read) < _MAX_LABEL:
                read.append(symbol)
                symbol = yield
            if is_last:
                break
        name = label.strip()
        if symbol == "{" and name in self._sink.functions:
            return (yield from arguments_of(self._sink, name, symbol))
        self._sink.text(self._before + "".join(read))
        if symbol == "{":
            return (yield from quoted(self._sink, arguments_of(DEAF, name, symbol), symbol))
        return symbol


CALLS_BEGIN: Final = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
CALL_BEGIN: Final = "<｜tool▁call▁begin｜>"  # noqa: RUF001
SEPARATOR: Final = "<｜tool▁sep｜>"  # noqa: RUF001
CALL_END: Final = "<｜tool▁call▁end｜>"  # noqa: RUF001
CALLS_END: Final = "<｜tool▁calls▁end｜>"  # noqa: RUF001


def deepseek_name(tag: str) -> str:
    """Of the spellings that distilled models have for a tag, the first one."""
    return tag.replace("\\", "").replace("_", "▁").replace(" ", "▁")


DEEPSEEK_TAGS: Final = tuple(
    dict.fromkeys(
        tag.replace("▁", blank)
        for tag in (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
        for blank in ("▁", "_", " ", "\\_")
    )
)


class DeepseekCalls:
    """`function` or the name, a separator, then the arguments, in V3 and R1 after name and a fence."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def read(self, tag: Tag) -> Machine:
        """From the tag that begins one call or all of them, to behind the last one."""
        symbol: Symbol = tag
        has_call = False
        read: list[str] = []
        while isinstance(symbol, Tag) and deepseek_name(symbol.name) in (CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END):
            name = deepseek_name(symbol.name)
            read.append(symbol.text)
            if name == CALLS_END:
                symbol = yield
                break
            symbol = yield from blanks((yield), read)
            if name == CALL_BEGIN:
                symbol = yield from self._one(symbol, read)
                has_call = not read
            elif name == CALL_END and has_call:
                read.clear()
        if not has_call:
            self._sink.text("".join(read))
        return symbol

    def _one(self, symbol: Symbol, read: list[str]) -> Machine:
        """From its head to behind its arguments and their fence."""
        kind, label = "", ""
        while isinstance(symbol, str) and len(kind) < _MAX_LABEL:
            kind += symbol
            symbol = yield
        read.append(kind)
        if not isinstance(symbol, Tag) or deepseek_name(symbol.name) != SEPARATOR:
            return symbol
        read.append(symbol.text)
        symbol = yield
        while isinstance(symbol, str) and symbol != "{" and len(label) < _MAX_LABEL:
            label += symbol
            symbol = yield
        read.append(label)
        match = _LABEL.fullmatch(label)
        name = (match[1] or kind.strip()) if match is not None else ""
        if symbol != "{":
            return symbol
        if name not in self._sink.functions:
            self._sink.text("".join(read))
            read[:] = [""]
            return (yield from quoted(self._sink, arguments_of(DEAF, name, symbol), symbol))
        read.clear()
        symbol = yield from arguments_of(self._sink, name, symbol)
        while isinstance(symbol, str) and symbol in BLANKS + "`":
            symbol = yield
        return symbol


def python_call(sink: Sink, before: str, symbol: Symbol) -> Machine:
    """`NAME.call(key="value", ...)`, as Llama 3.1 calls the tools that it was trained with."""
    text, quote = "", ""
    while isinstance(symbol, str) and len(text) < 1 << 16:
        text += symbol
        if quote:
            quote = "" if symbol == quote and not text.endswith("\\" + quote) else quote
        elif symbol in "'\"":
            quote = symbol
        symbol = yield
        if text.endswith(")") and not quote:
            break
    match = _PYTHON_CALL.fullmatch(text.strip())
    arguments = None if match is None or match[1] not in sink.functions else _keywords(match[2])
    if match is None or arguments is None:
        sink.text(before + text)
    else:
        sink.call(match[1])
        sink.arguments(arguments)
        sink.called()
    return symbol


_PYTHON_CALL: Final = re.compile(r"([A-Za-z0-9_]+)\.call\((.*)\)", re.DOTALL)
_KEYWORD: Final = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*")


def _keywords(text: str) -> str | None:
    """The JSON object of `key=value, ...`; None if the values are no JSON."""
    found, decoder, place = {}, json.JSONDecoder(), 0
    while text[place:].strip():
        match = _KEYWORD.match(text, place)
        if match is None:
            return None
        try:
            found[match[1]], place = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            return None
        rest = text[place:].lstrip()
        if rest and not rest.startswith(","):
            return None
        place = len(text) - len(rest) + 1 if rest else len(text)
    return json.dumps(found, ensure_ascii=False)
