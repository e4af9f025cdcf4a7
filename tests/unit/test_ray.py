"""What of the Ray launcher needs no Ray: addresses, resources, GPUs by UUID, restarts."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, LaunchError
from kog_dist.hardware.gpus import Gpu, Inventory
from kog_dist.launch.choice import choose_launcher
from kog_dist.launch.ray.cluster import NodeResources, shortfall
from kog_dist.launch.ray.devices import assigned_gpu
from kog_dist.launch.ray.gang import choose_ray_target
from kog_dist.launch.restarts import MAX_RESTARTS, WINDOW_S, RestartBudget
from kog_dist.runtime.ray_join import resolve_address
from kog_dist.runtime.ray_token import auth_environment

# ---- where the cluster is -----------------------------------------------------------------------------------------------------


@pytest.fixture
def living() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def resolve(given: str | None, **environ: str) -> tuple[str | None, list[str]]:
    said: list[str] = []
    return resolve_address(given, environ, said.append), said


def test_no_address_means_a_private_cluster() -> None:
    assert resolve(None) == (None, [])
    assert resolve(None, RAY_ADDRESS="") == (None, [])
    assert resolve("local", RAY_ADDRESS="10.0.0.7:6379") == (None, [])


def test_an_address_asks_for_ray() -> None:
    assert choose_launcher(LaunchConfig(ray_address="10.0.0.7:6379"), {}).launcher == "ray"
    assert choose_launcher(LaunchConfig(ray_address="10.0.0.7:6379", launcher="local"), {}).launcher == "local"


def test_an_address_that_answers_is_used(living: str, dead: str) -> None:
    assert resolve(living, RAY_ADDRESS=dead) == (living, [])
    assert resolve(None, RAY_ADDRESS=living) == (living, [])


def test_an_address_that_does_not_answer_is_an_error_at_once(dead: str) -> None:
    with pytest.raises(LaunchError, match=f"no Ray cluster answers at RAY_ADDRESS {dead}"):
        resolve(None, RAY_ADDRESS=dead)
    with pytest.raises(LaunchError, match=f"no Ray cluster answers at --ray-address {dead}"):
        resolve(dead)


def test_the_cluster_file_is_believed_only_if_its_cluster_answers(tmp_path: Path, living: str, dead: str) -> None:
    assert resolve("auto", RAY_TMPDIR=str(tmp_path)) == (None, [])
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(living)
    assert resolve("auto", RAY_TMPDIR=str(tmp_path)) == (living, [])
    file.write_text(dead)
    assert resolve("auto", RAY_TMPDIR=str(tmp_path)) == (
        None,
        [f"ignoring the dead Ray cluster {dead} that the cluster file names"],
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "is the port of Ray Client"),
        ("http://head:8265", "is a dashboard, which takes jobs: ray job submit --address http://head:8265 -- kog-launch"),
        ("head", "must be HOST:PORT of a Ray cluster, auto or local; got 'head'"),
        ("head:port", "must be HOST:PORT"),
        ("head:99999", "must be HOST:PORT"),
    ],
)
def test_what_is_no_address_is_explained(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(address)


def test_a_token_switches_authentication_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auth_environment({}) == {}
    assert auth_environment({"RAY_AUTH_TOKEN": "t"}) == {"RAY_AUTH_MODE": "token"}
    assert auth_environment({"RAY_AUTH_TOKEN_PATH": "/token"}) == {"RAY_AUTH_MODE": "token"}
    assert auth_environment({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}) == {}, "what the user says stands"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert auth_environment({}) == {"RAY_AUTH_MODE": "token"}


# ---- room for an engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        ([("10.0.0.6", 8, 8), ("10.0.0.7", 8, 2)], None),
        ([("10.0.0.6", 8, 2), ("10.0.0.7", 8, 6)], "needs 8 GPUs on one node, best node has 6 free (10.0.0.7, 8 in all)"),
        ([("10.0.0.7", 4, 4)], "needs 8 GPUs on one node, best node has 4 free (10.0.0.7)"),
        ([("10.0.0.7", 0, 0)], "needs 8 GPUs on one node, and no node has any"),
        ([], "needs 8 GPUs on one node, and no node has any"),
    ],
)
def test_missing_resources_are_named(nodes: list[tuple[str, float, float]], sentence: str | None) -> None:
    assert shortfall([NodeResources(*node) for node in nodes], "GPU", 8) == sentence


def test_gpus_are_given_by_number() -> None:
    for gpus in ("all", "0,2", "GPU-5f2a"):
        with pytest.raises(ConfigError, match="Ray chooses the GPUs, so give their number"):
            choose_ray_target(LaunchConfig(gpus=gpus))


# ---- the GPU of an actor ------------------------------------------------------------------------------------------------------


def gpu(index: int, **others: object) -> Gpu:
    return Gpu(index, f"GPU-{index:08x}-aaaa", "H200", f"0000:{index:02x}:00.0", **others)  # type: ignore[arg-type]


NODE = Inventory(tuple(gpu(index) for index in range(8)))


@pytest.mark.parametrize("ids", [["3"], ["GPU-00000003-aaaa"], ["GPU-00000003"]])
@pytest.mark.parametrize("mask", [None, "3", "0,1,2,3,4,5,6,7", ""])
def test_the_assigned_gpu_is_found_whatever_the_mask(ids: list[str], mask: str | None) -> None:
    """With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the mask is the node's, without it is the actor's."""
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert assigned_gpu(ids, environ, NODE) == "GPU-00000003-aaaa"


@pytest.mark.parametrize(
    ("ids", "inventory", "message"),
    [
        ([], NODE, "Ray assigned GPU none to this rank, expected one GPU of this node"),
        (["0", "1"], NODE, "Ray assigned GPU 0,1 to this rank, expected one"),
        (["8"], NODE, "Ray assigned GPU 8 to this rank, expected one GPU of this node: CUDA_VISIBLE_DEVICES=8 hides all 8"),
        (["0"], Inventory((), ("this machine has no NVIDIA driver",)), "this machine has no NVIDIA driver"),
        (["MIG-1"], NODE, "the kernel needs a whole one"),
        (["0"], Inventory((gpu(0, has_mig=True),)), "is split into MIG instances"),
    ],
)
def test_an_assignment_that_is_no_gpu_is_explained(ids: list[str], inventory: Inventory, message: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        assigned_gpu(ids, {}, inventory)


# ---- restarts -----------------------------------------------------------------------------------------------------------------


def test_restarts_are_bounded_in_a_window() -> None:
    now_s = 0.0
    budget = RestartBudget(lambda: now_s)
    assert [budget.take() for _ in range(MAX_RESTARTS + 1)] == [True] * MAX_RESTARTS + [False]
    now_s = WINDOW_S + 1
    assert budget.take()
    assert str(budget) == "3 restarts in 10 min"
