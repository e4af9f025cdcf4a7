"""The one reader of JSON from files: strict, and bounded before anything is built from it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from kog_dist.quoting import short

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, max_items: int) -> object:
    """The value of a document with at most `max_items` commas, colons and brackets outside of its strings.

    Raises ValueError with a sentence.

    Refused besides what is no JSON: bytes that are no UTF-8, a key that stands twice (readers would disagree on its value), lone
    surrogates, NaN and infinities, numbers of thousands of digits, hundreds of levels.
    """
    if _num_marks(raw) > max_items and _num_marks(_STRING.sub(b"", raw)) > max_items:
        raise ValueError(f"it has more than {max_items} items")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=object_without_duplicates, parse_constant=_refuse_constant)
        if _SURROGATE.search(raw):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has a lone surrogate, which no encoding of text can express") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except MemoryError:
        raise ValueError("there is not enough memory to read it") from None
    except ValueError as error:
        if "int_max_str_digits" in str(error):
            raise ValueError("it has a number of thousands of digits") from None
        raise
    return parsed


def _num_marks(raw: bytes) -> int:
    return sum(map(raw.count, (b",", b":", b"[", b"{")))


def parse_object(raw: bytes, max_items: int) -> dict[str, Any]:
    """The same for a document that must be an object."""
    parsed = parse_json(raw, max_items)
    if not isinstance(parsed, dict):
        raise ValueError(f"it holds a {type(parsed).__name__}, expected an object")
    return parsed


def object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Hook for json.loads: an object as a dict. Raises ValueError if a key stands twice."""
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {short(key)} stands twice")
            seen.add(key)
    return parsed


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
