"""Which functions of the product each test calls: what a drawn mutant is tried with are tests that call the function it is in.

`python -m pytest -p tests.mutants.reached FILES` in a tree whose modules note it (noted.py), with `TESTS_REACHED` naming a file,
writes there, by test, its seconds and its functions, as `file::qualified name`, also those of processes that it has started.
`Reach` keeps that in build/, under hashes of the files of tests.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import signal
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.mutants import noted

FOLDERS: Final = ("kog_dist", "workers", "launch", "collectives")
VARIABLE: Final = "TESTS_REACHED"
MOST_S: Final = 20.0  # of a processor, of the tests of one mutant
MOST_OF_ONE_S: Final = 6.0
Measured = dict[str, tuple[float, list[str]]]


class Noter:
    """A plugin that keeps which functions each test has called, in modules that note it (noted.py)."""

    def __init__(self, path: Path) -> None:
        self._by_children = Path(os.environ[noted.CHILDREN])
        self._path = path
        self._tests: Measured = {}
        self._not_passed: set[str] = set()
        noted.OWNER = os.getpid()
        signal.signal(signal.SIGPROF, _give_up)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        begin_s = _used_s()
        noted.CALLED.clear()
        try:
            return (yield)
        finally:
            if item.nodeid not in self._not_passed:
                found = sorted(noted.CALLED.union(self._of_children()))
                self._tests[item.nodeid] = round(_used_s() - begin_s, 3), found

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        signal.setitimer(signal.ITIMER_PROF, MOST_OF_ONE_S)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:  # it would seem to notice everything, or nothing
            self._not_passed.add(report.nodeid)

    def _of_children(self) -> list[str]:
        """What processes have noted that this test, or one before, has started; each once."""
        with self._by_children.open("r+") as written:
            lines = written.read().splitlines()
            written.truncate(0)
        return lines

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._tests))


def _give_up(*_: object) -> None:
    pytest.fail("no mutant is tried with a test that takes so long")


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(VARIABLE):
        config.pluginmanager.register(Noter(Path(path)))


def functions(source: str) -> list[tuple[int, int, str]]:
    """First line, last line and qualified name of all functions, inner ones behind those that they are in."""
    found: list[tuple[int, int, str]] = []

    def look(node: ast.AST, within: str) -> None:
        for inner in ast.iter_child_nodes(node):
            name = within
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{within}{inner.name}"
                if not isinstance(inner, ast.ClassDef):
                    found.append((*lines_of(inner), name))
                    name += ".<locals>"
                name += "."
            look(inner, name)

    look(ast.parse(source), "")
    return found


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """The first, of a decorator, and the last."""
    return min([function.lineno, *(one.lineno for one in function.decorator_list)]), function.end_lineno or function.lineno


def function_at(source: str, number: int) -> str:
    """The qualified name of the innermost function that has a line, from 1; empty outside of all."""
    return next((name for first, last, name in reversed(functions(source)) if first <= number <= last), "")


class Reach:
    """What was measured of the tests in some files."""

    def __init__(self, kept: Path) -> None:
        self._kept = kept
        self._files: dict[str, tuple[str, Measured]] = json.loads(kept.read_text()) if kept.exists() else {}
        self._index()

    def stale(self, root: Path, files: Sequence[str]) -> list[str]:
        """Which of all files of tests are new or changed; what is known of others is forgotten."""
        self._files = {file: found for file, found in self._files.items() if file in files and _digest(root / file) == found[0]}
        self._index()
        return [file for file in files if file not in self._files]

    def keep(self, root: Path, file: str, measured: Measured) -> None:
        """What its tests call."""
        self._files[file] = _digest(root / file), measured

    def save(self) -> None:
        """For the next run."""
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        self._kept.write_text(json.dumps(self._files))
        self._index()

    def _index(self) -> None:
        self._tests = {test: found for _, of_file in self._files.values() for test, found in of_file.items()}
        self._callers: dict[str, list[str]] = {}  # by function, and by file
        for test, (_, called) in self._tests.items():
            for name in {*called, *(name.partition("::")[0] for name in called)}:
                self._callers.setdefault(name, []).append(test)

    def tests_of(self, file: str, function: str) -> tuple[str, ...]:
        """Tests that call a function, or outside of all (empty) any of the file.

        Files in turns: first those that call little else, then those that call most of the file, who see what a function leaves
        to others.
        """
        return self._chosen(self._callers.get(f"{file}::{function}" if function else file, ()), file)

    def tests_of_any(self, names: Iterable[str], file: str = "") -> tuple[str, ...]:
        """The same of any of these functions (`file::qualified name`), or of any function of these files."""
        return self._chosen(dict.fromkeys(test for name in names for test in self._callers.get(name, ())), file)

    def _chosen(self, calling: Iterable[str], file: str) -> tuple[str, ...]:
        def num_of_file(test: str) -> int:
            return sum(name.startswith(f"{file}::") for name in self._tests[test][1])

        calling, chosen, left_s = list(calling), dict[str, None](), MOST_S
        least = self._in_turns(sorted(calling, key=lambda test: len(self._tests[test][1])))
        most = self._in_turns(sorted(calling, key=lambda test: (-num_of_file(test), len(self._tests[test][1]))))
        for order, most_s in ((least, MOST_S / 2), (most, MOST_S), (least, MOST_S)):
            for test in order:
                needed_s = self._tests[test][0]
                if test not in chosen and needed_s <= min(MOST_OF_ONE_S, left_s - (MOST_S - most_s)):
                    chosen[test] = None
                    left_s -= needed_s
        return tuple(chosen)

    def _in_turns(self, tests: Iterable[str]) -> list[str]:
        """The first of each file, then the second of each, and so on."""
        by_file: dict[str, list[str]] = {}
        for test in tests:
            by_file.setdefault(test.partition("::")[0], []).append(test)
        return [test for turn in itertools.zip_longest(*by_file.values()) for test in turn if test is not None]


def _used_s() -> float:
    """Seconds of processors, of this process and of those that it has waited for: a busy machine changes them little."""
    return sum(os.times()[:4])


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
