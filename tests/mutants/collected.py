"""pytest that has collected its tests: each mutant is put into the functions of a fork of it, in memory, which runs some of them.

Nothing is imported or collected again then, which takes more time than most tests. Started as a script in the tree whose tests it
runs, with their files, whose tests it names; then it takes one JSON object a line: `{"tests": [...], "limit_s": 9.0}`, with a
mutant also `file`, and its text `before` and `after`. The file must have the mutant, too: what is imported later, and processes
that tests start, read it. Answers are those of warm.py; `code` is `NOT_IN_MEMORY` where the mutant is not in a function.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO, Any, Final

import pytest

NOT_IN_MEMORY: Final = 71
_IS_FUNCTION: Final = 1  # CO_OPTIMIZED: no body of a module or a class
Functions = Mapping[tuple[str, str, int], Sequence[FunctionType]]


class NotInMemoryError(Exception):
    """A mutant of what runs while a module is imported, or of a closure that is there."""


def functions_of(folder: str) -> Functions:
    """All functions that come from files below it, by file, qualified name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    gc.unfreeze()  # what is frozen, as by tests/conftest.py, is not shown
    for one in gc.get_objects():
        if type(one) is FunctionType and (code := one.__code__).co_filename.startswith(folder):
            found.setdefault((os.path.realpath(code.co_filename), *_place(code)), []).append(one)
    return found


def put(path: Path, before: str, after: str, functions: Functions) -> None:
    """Give functions of a file that is imported the code that they have in another text of it. Raises NotInMemoryError."""
    old, new = (compile(text, path, "exec", dont_inherit=True) for text in (before, after))
    for was, becomes in _changed(old, new):
        for function in functions.get((str(path.resolve()), *_place(was)), ()):
            try:
                function.__code__ = becomes
            except ValueError as error:  # other variables of the functions around it
                raise NotInMemoryError(str(error)) from error


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Functions that differ, with the new ones, those within others, too."""
    is_function = bool(old.co_flags & _IS_FUNCTION)
    if not is_function and _own(old) != _own(new):
        raise NotInMemoryError("it runs while the module is imported")
    inner, others = ([one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new))
    if [_place(one) for one in inner] == [_place(one) for one in others]:
        for was, becomes in zip(inner, others, strict=True):
            if was != becomes:
                yield from _changed(was, becomes)
    if is_function:
        yield old, new


def _own(code: CodeType) -> tuple[object, ...]:
    """What it is without its functions."""
    constants = [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


class Collected:
    """A plugin that answers requests once all is collected, in place of running everything."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = functions_of(f"{os.getcwd()}/")
        gc.freeze()  # forks share what is there
        self._reply({"collected": list(items)})
        for line in self._requests:
            self._reply(answer(json.loads(line), items, functions))
        return True

    def _reply(self, reply: dict[str, Any]) -> None:
        self._replies.write(json.dumps(reply) + "\n")
        self._replies.flush()


def answer(request: dict[str, Any], items: Mapping[str, pytest.Item], functions: Functions) -> dict[str, Any]:
    """Put the mutant into a fork, if there is one, and run tests until one fails."""
    from tests.mutants.warm import First, forked

    def work() -> tuple[int, First]:
        first = First()
        if "file" in request:
            try:
                put(Path.cwd() / request["file"], request["before"], request["after"], functions)
            except NotInMemoryError:
                return NOT_IN_MEMORY, first
        asked = [items[test] for test in request["tests"]]
        asked[0].config.pluginmanager.register(first)
        for item, following in zip(asked, [*asked[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if first.failed:
                return 1, first
        return 0, first

    return forked(work, request["limit_s"])


def main() -> None:
    """Collect, and answer lines until there are no more."""
    sys.path[0] = str(Path(__file__).parents[2])
    from tests.mutants import warm

    sys.path[0] = os.getcwd()
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # pytest takes 0 to 2
    with open("collected.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    pytest.main([*warm.OPTIONS, *sys.argv[1:]], plugins=[Collected(requests, replies)])


if __name__ == "__main__":
    main()
