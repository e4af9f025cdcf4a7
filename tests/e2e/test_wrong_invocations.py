"""Whatever is wrong with a command line, of every command: one sentence that says it, and the exit code; nothing is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import engine_session
from tests.e2e.conftest import check_refusal

Case = tuple[list[str], int, str]
IDS = "--prompt-ids must be token ids separated by commas"
GPUS = "--gpus must be a count, all, or a list of indices or UUIDs such as 0,2"
NO_ENGINE = "no engine listens at ipc://"
NO_SUCH = "No such file or directory"
WRONG: dict[str, list[Case]] = {
    "kog_dist.launch.cli": [
        (["MODEL", "--ranks=two"], 2, "Invalid value for '--ranks': "),
        (["MODEL", "--ranks=8"], 2, "4 lanes cannot be spread over 8 ranks"),
        (["MODEL", "--launcher=slurm"], 2, "--launcher: launcher 'slurm' is not available"),
        (["MODEL", "--launcher=mpi"], 3, "no mpirun has started this process; start it as mpirun -n 4 kog-launch"),
        (["MODEL", "--gpus=99"], 2, "4 lanes cannot be spread over 99 ranks"),
        (["MODEL", "--gpus=4"], 2, "cannot run this model: it has head_dim 8 (a multiple of 16); use --device cpu"),
        (["MODEL", "--gpus=one"], 2, GPUS),
        (["MODEL", "--gpus=+1,"], 2, GPUS),
        (["MODEL", "--device=tpu"], 2, "--device: device 'tpu' is not available; use auto or cpu or cuda"),
        (["MODEL", "--config=no-such.toml"], 2, "config file no-such.toml cannot be read"),
        (["MODEL", "--instance=a/b"], 2, "--instance: instance name 'a/b' must be"),
        (["MODEL", "--instance=.."], 2, "and start with a letter or digit"),
        (["MODEL", "--json"], 2, "--json describes one request and goes only with --prompt or --prompt-ids"),
        (["MODEL", "--max-tokens=5"], 2, "--max-tokens describes one request and goes only with --prompt or --prompt-ids"),
        (["MODEL", "--prompt=x", "--prompt-ids=1"], 2, "--prompt and --prompt-ids exclude each other"),
        (["MODEL", "--prompt-ids=1,b"], 2, IDS),
        (["MODEL", "--prompt-ids=-1"], 2, IDS),
        (["MODEL", "--prompt-ids=1_0,+3"], 2, IDS),
        (["MODEL", "--prompt-ids=" + "9" * 6000], 2, IDS),
        (["MODEL", "--prompt-ids=1", "--max-tokens=0"], 2, "--max-tokens must be at least 1, got 0"),
        (["MODEL", "--prompt-ids=1", "--temperature=-1e-9"], 2, "temperature must be between 0 and 100, got -1e-09"),
        (["MODEL", "--prompt-ids=1", "--temperature=nan"], 2, "temperature must be between 0 and 100, got nan"),
        (["MODEL", "--prompt-ids=1", "--seed=-1"], 2, "--seed must be between 0 and 2**64 - 1, got -1"),
        (["MODEL", "--check", "--dry-run"], 2, "exclude each other"),
        (["MODEL", "--log-dir="], 2, "--log-dir: log_dir must be a folder, got ''"),
        (["MODEL", "--replicas=0"], 2, "--replicas: replicas must be between 1 and 256, got 0"),
        (["MODEL", "--port=70000"], 2, "--port: port must be between 0 and 65535, got 70000"),
        (["MODEL", "second"], 2, "Got unexpected extra argument(s) (second)"),
        (["no/such/model"], 3, "MODEL no/such/model does not exist; give the folder of a published checkpoint"),
        (["no-such/model"], 3, "`hf download no-such/model` downloads it"),
    ],
    "kog_dist.rpc.cli": [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["drain", "--frobnicate"], 2, "No such option: --frobnicate"),
        (["generate"], 2, "give either --prompt or --prompt-ids"),
        (["generate", "--prompt=x", "--prompt-ids=1"], 2, "give either --prompt or --prompt-ids"),
        (["generate", "--prompt-ids=a"], 2, IDS),
        (["generate", "--prompt=x", "--temprature=1"], 2, "No such option: --temprature (Possible options: --temperature)"),
        (["generate", "--prompt=x", "--top-p=2"], 2, "--top-p must be between 1e-06 and 1, got 2.0"),
        (["generate", "--prompt=x", "--max-tokens=0"], 2, "--max-tokens must be at least 1, got 0"),
        (["generate", "--prompt=x", "--logprobs=21"], 2, "--logprobs must be between 0 and 20, got 21"),
        (["generate", "--prompt=x", "--timeout=0"], 2, "--timeout must be a positive number of seconds, got 0.0"),
        (["generate", "--prompt=x", "--logit-bias=a=b"], 2, "--logit-bias must be ID=BIAS, such as 17=-2.5; got 'a=b'"),
        (["generate", "--prompt=x", "--json-schema={}", "--regex=a"], 2, "--json-schema and --regex exclude each other"),
        (["generate", "--prompt=x", "--json-schema=@no-such"], 2, f"--json-schema @no-such cannot be read: {NO_SUCH}"),
        (["status", "--instance=nobody"], 3, NO_ENGINE),
        (["status", "--instance=a/b"], 2, "instance name 'a/b' must be a name, not a path"),
        (["status", "--endpoint=http://x"], 2, "--endpoint 'http://x' must be ipc://PATH, or tcp://HOST:PORT with --key-file"),
        (["status", "--key-file=no-such"], 3, f"no-such cannot be read as an engine's rpc-access.json: {NO_SUCH}"),
        (["cancel", "--instance=nobody"], 3, NO_ENGINE),
        (
            ["stop", "--instance=nobody"],
            3,
            "no engine of the name 'nobody' runs here; kog-client list shows those that do, --ray",
        ),
        (["stop", "--ray=127.0.0.1:1"], 3, "no Ray cluster answers at --ray 127.0.0.1:1; start it, or give that of another one"),
        (["logs", "--ray=x"], 2, "--ray must be HOST:PORT of a Ray cluster, auto or local; got 'x'"),
        (["logs", "--ray=local"], 2, "--ray 'local' names no cluster; give its HOST:PORT, or for a private one --instance alone"),
    ],
    "kog_dist.chat.cli": [
        (["--frobnicate", "hi"], 2, "No such option: --frobnicate"),
        ([], 2, "standard input is empty; write a prompt to it, or start kog-chat on a terminal"),
        (["--temperature=-1", "hi"], 2, "temperature must be from 0 to 100, got -1.0"),
        (["--url=ftp://x", "hi"], 2, "the URL 'ftp://x' must be http://HOST:PORT, https://HOST:PORT or unix:/PATH"),
        (["--url=http://127.0.0.1:1", "hi"], 3, "no service answers at http://127.0.0.1:1: Connection refused"),
        (["--url=unix:/no/such", "hi"], 3, "no service answers at unix:/no/such: No such file or directory"),
        (["--instance=nobody", "hi"], 2, "no engine of the name 'nobody' serves HTTP"),
        (["--api-key=x", "--api-key-file=y", "hi"], 2, "--api-key and --api-key-file exclude each other"),
        (["--api-key-file=no-such", "hi"], 2, f"the API key file no-such cannot be read: {NO_SUCH}"),
    ],
    "kog_dist.gateway.cli": [
        (["--frobnicate"], 2, "No such option: --frobnicate"),
        (["--instance=a/b"], 2, "instance name 'a/b' must be a name, not a path"),
        (["--port=x"], 2, "Invalid value for '--port': "),
        (["--port=70000"], 2, "--port: port must be between 0 and 65535, got 70000"),
        (["--host=0.0.0.0"], 2, "--host 0.0.0.0 lets other machines in, and there is no API key"),
        (["--port=0", "--model=no-such"], 2, "--model no-such is not the folder of a model: it has no config.json"),
        (["--port=0", "--key-file=no-such"], 3, f"no-such cannot be read as an engine's rpc-access.json: {NO_SUCH}"),
        (["--api-key-file=no-such"], 2, "the API key file no-such cannot be read: No such file or directory"),
        (["--cors-origin=x"], 2, "--cors-origin: cors_origin 'x' must be like https://example.org, without a path, or *"),
        (["--log-format=xml"], 2, "--log-format: log_format 'xml' is not available; use text or json"),
    ],
    "kog_dist.bench.cli": [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["decode", "--frobnicate"], 2, "No such option: --frobnicate"),
        (["decode", "--ranks=0"], 2, "--ranks must be at least 1, got '0'"),
        (["decode", "--ranks=two"], 2, "--ranks must be numbers separated by commas, got 'two'"),
        (["compare", "a.json"], 2, "Missing argument 'B.json'"),
        (["compare", "no-such", "b.json"], 2, f"no-such cannot be read as a result of kog-bench serve: {NO_SUCH}"),
        (["serve", "--url=ftp://x"], 2, "the URL 'ftp://x' must be http://HOST:PORT, https://HOST:PORT or unix:/PATH"),
        (["serve", "--url=http://127.0.0.1:1"], 3, "cannot connect to http://127.0.0.1:1"),
        (["serve", "--num-prompts=0"], 2, "--num-prompts must be at least 1, got 0"),
        (["soak", "--demo"], 2, "--demo goes with --long, on CPU ranks; add --long, or leave --gpus out"),
        (["soak", "--demo", "--long", "--gpus=1"], 2, "--demo goes with --long, on CPU ranks; add --long, or leave --gpus out"),
        (["router", "--agents=2", "--turns=0"], 2, "--agents must be at least 0, --replicas and --turns at least 1"),
        (["agents", "no-such"], 2, f"trace no-such cannot be read: {NO_SUCH}"),
        (["soak", "--requests=0"], 2, "--requests must be at least 2, --clients, --ranks and --gpus at least 1"),
        (["chaos", "--seconds=0"], 2, "--seconds must be positive, --ranks 1, 2 or 4"),
        (["chaos", "--only=nonsense"], 2, "--only 'nonsense': no cell has this in its name; one is called "),
    ],
    "kog_dist.doctor.cli": [
        (["--frobnicate"], 2, "unrecognized arguments: --frobnicate"),
        (["extra"], 2, "unrecognized arguments: extra"),
    ],
    "kog_dist.train.__main__": [
        (["nonsense"], 2, "No such command 'nonsense'"),
        (["evaluate"], 2, "Missing option '--functions'"),
    ],
}
CASES = [(module, *case) for module, cases in WRONG.items() for case in cases]
NAMES = [f"{module.split('.')[1]} {' '.join(words)[-40:]}" for module, words, _, _ in CASES]
# One interpreter for all cases of a module: most of the time of such a command is that of its start.
RUN_ALL = """
import contextlib, importlib, io, json, sys

def said(main, arguments):
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["command", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    return code, out.getvalue(), err.getvalue()

main = importlib.import_module(sys.argv[1]).main
print(json.dumps([said(main, arguments) for arguments in json.loads(sys.argv[2])]))
"""
Answers = dict[str, list[tuple[int, str, str]]]


@pytest.fixture(scope="module")
def answers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Exit code, stdout and stderr for each case of a module."""
    found: Answers = {}
    with engine_session() as session:
        for module, cases in WRONG.items():
            commands = json.dumps([[str(tiny_model) if word == "MODEL" else word for word in words] for words, _, _ in cases])
            done = subprocess.run(
                [sys.executable, "-c", RUN_ALL, module, commands], env=session.environment(), stdin=subprocess.DEVNULL,
                cwd=tmp_path_factory.mktemp("empty"), capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert session.leftovers() == []
            found[module] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("module", "arguments", "code", "sentence"), CASES, ids=NAMES)
def test_a_wrong_invocation_is_one_sentence(
    answers: Answers, module: str, arguments: list[str], code: int, sentence: str
) -> None:  # fmt: skip
    check_refusal(code, sentence, *answers[module][WRONG[module].index((arguments, code, sentence))])
