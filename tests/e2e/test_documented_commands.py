"""Every command that README and docs show is run, as written, in the order of its block.

A ```console block is a sequence of `$ command` lines, which a backslash continues; a line that ends in `&` starts an engine,
which must be ready before the next line is run and gone at the end of the block. A ```python block is run while an engine named
`readme` serves. README's ```bash blocks are pasted whole into a shell. Documents say port 8000, where something else may listen
on this machine: engines and commands get a free port.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kog_dist.errors import LaunchError
from kog_dist.rpc.client import Client, DeadlineExceeded

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TIMEOUT_S = 100.0
DEFAULT_PORT = "127.0.0.1:8000"


def blocks(language: str) -> list[tuple[str, str]]:
    """Those of all pages but of clients, which `make clients` installs and runs."""
    found = []
    for path in (page for page in DOCUMENTS if page.name != "clients.md"):
        for number, match in enumerate(re.finditer(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)):
            found.append((f"{path.relative_to(ROOT)}:{number}", match.group(1)))
    return found


@functools.cache
def free_port() -> int:
    """A port below those that the system chooses: no test beside this one is given it meanwhile."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def here(text: str) -> str:
    """The text with the port that engines have in these tests."""
    return text.replace(DEFAULT_PORT, f"127.0.0.1:{free_port()}")


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "KOG_PORT": str(free_port())}


@pytest.fixture(scope="module", autouse=True)
def _own_engines() -> Iterator[None]:
    """Names of engines are those of the documents, and other clones on this machine have the same."""
    with tempfile.TemporaryDirectory(prefix="kog-d-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def run(command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        here(command), shell=True, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"`{command}` ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


def is_ready(command: str, instance: str, said: str) -> bool:
    """Whether the engine that `command` started takes requests. One that greets may still refuse them."""
    if command.startswith("kog-launch"):
        return "ready after" in said
    try:
        Client.of_instance(instance).close()
    except (LaunchError, DeadlineExceeded):
        return False
    return True


@contextmanager
def engine(command: str) -> Iterator[None]:
    """Run `command` until the end of the block; ready on entry, gone on exit."""
    name = re.search(r"--instance (\S+)", command)
    assert name is not None, f"`{command} &` must name its --instance, so that the test can wait for it"
    deadline = time.monotonic() + TIMEOUT_S
    with (
        tempfile.NamedTemporaryFile() as out,
        subprocess.Popen(
            f"exec {command}", shell=True, cwd=ROOT, env=environment(), stdout=out, start_new_session=True
        ) as process,
    ):  # fmt: skip
        try:
            while not is_ready(command, name.group(1), Path(out.name).read_text(encoding="utf-8")):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pytest.fail(f"`{command}` ended with {process.wait(0.05)} before it was ready")
                assert time.monotonic() < deadline, f"`{command}` was not ready in {TIMEOUT_S:.0f} s"
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)


@pytest.mark.parametrize(("place", "text"), blocks("console"), ids=[place for place, _ in blocks("console")])
def test_console_block(place: str, text: str) -> None:
    commands = [line[2:] for line in text.replace("\\\n", "").splitlines() if line.startswith("$ ")]
    assert commands, f"{place}: a console block without a command"

    def run_from(index: int) -> None:
        for position in range(index, len(commands)):
            if commands[position].rstrip().endswith("&"):
                with engine(commands[position].rstrip().removesuffix("&")):
                    return run_from(position + 1)
            run(commands[position])
        return None

    run_from(0)


@pytest.mark.parametrize("text", [text for place, text in blocks("bash") if place.startswith("README")])
def test_readme_can_be_pasted_into_a_shell(text: str) -> None:
    """As people do it: the shell reads one line after the other from its standard input."""
    name = re.search(r"--instance (\S+)", text)
    assert name is not None, "an engine that a block leaves behind is found by its name"
    try:
        done = run(f"bash -e <<'EOF'\n{text}echo the last line was reached\nEOF\n")
        assert done.stdout.endswith("the last line was reached\n")
    finally:
        left = subprocess.run(
            ["kog-client", "stop", "--now", "--instance", name[1]], env=environment(), capture_output=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
    assert left.returncode == 3, "the block ends its engine itself"


@pytest.fixture(scope="module")
def readme_engine() -> Iterator[None]:
    with engine("kog-launch --ranks 2 --instance readme"):
        yield


@pytest.mark.usefixtures("readme_engine")
@pytest.mark.parametrize(("place", "text"), blocks("python"), ids=[place for place, _ in blocks("python")])
def test_python_block(place: str, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", here(text)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{place}: {done.stderr[-2000:]}"
    assert done.stdout.strip(), f"{place} printed nothing"


def test_makefile_has_the_two_commands() -> None:
    for target in ("demo", "test"):
        shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        assert "kog-launch" in shown.stdout or "pytest" in shown.stdout
