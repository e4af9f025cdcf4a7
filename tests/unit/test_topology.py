"""Rank arguments, the local rendezvous, instance folders and leases."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.errors import ConfigError, LaunchError, RendezvousTimeout
from kog_dist.launch.local import popen
from kog_dist.runtime import instance as instance_module
from kog_dist.runtime.instance import LEASE_FILE, Instance, instances_root, process_start_time, read_holder, sweep_stale
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.runtime.wait import Deadline
from tests.unit.resource_limits import soft_limit

INFO = RankInfo(1, 4, 1, "demo", generation=3, control_fd=5, rendezvous_fd=6)


def never() -> bool:
    return False


def test_rank_info_travels_as_json() -> None:
    assert RankInfo.from_json(INFO.to_json()) == INFO
    assert "\n" not in INFO.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the rank's argument is not JSON"),
        ("[]", "must be an object, got list"),
        ("{}", "missing fields: rank, world_size, local_rank, instance"),
        ('{"rank": "1"}', "rank must be int, got '1'"),
        ('{"rank": true}', "rank must be int"),
        (INFO.to_json().replace("rank_", "x").replace("control_fd", "colour"), "colour"),
        (INFO.to_json().replace('"rank": 1', '"rank": 4'), "rank 4 is not one of 4 ranks"),
        (INFO.to_json().replace('"generation": 3', '"generation": 0'), "generation 0"),
    ],
)
def test_bad_rank_arguments_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RankInfo.from_json(text)


def test_a_rank_outside_the_world_is_refused() -> None:
    for rank in (-1, 4):
        with pytest.raises(ConfigError, match=f"rank {rank} is not one of 4"):
            replace(INFO, rank=rank)


# --- local rendezvous; what every rendezvous must do is in tests/multi/test_rendezvous.py ------------------------------------


@pytest.fixture
def meeting() -> Iterator[Segment]:
    segment = LocalRendezvous.create(3, max_payload_bytes=64)
    yield segment
    segment.close()


def join(meeting: Segment, rank: int, aborted: Callable[[], bool] = never) -> LocalRendezvous:
    return LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=aborted)


def test_a_half_written_payload_is_not_accepted(meeting: Segment) -> None:
    first, second, third = (join(meeting, rank) for rank in range(3))
    for rendezvous in (second, third):
        with pytest.raises(RendezvousTimeout):
            rendezvous.all_gather_bytes(b"payload", Deadline(0.0))
    place = meeting.buffer.find(b"payload")
    meeting.buffer[place] ^= 1
    with pytest.raises(RendezvousTimeout, match="rank 1 did not come"):
        first.all_gather_bytes(b"payload", Deadline.after(0.01))
    for rendezvous in (first, second, third):
        rendezvous.close()


def test_misuse_of_a_rendezvous_is_refused(meeting: Segment) -> None:
    with pytest.raises(ConfigError, match="rank 3 cannot join a rendezvous of 3"):
        join(meeting, 3)
    rendezvous = join(meeting, 0)
    with pytest.raises(ValueError, match="at most 64 bytes per rank, got 65"):
        rendezvous.all_gather_bytes(bytes(65), Deadline.after(1))
    rendezvous.close()
    other = Segment.create("other", 4096)
    with pytest.raises(LaunchError, match="not a rendezvous"):
        LocalRendezvous(other, 0, aborted=never)
    other.close()


# --- instances -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def test_an_instance_has_a_private_folder_and_leaves_nothing(root: Path) -> None:
    instance = Instance.acquire("demo", root)
    assert instance.folder == root / "demo"
    assert instance.folder.stat().st_mode & 0o777 == 0o700
    holder = read_holder(instance.folder)
    assert holder is not None
    assert holder.pid == os.getpid()
    assert holder.alive()
    instance.socket_path("rpc.sock").write_text("")
    instance.remove()
    instance.remove()
    assert list(root.iterdir()) == []


def test_a_folder_on_a_full_disk_is_named(root: Path) -> None:
    text = f"{root / 'demo'} cannot be written: File too large; .+ set XDG_RUNTIME_DIR"
    with soft_limit(resource.RLIMIT_FSIZE, 0), pytest.raises(LaunchError, match=text):
        Instance.acquire("demo", root)
    assert list(root.iterdir()) == []


def test_too_few_files_name_their_limit(root: Path) -> None:
    with soft_limit(resource.RLIMIT_NOFILE, 3):
        with pytest.raises(LaunchError, match=r"Too many open files; raise the limit of open files \(ulimit -n\)"):
            Instance.acquire("demo", root)
        with pytest.raises(LaunchError, match=r"cannot start rank 0: .+; raise the limit of open files \(ulimit -n\)"):
            popen("rank 0", "no_such_module", [], {}, (), None)
    assert list(root.iterdir()) == []


def test_the_loser_hears_who_has_the_name(root: Path) -> None:
    instance = Instance.acquire("demo", root)
    with pytest.raises(LaunchError, match=f"'demo' is taken by process {os.getpid()} \\(.+\\)"):
        Instance.acquire("demo", root)
    other = Instance.acquire("other", root)
    other.remove()
    instance.remove()
    Instance.acquire("demo", root).remove()


def test_of_many_starts_at_once_exactly_one_wins(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "_HANDOVER_S", 0.2)

    def start(_: int) -> Instance | None:
        sweep_stale(root)
        try:
            return Instance.acquire("demo", root)
        except LaunchError:
            return None

    for _ in range(10):
        with ThreadPoolExecutor(8) as pool:
            winners = [found for found in pool.map(start, range(8)) if found is not None]
        assert len(winners) == 1
        winners[0].remove()
    assert list(root.iterdir()) == []


def run_holder(root: Path, *, inherit: bool) -> tuple[subprocess.Popen[str], int]:
    """A process that holds 'demo'; with `inherit`, a child of it that holds the lease too and whose pid is returned."""
    program = """
