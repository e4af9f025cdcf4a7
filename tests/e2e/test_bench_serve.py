"""The fake engine behind the real gateway, measured by the commands that users type."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.request_stages import STEPS
from kog_dist.bench.engine.session import until
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Tokens
from kog_dist.rpc.transport import Access
from kog_dist.runtime.instance import Instance


def command(*arguments: str, module: str = "kog_dist.bench.cli") -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=90, check=False)


@contextmanager
def process(arguments: Sequence[str], root: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {"XDG_RUNTIME_DIR": str(root), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                raise


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture(scope="module")
def engine(root: Path) -> Iterator[Access]:
    """A fake engine of 1,000 tokens/s."""
    with process(command("replay", "--rate=1000", "--instance=e", "--ranks=3"), root) as child:
        socket = root / "kog" / "e" / "rpc.sock"
        until(lambda: socket.exists() or child.poll() is not None, 30, lambda: "no socket")
        yield Access.from_folder(socket.parent)
        child.terminate()
        _, said = child.communicate(timeout=10)
        assert child.returncode == 0, said
        assert "answers completed" in said


@pytest.fixture(scope="module")
def url(engine: Access, root: Path, demo_model: Path) -> Iterator[str]:
    """The gateway in front of it."""
    flags = ["--instance=e", "--port=0", f"--model={demo_model}"]
    with ExitStack() as stack:
        child = stack.enter_context(process(command(*flags, module="kog_dist.gateway.cli"), root))
        assert child.stderr is not None
        line = child.stderr.readline()
        assert "url=" in line, line
        url = line.partition("url=")[2].split()[0]
        until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, 30, lambda: "the gateway is not ready")
        yield url


def test_it_is_found_and_answers_like_an_engine(engine: Access) -> None:
    with Client(engine) as client:
        assert (client.welcome.model, client.welcome.world_size) == ("demo", 3)
        report = client.wait_ready(10)
        assert report.rank_states == ("ready",) * 3
        events = list(client.generate(prompt="x", max_tokens=300, ignore_eos=True, stamps=True))
    stamps = [stamp for event in events if isinstance(event, Tokens) for stamp in event.stamps_s]
    assert len(stamps) == 300
    assert stamps[-1] - stamps[0] > 0.28, "no token comes before it is due"
    with pytest.raises(Exception, match="'e' is taken"):
        Instance.acquire("e", Path(engine.address.removeprefix("ipc://")).parents[1])


def test_load_report_and_comparison(url: str, tmp_path: Path) -> None:
    flags = [f"--url={url}", "--num-prompts=6", "--output-len=50", "--input-len=8", "--ignore-eos"]
    first, second, page = (tmp_path / name for name in ("a.json", "b.json", "a.html"))
    done = run("serve", *flags, f"--output={first}", f"--html={page}")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["completed"], result["total_output_tokens"], result["output_tokens_from"]) == (6, 300, "usage")
    assert result["mean_tpot_ms"] > 0.5, "a token each millisecond, and never faster over a whole answer"
    assert "<svg" in page.read_text()
    assert run("serve", *flags, "--request-rate=50", "--seed=1", f"--output={second}").returncode == 0
    compared = run("compare", str(first), str(second), "--fail-if-slower=100000")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "request_rate is 'inf' and 50.0" in compared.stdout


def test_requests_that_fail_are_counted_and_the_code_says_so(url: str) -> None:
    done = run("serve", f"--url={url}", "--num-prompts=2", "--num-warmups=0", "--output-len=1000000")
    assert done.returncode == 4
    assert "x HTTP 400: " in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 2


@pytest.mark.parametrize("backend", ["openai-chat", "openai"])
def test_turns_of_an_agent(url: str, tmp_path: Path, backend: str) -> None:
    trace = tmp_path / "small.jsonl"
    subprocess.run(command(str(trace), "1000", module="kog_dist.bench.service.own_trace"), check=True, timeout=60)
    done = run("agents", str(trace), f"--url={url}", f"--backend={backend}", "--ignore-eos")
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    prompts = [turn["prompt_tokens"] for turn in figures["turns"]]
    assert len(prompts) == 16
    assert prompts == sorted(prompts), "each turn has all of the one before it"
    assert figures["total"]["output_tokens"] == sum(turn["output_tokens"] for turn in figures["turns"]) > 16 * 15
    assert done.stdout.splitlines()[16].split()[:2] == ["16", str(prompts[-1])]
    missing = run("agents", str(tmp_path / "none.jsonl"), f"--url={url}")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "none.jsonl cannot be read" in missing.stderr


def test_nobody_there() -> None:
    done = run("serve", "--url=http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    assert "start a service there" in done.stderr


def test_the_path_through_the_gateway_is_measured() -> None:
    done = run("gateway", "--rate=1000", "--tokens=200", "--repeats=1")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    for way in ("rpc", "http", "arrival"):
        assert figures[way]["tokens"] == 200
        assert 0 < figures[way]["p50_us"] <= figures[way]["p99_us"]


def test_the_hosts_way_to_a_first_token_is_measured() -> None:
    done = run("first-token", "--prompts=16,300", "--chunks-ms=5,20", "--rest-ms=2", "--head-ms=3", "--repeats=2")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert [figure["prompt"] for figure in figures] == [16, 300]
    for figure, chunks_ms in zip(figures, (5, 20), strict=True):
        assert figure["ms"] > chunks_ms + 2 + 3, "the played GPU works for so long"
        for steps in (figure["steps_ms"], figure["rested_steps_ms"]):
            assert tuple(steps) == STEPS
            assert steps["launched"] + steps["prefilled"] >= chunks_ms + 2


@pytest.mark.parametrize("wrong", ["1", "1,x", "1,0", "1,nan"])
def test_times_of_a_played_gpu_are_checked(wrong: str) -> None:
    done = run("first-token", "--prompts=16,300", f"--chunks-ms={wrong}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--chunks-ms must be a number of milliseconds for each of --prompts, below 10000, got {wrong!r}" in done.stderr


def test_chat_finds_the_ranks(url: str) -> None:
    asked = ["--url", url, "--completion", "--max-tokens=20", "def add("]
    done = subprocess.run(
        command(*asked, module="kog_dist.chat.cli"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith('"""The checks that one field')
    assert "20 tokens" in done.stderr
    assert "3 ranks" in done.stderr
