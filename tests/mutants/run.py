"""`make mutants`: whether the tests notice when one line of the code is wrong. docs/testing.md says how to read it.

A mutant is one replaced piece of one file, and the tests that should fail then. Two thirds are a list, of lines that matter; the
others are drawn anew from a seed (drawn.py), so that nobody can have written tests for them. Everything happens in copies of the
tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import noted, reached
from tests.mutants.collected import NOT_IN_MEMORY
from tests.mutants.drawn import Drawn, Product
from tests.mutants.reached import VARIABLE, Measured, Reach

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
WARM, COLLECTED = Path(__file__).with_name("warm.py"), Path(__file__).with_name("collected.py")
FOLDERS = ("tests/unit", "tests/multi", "tests/e2e")  # of tests
COMPILED = ("_twin.py", "_registers.py", "_documents.py", "_commits.py")  # tests whose work is done by other processes
LEFT_OUT = ("sweep", "gpu", "alone", "cluster", "service", "clients")  # marks of tests
SLOW = (  # to import, and no module of the product's
    "numpy", "torch", "hypothesis", "hypothesis.strategies", "anyio", "httpx", "uvicorn", "starlette.applications", "pydantic",
    "zmq", "tokenizers", "transformers", "jinja2.sandbox", "safetensors", "pytest_timeout", "xdist.plugin",
)  # fmt: skip
FIRST_FILES = 3
WANTED_SHARE, WANTED_OF_DRAWN = 0.9, 0.8
HANGS_S = "120"  # of a test; a mutant that makes one hang is noticed soon
SAVED_EVERY_S = 10.0  # what was measured
LIMIT_S = 300.0  # of the tests of one mutant; a mutant that makes them hang is noticed, too
KILLED, SURVIVED, LATE, BROKEN = "killed", "survived", "timeout", "broken"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache", "*.egg-info", "run")
_NO_TESTS = 5  # exit code of pytest


@dataclass(frozen=True)
class Mutant:
    """`line`: a piece of `file` that occurs in it once; `instead`: what takes its place; `breaks`: what users would see."""

    file: str
    line: str
    instead: str
    tests: tuple[str, ...]
    breaks: str

    @property
    def name(self) -> str:
        """One line that says what it is."""
        return f"{self.file}: {' '.join(self.line.split())}  ->  {' '.join(self.instead.split()) or '(nothing)'}"

    def applied(self, source: str) -> str:
        """The file's text with the mutant in it. Raises ValueError unless its piece is there exactly once."""
        if (num_found := source.count(self.line)) != 1:
            raise ValueError(f"{self.file} has {num_found} places like {self.line!r}, a mutant needs one")
        if self.line == self.instead:
            raise ValueError(f"{self.file}: {self.line!r} is replaced by itself")
        return source.replace(self.line, self.instead)


def read_list(path: Path) -> list[Mutant]:
    """The mutants of a list: `[[room]]` tables with `tests` and `mutants`, whose own `tests` go before the room's."""
    rooms = tomllib.loads(path.read_text())["room"]
    return [
        Mutant(**{"tests": room["tests"], **entry} | {"tests": tuple(entry.get("tests", room["tests"]))})
        for room in rooms
        for entry in room["mutants"]
    ]


@dataclass(frozen=True)
class Outcome:
    """Exit code of pytest, None if it took too long; the first test that failed, if one did; and what was printed."""

    code: int | None
    failed: str
    printed: str


