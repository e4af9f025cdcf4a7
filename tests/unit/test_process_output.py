"""What the launcher takes from what a process prints."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from kog_dist.launch.events import EventLog, LogFile
from kog_dist.launch.outcome import Outcome
from kog_dist.launch.process import EngineProcess
from kog_dist.runtime.notes import NOTE
from kog_dist.system.files import EXIT_FILE
from tests.unit.resource_limits import soft_limit


class Printed(EngineProcess):
    """A process that has printed this, and ended."""

    def __init__(self, text: str, log: LogFile | None = None) -> None:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        super().__init__("rank 0", 1, ended_fd=-1, stderr_fd=reading, log=log)

    @property
    def exit_code(self) -> int | None:
        return 70

    @property
    def pidfd(self) -> int:
        return -1

    def send(self, signum: int) -> None:
        pass


def test_a_note_is_no_reason_for_an_end() -> None:
    process = Printed(f"cuda:0 failed\n{NOTE}prompts go token by token: no torch\n\n")
    assert not process.read_output()
    assert process.last_line() == "cuda:0 failed"
    assert process.notes == ["prompts go token by token: no torch"]
    silent = Printed(f"{NOTE}prompts go through prefill\n")
    assert not silent.read_output()
    assert silent.last_line() == ""


def test_lines_that_a_full_disk_loses_are_said_to_be_lost_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(str(tmp_path)) as events:
        process = Printed("first\nlast\n", LogFile(tmp_path, "rank 0"))
        assert capsys.readouterr().err == ""
        with soft_limit(resource.RLIMIT_FSIZE, (tmp_path / "rank-0.log").stat().st_size + 6):
            assert not process.read_output()
            events.note("a line of the launcher")
            Outcome(0, "stopped").write(tmp_path, "default")
        events.note("there is room again")
    process.close()
    assert process.last_line() == "last"
    assert capsys.readouterr().err == (
        f"kog-launch: lines of the logs in {tmp_path} are lost: File too large; free space there, or choose another --log-dir\n"
    )
    assert (tmp_path / "rank-0.log").read_text().endswith("----\nfirst\n")
    assert (tmp_path / "launcher.log").read_text().endswith("there is room again\n")
    assert not (tmp_path / EXIT_FILE).exists()


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_logs_are_for_their_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with EventLog(str(tmp_path / "new" / "logs")) as events:
            assert events.log_dir is not None
            LogFile(events.log_dir, "rank 0").close()
            Outcome(0, "stopped").write(events.log_dir, "default")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")}
    assert modes == {"logs": 0o700, "launcher.log": 0o600, "rank-0.log": 0o600, EXIT_FILE: 0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
