"""`kog-launch --replicas`: one endpoint, several engines, their restarts and their number. No seconds are promised here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.rpc.client import Client

from .replica_clients import Crowd, Stream, replay
from .replica_engines import ENDED_S, READY_S, both_ready, launch, states


def stop(session: EngineSession) -> None:
    os.kill(session.processes()["launcher"], signal.SIGTERM)
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()} {session.output()}")


def test_answers_are_those_of_one_engine_and_restarts_refuse_nobody(session: EngineSession, tiny_model: Path) -> None:
    access = launch(session, tiny_model, "--replicas=2")
    with Client(access) as client:
        pids = {role: pid for role, pid in session.processes().items() if role.startswith("rank")}
        assert set(pids) == {"rank 0 of r0", "rank 0 of r1"}
        os.kill(session.processes()["launcher"], signal.SIGUSR1)
        crowd: list[Stream] = []
        begin_s = time.monotonic()
        while "r1 is ready, generation 2" not in session.output(stream="out"):
            assert time.monotonic() - begin_s < READY_S, session.output()
            part = [Stream((1, 2, 3 + i), 150) for i in range(3)]
            Crowd(access, part).join(ENDED_S)
            crowd += part
        assert [stream.error for stream in crowd if not stream.is_complete()] == []
        right = {stream.prompt_ids: replay(access, stream) for stream in crowd[:3]}
        assert all(stream.token_ids == right[stream.prompt_ids] for stream in crowd)
        new = {role: pid for role, pid in session.processes().items() if role.startswith("rank")}
        assert new.keys() == pids.keys()
        assert not set(new.values()) & set(pids.values())
        assert client.status().num_refused == client.status().num_failed == 0
    lines = session.output(stream="out").splitlines()
    assert [line.split(" after ")[0] for line in lines[1:]] == [
        "kog-launch: SIGUSR1: restarting the replicas one by one",
        "kog-launch: replica r0 is ready, generation 2,",
        "kog-launch: replica r1 is ready, generation 2,",
    ]
    stop(session)


def test_more_replicas_while_requests_wait_and_fewer_when_they_do_not(session: EngineSession, tiny_model: Path) -> None:
    access = launch(session, tiny_model, "--min-replicas=1", "--max-replicas=2", "--scale-down-after=1")
    with Client(access) as client:
        assert states(client) == {"r0": "ready"}
        streams = [Stream((1, 2, 3 + i), 3000) for i in range(3)]
        crowd = Crowd(access, streams)
        both_ready(session, client)
        crowd.join(60.0)
        assert all(stream.is_complete() for stream in streams)
        until(lambda: states(client) == {"r0": "ready"}, ENDED_S, lambda: f"{states(client)}")
    stop(session)


def test_replicas_that_cannot_start_end_the_run_with_the_cause(session: EngineSession, tmp_path: Path) -> None:
    done = session.run("kog_dist.launch.cli", [str(tmp_path / "nowhere"), "--replicas=2", "--instance=engine"])
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "nowhere does not exist" in done.stderr
    assert session.leftovers() == []
