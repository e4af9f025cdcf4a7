"""What becomes of an input when one of its values is another one: a line for each value, to be pinned as text (pinning.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tests.unit.pinning import digest

MISSING = object()
OTHERS: Mapping[str, Any] = {
    "missing": MISSING, "null": None, "true": True, "false": False, "-1": -1, "0": 0, "1": 1, "2": 2, "0.5": 0.5, "1.0": 1.0,
    "1e30": 1e30, "nan": float("nan"), "text": "x", "blank": "", "list": [], "list of 1": [1], "list of text": ["x"],
    "object": {}, "object of 1": {"a": 1},
}  # fmt: skip
Path = tuple[str | int, ...]


def around(
    base: Mapping[str, Any], outcome: Callable[[Any], object], *, refusals: tuple[type[Exception], ...],
    names: Iterable[str] = (), deepest: int = 4, others: Mapping[str, Any] = OTHERS,
) -> Iterator[str]:  # fmt: skip
    """A line for each value of `base`, and for each of `names` that it lacks (`name/inner` is in the object `name` of it): which
    other values are refused, which change nothing, and which change what comes out.
    """

    def found(value: Any) -> str:
        try:
            return digest(repr(outcome(value)))[:6]
        except refusals:
            return "refused"

    usual = found(base)
    yield f"as it is: {usual}"
    known = list(_paths(base, deepest))
    named: list[Path] = [tuple(name.split("/")) for name in names]
    for path in (*known, *(path for path in named if path not in known)):
        by_outcome: dict[str, list[str]] = {}
        for label, value in (*others.items(), *_near(_at(base, path))):
            text = found(_with(base, path, value))
            by_outcome.setdefault("same" if text == usual else text, []).append(label)
        shown = (f"{text}: {', '.join(labels)}" for text, labels in by_outcome.items())
        yield f"{'.'.join(map(str, path))} | {' | '.join(shown)}"


def _paths(value: Any, deepest: int, before: Path = ()) -> Iterator[Path]:
    if before:
        yield before
    if len(before) < deepest:
        entries = value.items() if isinstance(value, Mapping) else enumerate(value[:2]) if isinstance(value, list) else ()
        for key, inner in entries:
            yield from _paths(inner, deepest, (*before, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else value[key]
    return value


def _near(value: Any) -> Iterator[tuple[str, Any]]:
    """Values beside an old one."""
    if isinstance(value, bool) or not isinstance(value, int | float | list):
        return
    if isinstance(value, list):
        yield from (("one less", value[:-1]), ("one more", [*value, *value[-1:]]))
    else:
        yield from (("less", value - 1), ("more", value + 1), ("twice", 2 * value), ("half", value / 2), ("as text", str(value)))


def _with(value: Any, path: Path, new: Any) -> Any:
    """A copy of `value` that has `new` at `path`, or nothing there."""
    key, *rest = path
    copy: Any = dict if isinstance(value, Mapping) else list
    changed = copy(value)
    if rest:
        changed[key] = _with(value[key], tuple(rest), new)
    elif new is MISSING:
        if isinstance(value, list) or key in value:
            del changed[key]
    else:
        changed[key] = new
    return changed
