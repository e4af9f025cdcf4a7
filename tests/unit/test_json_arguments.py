"""Arguments of processes: what is read is what was written, and everything else is named."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pytest

from kog_dist.errors import ConfigError
from kog_dist.runtime.process_arguments import JsonArguments


@dataclass(frozen=True, slots=True)
class Inner:
    """A part."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeArgs(JsonArguments):
    """One of each kind."""

    reader: ClassVar[str] = "maker"

    flag: bool
    number: int
    limit_s: float
    path: str | None = None
    settings: dict[str, Any] | None = None
    inner: Inner = Inner()


ARGS = MadeArgs(True, 3, 2.5, "/x", {"a": [1, None]}, Inner(("one", "two")))


def test_what_is_written_is_read() -> None:
    for args in (ARGS, MadeArgs(False, 0, 1)):
        assert MadeArgs.from_json(args.to_json()) == args
    assert MadeArgs.from_json(ARGS.to_json()).inner.names == ("one", "two")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("flag", 1, "flag must be bool, got 1"),
        ("number", True, "number must be int, got True"),
        ("number", 2.0, "number must be int, got 2.0"),
        ("limit_s", True, "limit_s must be float"),
        ("limit_s", None, "limit_s must be float, got None"),
        ("path", 7, "path must be str, got 7"),
        ("settings", [], r"settings must be an object, got \[\]"),
        ("inner", {"names": ["one", 2]}, r"inner names\[1\] must be str, got 2"),
        ("inner", {"names": "one"}, "inner names must be a list, got 'one'"),
        ("inner", {}, "inner has missing fields: names"),
        ("inner", None, "inner must be an object, got NoneType"),
        ("wings", 2, "unknown fields: wings; it takes flag, number"),
    ],
)
def test_a_wrong_field_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=f"the maker's argument.* {words}"):
        MadeArgs.from_json(json.dumps({**asdict(ARGS), name: value}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[]", "must be an object, got list"),
        ('{"flag": true}', "missing fields: number, limit_s, path, settings, inner"),
        ('{"flag": true, "flag": false}', "'flag' stands twice"),
    ],
)
def test_what_is_no_object_of_these_fields_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MadeArgs.from_json(text)
