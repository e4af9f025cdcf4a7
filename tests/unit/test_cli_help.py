"""Commands answer at once: what they import before they need it is watched here; the time itself is a benchmark's matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kog_dist import __version__

SLOW = ("torch", "numpy", "zmq", "tokenizers", "safetensors", "jinja2", "rich", "psutil", "pydantic", "starlette", "uvicorn")


@pytest.mark.parametrize(
    "module",
    [
        "kog_dist.launch.cli",
        "kog_dist.rpc.cli",
        "kog_dist.bench.cli",
        "kog_dist.doctor.cli",
        "kog_dist.chat.cli",
        "kog_dist.gateway.cli",
    ],
)
def test_help_imports_nothing_slow(module: str) -> None:
    program = (
        f"import sys; sys.argv = ['command', '--help']\n"
        f"from {module} import main\n"
        f"try:\n    main()\n"
        f"finally:\n    print('SLOW', *[name for name in {SLOW!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
    assert done.stdout.splitlines()[-1] == "SLOW", "--help must not import these"


@pytest.mark.parametrize("package", ["launch", "rpc", "chat"])
def test_nothing_is_imported_before_ctrl_c_is_safe(package: str) -> None:
    program = (
        f"import sys; import kog_dist.{package}.cli; print('typer' in sys.modules, 'kog_dist.{package}.flags' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("package", ["launch", "rpc", "chat"])
def test_ctrl_c_while_the_command_is_imported_is_silent(package: str) -> None:
    program = (
        "import signal, sys, types\n"
        f"from kog_dist.{package} import cli\n"
        f"flags = types.ModuleType('kog_dist.{package}.flags')\n"
        "flags.run = lambda arguments: signal.raise_signal(signal.SIGINT)\n"
        f"sys.modules['kog_dist.{package}.flags'] = flags\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("command", ["kog-launch", "kog-client", "kog-bench", "kog-doctor", "kog-gateway", "kog-chat"])
def test_every_command_says_its_version(command: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / command, "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"kog_dist {__version__}\n"


@pytest.mark.parametrize("command", ["kog-client", "kog-bench"])
def test_every_command_of_a_program_has_one_whole_line(command: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / command, "--help"], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    listed = done.stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) > 5
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []
