"""What the settings of a fleet mean for each replica."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, LaunchError
from kog_dist.launch.replicas.launch import supervise, with_device
from kog_dist.launch.replicas.places import gpus_of_replica, replica_arguments
from kog_dist.launch.replicas.remote_replica import READ_AGAIN_S, RemoteReplicas
from kog_dist.router.orders import FleetReport, ReplicaReport
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.rpc.transport import Access

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize(
    ("gpus", "replicas", "shares"),
    [
        (None, 2, [None, None]),
        ("1", 2, ["0,", "1,"]),
        ("2", 2, ["0,1,", "2,3,"]),
        ("4,5,6,7", 2, ["4,5,", "6,7,"]),
        ("GPU-a,GPU-b", 2, ["GPU-a,", "GPU-b,"]),
    ],
)
def test_no_two_replicas_share_a_gpu(gpus: str | None, replicas: int, shares: list[str | None]) -> None:
    settings = LaunchConfig(gpus=gpus, replicas=replicas)
    assert [gpus_of_replica(settings, idx) for idx in range(replicas)] == shares


def test_replicas_take_gpus_only_when_asked() -> None:
    assert with_device(LaunchConfig(replicas=2)).device == "cpu", "left to itself, the first would take all"
    for settings in (LaunchConfig(replicas=2, gpus="1"), LaunchConfig(replicas=2, device="cuda")):
        assert with_device(settings) == settings


@pytest.mark.parametrize("gpus", ["0,1,2", "3,", "all"])
def test_gpus_that_do_not_divide_are_refused(gpus: str) -> None:
    with pytest.raises(ConfigError):
        gpus_of_replica(LaunchConfig(gpus=gpus, replicas=2), 0)


def test_a_replica_is_a_plain_engine_with_the_settings_of_the_run() -> None:
    settings = LaunchConfig(
        model="/m", ranks=2, replicas=3, min_replicas=1, max_replicas=3, instance="fleet", rpc_port=7000, verify=False,
        step_timeout=5.0, log_dir="/logs",
    )  # fmt: skip
    assert replica_arguments(settings, "fleet.r1", None) == [
        "/m", "--launcher=local", "--instance=fleet.r1", "--no-http", "--ranks=2", "--no-verify", "--step-timeout=5.0",
    ]  # fmt: skip


def test_settings_of_a_fleet_that_make_no_sense() -> None:
    request = cast(PromptRequest, object())
    with pytest.raises(ConfigError, match="--prompt goes with one engine"):
        supervise(LaunchConfig(replicas=2), request)
    with pytest.raises(ConfigError, match="at most 36 characters"):
        supervise(LaunchConfig(replicas=2, instance="x" * 37), None)
    for fields in ({"replicas": 0}, {"min_replicas": 2}, {"min_replicas": 3, "max_replicas": 2}, {"remote_replicas": " ,"}):
        with pytest.raises(ConfigError):
            LaunchConfig(**fields)


def write_access(path: Path, port: int) -> None:
    path.write_text(json.dumps(asdict(Access(f"tcp://10.0.0.1:{port}", KEY, KEY, KEY))))
    path.chmod(0o600)


def report(state: str, generation: int = 1) -> FleetReport:
    return FleetReport((ReplicaReport("x0", generation, state, "", 0, False),), 0, False, "")


def test_access_file_is_read_again_while_its_engine_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_access(path, 1)
    remotes = RemoteReplicas(f"{path},")
    assert [(order.name, order.generation, order.access.address) for order in remotes.orders()] == [("x0", 1, "tcp://10.0.0.1:1")]
    write_access(path, 2)
    remotes.look(report("ready"), 10.0)
    assert remotes.orders()[0].generation == 1, "it is there: nothing changes"
    remotes.look(report("lost"), 10.0 + READ_AGAIN_S)
    assert (remotes.orders()[0].generation, remotes.orders()[0].access.address) == (2, "tcp://10.0.0.1:2")
    path.write_text("half of a f")
    remotes.look(report("lost"), 20.0)
    assert remotes.orders()[0].generation == 2


def test_access_file_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        RemoteReplicas(str(tmp_path / "nowhere.json"))
