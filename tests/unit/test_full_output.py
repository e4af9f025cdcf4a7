"""Commands whose standard output is full, or read by somebody who has enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SENTENCE = "standard output cannot be written: No space left on device; send it somewhere else\n"
COMMANDS = {
    "kog-doctor": ["kog_dist.doctor.cli"],
    "kog-doctor --json": ["kog_dist.doctor.cli", "--json"],
    "kog-doctor --help": ["kog_dist.doctor.cli", "--help"],
    "kog-client --help": ["kog_dist.rpc.cli", "--help"],
    "kog-bench --help": ["kog_dist.bench.cli", "--help"],
    "kog-bench inspect --help": ["kog_dist.bench.cli", "inspect", "--help"],
    "kog-gateway --help": ["kog_dist.gateway.cli", "--help"],
    "kog-chat --help": ["kog_dist.chat.cli", "--help"],
}


def run(arguments: list[str], stdout: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        [sys.executable, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_sentence(name: str, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run(["-m", *COMMANDS[name]], full.fileno(), unbuffered)
    assert (done.returncode, done.stderr) == (3, f"{name.split()[0]}: {SENTENCE}")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", ["kog-doctor", "kog-bench --help"])
def test_a_reader_that_has_enough_hears_no_complaint(name: str, unbuffered: str) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = run(["-m", *COMMANDS[name]], write_fd, unbuffered)
    finally:
        os.close(write_fd)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


def test_what_went_wrong_before_comes_first() -> None:
    program = (
        "from kog_dist.rpc.output import checked_stdout\n"
        "try:\n"
        "    with checked_stdout():\n"
        "        print('begun')\n"
        "        raise KeyError('first')\n"
        "except KeyError:\n"
        "    raise SystemExit(7)\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = run(["-c", program], full.fileno(), unbuffered="")
    assert (done.returncode, done.stderr) == (7, "")
