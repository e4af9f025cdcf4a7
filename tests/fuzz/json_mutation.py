"""Changes to JSON that keep it JSON, or almost: values swapped, keys given twice, numbers at their limits, depth."""

from __future__ import annotations

import json
import random
from typing import Any

_SCALARS: tuple[str, ...] = (
    "null", "true", "false", "0", "-1", "1", "2", "3", "16", "1e400", "-0.0", "NaN", "Infinity", "1e-5", "0.5", "4096", "65536",
    "268435456", "2147483648", "9007199254740993", "18446744073709551616", "9" * 400, '""', '"x"', '"\\ud800"', '"\\u0000"',
    '"\\u001b]0;x\\u0007"', '"../x"', '"' + "a" * 300 + '"', "[]", "{}", "[[]]", "[0]", '{"":0}', "[" * 60 + "]" * 60,
)  # fmt: skip


def fuzzed_json(data: bytes, max_size: int, seed: int) -> bytes:
    """`mutate` of a target that reads JSON: changes of values more often than of bytes."""
    import atheris

    rng = random.Random(seed)
    changed = mutate_json(data, rng) if rng.random() < 0.7 else None
    return bytes(atheris.Mutate(data, max_size) if changed is None else changed[:max_size])


class _Object(list[tuple[str, Any]]):
    """The pairs of an object in their order, so that a key can stand twice."""


class _Raw(str):
    """A value as it will be written."""

    __slots__ = ()


def mutate_json(raw: bytes, rng: random.Random) -> bytes | None:
    """The same document with one to three changes; None if it is no JSON."""
    try:
        root = [json.loads(raw, object_pairs_hook=_Object)]
    except (ValueError, RecursionError):
        return None
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = [(holder, i) for holder in _holders(root) for i in range(len(holder))]
        _change(*rng.choice(places), places, rng)
        if not root:
            return b""
    return _written(root[0]).encode("utf-8", "surrogatepass")


def _holders(root: list[Any]) -> list[list[Any]]:
    found, at = [root], 0
    while at < len(found):
        children = (pair[1] for pair in found[at]) if isinstance(found[at], _Object) else found[at]
        found += [child for child in children if isinstance(child, list)]
        at += 1
    return found


def _change(holder: list[Any], index: int, places: list[tuple[list[Any], int]], rng: random.Random) -> None:
    item, pairs = holder[index], isinstance(holder, _Object)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[index]
    elif kind == 1:
        holder.insert(rng.randrange(len(holder) + 1), item)
    elif kind == 2 and pairs:
        other = rng.choice([pair[0] for pair in holder] + [item[0] + "x", "", "\ud800", "\x1b[2J", "k" * 2000])
        holder[index] = (other, item[1])
    elif kind == 3:
        other_holder, other_index = rng.choice(places)
        if other_index < len(other_holder):
            value = other_holder[other_index]
            value = value[1] if isinstance(other_holder, _Object) else value
            if not isinstance(value, list):
                holder[index] = (item[0], value) if pairs else value
    else:
        value = _Raw(rng.choice(_SCALARS))
        holder[index] = (item[0], value) if pairs else value


def _written(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, _Object):
        return "{" + ",".join(f"{json.dumps(key)}:{_written(child)}" for key, child in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)
