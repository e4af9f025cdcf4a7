"""`kog-launch --detach` and what is done with such an engine by its name: `kog-client logs` and `stop`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import INSTANCE, EngineSession, until
from kog_dist.rpc.messages import Tokens
from tests.e2e.conftest import NUM_ENDLESS, lines_of

LAUNCH, CLIENT = "kog_dist.launch.cli", "kog_dist.rpc.cli"
ENDED_S = 30.0  # no promise, only an end of waiting; a loaded machine is slow
CLEAN_S = 30.0  # tests/e2e/test_chaos.py measures the two seconds that are promised
FLEET = ("--replicas=1", "--max-replicas=1", "--min-replicas=1")


def assert_clean(session: EngineSession) -> None:
    until(lambda: not session.leftovers(), CLEAN_S, lambda: f"left behind: {session.leftovers()}")


def detached(session: EngineSession, *arguments: str) -> subprocess.CompletedProcess[str]:
    return session.run(LAUNCH, [*arguments, "--detach", f"--instance={INSTANCE}"])


def client(session: EngineSession, *words: str) -> subprocess.CompletedProcess[str]:
    return session.run(CLIENT, [*words, f"--instance={INSTANCE}"])


@pytest.mark.parametrize("extra", [(), FLEET], ids=["engine", "fleet"])
def test_it_returns_when_ready_and_the_engine_goes_on(session: EngineSession, tiny_model: Path, extra: tuple[str, ...]) -> None:
    done = detached(session, str(tiny_model), "--ranks=1", *extra)  # whose output ends, too: nobody holds it
    assert done.returncode == 0, done.stderr
    assert "ready after" in done.stdout
    launcher = session.processes()["launcher"]
    assert os.getsid(launcher) == launcher
    assert {os.readlink(f"/proc/{launcher}/fd/{fd}") for fd in range(3)} == {os.devnull}
    assert client(session, "generate", "--prompt-ids=1,2", "--max-tokens=3").returncode == 0
    shown = client(session, "logs", "--lines=1")
    assert (shown.returncode, shown.stdout.count("\n")) == (0, 1), shown.stderr
    assert "ready after" in shown.stdout
    refused = detached(session, str(tiny_model), "--ranks=1", *extra)
    assert refused.returncode == 3
    assert f"instance name '{INSTANCE}' is taken by process {launcher} " in refused.stderr
    stopped = client(session, "stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith(f"engine {INSTANCE} has stopped after ")
    assert_clean(session)
    assert "exit code 0: " in client(session, "logs", "--lines=1").stdout
    gone = client(session, "stop")
    assert (gone.returncode, gone.stderr) == (
        3, f"kog-client: no engine of the name '{INSTANCE}' runs here; kog-client list shows those that do, --ray ADDRESS "
        "looks on a Ray cluster\n"
    )  # fmt: skip


def test_stop_now_ends_a_request_and_followed_logs(session: EngineSession, tiny_model: Path) -> None:
    assert detached(session, str(tiny_model), "--ranks=1", "--shutdown-timeout=3000").returncode == 0
    follower = session.start(CLIENT, ["logs", "--follow", f"--instance={INSTANCE}"], "follower")
    with session.connect() as asking:
        stream = asking.generate(prompt_ids=(1, 2), max_tokens=NUM_ENDLESS, ignore_eos=True)
        assert any(isinstance(event, Tokens) for event in stream)
        assert client(session, "stop", "--now").returncode == 0
        stream.close()
    assert follower.wait(ENDED_S) == 0
    assert "exit code 1" in session.output("follower", "out").splitlines()[-1], "143 or 130: stopped by a signal"
    assert_clean(session)


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (("/no/such/model",), 3, "/no/such/model"),
        (("--startup-timeout=0.01",), 5, "the engine was not ready after 0.01 s: "),
        (("--prompt=x",), 2, "--detach goes with an engine that serves"),
        (("--dry-run",), 2, "--detach goes with an engine that serves"),
    ],
)
def test_a_start_that_fails_is_one_sentence_and_its_code(
    session: EngineSession, flags: tuple[str, ...], code: int, sentence: str
) -> None:
    done = detached(session, *flags)
    assert done.returncode == code, done.stderr
    assert [sentence in line for line in lines_of(done.stderr)] == [True], done.stderr
    assert_clean(session)


def test_without_logs_nobody_would_hear_it(session: EngineSession, tiny_model: Path) -> None:
    session.variables["XDG_STATE_HOME"] = os.devnull
    done = detached(session, str(tiny_model), "--ranks=1")
    assert done.returncode == 3
    assert "with --detach an engine is heard only in its logs, and they are none: " in done.stderr
    assert_clean(session)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_start_ends_the_engine(session: EngineSession, tiny_model: Path, signum: signal.Signals) -> None:
    caller = session.launch(str(tiny_model), "--ranks=2", "--detach")
    until(lambda: "coordinator" in session.processes(), ENDED_S, session.output)
    caller.send_signal(signum)
    code = caller.wait(ENDED_S)
    assert code == (-signum if signum is signal.SIGKILL else 128 + signum), session.output()
    assert_clean(session)
    assert "ready after" not in session.output(stream="out")


def test_a_launcher_that_is_killed_is_said_to_be(session: EngineSession) -> None:
    program = (
        "import os, signal, sys\n"
        "from kog_dist.launch import detach\n"
        "code = detach.begin(1.0)\n"
        "if code is None:\n"
        "    os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == 'kill' else signal.SIGSTOP)\n"
        "sys.exit(code)\n"
    )
    for how, code, words in (("kill", 137, "was killed by SIGKILL"), ("stop", 5, "has said nothing for 1 s and was killed")):
        shortened = program.replace("begin(1.0)", "begin(1.0 - detach.MARGIN_S)")
        done = subprocess.run(
            [sys.executable, "-c", shortened, how], capture_output=True, text=True, timeout=ENDED_S, env=session.environment(),
            check=False,
        )  # fmt: skip
        assert done.returncode == code
        assert words in done.stderr
