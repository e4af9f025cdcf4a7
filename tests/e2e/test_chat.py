"""`kog-chat` as a user has it: on a terminal, and in a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.openai_stub import OpenAiStub, Scripted, chat, completion, openai_stub

COMMAND = [sys.executable, "-m", "kog_dist.chat.cli"]
# The shell of a script starts what it runs in the background so, a run of these tests among them.
WITH_SIGINT_IGNORED = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
# Another thread takes the signal. So the wait in readline is not interrupted, as by one that comes just before that wait.
WITH_SIGINT_ELSEWHERE = """\
import signal, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
from kog_dist.chat.cli import main
main()
"""
USAGE = {"prompt_tokens": 3, "completion_tokens": 3}
DEADLINE_S = 30.0
AGAIN_S = 2.0


class Terminal:
    """A process on a terminal of its own, and what it has written there."""

    def __init__(self, command: list[str], **variables: str) -> None:
        own, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "LINES": "24", "COLUMNS": "80", "XDG_STATE_HOME": os.devnull, **variables}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self._fd, self.written = own, ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        """Ctrl-D until it ends, since what is typed while the terminal's mode changes may be lost; the exit code."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self.type("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(AGAIN_S)
        return self.process.wait(0)

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern occurs in what came since the last call; returns that."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (found := re.search(pattern, self.written, re.DOTALL)) is None:
            assert time.monotonic() < deadline_s, f"{pattern!r} did not come: {self.written!r}"
            if select.select([self._fd], [], [], 0.2)[0]:
                try:
                    self.written += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    assert re.search(pattern, self.written, re.DOTALL), f"it ended without {pattern!r}: {self.written!r}"
        seen, self.written = self.written[: found.end()], self.written[found.end() :]
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._fd)


@contextmanager
def terminal(stub: OpenAiStub, *, command: Sequence[str] = COMMAND, **variables: str) -> Iterator[Terminal]:
    made = Terminal([*command, f"--url={stub.url}"], **variables)
    try:
        yield made
    finally:
        made.close()


