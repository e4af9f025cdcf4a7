"""Unit tests made from functions themselves, and the process that runs code of unknown origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.train.sandbox import call_function, is_harmless
from kog_dist.train.unit_tests import MAX_TESTS, make_unit_tests, needed_context

MODULE = '''
from __future__ import annotations

import os
import re
from collections.abc import Sequence

WORDS = re.compile(r"[a-z]+")
HOME = os.environ["HOME"]


def longest(words: Sequence[str]) -> int:
    return max(map(len, words), default=0)


def longest_word(text: str) -> int:
    """Length of the longest word."""
    words = WORDS.findall(text.lower())
    return longest(words)


def in_home(name: str) -> str:
    path = HOME + name
    return path


def identity(value):
    result = value
    return result


def shuffled(values):
    found = {str(value) for value in values}
    return "".join(found)
'''


def source_of(name: str) -> str:
    return MODULE[MODULE.index(f"def {name}(") :].split("\n\n\n")[0] + "\n"


def test_a_function_is_tested_against_its_own_results() -> None:
    tests = make_unit_tests(MODULE, source_of("longest_word"), "longest_word")
    assert tests is not None
    assert tests.context.startswith("import re\n")
    assert "def longest(" in tests.context
    assert 3 <= len(tests.calls) == len(tests.outcomes) <= MAX_TESTS
    assert tests.passes(source_of("longest_word"), "longest_word")
    assert tests.passes("def longest_word(text):\n    return longest(WORDS.findall(text.lower()))\n", "longest_word")
    for wrong in ("return 0", "return text", "return len(text)", "pass", "raise ValueError", "return ("):
        assert not tests.passes(f"def longest_word(text):\n    {wrong}\n", "longest_word")


def test_what_cannot_be_tested_has_no_tests() -> None:
    assert needed_context(MODULE, "in_home") is None  # os
    assert make_unit_tests(MODULE, source_of("identity"), "identity") is None  # an idle answer would pass
    assert make_unit_tests(MODULE, source_of("shuffled"), "shuffled") is None  # another hash seed, another result
    assert needed_context("@cache\ndef f(x):\n    return x\n", "f") is None
    assert needed_context("def f(x):\n    return unknown(x)\n", "f") is None


@pytest.mark.parametrize(
    "program",
    [
        "import os", "from os import path", "from . import x", "import re.sre", "open('x')", "eval('1')", "().__class__",
        "globals()", "def f(__x): pass", "import json\njson.codecs.open('x')", "import typing\ntyping.sys.exit()",
        "from json import codecs", "import operator\noperator.attrgetter", "getattr(1, 'real')", "x = (", "__builtins__",
    ],
)  # fmt: skip
def test_programs_that_reach_out_are_refused(program: str) -> None:
    assert not is_harmless(program)
    assert is_harmless(
        "from __future__ import annotations\nimport math\n\ndef f(x: Unknown) -> Unknown:\n    return math.sqrt(x)\n"
    )


def test_a_runaway_is_stopped_and_the_next_call_goes_on(tmp_path: Path) -> None:
    source = """def f(kind):
    if kind == "loop":
        while True:
            pass
    if kind == "memory":
        return len(bytearray(10**12))
    if kind == "exit":
        raise BaseException
    print("said")
    return kind
"""
    kinds = ("fine", "loop", "memory", "exit", "last")
    outcomes = call_function("", source, "f", [f"(({kind!r},), {{}})" for kind in kinds])
    assert outcomes == [f"{kind!r} | tuple({kind!r}) | dict()" if kind in ("fine", "last") else None for kind in kinds]
    assert call_function("", "def f(x):\n    print('x' * 10**8)\n    return x\n", "f", ["((1,), {})"]) == [None]
    assert call_function("", "def f(x):\n    return x\n", "g", ["((1,), {})"]) == [None]


def test_outcomes_are_values_and_changed_arguments() -> None:
    source = "def f(x, *, add=1):\n    x.append(add)\n    return (y for y in x)\n"
    assert call_function("", source, "f", ["(([2],), {})", "(([],), {'add': 0.1 + 0.2})", "((1,), {})"]) == [
        "iterator(2, 1) | tuple(list(2, 1)) | dict()",
        "iterator(0.3) | tuple(list(0.3)) | dict('add': 0.3)",
        None,
    ]
