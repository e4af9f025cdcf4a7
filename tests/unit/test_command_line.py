"""What is shown of command lines: no key and no prompt, whoever keeps the line and however it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kog_dist.runtime.command_line import SHOWN_CHARS, command_of, shown_command
from kog_dist.runtime.instance import LEASE_FILE, read_holder
from tests.unit.test_layering import ROOT, source_files

KEY = "sk-hunter2hunter2"
LAUNCH = ["/usr/bin/python3", "-P", "-s", "/opt/venv/bin/kog-launch"]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/models/m", "--ranks", "2", "--api-key", KEY, "--quiet"], "/models/m --ranks 2 --api-key ... --quiet"),
        (["--api-key", KEY, "m"], "--api-key ... m"),
        ([f"--api-key={KEY}", "--ranks=2"], "--api-key=... --ranks=2"),
        (["--api-key", "--ranks", "--ranks", "3"], "--api-key ... --ranks 3"),
        (["--api-key", f"--{KEY}", "--ranks", "3"], "--api-key ... --ranks 3"),
        (["--api-key"], "--api-key ..."),
        (["--prompt", f"two words {KEY}", "--ranks", "1"], "..."),
        (["--ranks", "1", "--prompt", f"--instance={KEY}"], "--ranks 1 ..."),
        (["--json", "--prompt", f"--instance={KEY}"], "..."),
        (["--api-kye", KEY, KEY], "..."),
        (["m", KEY, "--no-http"], "m ..."),
        (["m", "--no-http", "--no-pin", "--ranks", "1"], "m --no-http --no-pin --ranks 1"),
        (["m", "--no-ranks", "1"], "m ..."),
        (["--no-http", "--api-key", KEY, "m"], "--no-http --api-key ... m"),
        (["--instance", "a\nb\x1b[31m"], "--instance a b\\x1b[31m"),
        ([], ""),
    ],
)
def test_of_a_launch_those_settings_are_shown_that_are_no_secret(words: list[str], shown: str) -> None:
    for program in (LAUNCH, ["kog-launch"], ["python", "-m", "kog_dist.launch.cli"]):
        said = shown_command([*program, *words])
        assert said.partition("launch")[2].removeprefix(".cli").strip() == shown
        assert KEY not in said
        assert shown_command(said.split()) == said, "who reads it again finds the same"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/usr/sbin/nginx", "-g", KEY], "nginx ..."),
        (["nginx: worker process --key " + KEY], "nginx:"),
        (["vllm", "serve", "m", "--api-key", KEY], "vllm ..."),
        (["python3.11", "-X", "dev", "-W", "error", "-m", "http.server", KEY], "python3.11 -m http.server ..."),
        (["python", "-c", f"print({KEY!r})"], "python ..."),
        (["python", "/srv/server.py", "--prompt", KEY], "python server.py ..."),
        (["python"], "python"),
        (["kog-chat", "--api-key", KEY, "words"], "kog-chat ..."),
        (["python", "-P", "-m", "kog_dist.gateway.process", f'{{"key": "{KEY}"}}'], "python -m kog_dist.gateway.process ..."),
        ([""], "?"),
        ([], ""),
    ],
)
def test_of_other_programs_only_their_names_are_shown(words: list[str], shown: str) -> None:
    assert shown_command(words) == shown


def test_it_is_bounded_and_never_cut_into_a_key() -> None:
    assert len(shown_command([*LAUNCH, "--log-dir", "x" * 500])) == SHOWN_CHARS
    for length in range(60, 130):
        assert "sk-" not in shown_command([*LAUNCH, "--log-dir", "x" * length, "--api-key", KEY])


def test_a_process_is_read_from_its_command_line() -> None:
    command = ["python", "-c", "print(flush=True); input()", "--api-key", KEY]
    with subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert command_of(process.pid) == "python ..."
        process.kill()
    assert command_of(2**22) == ""


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--api-key", KEY, "end"], ["--api-key", "." * len(KEY), "end"]),
        ([f"--api-key={KEY}", KEY], ["--api-key=" + "." * len(KEY), KEY]),
        (["--other", KEY], ["--other", KEY]),
    ],
)
def test_a_key_is_taken_out_of_what_the_system_shows(given: list[str], shown: list[str]) -> None:
    code = f"from kog_dist.runtime.command_line import hide_own as hide; hide('--api-key', {KEY!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")[3:-1]
        process.kill()
    assert found == shown


def test_a_lease_of_whoever_wrote_it_shows_no_key(tmp_path: Path) -> None:
    text = f'{{"pid": {os.getpid()}, "start_time": 1, "command": "python kog-launch --api-key {KEY} --ranks 2"}}'
    (tmp_path / LEASE_FILE).write_text(text)
    assert str(read_holder(tmp_path)) == f"process {os.getpid()} (python kog-launch --api-key ... --ranks 2)"


def test_nobody_else_reads_command_lines() -> None:
    """But to look for a process, without showing the line."""
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in source_files()}
    found = {file for file, text in texts.items() if re.search(r"/cmdline|\.cmdline\(|\"cmdline\"|orig_argv", text)}
    assert found == {
        "kog_dist/runtime/command_line.py",
        "kog_dist/runtime/port_holder.py",  # whose child a gateway is
        "kog_dist/bench/engine/processes.py",  # processes of a benchmark's own engines
        "launch/ray/cluster.py",  # whether a daemon belongs to this cluster
    }
