"""Two replicas on two nodes of a Ray cluster, 100 clients, and a node that dies in the middle."""

from __future__ import annotations

import importlib.util
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import ErrorCode
from kog_dist.rpc.transport import Access

from .conftest import NUM_ENDLESS
from .ray_daemons import RayDaemons, ray_daemons
from .replica_clients import Crowd, Stream, replay

READY_S = 90.0
ENDED_S = 60.0
NUM_STREAMS, NUM_TOKENS, NUM_PROMPTS = 100, 100, 10
ALONE = ("--parallel=1",)  # so that one stream alone is lost with a replica


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray (pip install 'ray[default]')")
def test_node_dies_under_a_hundred_streams(session: EngineSession, tiny_model: Path) -> None:
    with ray_daemons(session) as cluster:
        for _ in range(2):  # one after the other: each looks for free ports
            cluster.add_node(1)
        begin_s = time.monotonic()
        launcher = session.launch(str(tiny_model), "--launcher=ray", "--replicas=2", "--ranks=1", "--stall-timeout=10", *ALONE)
        until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
        print(f"\nready after {time.monotonic() - begin_s:.1f} s: {session.output(stream='out')}")
        access = Access.from_folder(session.instance_folder)
        check_node_death(session, access)
        check_replica_comes_back(session, cluster, access)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(ENDED_S) == 0, session.output()
        until(lambda: not cluster.engine_processes(), 3.0, lambda: f"{cluster.engine_processes()}")
    assert not (session.folder / "kog").exists() or not list((session.folder / "kog").rglob("rpc.sock"))


def check_node_death(session: EngineSession, access: Access) -> None:
    """The stream that was being decoded there has one clear error; all others are complete and right."""
    long = Stream((1, 2), NUM_ENDLESS)
    long_crowd = Crowd(access, [long])
    assert long.has_begun.wait(ENDED_S)
    streams = [Stream(tuple(range(3, 6 + i % NUM_PROMPTS)), NUM_TOKENS) for i in range(NUM_STREAMS - 1)]
    crowd = Crowd(access, streams)
    until(lambda: sum(stream.done is not None for stream in streams) >= NUM_STREAMS // 4, ENDED_S, session.output)
    with Client(access) as client:
        running = dict(zip(client.status().replica_names, client.status().replica_running, strict=True))
    assert long.done is None, "it is still being decoded"
    (name,) = [name for name, request_id in running.items() if request_id == long.request_id]
    kill_node_of(session.processes()[f"rank 0 of {name}"])
    killed_s = time.monotonic()
    long_crowd.join(ENDED_S)
    took_s = time.monotonic() - killed_s
    crowd.join(ENDED_S)
    assert [str(stream.error) for stream in streams if not stream.is_complete()] == []
    right = {stream.prompt_ids: replay(access, stream) for stream in streams[:NUM_PROMPTS]}
    assert all(stream.token_ids == right[stream.prompt_ids] for stream in streams)
    assert long.error is not None
    assert long.error.code == ErrorCode.ENGINE_LOST
    assert str(long.error).startswith(f"replica {name} was lost in the middle of the answer (")
    assert long.token_ids == replay(access, Stream(long.prompt_ids, len(long.token_ids)))
    assert took_s < 1.5
    print(f"{len(streams)} of {NUM_STREAMS} complete and right, one told after {took_s:.2f} s: {long.error}")


def kill_node_of(pid: int) -> None:
    """Kill the raylet above a process, and everything below it, as a power cut does."""
    raylet = next(process for process in psutil.Process(pid).parents() if process.name() == "raylet")
    for process in [raylet, *raylet.children(recursive=True)]:
        process.kill()


def check_replica_comes_back(session: EngineSession, cluster: RayDaemons, access: Access) -> None:
    """Ray has no room for it until there is a node again; meanwhile the other one serves."""
    with Client(access) as client:
        until(lambda: "ready" in client.status().replica_states, ENDED_S, lambda: f"{client.status().replica_states}")
        begin_s = time.monotonic()
        joined = cluster.begin_node(1)
        until(lambda: client.status().replica_states == ("ready", "ready"), READY_S, lambda: f"{client.status()}")
        joined()
        print(f"two replicas again {time.monotonic() - begin_s:.1f} s after a node was added: {session.output()}")
        assert Stream((1, 2, 3), 20).answered(access)
