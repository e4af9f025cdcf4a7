"""Core-seconds of each test, with the processes that it waits for: by folder and file, and the slowest, at the end of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.core_seconds import used_s

NUM_SLOWEST, SLOW_S = 20, 1.0
NUM_FILES = 30  # with their names
FEW = 50  # tests: nobody asks what so few of them cost


class CoreSeconds:
    """A plugin. With pytest-xdist a worker measures, and the controller, which gets its reports, prints."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._of_test: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._seen_s = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = used_s()
        report.core_s = now_s - self._seen_s  # type: ignore[attr-defined]  # pytest-xdist carries all attributes of a report
        self._seen_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_test[report.nodeid] = self._of_test.get(report.nodeid, 0.0) + getattr(report, "core_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._of_test) < FEW:
            return
        terminalreporter.section(f"core-seconds by folder and file, and of the {NUM_SLOWEST} slowest tests")
        for line in lines_of(self._of_test):
            terminalreporter.line(line)


def lines_of(core_s: dict[str, float]) -> list[str]:
    """The tables, of core-seconds by test."""
    files, folders, num_tests = dict[str, float](), dict[str, float](), Counter[str]()
    for test, of_test_s in core_s.items():
        file = test.partition("::")[0]
        for table, name in ((files, file), (folders, str(Path(file).parent))):
            table[name] = table.get(name, 0.0) + of_test_s
            num_tests[name] += 1
    by_folder = sorted(folders.items(), key=lambda one: -one[1])
    by_file = sorted(files.items(), key=lambda one: -one[1])[:NUM_FILES]
    slowest = sorted((one for one in core_s.items() if one[1] >= SLOW_S), key=lambda one: -one[1])[:NUM_SLOWEST]
    return [
        *(f"{of_folder_s:8.1f} {folder}: {num_tests[folder]} tests" for folder, of_folder_s in by_folder),
        f"{sum(folders.values()):8.1f} {len(core_s)} tests, without imports and collection",
        *(f"{of_file_s:8.1f} {file}: {num_tests[file]} tests" for file, of_file_s in by_file),
        *(f"{of_test_s:8.1f} {test}" for test, of_test_s in slowest),
    ]
