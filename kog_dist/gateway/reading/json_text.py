"""One JSON value as a model writes it, character by character; what is given out of it can always be completed."""

from __future__ import annotations

import enum
import json
import re
from typing import Final

MAX_DEPTH: Final = 128
BLANKS: Final = " \t\n\r"
_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_MAX_SCALAR: Final = 4096
_SCALAR_CHARACTERS: Final = frozenset("+-.0123456789aeflnrstuE")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_REPLACEMENT: Final = "\\ufffd"


class Expects(enum.Enum):
    """What comes next."""

    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()  # or the end of the list
    KEY = enum.auto()
    FIRST_KEY = enum.auto()  # or the end of the object
    COLON = enum.auto()
    MORE = enum.auto()  # a comma, or the end of object or list
    STRING = enum.auto()  # the rest of one
    SCALAR = enum.auto()
    NOTHING = enum.auto()  # the value is complete


class JsonText:
    """`take` gives out what is certain; `completion` then makes JSON of what was given so far, wherever it stopped.

    Lenient where models are known to slip: within strings, control characters are escaped and so is a backslash that escapes
    nothing; a comma before a closing bracket is left out; half a surrogate pair becomes U+FFFD.
    """

    def __init__(self) -> None:
        self.expects = Expects.VALUE
        self.is_broken = False  # what came is no JSON: nothing more is taken
        self.key = ""  # of the value that comes, as it was written, with its escapes
        self._closers: list[str] = []
        self._held = ""  # may be given with what comes next
        self._scalar = ""
        self._is_key = False  # the string is one
        self._escape = ""  # that is not complete
        self._surrogate = ""  # the first half of a pair

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._closers)

    @property
    def is_over(self) -> bool:
        """Whether the value is complete."""
        return self.expects is Expects.NOTHING

    @property
    def is_in_string(self) -> bool:
        """Whether what comes next is text of a string, tags included."""
        return self.expects is Expects.STRING

    def take(self, character: str) -> str:
        """What may be given out now; once it is over or broken, nothing."""
        if self.is_broken or self.is_over:
            return ""
        if self.expects is Expects.STRING:
            return self._in_string(character)
        if self.expects is Expects.SCALAR:
            if character in _SCALAR_CHARACTERS and len(self._scalar) < _MAX_SCALAR:
                self._scalar += character
                return ""
            return self._end_scalar() + ("" if self.is_broken else self.take(character))
        if character in BLANKS:
            self._held += character
            return ""
        return self._at_structure(character)

    def completion(self) -> str:
        """What makes JSON of the text so far; unfinished keys and scalars are left out. Call it once, at the end."""
        if self.is_over or not self._closers:
            return ""
        quote = '"' if self.expects is Expects.STRING and not self._is_key else ""
        half = _REPLACEMENT if self._surrogate and quote else ""
        return half + quote + "".join(reversed(self._closers))

    # ---- between strings ----
    def _at_structure(self, character: str) -> str:
        expects = self.expects
        is_key = expects in (Expects.KEY, Expects.FIRST_KEY)
        if character in "}]" and self._closers and character == self._closers[-1] and self._may_close():
            if expects in (Expects.KEY, Expects.VALUE):
                self._held = ""  # the comma
            self._closers.pop()
            return self._give(character, self._after_value())
        if is_key and character == '"':
            self._held, self._is_key, self.key = self._held + character, True, ""
            self.expects = Expects.STRING
            return ""
        if expects is Expects.COLON and character == ":":
            self._held, self.expects = self._held + character, Expects.VALUE
            return ""
        if expects is Expects.MORE and character == ",":
            self._held += character
            self.expects = Expects.KEY if self._closers[-1] == "}" else Expects.VALUE
            return ""
        if expects in (Expects.VALUE, Expects.FIRST_ITEM):
            return self._begin_value(character)
        self.is_broken = True
        return ""

    def _may_close(self) -> bool:
        """A bracket may also follow a comma; not a colon."""
        if self.expects is Expects.VALUE:
            return self._closers[-1] == "]"
        return self.expects in (Expects.FIRST_ITEM, Expects.FIRST_KEY, Expects.KEY, Expects.MORE)

    def _begin_value(self, character: str) -> str:
        if character == '"':
            self._is_key = False
            return self._give(character, Expects.STRING)
        if character in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            return self._give(character, Expects.FIRST_KEY if character == "{" else Expects.FIRST_ITEM)
        if character in "-0123456789tfn":
            self._scalar, self.expects = character, Expects.SCALAR
            return ""
        self.is_broken = True
        return ""

    def _end_scalar(self) -> str:
        scalar, self._scalar = self._scalar, ""
        if not _SCALAR.fullmatch(scalar):
            self.is_broken, self.expects = True, Expects.VALUE
            return ""
        return self._give(scalar, self._after_value())

    def _after_value(self) -> Expects:
        return Expects.MORE if self._closers else Expects.NOTHING

    def _give(self, text: str, expects: Expects) -> str:
        held, self._held, self.expects = self._held, "", expects
        return held + text

    # ---- strings ----
    def _in_string(self, character: str) -> str:
        if self._escape:
            return self._in_escape(character)
        if character == "\\":
            self._escape = character
            return ""
        half = self._take_half()
        if character == '"':
            self.expects = Expects.COLON if self._is_key else self._after_value()
            return half + self._say(character, is_text=False)
        if character < " ":
            character = json.dumps(character)[1:-1]
        return half + self._say(character)

    def _in_escape(self, character: str) -> str:
        escape = self._escape + character
        is_code = escape.startswith("\\u")
        if character not in (_HEX if len(escape) > 2 else _ESCAPES | {"u"}):
            self._escape = ""  # a backslash that escapes nothing
            literal = escape[:-1] if character == "'" and len(escape) == 2 else "\\" + escape[:-1]
            return self._take_half() + self._say("" if literal == "\\" else literal) + self._in_string(character)
        if is_code and len(escape) < 6:
            self._escape = escape
            return ""
        self._escape = ""
        code = int(escape[2:], 16) if is_code else 0
        if 0xDC00 <= code < 0xE000:
            first, self._surrogate = self._surrogate, ""
            return self._say(first + escape if first else _REPLACEMENT)
        half = self._take_half()
        if 0xD800 <= code < 0xDC00:
            self._surrogate = escape
            return half
        return half + self._say(escape)

    def _take_half(self) -> str:
        """A first half that no second one has followed."""
        half, self._surrogate = self._surrogate, ""
        return self._say(_REPLACEMENT) if half else ""

    def _say(self, text: str, *, is_text: bool = True) -> str:
        """Text of a string: of a key it is held until its value begins."""
        if not self._is_key:
            return text
        if is_text:
            self.key += text
        self._held += text
        return ""
