"""What twins look at, by which CI leaves them out: every change of it is noticed, and that they open nothing else."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import opened
from tests.rooms import ROOT, Rooms, closure, modules_of, twins

DECODE, PREFILL = ROOT / "tests/unit/test_decode_twin.py", ROOT / "tests/unit/prefill/test_tape.py"


@pytest.mark.parametrize(
    ("file", "of_decode", "of_prefill"),
    [
        ("workers/phases/attend.cuh", True, True),  # its folder has no modules
        ("collectives/device/ptx.cuh", True, True),
        ("tests/unit/decode_twin/decode.cpp", True, True),
        ("tests/unit/cpu_compiler.py", True, True),
        ("kog_dist/model/layers.py", True, True),
        ("kog_dist/records.py", True, True),
        ("workers/prefill/tape.cuh", False, True),  # need not be there
        ("workers/prefill/buffers/dense.py", False, True),
        ("tests/conftest.py", True, True),
        ("constraints.txt", True, True),
        ("kog_dist/gone.py", True, True),
        ("workers/coordinator/loop.py", False, False),
        ("kog_dist/gateway/static/page.js", False, False),
        ("tests/unit/test_plan.py", False, False),
        ("docs/testing.md", False, False),
    ],
)
def test_rooms_are_what_is_imported_and_what_lies_beside_it(file: str, of_decode: bool, of_prefill: bool) -> None:
    assert (Rooms(DECODE).has(ROOT / file), Rooms(PREFILL).has(ROOT / file)) == (of_decode, of_prefill)


def test_twins_are_what_compiles_device_code() -> None:
    compiler = ROOT / "tests/unit/cpu_compiler.py"
    compiling = {path for path in (ROOT / "tests/unit").rglob("test_*.py") if "cpu_compiler" in path.read_text(encoding="utf-8")}
    assert {path for path in compiling if path.name not in ("test_rooms.py", "test_shared_memory.py")} <= set(twins())
    assert compiler in closure([DECODE])


def test_a_name_in_a_module_is_of_that_module_and_its_packages() -> None:
    found = [str(path.relative_to(ROOT)) for path in modules_of("kog_dist.workers.cuda.build.device_sources")]
    assert found == ["kog_dist/__init__.py", "workers/__init__.py", "workers/cuda/__init__.py", "workers/cuda/build.py"]
    assert modules_of("numpy.linalg") == ()


def test_modules_that_functions_import_are_found(tmp_path: Path) -> None:
    module = tmp_path / "test_x.py"
    module.write_text("def test_it():\n    from kog_dist.workers.coordinator import loop\n")
    assert ROOT / "workers/coordinator/loop.py" in closure([module])


@pytest.mark.parametrize(
    ("reads", "finding"),
    [
        (ROOT / "docs/testing.md", "opens docs/testing.md"),
        (ROOT / "workers/phases/attend.cuh", ""),
        (Path("/proc/self/stat"), ""),
    ],
)
def test_a_twin_that_opens_something_else_fails(reads: Path, finding: str) -> None:
    plugin, item = opened.Opened(), cast(Any, SimpleNamespace(path=DECODE))
    running, ending = plugin.pytest_runtest_protocol(item), plugin.pytest_runtest_teardown(item)
    next(running)
    reads.read_bytes()
    next(ending)
    if finding:
        with pytest.raises(AssertionError, match=finding):
            end(ending)
    else:
        end(ending)
    end(running)
    (ROOT / "README.md").read_bytes()  # nobody listens any more
    next(ending := plugin.pytest_runtest_teardown(item))
    end(ending)


def end(hook: Generator[None, Any, Any]) -> None:
    """What the wrapper of a hook does behind it."""
    with pytest.raises(StopIteration):
        hook.send(None)


def test_bytecode_is_taken_for_its_module() -> None:
    assert opened.source_of(ROOT / "kog_dist/__pycache__/errors.cpython-311.pyc") == ROOT / "kog_dist/errors.py"
    assert opened.source_of(ROOT / "kog_dist/errors.py") == ROOT / "kog_dist/errors.py"
