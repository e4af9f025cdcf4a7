"""`make mutants`: whether the tests notice when one line of the code is wrong. docs/testing.md says how to read it.

A mutant is one replaced piece of one file, and the tests that should fail then. Two thirds are a list, of lines that matter; the
others are drawn anew from a seed (drawn.py), so that nobody can have written tests for them. Everything happens in copies of the
tree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.drawn import Drawn, Product

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
WANTED_SHARE, WANTED_OF_DRAWN = 0.9, 0.8
HANGS_S = "120"  # of a test; a mutant that makes one hang is noticed soon
LIMIT_S = 300.0  # of the tests of one mutant; a mutant that makes them hang is noticed, too
KILLED, SURVIVED, LATE, BROKEN = "killed", "survived", "timeout", "broken"
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".hypothesis", ".*_cache", "*.egg-info", "run")
_TESTS_FAILED, _NO_COLLECTION = 1, 2  # exit codes of pytest; others say that the list names tests that do not exist


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


class Tree:
    """A copy of the checkout in which mutants are tried one by one."""

    def __init__(self, folder: Path, root: Path) -> None:
        shutil.copytree(root, folder, symlinks=True, ignore=_LEFT_OUT)
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to(root / ".venv")
        self._folder = folder

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant | Drawn) -> Iterator[None]:
        """The tree with one mutant in it, and without it again."""
        path = self._folder / mutant.file
        source = path.read_text()
        self._write(path, mutant.applied(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # Python believes a time in seconds and a size, which may be those of the mutant

    def test(self, tests: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Exit code of pytest, None if it took too long; and what it printed."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        # Before the installed package, which is the checkout's, comes this one; what tests start gets it, too.
        environ = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": ""}
        environ["PYTEST_TIMEOUT"] = HANGS_S
        environ["TESTS_HYPOTHESIS_PROFILE"] = "mutants"  # KOG_ would be a setting, and refused
        process = subprocess.Popen(
            command, cwd=self._folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0].decode(errors="replace")
        return process.returncode, printed.decode(errors="replace")

    def verdict(self, mutant: Mutant | Drawn, limit_s: float, *, tests_pass: bool = True) -> str:
        """What the tests make of a mutant. `tests_pass` false: it is not known whether they do without one; then those that have
        noticed it are asked.
        """
        with self.mutated(mutant):
            code, printed = self.test(mutant.tests, limit_s)
        verdict = LATE if code is None else {0: SURVIVED, _TESTS_FAILED: KILLED, _NO_COLLECTION: KILLED}.get(code, BROKEN)
        if code is not None and code < 0:  # a signal: the mutant has ended pytest itself
            verdict = KILLED
        if verdict == KILLED and not tests_pass:
            failed = re.findall(r"^(?:FAILED|ERROR) ([^\s:]+)", printed, re.MULTILINE)  # files: names of tests may have blanks
            code, printed = self.test(list(dict.fromkeys(failed)) or mutant.tests, limit_s)
            verdict = KILLED if code == 0 else BROKEN
        if verdict == BROKEN:
            print(f"{mutant.name}: pytest ended with {code}\n{printed[-2000:]}", file=sys.stderr, flush=True)
        return verdict


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
    with tempfile.TemporaryDirectory(prefix="kog-mutants-") as folder, ThreadPoolExecutor(num_at_once) as pool:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for number in range(num_at_once):
            trees.put(Tree(Path(folder) / f"tree{number}", root))
        all_tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))

        def unmutated(tests: Sequence[str]) -> tuple[int | None, str]:
            with borrowed(trees) as tree:
                return tree.test(tests, len(tests) * LIMIT_S)

        def mutated(mutant: Mutant | Drawn) -> str:
            with borrowed(trees) as tree:
                return tree.verdict(mutant, limit_s, tests_pass=tests_first)

        parts = [all_tests[number::num_at_once] for number in range(num_at_once)] if tests_first else []
        for code, printed in pool.map(unmutated, filter(None, parts)):
            if code != 0:
                raise RuntimeError(f"the tests do not pass without a mutant:\n{printed}")
        yield from zip(mutants, pool.map(mutated, mutants), strict=True)


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
    parser.add_argument("--root", type=Path, default=ROOT)
    options = parser.parse_args(arguments)
    listed = [] if options.no_list else read_list(options.list)
    mutants = [mutant for mutant in listed if options.only in mutant.name]
    seed = options.seed if options.seed is not None else secrets.randbelow(10**6)
    num_drawn = options.drawn if options.drawn is not None else 0 if options.only else len(mutants) // 2
    drawn = Product(options.root).draw(seed, num_drawn) if num_drawn else []
    are_noticed = [
        report("listed", mutants, options, WANTED_SHARE),
        report(f"drawn from seed {seed}", drawn, options, WANTED_OF_DRAWN),
    ]
    return 0 if all(are_noticed) else 1


def report(kind: str, mutants: Sequence[Mutant | Drawn], options: argparse.Namespace, wanted_share: float) -> bool:
    """Try them, and say what became of each and of all; whether enough are noticed."""
    begin_s, verdicts = time.monotonic(), []
    is_drawn = any(isinstance(mutant, Drawn) for mutant in mutants)
    tried = try_all(mutants, options.root, num_at_once=options.at_once, tests_first=not is_drawn) if mutants else ()
    for mutant, verdict in tried:
        verdicts.append(verdict)
        print(f"{verdict:9}{mutant.name}", flush=True)
        if verdict == SURVIVED:
            print(f"{'':9}{mutant.breaks}; not noticed by {' '.join(mutant.tests)}", flush=True)
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
