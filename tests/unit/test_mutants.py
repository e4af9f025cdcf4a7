"""The list of mutants fits the code, and the runner tells noticed mutants from those that are not (tests/mutants/)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run import KILLED, LATE, LIST, ROOT, SURVIVED, Mutant, main, read_list, try_all

MUTANTS = read_list(LIST)
CODE = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n"
TESTS = "import code_under_test as c\n\n\ndef test_add():\n    assert c.add(2, 3) == 5\n    assert c.double(2) == 4\n"


def test_the_list_is_as_long_as_promised() -> None:
    assert len(MUTANTS) >= 200
    assert len({(mutant.file, mutant.line, mutant.instead) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name[:100])
def test_every_mutant_still_has_its_place_in_the_code(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    changed = mutant.applied(source)
    assert changed != source
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.breaks
    assert all((ROOT / test.partition("::")[0]).exists() for test in mutant.tests)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one module, whose tests do not notice everything."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of a start
    root = tmp_path / "project"
    root.mkdir()
    (root / "code_under_test.py").write_text(CODE)
    (root / "test_code.py").write_text(TESTS)
    (root / "pytest.ini").write_text("[pytest]\n")
    return root


def mutant(line: str, instead: str, test: str = "test_code.py") -> Mutant:
    return Mutant("code_under_test.py", line, instead, (test,), "sums are wrong")


def test_mutants_are_tried_one_by_one_in_a_copy(project: Path) -> None:
    wrong, hanging = mutant("a + b", "a - b"), mutant("return a + b", "while True: pass")
    planted = mutant("2 * a", "a * a")  # which the test does not tell apart
    syntax = mutant("def add(a, b):", "def add(a, b)")
    found = dict(try_all([wrong, planted, syntax, wrong], project, num_at_once=1))
    assert found == {wrong: KILLED, planted: SURVIVED, syntax: KILLED}
    assert dict(try_all([hanging], project, limit_s=2.0)) == {hanging: LATE}
    assert (project / "code_under_test.py").read_text() == CODE
    assert sorted(path.name for path in project.iterdir()) == ["code_under_test.py", "pytest.ini", "test_code.py"]


def test_the_list_must_fit(project: Path) -> None:
    missing = mutant("a * b", "a / b")
    with pytest.raises(ValueError, match=r"code_under_test.py has 0 places like 'a \* b'"):
        dict(try_all([missing], project))
    with pytest.raises(ValueError, match="has 7 places"):
        mutant("a", "b").applied("a" * 7)
    with pytest.raises(ValueError, match="replaced by itself"):
        mutant("a + b", "a + b").applied(CODE)


def test_tests_that_fail_anyway_notice_nothing(project: Path) -> None:
    (project / "test_code.py").write_text("def test_add():\n    assert False, 'always'\n")
    with pytest.raises(RuntimeError, match=r"do not pass without a mutant:(?s:.*)always"):
        dict(try_all([mutant("a + b", "a - b")], project))


LISTED = """
[[room]]
tests = ["test_code.py"]
[[room.mutants]]
file = "code_under_test.py"
line = 'a + b'
instead = 'a - b'
breaks = "sums are wrong"
"""
SURVIVOR = """
[[room.mutants]]
file = "code_under_test.py"
line = '2 * a'
instead = 'a * a'
breaks = "squares come out"
"""


def test_too_many_survivors_fail_the_run(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "list.toml"
    arguments = ["--list", str(listed), "--root", str(project), "--drawn", "0"]
    listed.write_text(LISTED + SURVIVOR)
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "survived code_under_test.py: 2 * a  ->  a * a\n         squares come out; not noticed by test_code.py" in printed
    assert "1 of 2 mutants noticed (listed): 50%, wanted 90%" in printed
    assert main([*arguments, "--only", "a + b"]) == 0
    assert "1 of 1 mutants noticed (listed): 100%, wanted 90%" in capsys.readouterr().out