import os, signal, subprocess, sys
from pathlib import Path
from kog_dist.runtime.instance import Instance
instance = Instance.acquire("demo", Path(sys.argv[1]))
(instance.folder / "rpc.sock").write_text("")
child = subprocess.Popen(["sleep", "60"], pass_fds=(instance.lease_fd,)) if sys.argv[2] == "True" else None
print(child.pid if child else 0, flush=True)
signal.pause()
"""
    command = [sys.executable, "-c", program, str(root), str(inherit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=30)
    assert process.stdout is not None
    process.stdout.close()


def test_what_a_killed_engine_left_is_swept(root: Path) -> None:
    process, _ = run_holder(root, inherit=False)
    try:
        assert sweep_stale(root) == [], "a live engine is not swept"
        with pytest.raises(LaunchError, match=f"process {process.pid}"):
            Instance.acquire("demo", root)
    finally:
        kill(process)
    (root / "empty").mkdir()
    (root / "a file").write_text("not ours")
    assert sweep_stale(root) == ["demo"]
    assert [path.name for path in root.iterdir()] == ["a file"]


def test_a_new_start_clears_the_old_folder(root: Path) -> None:
    kill(run_holder(root, inherit=False)[0])
    assert (root / "demo" / "rpc.sock").exists()
    instance = Instance.acquire("demo", root)
    assert [path.name for path in instance.folder.iterdir()] == [LEASE_FILE]
    instance.remove()


def test_the_lease_lives_as_long_as_the_coordinator(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "_HANDOVER_S", 0.05)
    process, child = run_holder(root, inherit=True)
    descriptor = os.pidfd_open(child)
    try:
        kill(process)
        assert sweep_stale(root) == []
        with pytest.raises(LaunchError, match="taken by process"):
            Instance.acquire("demo", root)
    finally:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
    monkeypatch.setattr(instance_module, "_HANDOVER_S", 30.0)
    Instance.acquire("demo", root).remove()  # waits until the child is really gone


def test_the_one_that_lives_longer_removes_the_folder(root: Path) -> None:
    parent = Instance.acquire("demo", root)
    child = Instance.inherit(parent.folder, os.dup(parent.lease_fd))
    parent.close()
    (child.folder / "sockets").mkdir()
    (child.folder / "sockets" / "rpc.sock").write_text("")
    child.remove()
    assert list(root.iterdir()) == []


def test_removing_late_does_not_touch_the_successor(root: Path) -> None:
    first = Instance.acquire("demo", root)
    twin = Instance.inherit(first.folder, os.dup(first.lease_fd))
    first.remove()
    successor = Instance.acquire("demo", root)
    twin.remove()
    assert read_holder(successor.folder) is not None
    successor.remove()


def test_a_removed_folder_or_lease_is_a_loss(root: Path) -> None:
    instance = Instance.acquire("demo", root)
    assert instance.loss() is None
    (instance.folder / "rpc.sock").touch()
    (instance.folder / LEASE_FILE).unlink()
    removed = f"the lease {instance.folder / LEASE_FILE} was removed while the engine ran"
    assert instance.loss() == f"{removed}, so another one could take its name"
    successor = Instance.acquire("demo", root)
    assert str(instance.loss()).startswith(f"{removed}, and process {os.getpid()} (")
    assert str(instance.loss()).endswith(") has taken its name")
    successor.remove()
    assert (
        instance.loss() == f"the instance folder {instance.folder} was removed while the engine ran, so no client could reach it"
    )
    instance.remove()
    assert list(root.iterdir()) == []


def test_whoever_lost_the_lease_removes_the_folder_unless_it_is_a_successors(root: Path) -> None:
    first = Instance.acquire("demo", root)
    (first.folder / "rpc.sock").touch()
    (first.folder / LEASE_FILE).unlink()
    first.remove()
    assert list(root.iterdir()) == []
    second = Instance.acquire("demo", root)
    (second.folder / LEASE_FILE).unlink()
    third = Instance.acquire("demo", root)
    (third.folder / "rpc.sock").touch()
    second.remove()
    assert third.loss() is None
    assert sorted(path.name for path in third.folder.iterdir()) == [LEASE_FILE, "rpc.sock"]
    third.remove()


def test_a_lock_on_a_deleted_lease_is_not_a_lease(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner removes the folder between this start's open and its flock."""
    flock, lease = fcntl.flock, root / "demo" / LEASE_FILE
    attempts: list[int] = []

    def flock_late(descriptor: int, operation: int) -> None:
        if not attempts:
            lease.unlink()
            lease.parent.rmdir()
        attempts.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    instance = Instance.acquire("demo", root)
    assert len(attempts) == 2
    assert lease.samefile(f"/proc/self/fd/{instance.lease_fd}")
    instance.remove()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "a" * 65, "é"])
