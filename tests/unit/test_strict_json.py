"""The one reader of JSON files, and that nothing in the core reads a model's JSON otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.strict_json import parse_json, parse_object

MODEL = Path(__file__).parents[2] / "kog_dist" / "model"
TALKS_TO_ITS_CHILD = {"chat_template.py", "template_sandbox.py"}


def test_ordinary_documents_are_read() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\\ud83d\\ude00", null, true]}', 100) == {"a": [1, 2.5, "\U0001f600", None, True]}
    assert parse_json(b'"\\\\ud800"', 100) == "\\ud800"


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b'{"a": 1, "a": 1}', "key 'a' stands twice"),
        (b'[{"b": {"a": 1, "a": 2}}]', "key 'a' stands twice"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b'["\\udfff"]', "lone surrogate"),
        (b"NaN", "NaN is no number"),
        (b"[-Infinity]", "-Infinity is no number"),
        (b"9" * 10_000, "thousands of digits"),
        (b"[" * 90, "Expecting value"),
        (b"[" * 99_000, "nested too deeply"),
        (b'{"a":' * 40_000, "nested too deeply"),
        (b"[" + b"[]," * 100_000 + b"[]]", "more than 100000 items"),
        (b"\xff", "utf-8"),
        (b"", "Expecting value"),
    ],
)
def test_what_readers_would_disagree_on_or_suffer_from_is_refused(raw: bytes, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        parse_json(raw, 100_000)


@pytest.mark.parametrize(
    ("raw", "num_items"),
    [(b"[1,2]", 2), (b'{"a":{"b":1}}', 4), (b"3", 0), (rb'["a,b:[{", "\"[", "\\"]', 3)],  # none of those in strings
)
def test_as_many_items_as_there_may_be_are_read(raw: bytes, num_items: int) -> None:
    parse_json(raw, num_items)
    with pytest.raises(ValueError, match=f"more than {num_items - 1} items"):
        parse_json(raw, num_items - 1)


def test_an_object_is_an_object() -> None:
    with pytest.raises(ValueError, match="holds a list, expected an object"):
        parse_object(b"[]", 10)


def test_model_files_are_read_by_the_strict_reader_only() -> None:
    readers = {path.name for path in MODEL.glob("*.py") if "json.load" in path.read_text(encoding="utf-8")}
    assert readers == TALKS_TO_ITS_CHILD
