"""Any process may be killed or stopped at any moment: one clear error, the right exit code, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.errors import RequestFailed
from kog_dist.rpc.client import Client, StreamEvent
from kog_dist.rpc.messages import ErrorCode, Tokens
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.runtime.instance import LEASE_FILE
from tests.e2e.conftest import NUM_ENDLESS, without_progress
from tests.patience import in_time, slowness

RANKS = 4
TOLD_S = 1.25 + 0.5  # the promise for one that is stopped; a loaded machine is slow
NUM_BEHIND = 2000  # tokens; a socket holds a few hundred messages
ENDED_S = 30.0  # the promise, two seconds after the kill nothing is left, is that of tests/e2e/test_chaos.py


def assert_clean(session: EngineSession) -> None:
    until(lambda: not session.leftovers(), ENDED_S, lambda: f"left behind: {session.leftovers()}")


def kill_all_at_once(session: EngineSession, *roles: str) -> None:
    """Kill processes so that none can answer to the death of another."""
    pids = session.processes()
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for role in roles:
            os.kill(pids[role], signum)


def token_ids(events: Iterator[StreamEvent], at_least: int, received: list[int] | None = None) -> list[int]:
    """Tokens, which follow those `received`; this list has them even if an error comes."""
    ids: list[int] = [] if received is None else received
    for event in events:
        if isinstance(event, Tokens):
            ids += event.token_ids
            if len(ids) >= at_least:
                break
    return ids


def stream(client: Client, max_tokens: int) -> Iterator[StreamEvent]:
    return client.generate(prompt_ids=[1, 2, 3], max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("removed", ["folder", "lease", "socket"])
def test_an_engine_whose_files_were_removed_ends(session: EngineSession, tiny_model: Path, removed: str) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", f"--log-dir={session.folder / 'logs'}")
    with session.connect() as client:
        until(lambda: "ready after" in session.output(stream="out"), ENDED_S, session.output)
        events = stream(client, NUM_ENDLESS)
        assert token_ids(events, 5)
        folder = session.instance_folder
        if removed == "folder":
            shutil.rmtree(folder.parent)
        else:
            (folder / {"lease": LEASE_FILE, "socket": SOCKET_NAME}[removed]).unlink()
        begin_s = time.monotonic()
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS)
        took_s = time.monotonic() - begin_s
        assert caught.value.code is ErrorCode.ENGINE_LOST
        assert in_time(took_s, 3.0), f"the client was told after {took_s:.2f} s"
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    what = {"folder": f"instance folder {folder}", "lease": f"lease {folder}/lease", "socket": f"socket file {folder}/rpc.sock"}
    [sentence] = without_progress(session.output()).splitlines()
    assert sentence.startswith(f"kog-launch: the {what[removed]} was removed while the engine ran")
    last_words = json.loads((session.folder / "logs" / "exit.json").read_text(encoding="utf-8"))
    assert (last_words["exit_code"], last_words["reason"]) == (4, "instance_lost")


def test_an_engine_that_lost_its_name_leaves_the_successor_alone(session: EngineSession, tiny_model: Path) -> None:
    first = session.launch(str(tiny_model), "--ranks=2")
    session.connect().close()
    until(lambda: "ready after" in session.output(stream="out"), ENDED_S, session.output)
    first.send_signal(signal.SIGSTOP)  # so that the other one is there before this one notices
    (session.instance_folder / LEASE_FILE).unlink()
    second = session.launch(str(tiny_model), "--ranks=1", name="second")
    until(lambda: "ready after" in session.output("second", "out"), ENDED_S, lambda: session.output("second"))
    first.send_signal(signal.SIGCONT)
    assert first.wait(ENDED_S) == 4
    assert f"process {second.pid} (" in session.output()
    assert ") has taken its name; the engine was stopped (" in session.output()
    with session.connect() as client:
        assert client.status().world_size == 1
        assert len(token_ids(stream(client, 3), 3)) == 3
    second.send_signal(signal.SIGTERM)
    assert second.wait(ENDED_S) == 0
    assert_clean(session)


@pytest.mark.parametrize(
    ("victim", "codes", "exit_code", "sentence"),
    [
        ("rank 0", {ErrorCode.RANK_FAILED}, 4, "rank 0 (pid {pid}) was killed by SIGKILL while serving"),
        ("rank 3", {ErrorCode.RANK_FAILED}, 4, "rank 3 (pid {pid}) was killed by SIGKILL while serving"),
        ("coordinator", {ErrorCode.ENGINE_LOST}, 4, "coordinator (pid {pid}) was killed by SIGKILL while serving"),
        ("launcher", {ErrorCode.ENGINE_LOST}, -signal.SIGKILL, ""),
    ],
)
def test_kill_during_a_stream(
    session: EngineSession, tiny_model: Path, victim: str, codes: set[ErrorCode], exit_code: int, sentence: str
) -> None:
    launcher = session.launch(str(tiny_model), f"--ranks={RANKS}", f"--log-dir={session.folder / 'logs'}")
    with session.connect() as client:
        whole = token_ids(stream(client, 60), 60)
        events = stream(client, NUM_ENDLESS)
        received = token_ids(events, 5)
        pid = session.processes()[victim]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS, received)
        assert caught.value.code in codes
        assert len(str(caught.value).splitlines()) == 1
    assert launcher.wait(ENDED_S) == exit_code
    assert_clean(session)
    assert received[:60] == whole[: len(received)], "what was acknowledged is a prefix of the right answer"
    errors = without_progress(session.output()).splitlines()
    assert errors == [f"kog-launch: {sentence.format(pid=pid)}; the engine was stopped"] if sentence else errors == []
    if sentence:
        last_words = json.loads((session.folder / "logs" / "exit.json").read_text(encoding="utf-8"))
        assert (last_words["exit_code"], last_words["pid"], last_words["signal"]) == (4, pid, "SIGKILL")


def test_a_client_that_is_behind_learns_of_the_loss(session: EngineSession, tiny_model: Path) -> None:
    """More waits for it than its socket holds."""
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client, session.connect() as other:
        whole = token_ids(stream(client, 60), 60)
        before = other.status().num_tokens
        events = stream(client, NUM_ENDLESS)
        received = token_ids(events, 5)
        come_s = ENDED_S * slowness()
        until(lambda: other.status().num_tokens - before > NUM_BEHIND, come_s, lambda: f"{other.status().num_tokens} tokens")
        os.kill(session.processes()["rank 0"], signal.SIGKILL)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS, received)
        assert caught.value.code is ErrorCode.RANK_FAILED
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    assert len(received) >= NUM_BEHIND
    assert received[:60] == whole


@pytest.mark.parametrize("victim", ["rank 1", "coordinator", "client", "launcher"])
def test_kill_during_a_prompt(session: EngineSession, tiny_model: Path, victim: str) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--prompt-ids=1,2", f"--max-tokens={NUM_ENDLESS}", "--ignore-eos")
    until(lambda: len(session.output(stream="out").split()) > 3, ENDED_S, session.output)
    pid = session.processes()[victim]
    os.kill(pid, signal.SIGKILL)
    expected = {"rank 1": 4, "coordinator": 4, "client": 128 + signal.SIGKILL, "launcher": -signal.SIGKILL}
    assert launcher.wait(ENDED_S) == expected[victim]
    assert_clean(session)
    errors = without_progress(session.output())
    assert "Traceback" not in errors
    assert errors.count("kog-client: ") == (victim != "client"), errors
    assert errors.count("kog-launch: ") == (victim != "launcher"), errors
    if victim != "launcher":
        assert f"{victim} (pid {pid}) was killed by SIGKILL" in errors


def test_stopped_rank_counts_as_hung(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        pid = session.processes()["rank 1"]
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS)
        assert caught.value.code == ErrorCode.RANK_FAILED
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    assert f"rank 1 (pid {pid}) gave no sign of life for " in session.output()


@pytest.mark.parametrize("apart_s", [0.0, 0.005, 0.03, 0.1])
def test_two_ranks_killed_one_after_the_other(session: EngineSession, tiny_model: Path, apart_s: float) -> None:
    """The second one while the engine is stopped for the first: one loss is named, and all is gone in time."""
    launcher = session.launch(str(tiny_model), f"--ranks={RANKS}")
    with session.connect() as client:
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        pids = {rank: session.processes()[rank] for rank in ("rank 1", "rank 2")}
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):  # the launcher was faster
                os.kill(pid, signal.SIGKILL)
            time.sleep(apart_s)  # what is tested: the second fault falls into the first one's end
        with pytest.raises(RequestFailed):
            token_ids(events, NUM_ENDLESS)
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    said = without_progress(session.output())
    assert len(said.splitlines()) == 1
    assert any(f"{rank} (pid {pid}) was killed by SIGKILL" in said for rank, pid in pids.items())


def test_wait_that_runs_out_of_time_says_what_it_waited_for(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), f"--ranks={RANKS}", "--step-timeout=1", "--stall-timeout=60")
    with session.connect() as client:
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        os.kill(session.processes()["rank 2"], signal.SIGSTOP)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS)
        assert "of rank 2" in str(caught.value)
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    assert re.search(r"rank [013]: [\w ,]+ waited 1\.\d+ s for \d+ words? of rank 2 \(epoch \d+ wanted", session.output())


def test_stopped_idle_rank_counts_as_hung(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--stall-timeout=0.5")
    session.connect().close()
    os.kill(session.processes()["rank 1"], signal.SIGSTOP)
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)


@pytest.mark.alone
@pytest.mark.parametrize("victims", [("coordinator",), ("coordinator", "rank 1")], ids=" and ".join)
def test_clients_of_a_stopped_coordinator_are_told_in_time(session: EngineSession, tiny_model: Path, victims: list[str]) -> None:
    """Those that are stopped cannot say anything: they are killed, and the connection closes."""
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        until(lambda: "ready after" in session.output(stream="out"), ENDED_S, session.output)
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        pids = session.processes()
        begin_s = time.monotonic()
        for victim in victims:
            os.kill(pids[victim], signal.SIGSTOP)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS)
        took_s = time.monotonic() - begin_s
        assert caught.value.code == ErrorCode.ENGINE_LOST
        assert in_time(took_s, TOLD_S), f"the client was told after {took_s:.2f} s"
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    [sentence] = without_progress(session.output()).splitlines()
    named = [f"kog-launch: {victim} (pid {pids[victim]}) gave no sign of life for 1." for victim in victims]
    assert sentence.startswith(tuple(named)), sentence
    assert sentence.endswith("; the engine was stopped")


@pytest.mark.parametrize("victim", ["coordinator", "rank 1"])
def test_a_pause_below_the_limit_is_no_stall(session: EngineSession, tiny_model: Path, victim: str) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--stall-timeout=10")
    with session.connect() as client:
        whole = token_ids(stream(client, 60), 60)
        events = stream(client, 60)
        received = token_ids(events, 5)
        pid = session.processes()[victim]
        for signum in (signal.SIGSTOP, signal.SIGCONT) * 3:
            os.kill(pid, signum)
        assert received + token_ids(events, 60 - len(received)) == whole
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0
    assert without_progress(session.output()) == ""


@pytest.mark.parametrize(("victim", "code"), [("coordinator", ErrorCode.ENGINE_LOST), ("rank 1", ErrorCode.RANK_FAILED)])
def test_a_stray_sigterm_is_a_loss(session: EngineSession, tiny_model: Path, victim: str, code: ErrorCode) -> None:
    """Nobody has asked the launcher for an end: it says whose it was, and its exit code is not that of a success."""
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        until(lambda: "ready after" in session.output(stream="out"), ENDED_S, session.output)
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        pid = session.processes()[victim]
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(RequestFailed) as caught:
            token_ids(events, NUM_ENDLESS)
        assert caught.value.code == code
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    said = f"kog-launch: {victim} (pid {pid}) was killed by SIGTERM while serving; the engine was stopped\n"
    assert without_progress(session.output()) == said


@pytest.mark.parametrize("stopped", ["coordinator", "reaper"])
def test_who_is_stopped_cleans_up_after_a_killed_launcher(session: EngineSession, tiny_model: Path, stopped: str) -> None:
    """The reaper and the coordinator stand in for each other; the kernel continues either when the launcher dies."""
    launcher = session.launch(str(tiny_model), "--ranks=2")
    session.connect().close()
    pids = session.processes()
    os.kill(pids[stopped], signal.SIGSTOP)
    kill_all_at_once(session, *({"coordinator", "reaper"} - {stopped}), "launcher")
    launcher.wait(ENDED_S)
    assert_clean(session)


@pytest.mark.alone  # whoever is late stops a coordinator that has answered
def test_an_engine_is_ready_when_its_coordinator_answers(session: EngineSession, tiny_model: Path) -> None:
    """Not when there is a socket file: what happens until then belongs to the start."""
    launcher = session.launch(str(tiny_model), "--ranks=1", "--stall-timeout=60", "--startup-timeout=3")
    until((session.instance_folder / SOCKET_NAME).exists, ENDED_S, session.output)
    os.kill(session.processes()["coordinator"], signal.SIGSTOP)
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    assert session.output(stream="out") == ""
    assert "the engine was not ready after 3 s: " in session.output()


@pytest.mark.parametrize("victim", ["rank 1", "coordinator"])
def test_who_is_stopped_while_it_loads_is_named(session: EngineSession, tiny_model: Path, victim: str) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--stall-timeout=1")
    until(lambda: victim in session.processes(), ENDED_S, session.output)
    pid = session.processes()[victim]
    os.kill(pid, signal.SIGSTOP)
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    assert f"{victim} (pid {pid}) gave no sign of life for 1." in session.output()
    assert session.output().endswith(" during start-up; the engine was stopped\n")


@pytest.mark.parametrize("victim", ["rank 1", "coordinator", "launcher"])
def test_kill_during_startup(session: EngineSession, tiny_model: Path, victim: str) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    until(lambda: victim in session.processes(), ENDED_S, session.output)
    os.kill(session.processes()[victim], signal.SIGKILL)
    assert launcher.wait(ENDED_S) == (-signal.SIGKILL if victim == "launcher" else 3)
    assert_clean(session)
    if victim != "launcher":
        assert f"{victim} (pid " in session.output()
        assert "was killed by SIGKILL during start-up" in session.output()
        assert len(without_progress(session.output()).splitlines()) == 1


def test_rank_that_is_stuck_in_startup_is_named(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--startup-timeout=1.5", "--stall-timeout=60")
    until(lambda: "rank 1" in session.processes(), ENDED_S, session.output)
    os.kill(session.processes()["rank 1"], signal.SIGSTOP)
    assert launcher.wait(ENDED_S) == 5
    assert_clean(session)
    assert "the engine was not ready after 1.5 s: rank " in session.output()


def test_reaper_that_is_killed_is_started_again(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        gone = session.processes()["reaper"]
        os.kill(gone, signal.SIGKILL)
        assert len(token_ids(stream(client, 20), 20)) == 20
        until(lambda: session.processes().get("reaper", gone) != gone, ENDED_S, session.output)
    until(lambda: without_progress(session.output()), ENDED_S, session.output)
    said = f"kog-launch: the process that cleans up (pid {gone}) was killed and has been started again\n"
    assert without_progress(session.output()) == said
    kill_all_at_once(session, "coordinator", "launcher")
    launcher.wait(ENDED_S)
    assert_clean(session)


def test_next_start_sweeps_what_nobody_could_remove(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    session.connect().close()
    kill_all_at_once(session, "reaper", "coordinator", "launcher")
    launcher.wait(ENDED_S)
    until(lambda: not session.survivors(), ENDED_S, lambda: f"{session.survivors()}")
    assert session.instance_folder.exists(), "the test is about a folder that is left behind"
    done = session.run("kog_dist.launch.cli", [str(tiny_model), "--ranks=1", "--prompt-ids=1", "--max-tokens=1"])
    assert done.returncode == 0, done.stderr
    assert_clean(session)


def test_killed_rank_is_named_after_a_pause_of_the_launcher(session: EngineSession, tiny_model: Path) -> None:
    """Its peers ask for an abort while the launcher cannot see anything; what they say is the consequence."""
    launcher = session.launch(str(tiny_model), "--ranks=2", "--step-timeout=1")
    with session.connect() as client:
        events = stream(client, NUM_ENDLESS)
        token_ids(events, 5)
        until(lambda: "ready after" in session.output(stream="out"), ENDED_S, session.output)
        launcher.send_signal(signal.SIGSTOP)
        pid = session.processes()["rank 1"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: "rank 0" not in session.processes(), ENDED_S, lambda: f"{session.processes()}")
        launcher.send_signal(signal.SIGCONT)
        with pytest.raises(RequestFailed):
            token_ids(events, NUM_ENDLESS)
    assert launcher.wait(ENDED_S) == 4
    assert_clean(session)
    assert (
        without_progress(session.output())
        == f"kog-launch: rank 1 (pid {pid}) was killed by SIGKILL while serving; the engine was stopped\n"
    )
