"""Mutants are drawn from a seed, of places that change what is computed, each with tests that are there."""

from __future__ import annotations

import ast
import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.drawn import Drawn, Product, of_device, of_python
from tests.mutants.run import BROKEN, KILLED, ROOT, SURVIVED, Mutant, try_all

MODULE = '''"""A note: 3 < 4."""
LIMIT: Final[int] = 5

@cached(slots=True)
def f(a: Literal[1] = 2, *, b: bool = True) -> Literal[3]:
    """Also 1 + 1."""
    if a < b and not c:
        g(a)
    x = max(a, b) - 1 if a else b
    raise ValueError(f"{a + 1} of 9")
'''
HEADER = """#pragma once
// a < b
constexpr int kSize = 4 + 1;
template <typename A, bool kB = (1 < 2)>
int f(int a, int b) {
    return a < b && b > 0 ? min(a, b) - 1 : a;  // a + b
}
"""


def changes(mutants: list[Drawn]) -> set[tuple[int, str, str]]:
    return {(mutant.number, mutant.old, mutant.instead) for mutant in mutants}


def test_python_is_changed_where_it_computes() -> None:
    found = list(of_python("a.py", MODULE))
    assert changes(found) == {
        (2, "5", "6"), (5, "2", "3"), (5, "True", "False"), (7, "<", "<="), (7, "and", "or"), (7, "not c", "(c)"),
        (7, "a < b and not c", "False"), (8, "g(a)", "pass"), (9, "max", "min"), (9, "-", "+"), (9, "1", "2"),
        (9, "max(a, b) - 1 if a else b", "(max(a, b) - 1)"), (9, "max(a, b) - 1 if a else b", "(b)"),
    }  # fmt: skip
    for mutant in found:
        assert ast.dump(ast.parse(mutant.applied(MODULE))) != ast.dump(ast.parse(MODULE)), mutant.name


def test_headers_are_changed_where_they_compute() -> None:
    assert changes(list(of_device("a.cuh", HEADER))) == {
        (6, " < ", " <= "), (6, " && ", " || "), (6, " > ", " >= "), (6, "min(", "max("), (6, " - ", " + "),
    }  # fmt: skip


def test_a_piece_is_found_by_its_bytes() -> None:
    source = 'a = "é" * 2\n'
    (mutant,) = [mutant for mutant in of_python("a.py", source) if mutant.old == "2"]
    assert mutant.applied(source) == 'a = "é" * 3\n'
    with pytest.raises(ValueError, match=r"a.py:1 has no '2' at"):
        mutant.applied("a = 1\n")


@cache
def product() -> Product:
    return Product(ROOT)


def test_what_is_drawn_follows_from_the_seed() -> None:
    first, again, other = product().draw(1, 4), product().draw(1, 4), product().draw(2, 4)
    assert first == again
    assert not {mutant.name for mutant in first} & {mutant.name for mutant in other}
    assert len({(mutant.file, mutant.number) for mutant in first}) == 4
    for mutant in first:
        assert mutant.applied((ROOT / mutant.file).read_text()) != (ROOT / mutant.file).read_text()


def test_nearly_all_of_the_product_has_tests_and_all_of_these_are_there() -> None:
    files = product().files
    assert all((ROOT / test).exists() for tests in files.values() for test in tests)
    without = [file for file, tests in files.items() if not tests]
    assert len(without) < 0.06 * len(files), without
    for pattern in (*product()._first, *product()._otherwise):
        assert any(fnmatch.fnmatch(file, pattern) for file in files), f"{pattern} fits nothing"


def test_a_test_that_fails_without_a_mutant_has_noticed_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "project"
    root.mkdir()
    (root / "code.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "test_good.py").write_text(
        "from code import add\n\n\ndef test_add():\n    assert add(0, 0) == 0\n    assert add(1, 2) == 3\n"
    )
    (root / "test_bad.py").write_text("def test_bad():\n    assert False\n")
    noticed = Mutant("code.py", "a + b", "a - b", ("test_good.py",), "sums are wrong")
    by_chance = Mutant("code.py", "a + b", "b + a", ("test_bad.py",), "nothing")
    ends_pytest = Mutant("code.py", "return a + b", "import os; os.abort()", ("test_good.py",), "nothing")
    survivor = Mutant("code.py", "a + b", "b + a", ("test_good.py",), "nothing")
    found = dict(try_all([noticed, by_chance, ends_pytest, survivor], root, num_at_once=1, tests_first=False))
    assert found == {noticed: KILLED, by_chance: BROKEN, ends_pytest: KILLED, survivor: SURVIVED}
