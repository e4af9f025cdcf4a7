"""A rank that the kernel kills for want of memory, in a control group of its own; needs the right to make one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until

LIMIT_BYTES = 600 << 20
SPARED, FIRST = "-1000", "1000"  # of whom the kernel kills
# Takes memory in the group until the process is gone whose number it is given.
EATER = """
import os, sys
open("/proc/self/oom_score_adj", "w").write(sys.argv[2])
open(sys.argv[3], "w").write(str(os.getpid()))
taken = []
while os.path.exists(f"/proc/{sys.argv[1]}/fd") and len(taken) < 400:
    taken.append(bytes([1]) * (4 << 20))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A folder of version 1 or 2 whose processes together have LIMIT_BYTES."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()]
    name, limit, own = next(
        (("memory/", "memory.limit_in_bytes", path) for _, controllers, path in lines if controllers == "memory"),
        ("", "memory.max", lines[-1][2]),
    )
    made = Path(f"/sys/fs/cgroup/{name}") / own.strip("/") / f"kog-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            (made / limit).write_text(str(LIMIT_BYTES))
            (made / "cgroup.procs").read_text()
        except OSError as error:
            pytest.skip(f"memory cannot be limited here: {error}")
        yield made
    finally:
        until(lambda: not (made / "cgroup.procs").read_text(), 10.0, lambda: "processes are left in the group")
        made.rmdir()


def test_a_rank_that_is_killed_for_want_of_memory_is_said_to_be(group: Path, session: EngineSession, tiny_model: Path) -> None:
    session.starter = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    launcher = session.launch(str(tiny_model), "--ranks=2", "--device=cpu")
    with session.connect():
        pid = session.processes()["rank 1"]
        Path(f"/proc/{pid}/oom_score_adj").write_text(FIRST)
        eater = [*session.starter, sys.executable, "-c", EATER, str(pid), SPARED, str(group / "cgroup.procs")]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(eater, timeout=30, check=False)
        assert launcher.wait(timeout=20) == 4
    assert f"rank 1 (pid {pid}) was killed by the system's out-of-memory killer (free memory, or raise" in session.output()
