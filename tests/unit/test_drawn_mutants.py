"""Mutants are drawn from a seed, of places that change what is computed, each with tests that are there."""

from __future__ import annotations

import ast
import fnmatch
import os
from pathlib import Path

import pytest

from tests.mutants.drawn import Drawn, Product, of_device, of_python
from tests.mutants.reached import VARIABLE, Reach, function_at
from tests.mutants.run import BROKEN, KILLED, ROOT, SURVIVED, Mutant, measured, try_all

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


NOT_COMPUTED = """
WAIT_S: Final = 3
_READ_BYTES = 9
text = os.read(fd, 65536)
is_late = time.monotonic() > limit_s
is_over = now_s >= end_s
LATEST_MS = 4
if TYPE_CHECKING:
    import a
assert f(1) > 2, "one"
f(timeout=3, most_s=4.0, strict=True)
time.sleep(0.5)
if __name__ == "__main__":
    pass
"""


def test_times_sizes_of_reads_and_invariants_are_no_mutants() -> None:
    assert changes(list(of_python("a.py", NOT_COMPUTED))) == {(11, "f(timeout=3, most_s=4.0, strict=True)", "pass")}


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Product:
    """The checkout, of whose tests one is known."""
    reach = Reach(tmp_path_factory.mktemp("reached") / "build" / "reached.json")
    reach.keep(ROOT, "tests/unit/test_config.py", {"tests/unit/test_config.py::test_a": (0.1, ["kog_dist/config.py::f"])})
    reach.save()
    return Product(ROOT, reach)


def test_what_is_drawn_follows_from_the_seed(product: Product) -> None:
    first, again, other = product.draw(1, 4), product.draw(1, 4), product.draw(2, 4)
    assert first == again
    assert not {mutant.name for mutant in first} & {mutant.name for mutant in other}
    assert len({(mutant.file, mutant.number) for mutant in first}) == 4
    for mutant in first:
        assert mutant.applied((ROOT / mutant.file).read_text()) != (ROOT / mutant.file).read_text()


def test_the_table_fits_the_tree(product: Product) -> None:
    for pattern, tests in product.table.items():
        assert any(fnmatch.fnmatch(file, pattern) for file in product.files), f"{pattern} fits nothing"
        assert all((ROOT / test).exists() for test in tests)
    headers = [file for file in product.files if file.endswith(".cuh")]
    assert all(product.tests_of(Drawn(header, 1, 0, "", "")) for header in headers), "no test of the table compiles it"


CALLED = """import functools

LIMIT = 3

class A:
    @property
    def size(self):
        return [one + 1 for one in self]

def f():
    def g():
        return 1
    return g() + 1
"""


@pytest.mark.parametrize(
    ("number", "function"), [(1, ""), (3, ""), (5, ""), (6, "A.size"), (8, "A.size"), (10, "f"), (12, "f.<locals>.g"), (13, "f")]
)
def test_a_line_belongs_to_the_innermost_function(number: int, function: str) -> None:
    assert function_at(CALLED, number) == function


