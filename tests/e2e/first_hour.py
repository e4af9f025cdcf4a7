"""What a new user does in the first hour, in a fresh clone, with seconds for each step: `make first-hour`.

Needs git, make, Python and a package index, and nothing that is installed here already. Ends with code 1 at the first step that
fails, and says what it printed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.clients.pinned import PYTHON

ROOT = Path(__file__).parents[2]
MODEL = "build/models/SmolLM2-135M-Instruct"
QUESTION, ANSWER = "What is the capital of France?", "Paris"
STEP_S = 900.0  # no step may take longer
ANSWER_S = 120.0
LEAVE_S = 30.0

Command = list[str | Path]
Step = tuple[str, Callable[[], str]]  # what it is called, and what does it and says in a few words how it went


class StepFailed(Exception):
    """A step did not do what a user expects of it."""


class FirstHour:
    """A folder in which nobody has done anything yet. `steps` in their order; `close` ends what they have started."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "kog_dist"
        self._folder, self._url = folder, ""
        self._bin, self._log = self.tree / ".venv" / "bin", folder / "kog-launch.log"
        self._engine: subprocess.Popen[bytes] | None = None
        homes = {name: str(folder / "home") for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HF_HOME")}
        (folder / "home").mkdir(mode=0o700)
        left_out = ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "PYTHONPATH")
        self._environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._environment |= {**homes, "PIP_CACHE_DIR": str(folder / "pip"), "NO_COLOR": "1", "NO_PROXY": "127.0.0.1"}

    @property
    def steps(self) -> list[Step]:
        """All of them."""
        return [
            ("clone", self.clone), ("install", self.install), ("make demo", self.demo), ("kog-doctor", self.doctor),
            ("make model", self.model), ("kog-launch --check", self.check), ("kog-launch", self.launch),
            ("kog-chat", self.chat), ("the page", self.page), ("openai-agents", self.agent), ("kog-bench serve", self.bench),
            ("a wrong model, a wrong field", self.mistakes), ("stop", self.stop),
        ]  # fmt: skip

    def clone(self) -> str:
        """The commit that is checked out here."""
        self._run(["git", "clone", "--quiet", str(ROOT), str(self.tree)], self._folder)
        return f"commit {self._run(['git', 'rev-parse', '--short', 'HEAD']).strip()}"

    def install(self) -> str:
        """What `make demo` does first."""
        self._run(["make", f"PYTHON={sys.executable}", ".venv/.installed"])
        used = sum(path.stat().st_size for path in (self.tree / ".venv").rglob("*") if path.is_file() and not path.is_symlink())
        return f"{used / 1e6:.0f} MB"

    def demo(self) -> str:
        """The bundled model on CPU ranks."""
        return _statistics(self._run(["make", "demo"]))

    def doctor(self) -> str:
        """A machine without a GPU is fine."""
        return self._run([self._bin / "kog-doctor"]).strip().splitlines()[-1]

    def model(self) -> str:
        """SmolLM2-135M-Instruct."""
        self._run(["make", "model"])
        return f"{sum(path.stat().st_size for path in (self.tree / MODEL).iterdir()) / 1e6:.0f} MB"

    def check(self) -> str:
        """Whether it would run."""
        return self._run([self._bin / "kog-launch", MODEL, "--check"]).partition(" (read as float16)")[0]

    def launch(self) -> str:
        """Until it serves."""
        command: Command = [self._bin / "kog-launch", MODEL, "--device=cpu", "--port=0", "--instance=first-hour"]
        with self._log.open("wb") as log:
            self._engine = subprocess.Popen(command, cwd=self.tree, env=self._environment, stdout=log, stderr=log)
        deadline_s = time.monotonic() + ANSWER_S
        while (found := re.search(r"(http://\S+), ready after (\S+ s)", self._said())) is None:
            if self._engine.poll() is not None or time.monotonic() > deadline_s:
                raise StepFailed(f"kog-launch did not become ready:\n{self._said()}")
            time.sleep(0.05)
        self._url = found[1]
        return f"ready after {found[2]}"

    def chat(self) -> str:
        """An answer at the terminal."""
        return _expected(ANSWER, self._run([self._bin / "kog-chat", "--instance=first-hour", "--temperature=0", QUESTION]))

    def page(self) -> str:
        """The playground with all its files, and the request that it sends."""
        page = self._get("/")
        files = sorted(set(re.findall(r'(?:src|href)="(/?static/[^"]+)"', page)))
        for name in files:
            self._get(f"/{name.lstrip('/')}")
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24, "stream": True}
        frames = re.findall(r"^data: (\{.*)$", self._get("/v1/chat/completions", body), re.M)
        said = "".join(choice["delta"].get("content") or "" for frame in frames for choice in json.loads(frame)["choices"])
        return f"{len(files)} files; {_expected(ANSWER, said)}"

    def agent(self) -> str:
        """An agent that calls a tool, installed beside it."""
        environment = self._folder / "agent"
        self._run([sys.executable, "-m", "venv", environment])
        pip: Command = [environment / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        self._run([*pip, f"openai-agents=={PYTHON['openai-agents']}"])
        script = self.tree / "tests" / "clients" / "scripts" / "openai_agents_package.py"
        found = json.loads(self._run([environment / "bin" / "python", script, f"{self._url}/v1"]).splitlines()[-1])
        return f"{_expected(ANSWER, found['text'])} weather({', '.join(found['asked'])})"

    def bench(self) -> str:
        """How fast it is."""
        command: Command = [self._bin / "kog-bench", "serve", f"--url={self._url}", "--num-prompts=3", "--output-len=32"]
        figures = json.loads(self._run(command).splitlines()[-1])
        return f"{figures['completed']} answers, TPOT {figures['median_tpot_ms']:.1f} ms"

    def mistakes(self) -> str:
        """Each is one sentence."""
        wrong = subprocess.run(
            [self._bin / "kog-launch", "no/such/model"], cwd=self.tree, env=self._environment, capture_output=True, text=True,
            timeout=ANSWER_S, check=False,
        )  # fmt: skip
        if wrong.returncode != 3 or len(wrong.stderr.splitlines()) != 1:
            raise StepFailed(f"kog-launch no/such/model ended with {wrong.returncode}:\n{wrong.stderr}")
        try:
            self._get("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "temprature": 1})
        except urllib.error.HTTPError as error:
            return _expected("did you mean temperature?", str(json.load(error)["error"]["message"]).partition(" docs/")[0])
        raise StepFailed("a misspelt field was accepted")

    def stop(self) -> str:
        """Nothing is left behind."""
        assert self._engine is not None, "it was started"
        self._engine.send_signal(signal.SIGTERM)
        code = self._engine.wait(LEAVE_S)
        left = [path for path in (self._folder / "home" / "kog").glob("*") if path.name == "first-hour"]
        if code or left:
            raise StepFailed(f"kog-launch ended with {code}, left {left}:\n{self._said()}")
        return "nothing left"

    def close(self) -> None:
        """The folder may go."""
        if self._engine is not None and self._engine.poll() is None:
            self._engine.kill()
            self._engine.wait(LEAVE_S)

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _run(self, command: Command, folder: Path | None = None) -> str:
        """What a command prints; a step fails with all that it has said if it does."""
        try:
            done = subprocess.run(
                command, cwd=folder or self.tree, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=STEP_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise StepFailed(f"{command[0]} did not end within {STEP_S:.0f} s") from None
        if done.returncode:
            raise StepFailed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout

    def _get(self, path: str, body: Any = None) -> str:
        """GET, or POST of a body."""
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, raw, {"content-type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text


def _expected(part: str, text: str) -> str:
    if part not in text:
        raise StepFailed(f"{part!r} was expected in: {text}")
    return text.strip().splitlines()[0]


def _statistics(said: str) -> str:
    found = re.search(r"[\d.,]+ tokens/s", said)
    if found is None:
        raise StepFailed(f"no figures in:\n{said}")
    return found[0]


def play(steps: Sequence[Step]) -> int:
    """Do them in order; a line for each as it ends, and their sum. Returns the exit code."""
    begin_s = time.monotonic()
    for name, step in steps:
        step_begin_s = time.monotonic()
        try:
            said = step()
        except (StepFailed, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            print(f"{name:<30} FAILED after {time.monotonic() - step_begin_s:.1f} s\n{error}", flush=True)
            return 1
        print(f"{name:<30}{time.monotonic() - step_begin_s:8.1f} s   {said}", flush=True)
    print(f"{'all':<30}{time.monotonic() - begin_s:8.1f} s", flush=True)
    return 0


def main() -> int:
    """Play the hour in a folder that is removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="kog-first-hour-"))
    hour = FirstHour(folder)
    try:
        return play(hour.steps)
    finally:
        hour.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
