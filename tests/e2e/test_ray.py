"""`kog-launch --launcher ray`: the tokens of a plain engine, jobs, and a new generation after every loss.

The cluster is a head without resources and nodes that join it, so the engine is never on the launcher's own node and clients
reach it over TCP; the private cluster of the last test is the opposite.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.bench.engine.session import EngineSession, engine_session, until
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client, StreamEvent
from kog_dist.rpc.messages import Done, ErrorCode, FinishReason, Tokens
from kog_dist.rpc.transport import Access
from tests.e2e.children import is_hardened, plant
from tests.e2e.conftest import NUM_ENDLESS, PLAIN_PROMPT, tokens_in
from tests.e2e.ray_daemons import BIN, RayDaemons, ray_daemons
from tests.patience import slowness

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[default]'"
)
RANKS = 2
NUM_CPUS = 4  # of each node
CLEAN_S = 2.0  # the promise: two seconds after the kill nothing is left
REFUSED_S = 15.0
LOADED_S = 150.0  # for what has no promise of its own: a worker of Ray starts in seconds, and in a minute on a loaded machine


@pytest.fixture(scope="module")
def daemons() -> Iterator[RayDaemons]:
    with engine_session() as session, ray_daemons(session) as cluster:
        cluster.add_node(NUM_CPUS)
        yield cluster


@pytest.fixture(scope="module")
def job_daemons() -> Iterator[RayDaemons]:
    """A cluster that takes jobs: they go through a dashboard, which takes its time to start."""
    with engine_session() as session, ray_daemons(session, dashboard=True) as cluster:
        cluster.add_node(NUM_CPUS)
        yield cluster


def ray_job(daemons: RayDaemons, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, environ = [str(BIN / "ray"), "job", *arguments], daemons.session.environment()
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)


def engines_are_gone(daemons: RayDaemons, timeout_s: float) -> None:
    until(lambda: not daemons.engine_processes(), timeout_s, lambda: f"left behind: {daemons.engine_processes()}")
    root = daemons.session.folder / "kog"
    until(lambda: not list(root.iterdir()), timeout_s, lambda: f"left behind: {list(root.rglob('*'))}")


def has_ended(daemons: RayDaemons, generation: dict[str, int]) -> None:
    until(
        lambda: not set(generation.values()) & set(daemons.engine_processes().values()), (CLEAN_S + 1.0) * slowness(),
        lambda: f"of {generation} are left {daemons.engine_processes()}",
    )  # fmt: skip


def raylet_of(engine: dict[str, int]) -> int:
    """Pid of the raylet of the node that an engine runs on."""
    return int(psutil.Process(engine["ray::RankActor.run"]).ppid())


def banners(session: EngineSession, name: str) -> list[str]:
    return [line for line in session.output(name, "out").splitlines() if "ready after" in line]


def connect(session: EngineSession, name: str, generation: int) -> Client:
    """A client of a generation, by the key file that the launcher has announced."""
    until(lambda: len(banners(session, name)) == generation, LOADED_S, lambda: session.output(name))
    found = re.search(r"tcp://\S+, --key-file (\S+),", banners(session, name)[0])
    assert found is not None, banners(session, name)
    return Client(Access.from_file(Path(found[1])))


def stream(client: Client) -> Iterator[StreamEvent]:
    return client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_ENDLESS, ignore_eos=True)


@pytest.mark.timeout(500)
def test_tokens_from_actors_that_import_nothing_from_the_working_directory(
    daemons: RayDaemons, plain_tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons.session, "cwd", tmp_path)
    marker = plant(tmp_path)
    done = daemons.session.run("kog_dist.launch.cli", [f"--ranks={RANKS}", "--launcher=auto", *PLAIN_PROMPT], timeout_s=LOADED_S)
    assert done.returncode == 0, done.stderr
    assert tokens_in(done.stdout) == plain_tokens
    assert not marker.exists()
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_tokens_from_a_job(job_daemons: RayDaemons, plain_tokens: list[int]) -> None:
    submitted = ray_job(job_daemons, "submit", "--", "kog-launch", "--launcher", "ray", "--ranks", str(RANKS), *PLAIN_PROMPT)
    assert submitted.returncode == 0, submitted.stdout
    assert tokens_in(submitted.stdout) == plain_tokens
    engines_are_gone(job_daemons, (CLEAN_S + 1.0) * slowness())


def ask(session: EngineSession, *arguments: str) -> subprocess.CompletedProcess[str]:
    return session.run("kog_dist.rpc.cli", arguments, timeout_s=LOADED_S)


@pytest.mark.timeout(500)
def test_logs_and_stop_of_an_engine_on_another_node(daemons: RayDaemons, tiny_model: Path, tmp_path: Path) -> None:
    """By its name where its launcher is, and by the cluster's address wherever that is: here for somebody without its folder."""
    session, elsewhere = daemons.session, tmp_path / "run"
    elsewhere.mkdir(mode=0o700)
    flags = [str(tiny_model), f"--ranks={RANKS}", f"--log-dir={tmp_path / 'logs'}", "--instance=far"]
    launcher = session.start("kog_dist.launch.cli", flags, "far")
    with connect(session, "far", 1):
        pass
    shown = ask(session, "logs", "--instance=far")
    assert "ready after" in shown.stdout, shown.stderr
    ray = ("--ray", daemons.address)
    unknown = ask(session, "logs", "--instance=near", *ray)
    assert (unknown.returncode, unknown.stderr) == (3, "kog-client: no engine 'near' is on this Ray cluster; there is far\n")
    variables = dict(session.variables)
    session.variables |= {"XDG_RUNTIME_DIR": str(elsewhere), "XDG_STATE_HOME": str(elsewhere)}
    try:
        assert ask(session, "stop", "--instance=far").returncode == 3, "its launcher cannot be found here without the cluster"
        assert ask(session, "logs", "--instance=far", *ray).stdout == shown.stdout
        rank = ask(session, "logs", "rank-1", "--instance=far", "--lines=500", *ray)
        assert rank.stdout == (tmp_path / "logs" / "rank-1.log").read_text(encoding="utf-8"), rank.stderr
        wrong = ask(session, "logs", "rank-7", "--instance=far", *ray)
        assert wrong.returncode == 2
        assert "there is no log of 'rank-7'; there are coordinator, " in wrong.stderr
        stopped = ask(session, "stop", "--instance=far", *ray)
    finally:
        session.variables.clear()
        session.variables |= variables
    assert stopped.stdout.startswith("engine far has stopped after "), stopped.stderr
    assert launcher.wait(LOADED_S) == 0
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


