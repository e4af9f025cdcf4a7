"""Whether tests that CI may leave out (tests/rooms.py) open anything of the repository that is not in their rooms."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.rooms import ROOT, Rooms, twins

rooms_of = cache(Rooms)
MADE = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "build", "kog_dist.egg-info"}  # by tools


class Opened:
    """A plugin that listens while such a file is imported, if nobody has imported the same before, and while its tests run."""

    def __init__(self) -> None:
        self._of_file = defaultdict[Path, set[str]](set)
        self._heard: set[str] | None = None  # None: nobody listens
        self._twins, self._is_hooked = set(twins()), False

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._heard is not None and event == "open" and isinstance(arguments[0], str):
            self._heard.add(arguments[0])

    @contextmanager
    def _listening(self, path: Path) -> Iterator[None]:
        if path not in self._twins:
            yield
            return
        if not self._is_hooked:
            self._is_hooked = True
            sys.addaudithook(self._hear)  # for as long as this process lives
        self._heard = self._of_file[path]
        try:
            yield
        finally:
            self._heard = None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        with self._listening(collector.path):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._listening(item.path):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        yield
        if opened := self._of_file.pop(item.path, None):
            self._heard = None
            others = sorted(str(path.relative_to(ROOT)) for path in sources_of(opened) if not rooms_of(item.path).has(path))
            assert not others, f"{item.path.name} opens {', '.join(others)}, and CI leaves it out where only that has changed"


def sources_of(opened: set[str]) -> set[Path]:
    """Files of the repository among these, modules for their bytecode; not what was made in a clone."""
    paths = {source_of(Path(os.path.realpath(name))) for name in opened}
    inside = {path for path in paths if path.is_relative_to(ROOT) and path.is_file()}
    return {path for path in inside if path.relative_to(ROOT).parts[0] not in MADE}


def source_of(path: Path) -> Path:
    """The module of its bytecode."""
    return path.parents[1] / f"{path.name.split('.')[0]}.py" if path.suffix == ".pyc" else path
