"""The checks that one field of an RPC message must pass, on the side that sends it and on the side that receives it.

A check takes the value as it came and returns it as it is kept; it raises ValueError with the end of a sentence that starts
with the field's name.
"""

from __future__ import annotations

import re
from array import array as words
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

Check = Callable[[Any], Any]


def checked(check: Check, **keywords: Any) -> Any:
    """A dataclass field whose value must pass `check`; takes `default=` as `dataclasses.field` does."""
    return field(metadata={"check": check}, **keywords)


def integer(low: int, high: int) -> Check:
    """An int (no bool) with low <= value <= high."""

    def check(value: object) -> int:
        if type(value) is not int:
            raise ValueError(f"must be an integer, got {_shown(value)}")
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}, got {value}")
        return value

    return check


def number(low: float, high: float) -> Check:
    """A finite float or int with low <= value <= high, kept as float; minus zero becomes zero."""

    def check(value: Any) -> float:
        if type(value) not in (int, float):
            raise ValueError(f"must be a number, got {_shown(value)}")
        if not low <= value <= high:  # false for NaN too
            raise ValueError(f"must be a finite number from {low:g} to {high:g}, got {_shown(value)}")
        return float(value) + 0.0

    return check


def text(low_bytes: int, high_bytes: int) -> Check:
    """A str of that many bytes in UTF-8."""

    def check(value: object) -> str:
        if type(value) is not str:
            raise ValueError(f"must be text, got {_shown(value)}")
        try:
            num_bytes = len(value) if value.isascii() else len(value.encode())
        except UnicodeEncodeError:
            raise ValueError("must be text that UTF-8 can hold (it has a lone surrogate)") from None
        if not low_bytes <= num_bytes <= high_bytes:
            raise ValueError(f"must have {low_bytes} to {high_bytes} bytes, got {num_bytes}")
        return value

    return check


def identifier(high_chars: int) -> Check:
    """1 to `high_chars` characters out of letters, digits and -_.: (ASCII), safe in logs and file names."""

    allowed = re.compile(rf"[A-Za-z0-9_.:-]{{1,{high_chars}}}")

    def check(value: object) -> str:
        if type(value) is not str or allowed.fullmatch(value) is None:
            raise ValueError(f"must be 1 to {high_chars} ASCII letters, digits or -_.: got {_shown(value)}")
        return value

    return check


def flag(value: object) -> bool:
    """A bool, and nothing that is only true-ish."""
    if type(value) is not bool:
        raise ValueError(f"must be true or false, got {_shown(value)}")
    return value


def choice(kind: type[Any]) -> Check:
    """A member of the string enumeration `kind`, by value."""

    def check(value: object) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"must be one of {', '.join(member.value for member in kind)}; got {_shown(value)}") from None

    return check


def optional(inner: Check) -> Check:
    """None, or what `inner` accepts."""

    def check(value: object) -> Any:
        return None if value is None else inner(value)

    return check


def array(inner: Check, high_items: int) -> Check:
    """A list or tuple of at most `high_items` values that `inner` accepts, kept as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple):
            raise ValueError(f"must be an array, got {_shown(value)}")
        if not value:
            return ()  # most arrays of most messages
        if len(value) > high_items:
            raise ValueError(f"must have at most {high_items} elements, got {len(value)}")
        kept = []
        for idx, item in enumerate(value):
            try:
                kept.append(inner(item))
            except ValueError as error:
                raise ValueError(f"element {idx} {error}") from None
        return tuple(kept)

    return check


def token_ids(high_items: int) -> Check:
    """Ids of a prompt: kept as 32-bit words, `array("I")`, where they fit; else a tuple of int64, for others to refuse.

    They come as such an array, as integers in a list or tuple, or as the words' bytes, lowest first. There are thousands of them:
    they are looked at one by one only where one of them is wrong.
    """
    one_by_one = array(integer(-(2**63), 2**63 - 1), high_items)

    def check(value: Any) -> Sequence[int]:
        if type(value) is bytes:
            if len(value) % 4 or len(value) > 4 * high_items:
                raise ValueError(f"must be at most {high_items} words of 4 bytes, got {len(value)} bytes")
            return words("I", value)
        if type(value) is words and value.typecode == "I" and len(value) <= high_items:
            return value
        is_array = type(value) in (list, tuple) and 0 < len(value) <= high_items
        if is_array and list(map(type, value)).count(int) == len(value):
            try:
                return words("I", value)
            except OverflowError:
                pass
        kept: tuple[int, ...] = one_by_one(value)
        return kept

    return check


def _shown(value: object) -> str:
    """A short form of a hostile value for an error message; never longer than 64 characters."""
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (str, bytes)):
        value = value[:40]
    shown = f"{type(value).__name__} {value!r}" if not isinstance(value, (str, float)) else repr(value)
    return shown.encode("ascii", "backslashreplace").decode()[:64]
