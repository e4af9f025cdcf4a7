"""`kog-launch --replicas`: any process of the engines behind one endpoint may be killed, and what is promised in seconds then."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import ErrorCode, FinishReason, Tokens
from kog_dist.rpc.transport import Access
from tests.e2e.conftest import NUM_ENDLESS, without_progress
from tests.patience import in_time, slowness

from .replica_clients import Crowd, Stream, replay
from .replica_engines import ENDED_S, READY_S, both_ready, launch

STALLED_S = 1.75  # of --stall-timeout=1
NUM_FURTHER = 50  # tokens of a stream that goes on
CLEAN_S = 3.0  # two seconds are promised; a loaded machine is slow


class WaitForProcessor:
    """How long processes have been ready to run without a processor, or this machine without its own, since this was made."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        waited = {f"/proc/{pid}/schedstat": 0.0 for pid in self._pids}
        for path in waited:
            with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
                waited[path] = int(Path(path).read_text().split()[1]) / 1e9
        stolen = Path("/proc/stat").read_text().splitlines()[0].split()[8]
        return {**waited, "stolen": int(stolen) / os.sysconf("SC_CLK_TCK")}

    def seconds(self) -> float:
        return sum(max(0.0, now - self._before[name]) for name, now in self._now().items())


def assert_clean(session: EngineSession) -> None:
    until(lambda: not session.leftovers(), CLEAN_S * slowness(), lambda: f"left behind: {session.leftovers()}")


@pytest.mark.alone
def test_any_process_may_be_killed(session: EngineSession, tiny_model: Path) -> None:
    access = launch(session, tiny_model, "--replicas=2")
    for victim in ("rank 0", "coordinator", "launcher"):
        check_kill_in_a_replica(session, access, victim)
    check_killed_launcher(session, access)


@pytest.mark.alone
def test_any_process_may_be_stopped_or_told_to_end(session: EngineSession, tiny_model: Path) -> None:
    """By somebody else than its launcher, which acts as on a kill.

    A second without a sign of life is enough, which the error says. What the launcher is held up itself meanwhile is added.
    """
    access = launch(session, tiny_model, "--replicas=2", "--stall-timeout=1")
    for victim, how in (("coordinator", "gave no sign of life for 1."), ("launcher", "gave no sign of life for 1.")):
        check_kill_in_a_replica(session, access, victim, signal.SIGSTOP, how, told_s=STALLED_S)
    check_kill_in_a_replica(session, access, "coordinator", signal.SIGTERM, "was killed by SIGTERM")
    for signum, how, told_s in (
        (signal.SIGKILL, "was killed by SIGKILL", 0.75),
        (signal.SIGTERM, "was killed by SIGTERM", 0.75),
        (signal.SIGSTOP, "gave no sign of life for 1.", STALLED_S),
    ):
        check_lost_router(session, access, signum, how, told_s)
    os.kill(session.processes()["launcher"], signal.SIGTERM)
    until(lambda: not session.leftovers(), ENDED_S, session.output)


def test_replicas_whose_folder_was_removed_end(session: EngineSession, tiny_model: Path) -> None:
    """That of the fleet: a launcher starts another generation of a replica whose own folder was removed."""
    launcher = session.launch(str(tiny_model), "--ranks=1", "--stall-timeout=10", "--replicas=1")
    until(lambda: "ready after" in session.output(stream="out"), READY_S, session.output)
    shutil.rmtree(session.instance_folder)
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    [sentence] = without_progress(session.output()).splitlines()
    assert sentence.startswith(f"kog-launch: the instance folder {session.instance_folder} was removed while the engine ran")


