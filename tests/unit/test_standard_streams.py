"""Commands whose standard streams are closed: one sentence, or none where nobody could read it; never a trace."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHAT, DOCTOR, CLIENT = "kog_dist.chat.cli", "kog_dist.doctor.cli", "kog_dist.rpc.cli"
NO_OUTPUT = "standard output is closed; redirect it to a file or to /dev/null"


@pytest.mark.parametrize(
    ("module", "arguments", "closed", "code", "sentence"),
    [
        (CHAT, "", "<&-", 2, "kog-chat: standard input is empty; write a prompt to it"),
        (CHAT, "hi", ">&-", 3, f"kog-chat: {NO_OUTPUT}"),
        (CHAT, "", "<&- >&- 2>&-", 3, ""),
        (CLIENT, "status --instance=no-such", "<&-", 3, "kog-client: no_engine: no engine listens"),
        (CLIENT, "status --instance=no-such", ">&- 2>&-", 3, ""),
        (DOCTOR, "--json", ">&-", 3, f"kog-doctor: {NO_OUTPUT}"),
    ],
)
def test_a_command_without_a_stream(module: str, arguments: str, closed: str, code: int, sentence: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m {module} {arguments} {closed}"], capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.startswith(sentence)
    assert len(done.stderr.splitlines()) == bool(sentence), done.stderr
    assert done.stdout == ""


def test_files_do_not_take_the_numbers_of_closed_streams() -> None:
    program = (
        "import os; from kog_dist.system.standard_streams import fill_closed; "
        "assert fill_closed() == {0, 1, 2}; assert os.open('/dev/null', os.O_RDONLY) > 2; "
        "import sys; assert sys.stdin.read() == ''; print('nowhere'); print('nowhere', file=sys.stderr); assert not fill_closed()"
    )
    done = subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{program}" <&- >&- 2>&-'], timeout=60, check=False)
    assert done.returncode == 0
