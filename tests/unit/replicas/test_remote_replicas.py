"""Engines that somebody else runs: their access files are read, and read again while one is not there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.errors import LaunchError
from kog_dist.launch.replicas.remote_replica import READ_AGAIN_S, RemoteReplicas
from kog_dist.rpc.transport import Access


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        write(path, f"ipc://{path.stem}")
    return paths


def write(path: Path, address: str) -> None:
    path.write_text(json.dumps({"address": address}))
    path.chmod(0o600)


def states(*found: str) -> Any:
    replicas = [SimpleNamespace(name=f"x{idx}", state=state) for idx, state in enumerate(found)]
    return cast(Any, SimpleNamespace(replicas=replicas))


def test_files_are_listed_with_commas(files: list[Path]) -> None:
    remotes = RemoteReplicas(f" {files[0]} ,,{files[1]}, ")
    assert len(remotes) == 2
    found = [(order.name, order.generation, order.access) for order in remotes.orders()]
    assert found == [("x0", 1, Access("ipc://a")), ("x1", 1, Access("ipc://b"))]
    assert len(RemoteReplicas(None)) == len(RemoteReplicas("")) == 0
    assert RemoteReplicas(None).orders() == ()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"none.json cannot be read"):
        RemoteReplicas(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("state", "is_read"), [("lost", True), ("failed", True), ("ready", False), ("loading", False), ("draining", False)]
)
def test_the_file_of_one_that_is_not_there_is_read_again(files: list[Path], state: str, is_read: bool) -> None:
    remotes = RemoteReplicas(",".join(map(str, files)))
    write(files[0], "ipc://new")
    remotes.look(states(state, "ready"), 10.0)
    first, second = remotes.orders()
    assert (first.access.address, first.generation) == (("ipc://new", 2) if is_read else ("ipc://a", 1))
    assert (second.access.address, second.generation) == ("ipc://b", 1)


def test_it_is_looked_at_once_a_second_and_changes_count_once(files: list[Path]) -> None:
    remotes = RemoteReplicas(",".join(map(str, files)))
    remotes.look(None, 0.0)  # nobody has said anything
    remotes.look(states("lost", "lost"), 10.0)
    assert [order.generation for order in remotes.orders()] == [1, 1], "nothing has changed"
    write(files[1], "ipc://new")
    remotes.look(states("lost", "lost"), 10.0 + READ_AGAIN_S - 0.01)
    assert [order.generation for order in remotes.orders()] == [1, 1], "it is too early"
    remotes.look(states("lost", "lost"), 10.0 + READ_AGAIN_S)
    remotes.look(states("lost", "lost"), 10.0 + 2 * READ_AGAIN_S)
    assert [order.generation for order in remotes.orders()] == [1, 2]


def test_a_file_that_is_being_copied_is_left_alone(files: list[Path]) -> None:
    remotes = RemoteReplicas(str(files[0]))
    files[0].write_text("{")
    remotes.look(states("lost"), 1.0)
    assert remotes.orders()[0].access.address == "ipc://a"
    write(files[0], "ipc://new")
    remotes.look(states(), 3.0)
    assert remotes.orders()[0].generation == 2
