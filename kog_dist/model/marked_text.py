"""What of a rendered chat came with the request: strings that carry, through all that a template does, a copy with marks.

In the copy (the `twin`) each character that can be part of a special token is replaced by a stand-in, a character that nothing
else in the render has. Every operation of a template is done twice, on the text and on its twin. Conditions see the text alone,
so a template takes the same way as without marks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sequence, ValuesView
from typing import Any, Final

from jinja2 import Environment, Undefined
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext

_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "environment"})
_TYPES: Final = frozenset({"text", "function", "object"})
_STAND_INS: Final = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0x40000, 0xE0000))  # private use, unassigned


class Marked(str):
    """A string that came with the request, in whole or in part. `twin`: the same with stand-ins, as long as the text."""

    __slots__ = ("marks", "twin")
    marks: Marks
    twin: str

    def __new__(cls, text: str, twin: str, marks: Marks) -> Marked:  # noqa: D102 - see the class
        made = super().__new__(cls, text)
        made.twin, made.marks = twin, marks
        return made

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: Any) -> str:
        text, twin = str.__getitem__(self, key), self.twin[key]
        return text if text == twin else Marked(text, twin, self.marks)

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))


class Marks:
    """The stand-ins of one render. `specials`: texts of the special tokens. `known`: all texts of the render: no stand-in is one
    of their characters. `everything`: any character may become part of a special token, since tokens are looked for in a text
    that was normalized.
    """

    def __init__(self, specials: Iterable[str], known: Sequence[str], *, everything: bool = False) -> None:
        """Raises ValueError if the render has so many characters that none is left."""
        specials = tuple(specials)
        used = set().union(*(text for text in known if everything or not text.isascii()))
        letters = {character for token in (known if everything else specials) for character in token if not character.isspace()}
        free = (chr(point) for points in _STAND_INS for point in points if chr(point) not in used)
        self._stand_ins = dict(zip(sorted(letters), free, strict=False))
        if len(self._stand_ins) < len(letters):
            raise ValueError("the messages have too many different characters")
        self._originals = {stand_in: letter for letter, stand_in in self._stand_ins.items()}
        self._longest = max(map(len, specials), default=0)
        # A long text cannot lie within a token, so it has at least one of these where it begins, ends or is one.
        telling = {letter for letter in letters if not letter.isalnum()}
        telling |= {letter for token in specials if telling.isdisjoint(token) for letter in token}
        self._telling = {letter: self._stand_ins[letter] for letter in (letters if everything else telling & letters)}
        self._light = str.maketrans({stand_in: letter for stand_in, letter in self._originals.items() if letter.isalnum()})
        self._table, self._everything = str.maketrans(self._stand_ins), everything
        self.runs = re.compile("[" + "".join(self._originals) + "]+" if self._originals else r"(?!)")

    # ---- values of the request ----
    def marked(self, value: object) -> Any:
        """A JSON value with its strings marked, keys too; roles and types are words of the API and stay as they are."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        if isinstance(value, dict):
            return {self._marked_text(key): self._marked_member(key, item) for key, item in value.items()}
        return value

    def _marked_member(self, key: str, value: object) -> object:
        is_word = isinstance(value, str) and ((key == "role" and value in _ROLES) or (key == "type" and value in _TYPES))
        return value if is_word else self.marked(value)

    def _marked_text(self, text: str) -> str:
        if self._everything or len(text) <= 2 * self._longest:
            return self.all_marked(text)
        twin = text
        for letter, stand_in in self._telling.items():
            if letter in text:
                twin = twin.replace(letter, stand_in)
        return text if twin is text else Marked(text, twin, self)

    def all_marked(self, text: str) -> str:
        """The text as one whose every character came with the request."""
        twin = text.translate(self._table)
        return str.__str__(text) if twin == text else Marked(text, twin, self)

    # ---- what templates do with them ----
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function` of the values, and of their twins, as one value. Of an iterator among them all items are taken first."""
        args = tuple(list(arg) if isinstance(arg, _ITERATED) and not isinstance(arg, LoopContext) else arg for arg in args)
        result = function(*args, **kwargs)
        if not _has_plain_text(result):
            return result
        with contextlib.suppress(_Unknown):
            if self.twin(args) is args and self.twin(kwargs) is kwargs:
                return result
            for twin_of in (self.twin, self._light_twin):  # a template may look for words, but seldom for a part of a tag
                try:
                    return self._paired(result, function(*twin_of(args), **twin_of(kwargs)))
                except Exception:  # what the texts can do, their twins need not: `int`, or an index of what a split leaves
                    continue
        return self._conservative(result)

    def _paired(self, result: Any, twin: Any) -> Any:
        """What came of texts and of their twins, as one value. Raises _Unknown if they went different ways."""
        if isinstance(result, Marked):
            return result
        if isinstance(result, str):
            if twin == result:
                return result
            twin = self._in_json(twin) if isinstance(twin, str) else ""
            if self._original(twin) != result:
                raise _Unknown
            return Marked(result, twin, self)
        if type(result) in (list, tuple):
            if type(twin) is not type(result) or len(twin) != len(result):
                raise _Unknown
            return type(result)(map(self._paired, result, twin))
        return result

    def _conservative(self, result: Any) -> Any:
        """The same where nothing is known of it: every character counts as marked."""
        if type(result) in (list, tuple):
            return type(result)(map(self._conservative, result))
        return self.all_marked(result) if isinstance(result, str) and not isinstance(result, Marked) else result

    def twin(self, value: object) -> Any:
        """The value with twins in place of marked strings; itself if it has none. Raises _Unknown."""
        return _with_twins(value, lambda text: text.twin)

    def _light_twin(self, value: object) -> Any:
        """The same with twins in which letters and digits have no stand-ins."""
        return _with_twins(value, lambda text: text.twin.translate(self._light))

    def text_of(self, value: Any) -> str:
        """`str(value)`, marked where the value is."""
        if isinstance(value, Marked):
            return value
        if value is None or isinstance(value, (str, int, float)):
            return str(value)
        text: str = self.call(str, (value,), {})
        return text

    def joined(self, values: Iterable[Any]) -> str:
        """The texts of the values one after the other."""
        texts = [self.text_of(value) for value in values]
        text = "".join(texts)
        if not any(type(piece) is Marked for piece in texts):
            return text
        return Marked(text, "".join(piece.twin if isinstance(piece, Marked) else piece for piece in texts), self)

    def _original(self, twin: str) -> str:
        for stand_in, letter in self._originals.items():
            if stand_in in twin:
                twin = twin.replace(stand_in, letter)
        return twin

    def _in_json(self, twin: str) -> str:
        """Stand-ins that JSON wrote as escapes become characters again."""
        return _PAIR.sub(self._unescaped, twin) if "\\ud" in twin else twin

    def _unescaped(self, match: re.Match[str]) -> str:
        high, low = int(match[1], 16), int(match[2], 16)
        character = chr(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00)
        return character if character in self._originals else match[0]


_PAIR: Final = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


class _Unknown(Exception):
    """A text and its twin went different ways, or marks may be where they are not looked for."""


def _with_twins(value: object, twin_of: Callable[[Marked], str]) -> object:
    if isinstance(value, Marked):
        return twin_of(value)
    if isinstance(value, (list, tuple, *_VIEWS)):
        items = [_with_twins(item, twin_of) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return tuple(items) if isinstance(value, tuple) else items
    if type(value) is dict:
        members = [(_with_twins(key, twin_of), _with_twins(item, twin_of)) for key, item in value.items()]
        is_same = all(new[0] is old[0] and new[1] is old[1] for new, old in zip(members, value.items(), strict=True))
        return value if is_same else dict(members)
    if isinstance(value, _PLAIN):
        return value
    raise _Unknown


def _has_plain_text(result: Any) -> bool:
    if isinstance(result, str):
        return not isinstance(result, Marked)
    return type(result) in (list, tuple) and any(map(_has_plain_text, result))


_VIEWS: Final = (KeysView, ValuesView, ItemsView)
_ITERATED: Final = (Iterator, *_VIEWS)
_PLAIN: Final = (str, int, float, type(None), Undefined, Context, EvalContext, Environment)  # what has no marks inside