def piped(arguments: list[str], text: str | None = "hello", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([*COMMAND, *arguments], input=text, capture_output=True, text=True, timeout=60, env=environment)


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    go_on = threading.Event()
    answers = (
        Scripted(chat(["Good", " day"], usage=USAGE)),
        Scripted(chat(["never", " complete"], usage=USAGE), wait=go_on),
        Scripted(chat(["sec", "ond\x1b[2J"], usage=USAGE)),
        Scripted(chat(["inst", "ead"], usage=USAGE)),
    )
    with openai_stub(*answers) as stub, terminal(stub, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("stub at .*answers; /help.*> ")
        shown.type("hi\n")
        assert "first after" in shown.wait_for(r"Good day.*3 prompt tokens.*tokens, first after.*\].*> ")
        shown.type("/temperature 0.5\n")
        shown.wait_for(r"temperature is 0\.5.*> ")
        shown.type("again\n")
        shown.wait_for("never.*tokens")  # the rate line is there
        shown.interrupt()
        shown.wait_for(r"\[cancelled\].*> ")
        go_on.set()
        shown.type("third\n")
        assert "\x1b[2J" not in shown.wait_for(r"second.*first after.*> ").replace("\x1b[2K", "")
        shown.type("/edit fourth\n")
        shown.wait_for(r"instead.*first after.*> ")
        shown.type("/st\t\n")
        shown.wait_for(r"4 answers of \d+ tokens together.*> ")
        shown.interrupt()
        shown.wait_for("Ctrl-D ends.*> ")
        assert shown.end() == 0
    said = [message["content"] for message in stub.requests[2]["messages"]]
    assert said == ["hi", "Good day", "again", "never complete", "third"]
    assert [message["content"] for message in stub.requests[-1]["messages"]][-2:] == ["never complete", "fourth"]
    kept = tmp_path / "kog" / "chat_history"
    assert kept.read_text().splitlines()[-4:] == ["again", "third", "/edit fourth", "/stats"]
    assert kept.stat().st_mode & 0o077 == 0
    assert stub.requests[-1]["temperature"] == 0.5


@pytest.mark.parametrize(
    "command",
    [[sys.executable, "-c", WITH_SIGINT_IGNORED, *COMMAND[1:]], [sys.executable, "-c", WITH_SIGINT_ELSEWHERE]],
    ids=["ignored by whoever started it", "between two steps of Python"],
)
def test_one_ctrl_c_is_enough(command: list[str]) -> None:
    go_on = threading.Event()
    with (
        openai_stub(Scripted(chat(["never", " complete"], usage=USAGE), wait=go_on)) as stub,
        terminal(stub, command=command) as shown,
    ):
        shown.wait_for("Ctrl-D ends.*> ")
        shown.interrupt()
        shown.wait_for("Ctrl-D ends.*> ")
        shown.type("hi\n")
        shown.wait_for("never.*tokens")
        shown.interrupt()
        shown.wait_for(r"\[cancelled\].*> ")
        go_on.set()
        shown.type("half a line")
        shown.wait_for("half a line")
        shown.interrupt()
        shown.wait_for("Ctrl-D ends.*> ")
        assert shown.end() == 0
    assert len(stub.requests) == 1, "a line that was given up is not sent"


def test_no_colour_and_errors_on_a_terminal() -> None:
    answers = (Scripted([b'{"error": {"message": "no room"}}'], status=429), Scripted(chat(["ok"], usage=USAGE)))
    with openai_stub(*answers) as stub, terminal(stub, NO_COLOR="1") as shown:
        shown.wait_for("> ")
        shown.type("hi\n")
        shown.wait_for("kog-chat: HTTP 429: no room.*> ")
        shown.type("/nonsense\n")
        shown.wait_for("there is no command /nonsense.*> ")
        shown.type("hi\n")
        seen = shown.wait_for(r"ok.*first after.*\]")
        assert "\x1b[2m" not in seen
        assert shown.end() == 0
    assert len(stub.requests[-1]["messages"]) == 1, "what was not answered is not part of the conversation"


def test_a_pipe_gets_the_answer_alone() -> None:
    with openai_stub(Scripted(chat(["Good", " day"], usage=USAGE))) as stub:
        done = piped([f"--url={stub.url}", "--system=be brief"], KOG_API_KEY="secret")
        assert (done.returncode, done.stdout) == (0, "Good day\n")
        assert re.fullmatch(r"\[3 prompt tokens, .*first after \d+ ms\]\n", done.stderr)
        assert stub.headers[0]["authorization"] == "Bearer secret"
        assert [message["content"] for message in stub.requests[0]["messages"]] == ["be brief", "hello"]
        assert piped([f"--url={stub.url}", "-q", "asked"], text="").stderr == ""


def test_reasoning_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """A terminal folds it; the next question does not send it back, and a pipe has none of it."""
    answers = (
        Scripted(chat(["Good", " day"], usage=USAGE, reasoning=["They", " greet\x1b[2J."])),
        Scripted(chat([], usage=USAGE, reasoning=["Hm"], finish="length")),
        Scripted(chat(["fine"], usage=USAGE)),
    )
    with openai_stub(*answers) as stub, terminal(stub, XDG_STATE_HOME=str(tmp_path)) as shown:
        shown.wait_for("> ")
        shown.type("hi\n")
        seen = shown.wait_for(r"Good day.*first after.*\].*> ")
        assert re.search(r"\x1b\[2m\[thought for \d+\.\d s; /thought shows it\].*\r\n\r\n.*Good day", seen, re.DOTALL)
        assert "They" not in seen
        shown.type("/thought\n")
        shown.wait_for(r"They greet.{1,8}\[2J\.")
        shown.type("and\n")
        shown.wait_for(r"thought for.*cut off at the most tokens allowed.*> ")
        shown.type("you\n")
        shown.wait_for(r"fine.*first after.*> ")
        assert shown.end() == 0
    assert [message["content"] for message in stub.requests[-1]["messages"]] == ["hi", "Good day", "you"]
    with openai_stub(Scripted(chat(["Good", " day"], usage=USAGE, reasoning=["They greet."]))) as stub:
        assert piped([f"--url={stub.url}"]).stdout == "Good day\n"


def test_a_completion_continues_the_text() -> None:
    with openai_stub(Scripted(completion(["a, b):"], usage=USAGE))) as stub:
        done = piped([f"--url={stub.url}", "--completion", "--max-tokens=5"], text="def add(")
    assert (done.returncode, done.stdout) == (0, "a, b):\n")
    assert (stub.requests[0]["prompt"], stub.requests[0]["max_tokens"]) == ("def add(", 5)
    assert "cut off" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text", "code", "reason"),
    [
        (["--url=http://127.0.0.1:9"], "x", 3, "no service answers at http://127.0.0.1:9: .*start one with kog-launch"),
        (["--instance=there-is-none"], "x", 2, "'there-is-none' serves HTTP"),
        (["--url=ftp://x"], "x", 2, "URL"),
        (["--url=http://127.0.0.1:9"], "", 2, "standard input is empty"),
        (["--temperature=-1"], "x", 2, "temperature must be from 0"),
        (["--api-key-file=/nonexistent"], "x", 2, "API key file"),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments: list[str], text: str, code: int, reason: str, tmp_path: Path) -> None:
    done = piped(arguments, text, XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (code, "")
    assert re.search(reason, done.stderr)
    assert done.stderr.count("\n") == 1


def test_an_answer_that_fails_in_the_middle_has_code_4_and_a_closed_reader_none() -> None:
    with openai_stub(Scripted(chat(["half"])[:2], cut_off=True)) as stub:
        done = piped([f"--url={stub.url}"])
        assert (done.returncode, done.stdout) == (4, "half\n")
        assert "closed the connection in the middle" in done.stderr
    with openai_stub(Scripted(chat(["line\n"] * 20_000, usage=USAGE))) as stub:
        command = f"echo x | {' '.join(COMMAND)} --url={stub.url} -q | head -1"
        done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "")