def test_names_that_are_not_names_are_refused(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="instance name"):
        Instance.acquire(name, root)


def test_socket_paths_have_a_limit(root: Path) -> None:
    instance = Instance.acquire("demo", root)
    with pytest.raises(LaunchError, match="at most 107"):
        instance.socket_path("x" * 100)
    instance.remove()


def test_the_root_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert instances_root() == tmp_path / "kog"
    assert (tmp_path / "kog").stat().st_mode & 0o777 == 0o700
    (tmp_path / "kog").chmod(0o755)
    with pytest.raises(LaunchError, match="mode 0700"):
        instances_root()
    (tmp_path / "kog").rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kog").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="must be a directory"):
        instances_root()


def test_without_a_runtime_folder_the_temporary_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert instances_root() == tmp_path / f"kog-{os.getuid()}"


def test_no_folder_for_temporary_files_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in [...]")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", no_folder)
    with pytest.raises(LaunchError, match="set XDG_RUNTIME_DIR"):
        instances_root()


def test_a_folder_that_cannot_be_swept_does_not_stop_the_sweep(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / LEASE_FILE).symlink_to(root)
    (root / "b").mkdir()
    (root / "b" / LEASE_FILE).touch()
    assert sweep_stale(root) == ["b"]


def test_a_lease_knows_a_reused_pid(root: Path) -> None:
    instance = Instance.acquire("demo", root)
    holder = read_holder(instance.folder)
    assert holder is not None
    assert not replace(holder, start_time=holder.start_time - 1).alive()
    instance.remove()
    assert process_start_time(2**22 + 1) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "start_time": 1, "command": ""}'])
def test_a_damaged_lease_names_nobody(root: Path, text: Any) -> None:
    (root / LEASE_FILE).write_text(text)
    assert read_holder(root) is None
