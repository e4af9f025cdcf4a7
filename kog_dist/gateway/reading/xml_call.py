"""Calls as Qwen3-Coder and Qwen3.5 write them.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from kog_dist.gateway.reading.json_text import BLANKS
from kog_dist.gateway.reading.symbols import DEAF, Machine, Sink, quoted, shown
from kog_dist.gateway.reading.tags import END, Symbol, Tag
from kog_dist.gateway.reading.typed_values import json_of, types_of

TOOL_CALL_END: Final = "</tool_call>"
FUNCTION: Final = "<function="
_FUNCTION_END: Final = "</function>"
_PARAMETER: Final = "<parameter="
_PARAMETER_END: Final = "</parameter>"
_MAX_HELD: Final = 4096
_BEFORE_TAG: Final = re.compile(rf"\n?({_PARAMETER_END}|{_FUNCTION_END})[ \t\n\r]*")


class XmlCall:
    """Reads from behind `<function=` to the end of the function. `is_call`: its name is known; else all of it was text."""

    def __init__(self, sink: Sink, before: str) -> None:
        """`before`: what was read of it, which is text if it is no call."""
        self._sink, self._before = sink, before
        self._parameters: Mapping[str, object] = {}
        self._keys: set[str] = set()
        self._word = ""  # what was read last
        self.is_call = False

    def read(self, symbol: Symbol) -> Machine:
        """From the name to behind `</function>`."""
        symbol = yield from self._name(symbol)
        if symbol != ">" or self._word not in self._sink.functions:
            self._sink.text(self._before + self._word)
            return symbol if symbol != ">" else (yield from quoted(self._sink, XmlCall(DEAF, "")._body(), symbol))
        self.is_call, self._parameters = True, self._sink.functions[self._word]
        self._sink.call(self._word)
        return (yield from self._body())

    def _body(self) -> Machine:
        """From behind the name's `>`."""
        self._sink.arguments("{")
        symbol = yield from self._tag((yield))
        while self._word == _PARAMETER:
            symbol = yield from self._parameter(symbol)
        if self._word != _FUNCTION_END:
            self._close()
            self._sink.text(self._word)
        return symbol

    def _close(self) -> None:
        self._sink.arguments("}")
        self._sink.called()

    def _parameter(self, symbol: Symbol) -> Machine:
        """From its key to behind the tag that follows its value."""
        symbol = yield from self._name(symbol)
        if symbol != ">":
            return symbol
        key, types, value = self._word, self._types_of(self._word), _Value()
        is_new, is_text = key not in self._keys, types == {"string"}
        head = (", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": " if is_new else ""
        self._keys.add(key)
        text = ""
        if is_new and is_text:
            self._sink.arguments(head + '"')
        symbol = yield
        if symbol == "\n":
            symbol = yield
        while not value.ends_before(symbol):
            given = "".join(map(value.take, shown(symbol)))
            if not is_text:
                text += given
            elif is_new and given:
                self._sink.arguments(json.dumps(given, ensure_ascii=False)[1:-1])
            if value.is_over:
                break
            symbol = yield
        if is_new:
            self._sink.arguments('"' if is_text else head + json_of(text, types))
        self._word = value.follows
        if self._word == _FUNCTION_END:
            self._close()
        return (yield) if value.is_over else symbol

    def _types_of(self, key: str) -> frozenset[str]:
        """Of a parameter that the schema does not know: text."""
        properties, rest = self._parameters.get("properties"), self._parameters.get("additionalProperties")
        if isinstance(properties, Mapping) and key in properties:
            return types_of(properties[key], self._parameters)
        return types_of(rest, self._parameters) if isinstance(rest, Mapping) and rest else frozenset({"string"})

    def _name(self, symbol: Symbol) -> Machine:
        """Up to its `>`, which is given back; or to what no name has."""
        self._word = ""
        while isinstance(symbol, str) and symbol not in ">\n<{" and len(self._word) < 256:
            self._word += symbol
            symbol = yield
        return symbol

    def _tag(self, symbol: Symbol) -> Machine:
        """A parameter or the function's end, with blanks before it."""
        self._word = ""
        while symbol in tuple(BLANKS):
            symbol = yield
        while symbol is not END and any(tag.startswith(self._word + shown(symbol)) for tag in (_PARAMETER, _FUNCTION_END)):
            self._word += shown(symbol)
            if self._word == _FUNCTION_END:
                self._close()
            is_whole = self._word in (_PARAMETER, _FUNCTION_END)
            symbol = yield
            if is_whole:
                break
        return symbol


class _Value:
    """Finds the end of a value: `</parameter>`, but only before another parameter or the function's end; else it is its text.

    `follows`: the tag behind it, which has been read.
    """

    def __init__(self) -> None:
        self._held = ""
        self.is_over = False
        self.follows = ""

    def take(self, character: str) -> str:
        """The text that is certain."""
        self._held += character
        given = ""
        while not self._may_end():
            given, self._held = given + self._held[0], self._held[1:]
        return given

    def ends_before(self, symbol: Symbol) -> bool:
        """Whether the value ends with what was held back: a tag comes, or the end of the answer."""
        if not isinstance(symbol, Tag) or symbol.name not in (END.name, TOOL_CALL_END):
            return False
        match = _BEFORE_TAG.fullmatch(self._held)
        if match is not None and match[1] == _FUNCTION_END:
            self.follows = _FUNCTION_END
        return match is not None or symbol is END

    def _may_end(self) -> bool:
        """Whether what is held may be an end; sets `follows` once it is."""
        held = self._held.removeprefix("\n")
        if any(tag.startswith(held) for tag in (_PARAMETER_END, _FUNCTION_END)):
            return True
        if len(held) > _MAX_HELD:
            return False
        if held.startswith(_FUNCTION_END):
            return not held[len(_FUNCTION_END) :].strip(BLANKS)
        if not held.startswith(_PARAMETER_END):
            return False
        rest = held[len(_PARAMETER_END) :].lstrip(BLANKS)
        if rest in (_PARAMETER, _FUNCTION_END):
            self.follows, self.is_over = rest, True
        return any(tag.startswith(rest) for tag in (_PARAMETER, _FUNCTION_END))
