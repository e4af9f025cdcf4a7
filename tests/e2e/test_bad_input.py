"""Bad input: one clear sentence, the right exit code, nothing left behind, and an engine that goes on."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.engine.session import INSTANCE, EngineSession, until
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from tests.e2e.conftest import check_refusal

LAUNCH, CLIENT = "kog_dist.launch.cli", "kog_dist.rpc.cli"
ENDED_S = 30.0  # no promise, only an end of waiting; a loaded machine is slow


def refused(session: EngineSession, code: int, sentence: str, *arguments: str, module: str = LAUNCH) -> str:
    """Run a command that must end with `code` and say `sentence`; returns what it said."""
    done = session.run(module, arguments)
    check_refusal(code, sentence, done.returncode, done.stdout, done.stderr)
    assert session.leftovers() == []
    return done.stderr


Case = tuple[list[str], int, str]
# What only the engine, the model or the system can refuse; all else: test_wrong_invocations.py.
WRONG: list[Case] = [
    (["--rnaks=2"], 2, "No such option: --rnaks"),
    (["--ranks=3"], 2, "4 lanes cannot be spread over 3 ranks; use one of 1, 2, 4"),
    (["--log-dir=/proc/no"], 3, "log folder /proc/no cannot be made"),
    (["--ranks=1", "--prompt-ids=1,320"], 2, "prompt_ids[1] is 320, the vocabulary has ids 0 to 319"),
    (["--log-dir=/proc"], 3, "log file /proc/launcher.log cannot be opened: "),
]
# What an engine refuses, whoever asks: `--prompt` of kog-launch asks as a client does (above).
REFUSED: dict[str, list[str]] = {
    "prompt_ids[0] is 999, the vocabulary has ids 0 to 319": ["--prompt-ids=999"],
    "has no tokenizer.json; give token ids instead of text": ["--prompt=text"],
    "temperature": ["--prompt-ids=1", "--temperature=101"],
    "exceed the context of 32768 tokens": ["--prompt-ids=1", "--max-tokens=33000"],
    "the prompt has 32769 tokens and the context 32768": ["--prompt-ids=" + "1," * 32_768 + "1"],
}


def named(value: object) -> str | None:
    return value[-1][:30] if isinstance(value, list) else None


@pytest.mark.parametrize(("arguments", "code", "sentence"), WRONG, ids=named)
def test_wrong_commands(session: EngineSession, tiny_model: Path, arguments: list[str], code: int, sentence: str) -> None:
    refused(session, code, sentence, str(tiny_model), *arguments)


def test_refusal_is_left_in_exit_json(session: EngineSession, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    said = refused(session, 3, "does not exist", str(tmp_path / "nothing"), f"--log-dir={logs}")
    last_words = json.loads((logs / "exit.json").read_text(encoding="utf-8"))
    assert (last_words["exit_code"], last_words["reason"]) == (3, "cannot_start")
    assert said == f"kog-launch: {last_words['sentence']}\n"


def test_empty_model_is_not_the_current_folder(session: EngineSession) -> None:
    refused(session, 2, "MODEL: model must be the folder of a checkpoint, got ''", "", "--check")


def test_log_folder_keeps_earlier_runs_but_not_how_they_ended(session: EngineSession, tiny_model: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for ids, code, reason in (("1", 0, "answered"), ("999", 2, "request_refused")):
        arguments = [str(tiny_model), "--ranks=1", f"--prompt-ids={ids}", "--max-tokens=1", f"--log-dir={logs}"]
        assert session.run(LAUNCH, arguments).returncode == code
        last_words = json.loads((logs / "exit.json").read_text(encoding="utf-8"))
        assert (last_words["exit_code"], last_words["reason"]) == (code, reason)
        assert (last_words["sentence"] is None) == (code == 0)
    for role in ("launcher", "coordinator", "rank-0"):
        text = (logs / f"{role}.log").read_text(encoding="utf-8")
        assert text.count(f"---- {role.replace('-', ' ')}, run of kog-launch ") == 2
    events = (logs / "launcher.log").read_text(encoding="utf-8")
    assert events.index("exit code 0: answered") < events.index("exit code 2: request_refused")
    launcher = session.launch(str(tiny_model), "--ranks=1", f"--log-dir={logs}")
    session.connect().close()
    assert not (logs / "exit.json").exists(), "a run that goes on has not ended"
    until(lambda: "ready after" in (logs / "launcher.log").read_text(encoding="utf-8"), ENDED_S, session.output)
    launcher.terminate()
    assert launcher.wait(ENDED_S) == 0


def test_an_engine_that_serves_has_logs_that_outlive_it(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=1")
    session.connect().close()
    logs = session.folder / "state" / "kog" / "logs" / INSTANCE
    until(lambda: "ready after" in (logs / "launcher.log").read_text(encoding="utf-8"), ENDED_S, session.output)
    refused = session.run(LAUNCH, [str(tiny_model), "--ranks=1", f"--instance={INSTANCE}"])
    assert refused.returncode == 3
    assert not (logs / "exit.json").exists(), "a start that is refused is not the end of the engine that runs"
    launcher.terminate()
    assert launcher.wait(ENDED_S) == 0
    assert not session.instance_folder.exists()
    assert json.loads((logs / "exit.json").read_text(encoding="utf-8"))["exit_code"] == 0
    assert {path.name for path in logs.glob("*.log")} == {"launcher.log", "coordinator.log", "rank-0.log"}


def test_output_that_cannot_be_written_is_one_sentence(session: EngineSession, tiny_model: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m {LAUNCH} {shlex.quote(str(tiny_model))}"
    full = "kog-launch: standard output cannot be written: No space left on device; send it somewhere else\n"
    cases = {
        "--print-config >/dev/full": full,
        "--check >/dev/full": full,
        "--prompt-ids=1 >&-": "kog-launch: standard output is closed; send it to /dev/null if it is not wanted\n",
    }
    for words, sentence in cases.items():
        done = subprocess.run(
            ["sh", "-c", f"{command} {words}"], env=session.environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (3, sentence)
    closed = f"{command} --ranks=1 --prompt-ids=1 --max-tokens=1 <&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", closed], env=session.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, len(done.stdout.split())) == (0, 1), "neither stdin nor stderr is needed"
    assert session.leftovers() == []


def test_unknown_setting_is_named_with_its_source(session: EngineSession, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("rank = 2\n", encoding="utf-8")
    refused(session, 2, f"{file}: there is no setting 'rank'; did you mean ranks?", str(tiny_model), f"--config={file}")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def flip_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1001] ^= 1
    path.write_bytes(raw)


def write_nan(folder: Path) -> None:
    """NaN in lane 2 of one matrix, in a checkpoint without hashes."""
    (folder / "manifest.json").unlink()
    tensor = open_checkpoint(folder).files[0].tensors["model.layers.1.feed_forward.w2.weight"]
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    place = tensor.begin + (tensor.end - tensor.begin) * 5 // 8 // 2 * 2
    raw[place : place + 2] = b"\xc0\x7f"
    path.write_bytes(raw)


def change_shape(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["intermediate_size"] *= 2
    path.write_text(json.dumps(config), encoding="utf-8")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "by_metadata", "sentence"),
    [
        (truncate, True, "model.safetensors"),
        (remove_weights, True, "has neither model.safetensors nor model.safetensors.index.json"),
        (change_shape, True, "but config.json asks for"),
        (break_config, True, "config.json"),
        (flip_bit, False, "differs from its SHA-256 in manifest.json"),
        (write_nan, False, "model.layers.1.feed_forward.w2.weight"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(
    session: EngineSession, tiny_model: Path, tmp_path: Path, damage: Callable[[Path], None], by_metadata: bool, sentence: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    said = refused(session, 3, sentence, str(folder), "--ranks=4", "--prompt-ids=1")
    if by_metadata:
        refused(session, 3, sentence, str(folder), "--check")
    else:
        assert "could not start: " in said
        assert "(3 ranks stopped because of rank " in said
        assert session.run(LAUNCH, [str(folder), "--check"]).returncode == 0, "--check reads no values"


def test_unverified_nan_weights_fail_the_request_and_not_the_engine(session: EngineSession, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    spec = ModelSpec(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=64, vocab_size=64, max_context=64,
        num_lanes=2,
    )  # fmt: skip
    write_checkpoint(folder, spec, random_tensors(spec, seed=1), dtype="float32", manifest=False)
    path = folder / "model.safetensors"
    tensor = open_checkpoint(folder).files[0].tensors["model.tok_embeddings.weight"]
    raw = bytearray(path.read_bytes())
    start = tensor.begin + 9 * 32 * 4  # the row of token 9
    raw[start : start + 4] = np.array([np.nan], "<f4").tobytes()
    path.write_bytes(raw)
    refused(session, 3, "model.tok_embeddings.weight", str(folder), "--ranks=2", "--prompt-ids=1")
    launcher = session.launch(str(folder), "--ranks=2", "--no-verify")
    with session.connect() as client:
        done = session.run(CLIENT, ["generate", "--instance=engine", "--prompt-ids=1,9", "--max-tokens=5"])
        assert (done.returncode, done.stdout) == (4, "")
        assert "numerical_fault: the logits of token 0 are not finite" in done.stderr
        assert session.run(CLIENT, ["generate", "--instance=engine", "--prompt-ids=1,2", "--max-tokens=1"]).returncode == 0
        assert client.status().num_failed == 1
    launcher.terminate()
    assert launcher.wait(ENDED_S) == 0


def test_engine_is_unharmed_by_refused_requests(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        for sentence, arguments in REFUSED.items():
            done = session.run(CLIENT, ["generate", "--instance=engine", *arguments])
            assert done.returncode == 2, done.stderr
            assert sentence in done.stderr
            assert len(done.stderr.splitlines()) == 1
        report = client.status()
        assert (report.state, report.rank_states) == ("ready", ("ready", "ready"))
    launcher.terminate()
    assert launcher.wait(ENDED_S) == 0


def test_instance_name_is_taken(session: EngineSession, tiny_model: Path) -> None:
    first = session.launch(str(tiny_model), "--ranks=1")
    with session.connect() as client:
        done = session.run(LAUNCH, [str(tiny_model), "--ranks=1", "--instance=engine"])
        assert done.returncode == 3
        assert f"instance name 'engine' is taken by process {first.pid}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert client.status().state == "ready"
    first.terminate()
    assert first.wait(ENDED_S) == 0


def test_port_is_taken(session: EngineSession, tiny_model: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refused(session, 3, "coordinator could not start", str(tiny_model), "--ranks=2", f"--rpc-port={port}")
        assert str(port) in said


def test_port_is_shown_and_usable(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=1", "--rpc-port=0")
    session.connect().close()
    until(lambda: "tcp://" in session.output(stream="out"), ENDED_S, session.output)
    address = next(word.strip(",") for word in session.output(stream="out").split() if word.startswith("tcp://"))
    key = f"--key-file={session.instance_folder / 'rpc-access.json'}"
    done = session.run(CLIENT, ["generate", f"--endpoint={address}", key, "--prompt-ids=1", "--max-tokens=3", "--json"])
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3
    launcher.terminate()
    assert launcher.wait(ENDED_S) == 0


@pytest.mark.parametrize("extra", [("--prompt-ids=1", "--max-tokens=1"), ("--replicas=2",)], ids=["prompt", "replicas"])
@pytest.mark.parametrize("num_files", [6, 9, 13, 14])
def test_a_start_without_files_to_open_leaves_no_folder(
    session: EngineSession, tiny_model: Path, num_files: int, extra: tuple[str, ...]
) -> None:
    session.starter = ("sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh")
    refused(session, 3, "raise the limit of open files (ulimit -n)", str(tiny_model), "--ranks=1", "--device=cpu", *extra)