def check_kill_in_a_replica(
    session: EngineSession, access: Access, victim: str, signum: int = signal.SIGKILL, how: str = "was killed by SIGKILL",
    told_s: float = 1.0,
) -> None:  # fmt: skip
    """Its stream ends with one error, the replica comes back, and the other one's stream goes on all the while."""
    with Client(access) as client:
        both_ready(session, client)
        streams = [Stream((1, 2, 3), NUM_ENDLESS), Stream((4, 5, 6), NUM_ENDLESS)]
        crowd = Crowd(access, streams)
        for stream in streams:
            assert stream.has_begun.wait(ENDED_S)
        num_said = len(session.output())
        processes = session.processes()
        pid, watching = processes[f"{victim} of r0"], WaitForProcessor(processes["launcher"], processes["launcher of r0"])
        os.kill(pid, signum)
        killed_s = time.monotonic()
        until(lambda: any(stream.error for stream in streams), ENDED_S, session.output)
        took_s = time.monotonic() - killed_s - watching.seconds()
        (lost,) = [stream for stream in streams if stream.error is not None]
        (kept,) = [stream for stream in streams if stream.error is None]
        assert lost.error is not None
        assert in_time(took_s, told_s), f"the client was told of the {victim}'s end after {took_s:.2f} s: {lost.error}"
        assert lost.error.code in (ErrorCode.ENGINE_LOST, ErrorCode.RANK_FAILED)
        assert str(lost.error).startswith("replica r0 was lost in the middle of the answer (")
        both_ready(session, client)
        num_kept = len(kept.token_ids)
        until(lambda: len(kept.token_ids) >= num_kept + NUM_FURTHER, ENDED_S, lambda: f"{kept.error}, {kept.done}")
        client.cancel(kept.request_id)
        crowd.join(ENDED_S)
        assert kept.error is None
        assert kept.done is not None
        assert kept.done.finish_reason is FinishReason.CANCELLED
        assert lost.token_ids == replay(access, Stream(lost.prompt_ids, len(lost.token_ids)))
    who = {"rank 0": "rank 0", "coordinator": "coordinator", "launcher": "its launcher"}[victim]
    said = session.output()[num_said:]
    assert said.startswith(f"kog-launch: replica r0: {who} (pid {pid}) {how}"), said
    assert "; starting generation " in said
    assert said.count("\n") == 1


def check_lost_router(session: EngineSession, access: Access, signum: int, how: str, told_s: float) -> None:
    """Its clients have one error at once; another router serves the same replicas."""
    ranks = {role: pid for role, pid in session.processes().items() if role.startswith("rank")}
    with Client(access) as client:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_ENDLESS, ignore_eos=True)
        while not isinstance(next(events), Tokens):
            pass
        processes = session.processes()
        pid, watching = processes["router"], WaitForProcessor(processes["launcher"])
        os.kill(pid, signum)
        lost_s = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            list(events)
        took_s = time.monotonic() - lost_s - watching.seconds()
        assert in_time(took_s, told_s), f"the client was told of the router's end after {took_s:.2f} s: {caught.value}"
        assert caught.value.code == ErrorCode.ENGINE_LOST
    with Client(access, connect_timeout_s=READY_S, patient=True) as client:
        both_ready(session, client)
        assert Stream((1, 2), 5).answered(access)
    said = next(line for line in session.output().splitlines() if f"the router (pid {pid}) {how}" in line)
    assert said.endswith("; its clients have lost their requests, and it is started again")
    assert {role: pid for role, pid in session.processes().items() if role.startswith("rank")} == ranks


def check_killed_launcher(session: EngineSession, access: Access) -> None:
    """Nothing outlives it, and its clients know."""
    stream = Stream((1, 2, 3), NUM_ENDLESS)
    crowd = Crowd(access, [stream])
    assert stream.has_begun.wait(ENDED_S)
    os.kill(session.processes()["launcher"], signal.SIGKILL)
    crowd.join(1.0)
    assert stream.error is not None
    assert stream.error.code == ErrorCode.ENGINE_LOST
    assert_clean(session)


def test_second_signal_does_not_wait(session: EngineSession, tiny_model: Path) -> None:
    access = launch(session, tiny_model, "--replicas=2", "--shutdown-timeout=60")
    stream = Stream((1, 2, 3), NUM_ENDLESS)
    crowd = Crowd(access, [stream])
    assert stream.has_begun.wait(ENDED_S)
    pid = session.processes()["launcher"]
    os.kill(pid, signal.SIGINT)
    until(lambda: "draining" in session.output(stream="out"), ENDED_S, session.output)
    os.kill(pid, signal.SIGINT)
    crowd.join(ENDED_S)
    assert stream.error is not None
    assert stream.error.code == ErrorCode.SHUTDOWN
    assert_clean(session)
