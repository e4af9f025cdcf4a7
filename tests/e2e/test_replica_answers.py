"""`kog-launch --replicas`: one endpoint, several engines, their restarts and their number. No seconds are promised here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.launch.replicas.places import replica_instance
from kog_dist.rpc.client import Client
from kog_dist.rpc.transport import Access

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


def test_turns_of_an_agent_stay_at_one_replica_and_unrelated_prompts_are_spread(session: EngineSession, tiny_model: Path) -> None:
    """One request at a time, so that both replicas are free whenever one comes."""
    access = launch(session, tiny_model, "--replicas=2")
    first = Stream(tuple(1 + i % 300 for i in range(640)), 32)
    (home,) = placed(session, access, first)
    held = (*first.prompt_ids, *first.token_ids)
    second = Stream((*held, *(1 + i * 7 % 300 for i in range(790))), 8)
    assert 0.45 < len(held) / len(second.prompt_ids) < 0.47
    assert placed(session, access, second) == [home], "though the other one has been idle longer"
    assert second.done is not None
    assert second.done.num_cached_tokens >= len(held) - 1, "the last token of an answer is not computed"
    unrelated = [Stream((*range(1, 257), *(1 + (i * 11 + number) % 300 for i in range(512))), 8) for number in range(4)]
    assert sorted(placed(session, access, *unrelated)) == ["r0", "r0", "r1", "r1"], "they share 256 tokens"


def placed(session: EngineSession, access: Access, *streams: Stream) -> list[str]:
    """Ask one after the other; which replica has answered each."""
    names = []
    for stream in streams:
        before = num_completed(session)
        assert stream.answered(access), stream.error
        after = num_completed(session)
        names += [name for name in before if after[name] > before[name]]
    assert len(names) == len(streams)
    return names


def num_completed(session: EngineSession) -> dict[str, int]:
    """Requests that each of two replicas has answered, as it says itself."""
    fleet, counts = session.instance_folder, {}
    for name in ("r0", "r1"):
        with Client(Access.from_folder(fleet.with_name(replica_instance(fleet.name, name)))) as client:
            counts[name] = client.status().num_completed
    return counts


def test_more_replicas_while_requests_wait_and_fewer_when_they_do_not(session: EngineSession, tiny_model: Path) -> None:
    access = launch(session, tiny_model, "--min-replicas=1", "--max-replicas=2", "--scale-down-after=1", "--parallel=1")
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
