"""A call as `{"name": ..., "arguments": {...}}`, character by character."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import field
from typing import Final

from kog_dist.gateway.reading.json_text import BLANKS, Expects, JsonText
from kog_dist.records import dataclass

ARGUMENTS: Final = frozenset({"arguments", "parameters"})
MAX_HELD: Final = 1 << 18  # characters before it is known whether it is a call; what is longer is text


class Arguments:
    """The arguments of a call: an object, or a string or `null` in its place (a JSON text of an object; none).

    `take` gives out JSON that `completion` completes.
    """

    def __init__(self) -> None:
        self.text = JsonText()  # of the object
        self.is_none = True  # whether they are no object so far
        self.is_wrong = False
        self._is_string: bool | None = None
        self._string = JsonText()
        self._scalar = ""

    def take(self, character: str) -> str:
        """What may be given out."""
        if self.is_wrong:
            return ""
        if self._scalar or (self._is_string is None and character not in '{"'):
            self._scalar += character if len(self._scalar) < len("null ") else ""
            return ""
        if self._is_string is None:
            self._is_string = character == '"'
        if not self._is_string:
            self.is_none = False
            return self.text.take(character)
        return "".join(map(self._take_decoded, self._decoded(character)))

    def _take_decoded(self, character: str) -> str:
        if self.is_none:
            if character in BLANKS:
                return ""
            if character != "{":
                self.is_wrong = True
                return ""
            self.is_none = False
        return self.text.take(character)

    def _decoded(self, character: str) -> str:
        """The characters of the string that are certain now."""
        given = self._string.take(character)
        if given in ("", '"'):
            return ""
        inner = given[:-1] if self._string.is_over else given
        text: str = json.loads(f'"{inner}"')
        return text

    def end(self) -> str:
        """The rest of them, once their value is complete, or the answer was cut; `{}` where they are none."""
        if self.is_none:
            if (self._is_string and self._string.is_over) or self._scalar == "null":
                return "{}"
            self.is_wrong = True
            return ""
        return self.text.completion()


@dataclass
class CallJson:
    """Reads one such object. What becomes certain is in `said`: None is the beginning of the call `name`, text its arguments.

    `keys`: it may have no others (of a form that anything could be). `has_begun`: it is a call.
    `is_other`: it is an object, and no call.
    """

    names: Collection[str]
    keys: frozenset[str] | None = None
    name: str = ""
    has_begun: bool = False
    is_other: bool = False
    said: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._object = JsonText()
        self._key = ""
        self._in_value = False
        self._name: str | None = None  # as far as it has come, as JSON
        self._arguments: Arguments | None = None
        self._waiting = ""  # arguments that came before the name
        self._num_taken = 0

    @property
    def is_over(self) -> bool:
        """Whether the object is complete, or is none."""
        return self._object.is_over or self._object.is_broken

    @property
    def is_broken(self) -> bool:
        """Whether it is no JSON; the character that showed it is not part of it."""
        return self._object.is_broken

    @property
    def is_in_string(self) -> bool:
        """Whether a tag that comes next is text of a string."""
        return self._object.is_in_string

    def take(self, character: str) -> None:
        """The next character."""
        before, depth = self._object.expects, self._object.depth
        self._object.take(character)
        self._num_taken += 1
        if self._object.is_broken:
            self._end()
            return
        if self.is_other:
            return
        after = self._object.expects
        if before is Expects.VALUE and depth == 1 and after is not Expects.VALUE:
            self._begin_value()
        if self._in_value:
            is_behind = before is Expects.SCALAR and depth == 1 and after is not Expects.SCALAR
            if not is_behind:
                self._take_in_value(character)
            if is_behind or (after is Expects.MORE and self._object.depth == 1):
                self._in_value = False
                self._end_value()
        if self._object.is_over:
            self._end()
        elif not self.has_begun and self._num_taken > MAX_HELD:
            self.is_other = True

    def cut(self) -> None:
        """The answer has ended within it."""
        if self.has_begun and self._in_arguments():
            self._in_value = False
            self._say(self._arguments.end() if self._arguments is not None else "")

    # ---- values ----
    def _in_arguments(self) -> bool:
        return self._in_value and self._key in ARGUMENTS

    def _begin_value(self) -> None:
        self._key, self._in_value = self._object.key, True
        if self.keys is not None and self._key not in self.keys:
            self._is_no_call()
        elif self._key == "name" and self._name is None:
            self._name = ""
        elif self._key in ARGUMENTS and self._arguments is None:
            self._arguments = Arguments()
        else:
            self._key = ""  # of no interest

    def _take_in_value(self, character: str) -> None:
        if self._key == "name":
            self._name = (self._name or "") + character
        elif self._key in ARGUMENTS and self._arguments is not None:
            given = self._arguments.take(character)
            if self._arguments.is_wrong:
                self._is_no_call()
            elif not self._arguments.is_none:
                self._say(given)

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = _string(self._name or "")
            if self.name not in self.names:
                self._is_no_call()
            elif self._waiting:
                self._say("")
        elif self._key in ARGUMENTS and self._arguments is not None:
            rest = self._arguments.end()
            if self._arguments.is_wrong:
                self._is_no_call()
            self._say(rest)

    def _say(self, text: str) -> None:
        """Arguments, now or once the name is known."""
        if self.is_other and not self.has_begun:
            return
        self._waiting += text
        if not self.name or (not self._waiting and not self.has_begun):
            return
        if not self.has_begun:
            self.has_begun = True
            self.said.append(None)
        if self._waiting:
            self.said.append(self._waiting)
            self._waiting = ""

    def _is_no_call(self) -> None:
        if self.has_begun:
            return
        self.is_other = True

    def _end(self) -> None:
        """The object is complete, or broken."""
        if self._object.is_broken:
            self.cut()
        elif not self.has_begun and not self.is_other:
            if self.name and self._arguments is None:
                self._say("{}")
            else:
                self.is_other = True


def _string(raw: str) -> str:
    """What a JSON string says; nothing if it is another value."""
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