def test_tests_that_call_least_and_most_are_first_and_take_no_more_than_their_time(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("")
    reach = Reach(tmp_path / "build" / "reached.json")
    assert reach.stale(tmp_path, ["a.py", "b.py"]) == ["a.py", "b.py"]
    little, all_of_it = ["m.py::f", "n.py::a"], ["m.py::f", "m.py::g", *(f"n.py::{number}" for number in range(20))]
    first = {"a.py::one": (4.0, ["m.py::f", *"xyz"]), "a.py::two": (4.0, ["m.py::f"]), "a.py::long": (7.0, ["m.py::f"])}
    reach.keep(tmp_path, "a.py", first)
    others = {f"b.py::{number}": (3.0, [*little, "n.py::b"]) for number in range(9)}
    reach.keep(tmp_path, "b.py", {"b.py::one": (4.0, little), **others, "b.py::all": (3.0, all_of_it)})
    reach.save()
    assert reach.tests_of("m.py", "f") == ("a.py::two", "b.py::one", "b.py::all", "b.py::0", "a.py::one")
    assert reach.tests_of("m.py", "g") == ("b.py::all",)
    assert len(reach.tests_of("m.py", "")) == 5
    assert reach.tests_of("m.py", "h") == reach.tests_of("n.py", "c") == ()
    assert reach.tests_of_any(["m.py::g", "n.py::b"], "m.py")[0] == "b.py::0"
    (tmp_path / "b.py").write_text("# changed")
    again = Reach(tmp_path / "build" / "reached.json")
    assert again.stale(tmp_path, ["a.py", "b.py"]) == ["b.py"]
    assert again.tests_of("m.py", "f") == ("a.py::two", "a.py::one")


def test_what_is_defined_outside_of_functions_is_tried_with_tests_of_those_that_use_it(tmp_path: Path) -> None:
    for folder in ("workers", "launch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "workers" / "sizes.py").write_text(
        "WORD = 8\nOTHER = 9\nENTRY = 4 * WORD\n\n\nclass A:\n    size: int = 5\n\n\ndef f():\n    return ENTRY\n\n\ndef g():\n"
        "    return OTHER\n"
    )
    (tmp_path / "launch" / "user.py").write_text(
        "from workers.sizes import WORD, A\n\n\ndef h():\n    return WORD\n\n\ndef i(a: A):\n    return a.size\n"
    )
    (tmp_path / "a.py").write_text("")
    reach = Reach(tmp_path / "build" / "reached.json")
    called = {"f": "workers/sizes.py::f", "g": "workers/sizes.py::g", "h": "launch/user.py::h", "i": "launch/user.py::i"}
    reach.keep(tmp_path, "a.py", {f"a.py::{name}": (0.1, [function]) for name, function in called.items()})
    reach.save()
    product = Product(tmp_path, reach)

    def tried(number: int) -> set[str]:
        return {test.partition("::")[2] for test in product.tests_of(Drawn("workers/sizes.py", number, 0, "", ""))}

    assert [tried(number) for number in (1, 2, 3, 7)] == [{"f", "h"}, {"g"}, {"f"}, {"i"}]
    assert tried(11) == {"f"}


def test_it_is_seen_what_tests_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for folder in ("workers", "tests/unit", "tests/multi", "tests/mutants"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "reached.py").write_text((ROOT / "tests" / "mutants" / "reached.py").read_text())
    (tmp_path / "workers" / "sums.py").write_text("def add(a, b):\n    return sum(x for x in (a, b))\n\n\ndef no():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sweep: a\n    gpu: a\n    alone: a\n")
    (tmp_path / "tests" / "unit" / "test_sums.py").write_text(
        "from workers.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\ndef test_other():\n    pass\n\n\n"
        "def test_fails():\n    assert add(1, 2) == 4\n"
    )
    reach = measured(tmp_path, 1)
    assert reach.tests_of("workers/sums.py", "add") == ("tests/unit/test_sums.py::test_add",)
    assert reach.tests_of("workers/sums.py", "no") == ()
    assert VARIABLE not in os.environ


def test_a_test_that_fails_without_a_mutant_has_noticed_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "project"
    root.mkdir()
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "test_good.py").write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(0, 0) == 0\n    assert add(1, 2) == 3\n"
    )
    (root / "test_bad.py").write_text("def test_bad():\n    assert False\n")
    noticed = Mutant("sums.py", "a + b", "a - b", ("test_good.py",), "sums are wrong")
    by_chance = Mutant("sums.py", "a + b", "b + a", ("test_bad.py",), "nothing")
    ends_pytest = Mutant("sums.py", "return a + b", "import os; os.abort()", ("test_good.py",), "nothing")
    survivor = Mutant("sums.py", "a + b", "b + a", ("test_good.py",), "nothing")
    found = dict(try_all([noticed, by_chance, ends_pytest, survivor], root, num_at_once=1, tests_first=False))
    assert found == {noticed: KILLED, by_chance: BROKEN, ends_pytest: KILLED, survivor: SURVIVED}
