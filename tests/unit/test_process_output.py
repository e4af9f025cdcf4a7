"""What the launcher takes from what a process prints."""

from __future__ import annotations

import os

from kog_dist.launch.process import EngineProcess
from kog_dist.workers.notes import NOTE


class Printed(EngineProcess):
    """A process that has printed this, and ended."""

    def __init__(self, text: str) -> None:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        super().__init__("rank 0", 1, ended_fd=-1, stderr_fd=reading, log=None)

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
