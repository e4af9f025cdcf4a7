"""The fault plug-in does what it says, to any process."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.engine.injection import FaultKind, fault_of_process, short_read
from kog_dist.bench.engine.session import until
from kog_dist.errors import LaunchError

COUNTS = "import sys\nfor i in range(10**9):\n    print(i, flush=True)\n    sys.stdin.readline()\n"
LIMIT_S = 20.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-P", "-c", COUNTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == b"0\n"
        yield made
        made.kill()


def state(child: subprocess.Popen[bytes]) -> str:
    return str(psutil.Process(child.pid).status())


def do(child: subprocess.Popen[bytes], kind: FaultKind) -> float:
    injected = fault_of_process(child.pid, kind, random.Random(1))
    return injected.end_s - injected.begin_s


@pytest.mark.parametrize(("kind", "signum"), [(FaultKind.KILL, signal.SIGKILL), (FaultKind.TERM, signal.SIGTERM)])
def test_a_process_is_ended(child: subprocess.Popen[bytes], kind: FaultKind, signum: signal.Signals) -> None:
    do(child, kind)
    assert child.wait(LIMIT_S) == -signum
    with pytest.raises(LaunchError, match="ended before its fault"):
        do(child, kind)


def test_a_process_is_stopped_and_continued(child: subprocess.Popen[bytes]) -> None:
    do(child, FaultKind.STOP)
    until(lambda: state(child) == "stopped", LIMIT_S, lambda: state(child))
    do(child, FaultKind.CONT)
    until(lambda: state(child) == "sleeping", LIMIT_S, lambda: state(child))


@pytest.mark.parametrize(("kind", "at_least_s"), [(FaultKind.PAUSE, 0.1), (FaultKind.DELAY, 1.0)])
def test_a_process_that_was_held_up_goes_on(child: subprocess.Popen[bytes], kind: FaultKind, at_least_s: float) -> None:
    assert do(child, kind) >= at_least_s
    until(lambda: state(child) == "sleeping", LIMIT_S, lambda: state(child))


def test_files_of_a_process_grow_no_more(tmp_path: Path) -> None:
    written = tmp_path / "file"
    program = (
        "import sys\nfile = open(sys.argv[1], 'wb', buffering=0)\nfile.write(b'a')\nprint('begun', flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n    file.write(b'b')\nexcept OSError as error:\n    print(type(error).__name__, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(written)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        do(child, FaultKind.ENOSPC)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"OSError\n"
        assert child.wait(LIMIT_S) == 0
    assert written.read_bytes() == b"a"


def test_a_file_is_cut_in_half(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    short_read(path)
    assert path.read_bytes() == b"abc"