@pytest.mark.timeout(500)
def test_followed_logs_end_with_the_launcher_that_is_stopped_by_its_engines_name(daemons: RayDaemons, tiny_model: Path) -> None:
    session = daemons.session
    launcher = session.start("kog_dist.launch.cli", [str(tiny_model), f"--ranks={RANKS}", "--instance=here"], "here")
    with connect(session, "here", 1):
        pass
    follow = ["logs", "--follow", "--instance=here", "--ray", daemons.address]
    following = session.start("kog_dist.rpc.cli", follow, "following")
    until(lambda: "ready after" in session.output("following", "out"), LOADED_S, lambda: session.output("following"))
    stopped = ask(session, "stop", "--instance=here")
    assert stopped.stdout.startswith("engine here has stopped after "), stopped.stderr
    assert launcher.wait(LOADED_S) == 0
    assert following.wait(LOADED_S) == 0
    assert "SIGTERM: draining" in session.output("following", "out")
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


def test_too_few_resources_are_named(daemons: RayDaemons) -> None:
    done = daemons.session.run("kog_dist.launch.cli", ["--ranks=8", "--startup-timeout=1.5", *PLAIN_PROMPT])
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"kog-launch: no place for the engine after 1\.5 s: needs 8 CPUs on one node, best node has 4 free \([\d.]+\)", last
    ), done.stderr
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


@pytest.mark.parametrize(
    ("token", "why"), [("b" * 64, "it refuses this token"), ("", "it wants a token, and there is none here")]
)
def test_a_wrong_token_is_said_at_once(daemons: RayDaemons, monkeypatch: pytest.MonkeyPatch, token: str, why: str) -> None:
    monkeypatch.setitem(daemons.session.variables, "RAY_AUTH_TOKEN", token)
    begin_s = time.monotonic()
    done = daemons.session.run("kog_dist.launch.cli", ["--ranks=2", *PLAIN_PROMPT])
    assert done.returncode == 3
    assert f"kog-launch: cannot join the Ray cluster at {daemons.address}: {why}; set RAY_AUTH_TOKEN or" in done.stderr
    assert time.monotonic() - begin_s < REFUSED_S, "Ray itself tries for 20 s"


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_a_cancelled_job_finishes_the_running_request(job_daemons: RayDaemons) -> None:
    daemons = job_daemons
    submitted = ray_job(
        daemons, "submit", "--no-wait", "--submission-id=serving", "--", "kog-launch", "--launcher", "ray", "--ranks", str(RANKS)
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout
    folder = daemons.session.folder / "kog" / "default"
    until((folder / "rpc.sock").exists, LOADED_S, lambda: ray_job(daemons, "logs", "serving").stdout)
    with Client(Access.from_folder(folder), patient=True, connect_timeout_s=LOADED_S) as client:
        client.wait_ready(LOADED_S)
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=200, ignore_eos=True)
        next(events)
        with subprocess.Popen([BIN / "ray", "job", "stop", "serving"], env=daemons.session.environment()) as stopping:
            *_, last = events
            stopping.wait(LOADED_S)
    assert isinstance(last, Done)
    assert last.finish_reason is FinishReason.LENGTH
    assert "kog-launch: SIGTERM: draining, at most 10 s" in ray_job(daemons, "logs", "serving").stdout
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


