"""What is said of the process that has a port."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.runtime.port_holder import holder_of_port

SERVER = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.chdir(tmp_path)
    Path("server.py").write_text(SERVER)
    command = ["python", "server.py", "--api-key", "secret", "--prompt", "two\nlines\x1b[31m"]
    with subprocess.Popen(
        command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_its_command_is_one_line_without_secrets(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    said = holder_of_port(int(server.stdout.readline()))
    assert said == f"process {server.pid} (python server.py ...)"
