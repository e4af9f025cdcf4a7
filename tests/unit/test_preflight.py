"""`--check` refuses what a start refuses, in the same sentence: both call `preflight`, and it takes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.fakes.tiny_model import write_tiny_model
from kog_dist.config import LaunchConfig
from kog_dist.errors import KogError
from kog_dist.launch import inspection, supervisor
from kog_dist.launch.http import HttpGateway
from kog_dist.launch.preflight import preflight


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "kog").mkdir(mode=0o700)
    (tmp_path / "model").mkdir()
    write_tiny_model(tmp_path / "model")


def key_file(folder: Path, text: str = "abcdefgh\n", mode: int = 0o600) -> dict[str, Any]:
    (folder / "keys").write_text(text)
    (folder / "keys").chmod(mode)
    return {"api_key_file": str(folder / "keys")}


def fifo(folder: Path, name: str) -> str:
    os.mkfifo(folder / name, 0o600)
    return str(folder / name)


def plain_file(folder: Path, name: str) -> str:
    (folder / name).touch()
    return str(folder / name)


def open_folder(folder: Path) -> str:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o755)
    return str(folder / "open" / "http.sock")


def log_folder_with(folder: Path, make: Callable[[Path], object]) -> dict[str, Any]:
    (folder / "logs").mkdir()
    make(folder / "logs")
    return {"log_dir": str(folder / "logs")}


REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "a key file of others": (lambda folder: key_file(folder, mode=0o644), "other users may read it"),
    "a key file of the group": (lambda folder: key_file(folder, mode=0o640), "other users may read it"),
    "no key file": (lambda folder: {"api_key_file": str(folder / "none")}, "No such file"),
    "a key file that is a folder": (lambda folder: {"api_key_file": str(folder)}, "Is a directory"),
    "a key file that is a FIFO": (lambda folder: {"api_key_file": fifo(folder, "keys")}, "it is a FIFO"),
    "a key file without a key": (lambda folder: key_file(folder, "# none\n"), "has no key"),
    "a key that is none": (lambda folder: key_file(folder, "short\n"), "line 1 of the API key file"),
    "an open address without a key": (lambda folder: {"host": "0.0.0.0", "port": 0}, "there is no API key"),
    "an open address of IPv6": (lambda folder: {"host": "::", "port": 0}, "there is no API key"),
    "a name that is no address": (lambda folder: {"host": "no.such.host.invalid", "api_key": "abcdefgh"}, "no address"),
    "an address of another machine": (lambda folder: {"host": "192.0.2.1", "port": 0, "api_key": "abcdefgh"}, "a --host that"),
    "a log folder below a file": (lambda folder: {"log_dir": plain_file(folder, "file") + "/logs"}, "cannot be made or used"),
    "a log folder that is a file": (lambda folder: {"log_dir": plain_file(folder, "file")}, "cannot be made or used"),
    "a log folder in /proc": (lambda folder: {"log_dir": "/proc/kog/logs"}, "cannot be made or used"),
    "a log that is a FIFO": (
        lambda folder: log_folder_with(folder, lambda logs: fifo(logs, "launcher.log")), "it is a FIFO"
    ),
    "a log that is a folder": (
        lambda folder: log_folder_with(folder, lambda logs: (logs / "launcher.log").mkdir()), "cannot be opened"
    ),
    "an exit.json that is a folder": (
        lambda folder: log_folder_with(folder, lambda logs: (logs / "exit.json").mkdir()), "cannot be made or used"
    ),
    "a socket in an open folder": (lambda folder: {"http_socket": open_folder(folder)}, "with mode 0700"),
    "a socket that is a file": (lambda folder: {"http_socket": plain_file(folder / "kog", "s")}, "is no socket"),
    "a socket below a file": (lambda folder: {"http_socket": plain_file(folder, "file") + "/s"}, "file must be a directory"),
    "a socket in no folder": (lambda folder: {"http_socket": str(folder / "a" / "b" / "s")}, "cannot create"),
    "a long path of a socket": (lambda folder: {"http_socket": str(folder / ("x" * 120) / "s")}, "at most 107"),
    "no access file": (lambda folder: {"replicas": 0, "remote_replicas": str(folder / "a.json")}, "cannot be read"),
    "a long name of replicas": (lambda folder: {"replicas": 2, "instance": "x" * 40}, "at most 36 characters"),
    "an RPC address of another machine": (lambda folder: {"rpc_port": 0, "rpc_host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
}  # fmt: skip
OF_THE_COORDINATOR = {"an RPC address of another machine"}  # which says it itself


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except KogError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_a_check_refuses_what_a_start_refuses(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, why = REFUSED[name]
    settings = LaunchConfig(model=str(tmp_path / "model"), device="cpu", ranks=1, **make(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    checked = refusal(lambda: inspection.check(settings))
    assert why in checked
    assert sorted(tmp_path.rglob("*")) == before, "a check leaves nothing behind"
    if name in OF_THE_COORDINATOR or settings.has_router:
        return
    monkeypatch.setattr(supervisor, "preflight", lambda settings, *, serves: None)
    assert refusal(lambda: supervisor.supervise(settings, None)) == checked, "what a start takes refuses the same by itself"


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[LaunchConfig]:
    """Settings of which a running engine has the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield LaunchConfig(model=str(tmp_path / "model"), device="cpu", ranks=1, port=listener.getsockname()[1])


def test_a_port_that_is_taken_now_is_no_reason(taken: LaunchConfig) -> None:
    assert "parameters" in inspection.check(taken)
    with pytest.raises(KogError, match="Address already in use"):
        HttpGateway.open(taken)


def test_a_socket_that_is_taken_now_is_no_reason(tmp_path: Path) -> None:
    settings = LaunchConfig(http_socket=str(tmp_path / "run" / "s"))
    gateway = HttpGateway.open(settings)
    assert gateway is not None
    preflight(settings, serves=True)
    gateway.close()
    preflight(settings, serves=True)


def test_what_is_well_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for changes in (
        {"log_dir": str(tmp_path / "new" / "logs")}, {"log_dir": str(tmp_path / "logs")}, key_file(tmp_path),
        {"http_socket": str(tmp_path / "run" / "s")}, {"rpc_port": 0}, {"http": False, "host": "0.0.0.0"}, {"port": 0},
    ):  # fmt: skip
        preflight(LaunchConfig(**changes), serves=True)
    (tmp_path / "keys").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "logs" / "launcher.log").read_text() == "kept"


def test_one_prompt_needs_no_address() -> None:
    preflight(LaunchConfig(host="0.0.0.0"), serves=False)
