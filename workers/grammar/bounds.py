"""What no constraint may ask for, found by looking at it: what cannot be followed, or not within an answer, is refused at once.

Whatever else explodes is stopped by the limit on processor time (checks.py) and by a trial (compiler.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Final

MAX_LEAST: Final = 100_000  # items, characters or properties that an answer must have
MAX_REPEATS: Final = 150_000  # of a piece of a regular expression, each 0.1 us a token; counts within counts multiply
MAX_MULTIPLE: Final = 1_000_000  # whose remainders are states of an automaton; those by 2 and 5 show in the last digits
MAX_MULTIPLE_CORE: Final = 50_000  # of integers, without the factors 2 and 5
MAX_OPENINGS: Final = 1960  # that may come next: the parser keeps 2,000 items in a row
_ITEMS_OF_OPTIONAL: Final = 4  # a property that may be left out: all behind it, to the next one that may not, can come instead
_LEAST: Final = ("minItems", "minLength", "minProperties")
_TOGETHER: Final = ("allOf",)
_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_TOKEN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)  # escapes, classes, counts


class Beyond(Exception):
    """The text says what is asked for too much of, and how much there may be."""


def check_regex(text: str) -> int:
    """How often a piece of it may be repeated. Raises Beyond if that is too often. What is no regular expression passes: the
    library says so.
    """
    most, lasts, groups = 1, [1], [1]  # by open group: repeats of its last piece, and of the one that is repeated most
    for token in _TOKEN.finditer(text):
        piece = token[0]
        if piece == "(":
            lasts.append(1)
            groups.append(1)
        elif piece == ")" and len(groups) > 1:
            lasts.pop()
            lasts[-1] = groups.pop()
        elif token[1] is not None:
            lasts[-1] *= max(1, int(token[2] or token[1]))
        elif piece not in "*+?|":
            lasts[-1] = 1
        groups[-1] = max(groups[-1], lasts[-1])
        most = max(most, groups[-1])
        if most > MAX_REPEATS:
            raise Beyond(f"it repeats a piece {most} times, with counts within counts; at most {MAX_REPEATS}")
    return most


def check_schema(schema: dict[str, Any]) -> int:
    """The same of the regular expressions in it. Raises Beyond if it asks for too much somewhere."""
    most = 1
    for node in _nodes(schema):
        for name in _LEAST:
            if _is_count(node.get(name)) and node[name] > MAX_LEAST:
                raise Beyond(f"{name} is {node[name]}; at most {MAX_LEAST}")
        pattern, patterns = node.get("pattern"), node.get("patternProperties")
        for text in ([pattern] if isinstance(pattern, str) else []) + (list(patterns) if isinstance(patterns, dict) else []):
            most = max(most, check_regex(text))
        if "multipleOf" in node or "allOf" in node:
            _check_multiples([one["multipleOf"] for one in _stand_for(node, schema, _TOGETHER) if "multipleOf" in one])
        num_openings = sum(map(_openings_of, _stand_for(node, schema, _ALTERNATIVES)))
        if num_openings > MAX_OPENINGS:
            raise Beyond(
                f"about {num_openings} things may come next in one place, and at most {MAX_OPENINGS} may (an optional property "
                f"counts for {_ITEMS_OF_OPTIONAL}); make properties required"
            )
    return most


def _check_multiples(values: Sequence[object]) -> None:
    """Of all that count together."""
    multiples = [Fraction(str(value)) for value in values if _is_count(value) and 0 < value < math.inf]  # type: ignore[operator]
    scale = math.lcm(*(multiple.denominator for multiple in multiples))
    common = core = math.lcm(*(int(multiple * scale) for multiple in multiples))
    for factor in (2, 5):
        while core % factor == 0:
            core //= factor
    if common > MAX_MULTIPLE or (scale == 1 and core > MAX_MULTIPLE_CORE):
        raise Beyond(
            f"multipleOf, with others that count together, asks for remainders by {common}; at most {MAX_MULTIPLE}, and "
            f"of integers {MAX_MULTIPLE_CORE} without factors of 2 and 5"
        )


def _nodes(value: object) -> Iterator[dict[str, Any]]:
    """Every object of a JSON document: more than those that are schemas, which is no harm."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _stand_for(node: dict[str, Any], root: dict[str, Any], lists: Sequence[str]) -> list[dict[str, Any]]:
    """A schema, and all that its references and `lists` of schemas lead to."""
    found, left = dict[int, dict[str, Any]](), [node]
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in found:
            continue
        found[id(one)] = one
        for name in lists:
            left += one[name] if isinstance(one.get(name), list) else []
        if isinstance(reference := one.get("$ref"), str):
            left.append(_target(reference, root))
    return list(found.values())


def _target(reference: str, root: dict[str, object]) -> Any:
    """What a reference within the document leads to; None where it leads nowhere, which the library says."""
    here: Any = root if reference.startswith("#") else None
    for part in reference.split("/")[1:]:
        here = here.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(here, dict) else None
    return here


def _openings_of(node: dict[str, Any]) -> int:
    """Items of the parser behind the first bracket of its objects, or behind a property that is required."""
    values = node["enum"] if isinstance(node.get("enum"), list) else [node.get("const")]
    properties, required = node.get("properties"), node.get("required")
    wanted = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    longest = run = 0
    for name in properties if isinstance(properties, dict) else ():
        run = 0 if name in wanted else run + 1
        longest = max(longest, run)
    return sum(isinstance(value, dict) for value in values) + _ITEMS_OF_OPTIONAL * longest + bool(properties)


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