class Tree:
    """A copy of the checkout in which mutants are tried one by one, with a process that runs its tests."""

    def __init__(self, folder: Path, root: Path) -> None:
        shutil.copytree(root, folder, symlinks=True, ignore=_LEFT_OUT)
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to(root / ".venv")
        self.folder = folder
        # Before the installed package, which is the checkout's, comes this one; what tests start gets it, too.
        environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTEST_TIMEOUT": HANGS_S}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environ["TESTS_HYPOTHESIS_PROFILE"] = "mutants"  # KOG_ would be a setting, and refused
        command = [sys.executable, str(WARM), *(SLOW if (root / "kog_dist").exists() else ())]
        # Engines of two trees have the same names.
        environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="run-", dir=folder.parent)
        self._environ = environ
        self._warm = self._started(command)
        self._collected: subprocess.Popen[str] | None = None
        self._has = set[str]()

    def _started(self, command: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self._environ, stdin=pipe, stdout=pipe, text=True)

    def close(self) -> None:
        """End its processes."""
        for process in filter(None, (self._warm, self._collected)):
            process.communicate()

    def collect(self, tests: Sequence[str]) -> None:
        """Keep the tests of these files ready for mutants of functions, if that is not so already."""
        if self._collected is not None:
            return
        files = sorted({test.partition("::")[0] for test in tests})
        self._collected = self._started([sys.executable, str(COLLECTED), *files])
        self._has = set(_answer(self._collected, None)["collected"])

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant | Drawn) -> Iterator[None]:
        """The tree with one mutant in it, and without it again."""
        path = self.folder / mutant.file
        self._before = source = path.read_text()
        self._write(path, mutant.applied(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # Python believes a time in seconds and a size, which may be those of the mutant

    def test(self, tests: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None) -> Outcome:
        """What pytest makes of some tests."""
        return Outcome(**_answer(self._warm, {"arguments": tests, "limit_s": limit_s, "environ": environ or {}}))

    def in_memory(self, tests: Sequence[str], limit_s: float, mutant: Mutant | Drawn | None = None) -> Outcome | None:
        """The same of tests that are collected, with a mutant whose file has it already; None if it is not in a function."""
        if self._collected is None or not self._has.issuperset(tests):
            return None
        request: dict[str, Any] = {"tests": tests, "limit_s": limit_s}
        if mutant is not None:
            after = (self.folder / mutant.file).read_text()
            request |= {"file": mutant.file, "before": self._before, "after": after}
        found = Outcome(**_answer(self._collected, request))
        return None if found.code == NOT_IN_MEMORY else found

    def verdict(self, mutant: Mutant | Drawn, limit_s: float, passing: set[str]) -> str:
        """What the tests make of a mutant. The one that has noticed it must pass without it: those of `passing` are known to."""
        if not mutant.tests:
            return SURVIVED
        with self.mutated(mutant):
            tests = [test for test in mutant.tests if test in self._has]
            found = self.in_memory(tests, limit_s, mutant) if tests else None
            if found is None or found.code == 0:  # what is made while modules are imported may still show it
                for tests in in_turn(mutant.tests):
                    found = self.test(["-x", *tests], limit_s)
                    if found.code != 0:
                        break
        assert found is not None
        verdict = {None: LATE, 0: SURVIVED, _NO_TESTS: BROKEN}.get(found.code, KILLED)  # signals and errors of pytest's, too
        noticed_by = [found.failed or tests[0]]
        if verdict == KILLED and not passing.issuperset(noticed_by):
            found = self.in_memory(noticed_by, limit_s) or self.test(noticed_by, limit_s)
            verdict = KILLED if found.code == 0 else BROKEN
            passing.update(noticed_by if found.code == 0 else ())
        if verdict == BROKEN:
            print(f"{mutant.name}: pytest ended with {found.code}\n{found.printed[-2000:]}", file=sys.stderr, flush=True)
        return verdict


def _answer(process: subprocess.Popen[str], request: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a process of tests says to a request; None asks for what it says by itself. Raises RuntimeError if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if request is not None:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"a process that runs tests has ended with {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def in_turn(tests: Sequence[str]) -> Iterator[list[str]]:
    """Those of the first few files, then all others: most mutants are noticed by the first, and files take time to import.

    Files that compile a program for every mutant are alone, as long as each of them may take.
    """
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    compiling = [file for file in files if file.endswith(COMPILED)]
    files = [file for file in files if file not in compiling]
    for part in filter(None, (files[:FIRST_FILES], files[FIRST_FILES:], *([file] for file in compiling))):
        yield [test for test in tests if test.partition("::")[0] in part]


def try_all(
    mutants: Sequence[Mutant | Drawn],
    root: Path = ROOT,
    *,
    num_at_once: int = 2,
    limit_s: float = LIMIT_S,
    tests_first: bool = True,
) -> Iterator[tuple[Mutant | Drawn, str]]:
    """Every mutant with its verdict, in the order in which they are known.

    Raises RuntimeError with pytest's words if the tests fail without any mutant: then they would seem to notice all of them.
    `tests_first` false: of many tests those are tried without a mutant that have noticed one.
    """
    with forest(root, num_at_once) as trees, ThreadPoolExecutor(num_at_once) as pool:
        all_tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        passing: set[str] = set()

        # Of the list each mutant has its own few files, which are quicker to import than all of them.
        drawn_tests = [] if tests_first else [test for test in all_tests if not test.partition("::")[0].endswith(COMPILED)]

        def unmutated(tests: Sequence[str]) -> Outcome:
            with borrowed(trees) as tree:
                return tree.test(["-x", *tests], len(tests) * LIMIT_S)

        def mutated(mutant: Mutant | Drawn) -> str:
            with borrowed(trees) as tree:
                if drawn_tests:
                    tree.collect(drawn_tests)
                return tree.verdict(mutant, limit_s, passing)

        parts = [all_tests[number::num_at_once] for number in range(num_at_once)] if tests_first else []
        for found in pool.map(unmutated, filter(None, parts)):
            if found.code != 0:
                raise RuntimeError(f"the tests do not pass without a mutant:\n{found.printed}")
        verdicts = {pool.submit(mutated, mutant): mutant for mutant in mutants}
        for verdict in as_completed(verdicts):
            yield verdicts[verdict], verdict.result()


def measured(root: Path, num_at_once: int, *, wanted: Sequence[str] = (), looks: bool = True) -> Reach:
    """Which functions each test of `FOLDERS` calls: of new and changed files of tests this is found out, which takes minutes.

    Short tests that import many files of `wanted` are first, so that most is known soon. `looks` false: what is known already.
    """
    reach = Reach(root / "build" / "mutants" / "reached.json")
    files = [str(path.relative_to(root)) for folder in FOLDERS for path in sorted((root / folder).rglob("test_*.py"))]
    stale = reach.stale(root, [file for file in files if not file.endswith(COMPILED)])
    if stale and looks:
        texts = {file: (root / file).read_text() for file in stale}
        stale.sort(key=lambda file: (-num_imported(texts[file], wanted) / len(texts[file]), file))
        print(f"looking at what the tests of {len(stale)} files call", flush=True)
        modules = noted.compiled(root, reached.FOLDERS)
        with forest(root, num_at_once, modules) as trees, ThreadPoolExecutor(num_at_once) as pool:

            def look(file: str) -> Measured | None:
                with borrowed(trees) as tree, tempfile.TemporaryDirectory(prefix="kog-reached-") as folder:
                    written, by_children = Path(folder, "reached.json"), Path(folder, "children")
                    by_children.touch()
                    arguments = ["-p", "tests.mutants.reached", "-m", f"not ({' or '.join(LEFT_OUT)})", file]
                    outcome = tree.test(arguments, 4 * LIMIT_S, {VARIABLE: str(written), noted.CHILDREN: str(by_children)})
                    found: Measured | None = json.loads(written.read_text()) if written.exists() else {}
                    return None if outcome.code is None else found

            looked, saved_s = {pool.submit(look, file): file for file in stale}, time.monotonic()
            for one in as_completed(looked):
                if (found := one.result()) is not None:  # else it took too long, and is tried again next time
                    reach.keep(root, looked[one], found)
                if time.monotonic() - saved_s > SAVED_EVERY_S:
                    reach.save()
                    saved_s = time.monotonic()
        reach.save()
    return reach


def num_imported(source: str, files: Sequence[str]) -> int:
    """From how many of these files of the product a test imports."""
    modules = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    names = [file.removesuffix(".py").replace("/", ".") for file in files]
    return sum(not modules.isdisjoint({name, f"kog_dist.{name}"}) for name in names)


@contextlib.contextmanager
def forest(root: Path, size: int, modules: Mapping[str, bytes] | None = None) -> Iterator[queue.SimpleQueue[Tree]]:
    """Some trees, whose modules are compiled already if they are given."""
    with tempfile.TemporaryDirectory(prefix="kog-mutants-") as folder, contextlib.ExitStack() as closing:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(size):
            trees.put(tree := Tree(Path(folder) / f"tree{number}", root))
            closing.callback(tree.close)
            noted.write(tree.folder, modules or {})
        yield trees


@contextlib.contextmanager
def borrowed(trees: queue.SimpleQueue[Tree]) -> Iterator[Tree]:
    """A tree that nobody else uses meanwhile."""
    tree = trees.get()
    try:
        yield tree
    finally:
        trees.put(tree)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the list. Returns 1 if too few mutants are noticed, or if the list is wrong."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose line of the report has this in it")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--seed", type=int, help="of those that are drawn; any")
    parser.add_argument("--drawn", type=int, metavar="N", help="how many are drawn; half as many as are listed, none with --only")
    parser.add_argument("--no-list", action="store_true", help="those that are drawn alone")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="copies of the tree")
    parser.add_argument("--known", action="store_true", help="tests of which is known what they call; looks at no others")
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    listed = [] if options.no_list else read_list(options.list)
    mutants = [mutant for mutant in listed if options.only in mutant.name]
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    num_drawn = options.drawn if options.drawn is not None else 0 if options.only else len(mutants) // 2
    drawn = draw(seed, num_drawn, options) if num_drawn else []
    are_noticed = [
        report("listed", mutants, options, WANTED_SHARE),
        report(f"drawn from seed {seed}", drawn, options, WANTED_OF_DRAWN),
    ]
    return 0 if all(are_noticed) else 1


def draw(seed: int, count: int, options: argparse.Namespace) -> list[Drawn]:
    """So many mutants, with the tests that call what they are in."""
    product = Product(options.root)
    drawn = product.draw(seed, count)
    reach = measured(options.root, options.at_once, wanted=[mutant.file for mutant in drawn], looks=not options.known)
    return product.with_tests(drawn, reach)


def report(kind: str, mutants: Sequence[Mutant | Drawn], options: argparse.Namespace, wanted_share: float) -> bool:
    """Try them, and say what became of each and of all; whether enough are noticed."""
    begin_s, verdicts = time.monotonic(), []
    is_drawn = any(isinstance(mutant, Drawn) for mutant in mutants)
    tried = try_all(mutants, options.root, num_at_once=options.at_once, tests_first=not is_drawn) if mutants else ()
    for mutant, verdict in tried:
        verdicts.append(verdict)
        print(f"{verdict:9}{mutant.name}", flush=True)
        if verdict == SURVIVED:
            files = " ".join(dict.fromkeys(test.partition("::")[0] for test in mutant.tests))
            print(f"{'':9}{mutant.breaks}; {f'not noticed by {files}' if files else 'no test calls it'}", flush=True)
    if not verdicts:
        return True
    num_killed = sum(verdict in (KILLED, LATE) for verdict in verdicts)
    share, minutes = num_killed / len(verdicts), (time.monotonic() - begin_s) / 60
    print(
        f"{num_killed} of {len(verdicts)} mutants noticed ({kind}): {share:.0%}, wanted {wanted_share:.0%}; {minutes:.1f} minutes"
    )
    return share >= wanted_share and BROKEN not in verdicts


if __name__ == "__main__":
    sys.exit(main())
