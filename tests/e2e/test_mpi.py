"""`mpirun -n N kog-launch`: one banner, and an end of everything when anything dies, within the seconds that are promised."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.errors import RequestFailed
from kog_dist.rpc.messages import Done
from kog_dist.runtime.http_file import HTTP_FILE
from tests.e2e.conftest import NUM_ENDLESS, lines_of
from tests.multi.mpi_command import FLAVOURS, mpirun_or_skip
from tests.patience import slowness

pytestmark = pytest.mark.alone
RANKS = 2
CLEAN_S = 2.0  # the promise: two seconds after the kill nothing is left
ENDED_S = 3.0  # the promise: three seconds after the death of any rank mpirun has ended
LOADED_S = 40.0  # for what has no promise of its own; a loaded machine is slow
SCREEN_LINES = 24


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def under_mpirun(session: EngineSession, flavour: str, num_ranks: int) -> None:
    session.starter = tuple(mpirun_or_skip(flavour, num_ranks))


def assert_clean(session: EngineSession) -> None:
    until(lambda: not session.leftovers(), (CLEAN_S + 1.0) * slowness(), lambda: f"left behind: {session.leftovers()}")


def memory_of_mpich() -> set[Path]:
    return set(Path("/dev/shm").glob("mpich_shm_*"))


def our_lines(session: EngineSession) -> list[str]:
    """What kog-launch has said on stderr, less the progress of start-up."""
    return lines_of(session.output())


def test_serving_has_one_banner_and_logs_of_all_ranks(session: EngineSession, tiny_model: Path, flavour: str) -> None:
    under_mpirun(session, flavour, RANKS)
    logs = session.folder / "logs"
    launcher = session.launch(str(tiny_model), f"--log-dir={logs}", "--http", "--port=0")
    with session.connect() as client:
        assert len(list(client.generate(prompt_ids=[1, 2], max_tokens=4, ignore_eos=True))) > 1
        assert client.status().world_size == RANKS
        until(lambda: "ready after" in session.output(stream="out"), LOADED_S, session.output)
        url = json.loads((session.instance_folder / HTTP_FILE).read_text(encoding="utf-8"))["url"]
        assert httpx.get(f"{url}/readyz", timeout=LOADED_S, trust_env=False).status_code == 200
        assert set(session.processes()) >= {"launcher", "gateway", *(f"host {rank}" for rank in range(1, RANKS))}
        client.drain()
    assert launcher.wait(LOADED_S) == 0, session.output()
    assert_clean(session)
    banner, *others = [line for line in session.output(stream="out").splitlines() if line.startswith("kog-launch")]
    assert banner.startswith(f"kog-launch: tiny on {RANKS} ranks (cpu), started by {flavour} "), banner
    assert (others, our_lines(session)) == ([], [])
    names = {path.name for path in logs.iterdir()}
    logs_of_ranks = {f"rank-{rank}.log" for rank in range(RANKS)}
    assert names == {"launcher.log", "coordinator.log", "gateway.log", "exit.json"} | logs_of_ranks
    assert json.loads((logs / "exit.json").read_text(encoding="utf-8"))["reason"] == "drained"


@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "coordinator", "launcher", "host 1", "mpirun"])
def test_kill_during_a_stream(session: EngineSession, tiny_model: Path, flavour: str, victim: str) -> None:
    under_mpirun(session, flavour, RANKS)
    launcher = session.launch(str(tiny_model))
    with session.connect() as client:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_ENDLESS, ignore_eos=True)
        next(events)
        until(lambda: "ready after" in session.output(stream="out"), LOADED_S, session.output)
        pid = launcher.pid if victim == "mpirun" else session.processes()[victim]
        os.kill(pid, signal.SIGKILL)
        code = launcher.wait(ENDED_S * slowness())
        assert_clean(session)
        with pytest.raises(RequestFailed):
            list(events)
    assert code != 0
    assert len(session.output().splitlines()) <= SCREEN_LINES, session.output()
    assert "Traceback" not in session.output()
    if victim in ("rank 0", "rank 1", "coordinator"):
        said = f"kog-launch: {victim} (pid {pid}) was killed by SIGKILL while serving; the engine was stopped"
        assert our_lines(session) == [said]
        assert flavour != "MPICH" or code == 4, "mpirun passes the launcher's exit code on"


@pytest.mark.parametrize("victim", ["rank 1", "host 1"])
def test_kill_during_startup(session: EngineSession, tiny_model: Path, flavour: str, victim: str) -> None:
    under_mpirun(session, flavour, RANKS)
    launcher = session.launch(str(tiny_model))
    until(lambda: "rank 1" in session.processes(), LOADED_S, session.output)
    pid = session.processes()[victim]
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(ENDED_S * slowness()) != 0
    assert_clean(session)
    if victim == "rank 1":
        (said,) = our_lines(session)
        assert said.startswith(f"kog-launch: rank 1 (pid {pid}) was killed by SIGKILL during start-up")


def test_stopped_host_cannot_hold_up_the_end(session: EngineSession, tiny_model: Path, flavour: str) -> None:
    under_mpirun(session, flavour, RANKS)
    launcher = session.launch(str(tiny_model))
    session.connect().close()
    os.kill(session.processes()["host 1"], signal.SIGSTOP)
    pid = session.processes()["rank 1"]
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(ENDED_S * slowness()) != 0
    assert_clean(session)
    assert our_lines(session) == [f"kog-launch: rank 1 (pid {pid}) was killed by SIGKILL while serving; the engine was stopped"]


def test_sigterm_to_mpirun_ends_all_in_order(session: EngineSession, tiny_model: Path, flavour: str) -> None:
    """Open MPI kills a quarter of a second after it has passed the signal on: time to tell clients, and no more."""
    under_mpirun(session, flavour, RANKS)
    launcher = session.launch(str(tiny_model))
    with session.connect() as client:
        until(lambda: "ready after" in session.output(stream="out"), LOADED_S, session.output)
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=200 if flavour == "MPICH" else NUM_ENDLESS, ignore_eos=True)
        next(events)
        launcher.send_signal(signal.SIGTERM)
        if flavour == "MPICH":
            *_, last = events
            assert isinstance(last, Done)
        else:
            with pytest.raises(RequestFailed, match="the engine was stopped before the answer was complete"):
                list(events)
        code = launcher.wait(ENDED_S * slowness())
    assert_clean(session)
    assert our_lines(session) == []
    if flavour == "MPICH":
        assert "kog-launch: SIGTERM: draining" in session.output(stream="out")
        assert code == 0


@pytest.mark.parametrize("moment", ["_identity", "_host"])
def test_exception_on_one_rank_ends_all(session: EngineSession, tiny_model: Path, flavour: str, moment: str) -> None:
    """Before MPI_Finalize the abort hook ends the job, afterwards the launcher does, who hears from its host no more."""
    under_mpirun(session, flavour, RANKS)
    (session.folder / "sitecustomize.py").write_text(
        "from os import environ\n"
        "if '1' in (environ.get('PMI_RANK'), environ.get('OMPI_COMM_WORLD_RANK')):\n"
        "    import sys\n"
        "    from kog_dist.launch.mpi import launch as mpi\n"
        "    def broken(*arguments):\n"
        "        raise ArithmeticError('planted')\n"
        f"    if not any('worker' in word for word in sys.orig_argv):\n"
        f"        mpi.{moment} = broken\n",
        encoding="utf-8",
    )
    session.variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(session.folder), os.environ.get("PYTHONPATH"))))
    before = memory_of_mpich()
    launcher = session.launch(str(tiny_model))
    assert launcher.wait(LOADED_S) != 0
    assert_clean(session)
    assert memory_of_mpich() <= before
    said = session.output()
    assert said.count("ArithmeticError: planted") == 1, said


def test_process_that_never_calls_mpi_is_not_waited_for_for_ever(session: EngineSession, tiny_model: Path, flavour: str) -> None:
    under_mpirun(session, flavour, 1)
    before = memory_of_mpich()
    launcher = session.start(
        "kog_dist.launch.cli", [str(tiny_model), "--startup-timeout=0.5", ":", "-n", "1", "sleep", "60"], "launch"
    )
    assert launcher.wait(LOADED_S) != 0
    assert_clean(session)
    assert "kog-launch: the MPI processes did not meet in time" in session.output()
    assert memory_of_mpich() <= before
