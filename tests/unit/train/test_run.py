"""A run with each optimizer and schedule: pieces equal the whole, ranks equal one process, and a killed save loses nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from typer.testing import CliRunner

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.train import state
from kog_dist.train.__main__ import app
from kog_dist.train.config import read_run_config
from kog_dist.train.display import duration
from kog_dist.train.distributed import Ranks, one_device
from kog_dist.train.execution import faster_windows, with_windows
from kog_dist.train.model import TrainingModel
from kog_dist.train.run import Run
from kog_dist.train.schedule import learning_rate_factor
from kog_dist.train.settings import Execution, RunSettings
from kog_dist.train.specs import demo_spec, nano_spec
from kog_dist.train.stopping import StopRequest
from tests.unit.train.tokens import write_tokens

ROOT = Path(__file__).parents[3]
SETTINGS = RunSettings(num_steps=12, batch=4, time=32, learning_rate=1e-2, adam_learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def silent(line: str) -> None:
    assert line


def weights_of(run: Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.module.state_dict().items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "change", [{}, {"optimizer": "adamw", "schedule": "cosine", "precision": "bf16"}], ids=["defaults", "others"]
)
def test_pieces_give_the_bits_of_one_go(tokens: Path, tmp_path: Path, change: dict[str, str]) -> None:
    settings = replace(SETTINGS, **change)  # type: ignore[arg-type]
    whole = Run(nano_spec(), settings, tokens)
    before = whole.held_out_loss()
    assert whole.train(report=silent, report_every=6)
    assert whole.held_out_losses[-1][1] < before - 0.3
    pieces = Run(nano_spec(), settings, tokens)
    assert not pieces.train(call_seconds=0, report=silent, report_every=6, save_to=tmp_path)
    assert pieces.step_idx == 10  # the clock is looked at every ten steps: in the middle of the second entry of the curves
    rest = Run(nano_spec(), settings, tokens)
    assert rest.resume(tmp_path)
    assert rest.train(report=silent, report_every=6, save_to=tmp_path)
    assert same_bits(weights_of(whole), weights_of(rest))
    assert same_bits(whole.optimizers.state(), rest.optimizers.state())
    assert (rest.losses, rest.held_out_losses) == (whole.losses, whole.held_out_losses)
    assert same_bits(state.load_tensors(tmp_path, "weights"), weights_of(whole))
    assert len({file.name.split("-")[1] for file in tmp_path.glob("*.safetensors")}) == 1  # the older generation is gone


def test_a_state_from_before_a_setting_existed_had_its_default(tokens: Path, tmp_path: Path) -> None:
    run = Run(nano_spec(), SETTINGS, tokens)
    run.train_step()
    run.save(tmp_path)
    progress = json.loads((tmp_path / "progress.json").read_text(encoding="utf-8"))
    del progress["settings"]["repetition_share"], progress["settings"]["function_share"]
    (tmp_path / "progress.json").write_text(json.dumps(progress), encoding="utf-8")
    assert Run(nano_spec(), SETTINGS, tokens).resume(tmp_path)
    with pytest.raises(ConfigError, match="holds a run with settings"):
        Run(nano_spec(), replace(SETTINGS, repetition_share=0.25), tokens).resume(tmp_path)


def test_a_save_that_dies_leaves_the_state_before(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(nano_spec(), SETTINGS, tokens)
    run.train_step()
    run.save(tmp_path)
    saved = weights_of(run)
    run.train_step()

    def die(*paths: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", die)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path)
    again = Run(nano_spec(), SETTINGS, tokens)
    assert again.resume(tmp_path)
    assert again.step_idx == 1
    assert same_bits(weights_of(again), saved)
    (tmp_path / "progress.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is no training state"):
        again.resume(tmp_path)


def test_a_run_can_begin_with_given_weights(tokens: Path, tmp_path: Path) -> None:
    start = TrainingModel(replace(nano_spec(), delay=0), seed=9).state_dict()
    run = Run(nano_spec(), SETTINGS, tokens, start=start)
    assert same_bits(weights_of(run), start)
    run.save(tmp_path)
    with pytest.raises(ConfigError, match="holds a run with start_digest"):
        Run(nano_spec(), SETTINGS, tokens).resume(tmp_path)


def test_autosave_and_a_signal(tokens: Path, tmp_path: Path) -> None:
    run = Run(nano_spec(), replace(SETTINGS, num_steps=40), tokens)
    seen: list[int] = []
    with StopRequest() as stop:

        def advanced(step: int, num_steps: int | None, tokens_per_s: float) -> None:
            assert tokens_per_s > 0
            saved = state.load_progress(tmp_path)
            seen.append(saved["step"] if saved else 0)
            if step == 30:
                signal.raise_signal(signal.SIGTERM)

        finished = run.train(
            report=silent, report_every=40, advanced=advanced, stop=stop.is_asked, save_to=tmp_path, save_seconds=0
        )
    assert not finished
    assert seen == [0, 20]  # saved at every look at the clock; the rate is measured anew from step 20 on
    progress = state.load_progress(tmp_path)
    assert progress is not None
    assert progress["step"] == 30
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_schedules() -> None:
    def factors(schedule: str) -> list[float]:
        return [learning_rate_factor(step, 100, schedule=schedule, warmup_steps=10, decay_share=0.5) for step in range(100)]

    wsd, cosine = factors("wsd"), factors("cosine")
    assert wsd[:10] == cosine[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert wsd[9:51] == [1.0] * 42
    assert wsd[75] == 0.5
    assert cosine[55] == pytest.approx(0.5)
    assert all(earlier > later for earlier, later in itertools.pairwise(cosine[10:]))
    assert max(wsd[99], cosine[99]) < 0.03
    assert learning_rate_factor(10**6, None, schedule="wsd", warmup_steps=10, decay_share=0.5) == 1.0


def test_what_is_wrong_with_settings_is_named(tmp_path: Path, tokens: Path) -> None:
    for change, message in (
        ({"optimizer": "sgd"}, "optimizer must be one of muon, adamw, got 'sgd'"),
        ({"schedule": "step"}, "schedule must be one of wsd, cosine"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be more than 0"),
        ({"decay_share": 2.0}, "decay_share must be from 0 to 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(SETTINGS, **change)
    with pytest.raises(ConfigError, match="windows must be one of sdpa, flex, auto"):
        Execution(windows="triton")
    with pytest.raises(ConfigError, match="flex attention is trained on CUDA only"):
        Run(nano_spec(), SETTINGS, tokens, execution=Execution(windows="flex"))
    with pytest.raises(ConfigError, match="token id 319, but the model has a vocabulary of 300; prepare with --vocab-size 300"):
        Run(replace(nano_spec(), vocab_size=300), SETTINGS, tokens)
    assert with_windows(TrainingModel(nano_spec()), "auto", 32) == "sdpa"
    for text, message in (
        ("[run]\nsteps = 3\n", "there is no key 'steps'; known are num_steps"),
        ("[run]\nbatch = 'many'\n", "batch = 'many' is of the wrong type, it must be int"),
        ("[run]\nnum_steps = 1.5\n", r"num_steps = 1.5 is of the wrong type, it must be int \| None"),
        ("[execution]\ncompiled = 1\n", "compiled = 1 is of the wrong type, it must be bool"),
        ("[training]\n", r"has \[training\]"),
        ("[model]\nshape = 'nano'\nnum_lanes = 2\n", "shape and other keys"),
        ("[model]\nhidden_size = 32\n", "missing 5 required"),
        ("[model]\nshape =", "is no TOML"),
    ):
        whole = text if "[model]" in text else f"[model]\nshape = 'nano'\n{text}"
        (tmp_path / "bad.toml").write_text(whole, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_run_config(tmp_path / "bad.toml")


@pytest.mark.parametrize(("clock", "chosen"), [([0, 5, 10, 25], "sdpa"), ([0, 15, 20, 25], "flex")])
def test_the_faster_windows_are_kept(monkeypatch: pytest.MonkeyPatch, clock: list[float], chosen: str) -> None:
    model = TrainingModel(nano_spec())
    mask = model.window_mask = cast(BlockMask, object())
    seen: list[object] = []

    def loss() -> Tensor:
        seen.append(model.window_mask)
        return model.model.tok_embeddings.weight.sum()

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("time.perf_counter", iter(clock).__next__)
    found, times_s = faster_windows(model, loss, Ranks(0, 1, torch.device("cpu")))
    assert found == chosen
    assert times_s == {"sdpa": (clock[1] - clock[0]) / 5, "flex": (clock[3] - clock[2]) / 5}
    assert seen == [None] * 8 + [mask] * 8
    assert model.window_mask is (mask if chosen == "flex" else None)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_named_configurations() -> None:
    nano, demo = (read_run_config(ROOT / "configs" / "train" / f"{name}.toml") for name in ("nano", "demo"))
    assert (nano.spec, nano.settings.num_steps, nano.execution) == (nano_spec(), 200, Execution())
    assert (demo.spec, demo.settings.batch, demo.execution.windows) == (
        replace(demo_spec(), hidden_size=384, intermediate_size=1408), 96, "flex",
    )  # fmt: skip


def test_command_writes_curves_and_changes_what_the_file_says(tokens: Path, tmp_path: Path) -> None:
    command = [
        "run", "--config", str(ROOT / "configs" / "train" / "nano.toml"), "--data", str(tokens), "--state", str(tmp_path),
        "--steps", "4", "--batch", "2", "--time", "16", "--schedule", "cosine", "--report-every", "2",
    ]  # fmt: skip
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert json.loads(result.stdout.strip().split("\n")[-1])["finished"] is True
    progress = state.load_progress(tmp_path)
    assert progress is not None
    assert progress["settings"]["schedule"] == "cosine"
    assert progress["settings"]["learning_rate"] == 1e-2  # of the file
    curves = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))
    assert curves["data_digest"] == "00ff"
    assert curves["tokens"] == [64, 128]
    assert curves["losses"] == [loss for _, loss in progress["losses"]]
    assert (tmp_path / "curves.svg").read_text(encoding="utf-8").startswith('<svg xmlns="http://www.w3.org/2000/svg"')


def test_two_ranks_train_as_one_process_does(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is this process, rank 1 a second one; with the environment that torchrun gives, over gloo."""
    single = Run(nano_spec(), SETTINGS, tokens)
    single.train(report=silent, report_every=6)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    common = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "0", "LOCAL_RANK": "0",
    }  # fmt: skip
    command = [
        "run", "--data", str(tokens), "--state", str(tmp_path), "--model", "nano", "--steps", "12", "--batch", "4",
        "--time", "32", "--lr", "1e-2", "--adam-lr", "1e-2", "--warmup-steps", "2", "--report-every", "6",
    ]  # fmt: skip
    for name, value in common.items():
        monkeypatch.setenv(name, value)
    second = subprocess.Popen(
        [sys.executable, "-m", "kog_dist.train", *command], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        out, err = second.communicate(timeout=60)
    finally:
        second.kill()
    assert second.returncode == 0, err
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert not [name for name in names if "gloo" in name], "threads of the group would meet the end of the process"
    assert "processes: 2" in result.stdout
    assert out == ""  # the first alone reports
    found = state.load_tensors(tmp_path, "weights")
    torch.testing.assert_close(found, weights_of(single), rtol=0, atol=2e-4)  # sums in another order, then Muon
    progress = state.load_progress(tmp_path)
    assert progress is not None
    assert [loss for _, loss in progress["losses"]] == pytest.approx([loss for _, loss in single.losses], abs=1e-3)


def test_durations() -> None:
    assert [duration(s) for s in (5, 125, 3725, float("inf"))] == ["0:05", "2:05", "1:02:05", "?"]


def test_a_state_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    state.make_folder(tmp_path / "new" / "state")
    assert list((tmp_path / "new" / "state").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"the state folder .*/file cannot be written: File exists"):
        state.make_folder(tmp_path / "file")


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device must be cpu, cuda or cuda:N, got 'tpu'"):
        one_device("tpu")
