"""Core-seconds of groups and of tests, as `make test` prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.core_seconds import table
from tests.core_seconds_of_tests import lines_of

ROOT = Path(__file__).parents[2]
BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_command_is_counted_with_its_children_and_its_exit_code_stays(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}]); sys.exit(3)"
    counted = (
        "import sys; from pathlib import Path; from tests.core_seconds import count; sys.exit(count('busy', sys.argv[1:], {}))"
    )
    command = [sys.executable, "-c", counted.format(f"Path({str(tmp_path)!r})"), sys.executable, "-c", child]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 3
    note = json.loads((tmp_path / "busy.json").read_text())
    assert note["core_s"] >= 0.3
    assert note["code"] == 3


def test_the_table_has_the_most_expensive_group_first_and_is_printed_once(tmp_path: Path) -> None:
    for group, core_s in (("types", 70.0), ("processes", 700.0)):
        note = {"group": group, "core_s": core_s, "wall_s": core_s / 2, "code": 0}
        (tmp_path / f"{group}.json").write_text(json.dumps(note))
    assert [line.split() for line in table(tmp_path)[1:]] == [
        ["700.0", "350.0", "s", "processes"], ["70.0", "35.0", "s", "types"], ["770.0", "all"],
    ]  # fmt: skip
    assert len(table(tmp_path)) == 2


def test_tests_are_summed_by_folder_and_file() -> None:
    lines = lines_of({"tests/unit/a.py::one": 1.0, "tests/unit/b.py::two[x/y]": 2.0, "tests/e2e/c.py::three": 4.0})
    assert [line.split()[:2] for line in lines] == [
        ["4.0", "tests/e2e:"], ["3.0", "tests/unit:"], ["7.0", "3"],
        ["4.0", "tests/e2e/c.py:"], ["2.0", "tests/unit/b.py:"], ["1.0", "tests/unit/a.py:"],
        ["4.0", "tests/e2e/c.py::three"], ["2.0", "tests/unit/b.py::two[x/y]"], ["1.0", "tests/unit/a.py::one"],
    ]  # fmt: skip
