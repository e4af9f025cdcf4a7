"""Mutants are drawn from a seed, of places that change what is computed, each with tests that are there."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import collected, noted
from tests.mutants.drawn import Drawn, Product, of_device, of_python
from tests.mutants.reached import VARIABLE, Reach, function_at
from tests.mutants.run import BROKEN, KILLED, ROOT, SURVIVED, Mutant, Outcome, borrowed, forest, measured, num_imported, try_all

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
def product() -> Product:
    """The checkout."""
    return Product(ROOT)


def test_what_is_drawn_follows_from_the_seed(product: Product) -> None:
    first, again, other = product.draw(1, 4), product.draw(1, 4), product.draw(2, 4)
    assert first == again
    assert not {mutant.name for mutant in first} & {mutant.name for mutant in other}
    assert len({(mutant.file, mutant.number) for mutant in first}) == 4
    for mutant in first:
        assert mutant.applied((ROOT / mutant.file).read_text()) != (ROOT / mutant.file).read_text()


def test_the_table_fits_the_tree(product: Product, tmp_path: Path) -> None:
    for pattern, tests in product.table.items():
        assert any(fnmatch.fnmatch(file, pattern) for file in product.files), f"{pattern} fits nothing"
        assert all((ROOT / test).exists() for test in tests)
    headers = [file for file in product.files if file.endswith(".cuh")]
    unknown = Reach(tmp_path / "reached.json")
    assert all(product.tests_of(Drawn(header, 1, 0, "", ""), unknown) for header in headers), "no test of the table compiles it"


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
    product = Product(tmp_path)

    def tried(number: int) -> set[str]:
        return {test.partition("::")[2] for test in product.tests_of(Drawn("workers/sizes.py", number, 0, "", ""), reach)}

    assert [tried(number) for number in (1, 2, 3, 7)] == [{"f", "h"}, {"g"}, {"f"}, {"i"}]
    assert tried(11) == {"f"}


def test_it_is_seen_what_tests_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for folder in ("workers", "tests/unit", "tests/multi", "tests/mutants"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("reached.py", "noted.py"):
        (tmp_path / "tests" / "mutants" / name).write_text((ROOT / "tests" / "mutants" / name).read_text())
    (tmp_path / "workers" / "sums.py").write_text("def add(a, b):\n    return sum(x for x in (a, b))\n\n\ndef no():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    sweep: a\n    gpu: a\n    alone: a\n")
    (tmp_path / "tests" / "unit" / "test_sums.py").write_text(
        "from workers.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\ndef test_other():\n    pass\n\n\n"
        "def test_fails():\n    assert add(1, 2) == 4\n"
    )
    assert measured(tmp_path, 1, looks=False).tests_of("workers/sums.py", "add") == ()
    reach = measured(tmp_path, 1)
    assert reach.tests_of("workers/sums.py", "add") == ("tests/unit/test_sums.py::test_add",)
    assert reach.tests_of("workers/sums.py", "no") == ()
    assert VARIABLE not in os.environ


NOTED = '''"""Sums."""
from __future__ import annotations

class Sum:
    """Of two."""

    @classmethod
    async def add(cls) -> Unknown:
        """Twice."""
        return [inner(1) for inner in [lambda one: cls.of(one)]]

    @staticmethod
    def of(one):
        def inner(): return one
        if inner():
            def never(): ...
        return inner()

def fails():
    raise ValueError(__doc__, Sum.__doc__, Sum.add.__doc__)
'''
USES_IT = """
import asyncio, os, sums
assert asyncio.run(sums.Sum.add()) == [1]
sums.Sum.of(2)
if os.fork() == 0:
    try:
        sums.fails()
    except ValueError as error:
        assert error.args == ("Sums.", "Of two.", "Twice."), error
        assert error.__traceback__.tb_next.tb_lineno == 20
        os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_processes_note_which_functions_they_call_and_are_the_same_otherwise(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(NOTED)
    (tmp_path / "empty.py").write_text("")
    noted.write(tmp_path, noted.compiled(tmp_path, ["."]))
    assert (tmp_path / "sums.py").read_text() == NOTED
    (written := tmp_path / "written").touch()
    environ = {**os.environ, noted.CHILDREN: str(written), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    subprocess.run([sys.executable, "-c", USES_IT], env=environ, check=True)
    assert written.read_text().splitlines() == [
        f"sums.py::{name}" for name in ("Sum.add", "Sum.of", "Sum.of.<locals>.inner", "fails")
    ]


def test_tests_that_import_most_of_what_is_wanted_are_looked_at_first() -> None:
    source = "from workers.sums import add\nfrom kog_dist.launch.flags import serve\nimport kog_dist.config\n"
    assert num_imported(source, ["workers/sums.py", "launch/flags.py", "launch/flags.py", "workers/other.py"]) == 3


IN_MEMORY = """LIMIT = 3

def add(a, b=LIMIT):
    def twice(one): return 2 * one
    return twice(a) + b

def made(by):
    def times(one): return one * by
    return times

class Sum:
    @property
    def size(self): return add(1) + 1

by_five = made(5)
"""


@pytest.mark.parametrize(
    ("old", "instead", "found"),
    [
        ("2 * one", "3 * one", (6, 7, 10)), ("twice(a) + b", "twice(a) - b", (-1, 0, 10)), ("add(1) + 1", "add(1)", (5, 5, 10)),
        ("one * by", "one + by", (5, 6, 7)),
    ],
)  # fmt: skip
def test_functions_are_changed_in_memory(tmp_path: Path, old: str, instead: str, found: tuple[int, int, int]) -> None:
    (tmp_path / "sums.py").write_text(IN_MEMORY)
    spec = importlib.util.spec_from_file_location("sums", tmp_path / "sums.py")
    assert spec is not None
    assert spec.loader is not None
    sums = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sums)
    assert (sums.add(1), sums.Sum().size, sums.by_five(2)) == (5, 6, 10)
    collected.put(tmp_path / "sums.py", IN_MEMORY, IN_MEMORY.replace(old, instead), collected.functions_of(f"{tmp_path}/"))
    assert (sums.add(1), sums.Sum().size, sums.by_five(2)) == found


@pytest.mark.parametrize(("old", "instead"), [("= 3", "= 4"), ("b=LIMIT", "b=1"), ("made(5)", "made(6)"), ("@property", "")])
def test_what_runs_while_a_module_is_imported_is_not_changed_in_memory(tmp_path: Path, old: str, instead: str) -> None:
    with pytest.raises(collected.NotInMemoryError):
        collected.put(tmp_path / "sums.py", IN_MEMORY, IN_MEMORY.replace(old, instead), {})


def test_tests_that_are_collected_are_run_with_a_mutant_without_being_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (root := tmp_path / "project").mkdir()
    (root / "sums.py").write_text("LIMIT = 2\n\n\ndef add(a, b):\n    return min(a + b, LIMIT)\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "test_sums.py").write_text(
        f"from sums import add\n\n\nwith open({str(tmp_path / 'imported')!r}, 'a') as noted:\n    noted.write('x')\n\n\n"
        "def test_one():\n    assert add(1, 0) == 1\n\n\ndef test_two():\n    assert add(1, 1) == 2\n"
    )
    (root / "conftest.py").write_text("import gc\n\n\ndef pytest_collection_finish():\n    gc.freeze()\n")
    test = "test_sums.py::test_{}".format
    with forest(root, 1) as trees, borrowed(trees) as tree:
        tree.collect([test("one")])
        mutant, of_import = Mutant("sums.py", "a + b", "a - b", (), ""), Mutant("sums.py", "LIMIT = 2", "LIMIT = 3", (), "")
        with tree.mutated(mutant):
            assert tree.in_memory([test("one")], 60, mutant) == Outcome(0, "", "")
            found = tree.in_memory([test("one"), test("two")], 60, mutant)
            assert found is not None
            assert (found.code, found.failed) == (1, test("two"))
            assert "assert 0 == 2" in found.printed
        assert tree.in_memory([test("two")], 60) == Outcome(0, "", "")
        with tree.mutated(of_import):
            assert tree.in_memory([test("two")], 60, of_import) is None
        assert tree.in_memory([test("three")], 60) is None
    assert (tmp_path / "imported").read_text() == "x"


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