def test_killed_launcher_leaves_nothing(daemons: RayDaemons, tiny_model: Path) -> None:
    launcher = daemons.session.launch(str(tiny_model), f"--ranks={RANKS}", name="killed")
    with connect(daemons.session, "killed", 1) as client:
        events = stream(client)
        next(events)
        ours = {role: pid for role, pid in daemons.engine_processes().items() if not role.startswith("ray::")}
        assert [role for role, pid in ours.items() if not is_hardened(pid)] == []
        os.kill(launcher.pid, signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            list(events)
    assert caught.value.code in (ErrorCode.ENGINE_LOST, ErrorCode.RANK_FAILED)  # Ray ends the actors in any order
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_every_loss_leads_to_a_new_generation(daemons: RayDaemons, tiny_model: Path) -> None:
    """Three times in ten minutes; the last of them is the loss of the node, and the engine goes to another one."""
    session = daemons.session
    second_node = daemons.begin_node(NUM_CPUS)
    launcher = session.launch(str(tiny_model), f"--ranks={RANKS}", name="generations")
    whole: list[int] = []
    for generation, victim in enumerate(("rank 1", "ray::RankActor.run", "node", "engine host"), start=1):
        with connect(session, "generations", generation) as client:
            if not whole:
                answer = client.generate(prompt_ids=[1, 2, 3], max_tokens=40, ignore_eos=True)
                whole = [token for event in answer if isinstance(event, Tokens) for token in event.token_ids]
            before = daemons.engine_processes()
            if victim == "node":
                second_node()
            events, received = stream(client), list[int]()
            while len(received) < 5:
                event = next(events)
                received += event.token_ids if isinstance(event, Tokens) else ()
            # A SIGTERM that the driver has not asked for is a loss as a kill is.
            signum = signal.SIGTERM if victim == "engine host" else signal.SIGKILL
            os.kill(raylet_of(before) if victim == "node" else before[victim], signum)
            with pytest.raises(RequestFailed) as caught:
                received += [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
        assert caught.value.code in (ErrorCode.RANK_FAILED, ErrorCode.ENGINE_LOST)
        assert received[:40] == whole[: len(received)], "what was acknowledged is a prefix of the right answer"
        has_ended(daemons, {role: pid for role, pid in before.items() if role not in ("launcher", "reaper")})
    assert launcher.wait(LOADED_S) == 4
    engines_are_gone(daemons, (CLEAN_S + 1.0) * slowness())
    said = [line for line in session.output("generations").splitlines() if "starting it again" in line or "not started" in line]
    assert [re.sub(r"\d+\)", "N)", line.removeprefix("kog-launch: ")) for line in (said[0], said[3])] == [
        "rank 1 (pid N) was killed by SIGKILL while serving; the engine was stopped; starting it again as generation 2",
        "the engine's host process (pid N) was killed by SIGTERM; it is not started again after 3 restarts in 10 min",
    ]
    assert "with its Ray actor (pid " in said[1]
    assert len(said) == 4
    assert session.output("generations", "out").count("tiny on 2 ranks (cpu; Ray ") == 1, "one banner"


@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_private_cluster(session: EngineSession, plain_tokens: list[int]) -> None:
    done = session.run("kog_dist.launch.cli", [f"--ranks={RANKS}", "--launcher=ray", *PLAIN_PROMPT], timeout_s=LOADED_S)
    assert done.returncode == 0, done.stderr
    assert tokens_in(done.stdout) == plain_tokens
    until(lambda: not session.leftovers(), (CLEAN_S + 1.0) * slowness(), lambda: f"left behind: {session.leftovers()}")
