"""Training on a GPU: compiled layers compute what plain ones do, pieces give the bits of one go, two GPUs train as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kog_dist.train.distributed import Ranks
from kog_dist.train.model import Residual, TrainingModel
from kog_dist.train.run import Run
from kog_dist.train.settings import Execution, RunSettings
from kog_dist.train.specs import ablation_spec, demo_spec
from kog_dist.train.state import load_tensors
from tests.unit.train.tokens import write_tokens

ROOT = Path(__file__).parents[2]
SETTINGS = RunSettings(num_steps=20, batch=8, time=256, warmup_steps=2)
FORMS = {
    "delay 0": replace(ablation_spec(), delay=0),
    "delay 2": ablation_spec(),
    "delay 2 without early": replace(ablation_spec(), early_comm=False),
    "none": replace(ablation_spec(), attention_comm=False, mlp_comm=False),
    "ladder": replace(ablation_spec(), delay=0),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"), vocab_size=4096, num_tokens=200_000)


def cuda() -> Ranks:
    return Ranks(0, 1, torch.device("cuda"))


def silent(line: str) -> None:
    assert line


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # what torch.compile warns of is its own affair
@pytest.mark.parametrize("form", FORMS)
def test_compiled_layers_compute_what_plain_ones_do(form: str) -> None:
    residual = Residual.LADDER if form == "ladder" else Residual.LANES
    model = TrainingModel(FORMS[form], seed=1, residual=residual).cuda()
    ids = torch.randint(0, 4096, (4, 257), generator=torch.Generator().manual_seed(0)).cuda()
    outcomes = []
    for compiled in (False, True):
        if compiled:
            model.compile_layers()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        outcomes.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        model.zero_grad()
    exact = TrainingModel(FORMS[form], seed=1, residual=residual).double().cuda()
    expected = exact.loss(ids[:, :-1], ids[:, 1:])
    expected.backward()  # type: ignore[no-untyped-call]
    for loss, gradients in outcomes:
        assert float((loss - expected).abs()) < 2e-3
        for name, parameter in exact.named_parameters():
            found, wanted = gradients[name], parameter.grad
            assert found is not None
            assert wanted is not None
            assert float((found - wanted).norm() / wanted.norm()) < 0.05, name


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("windows", "graph"), [("sdpa", False), ("flex", False), ("auto", False), ("sdpa", True), ("flex", True)]
)
def test_runs_repeat_their_bits_and_resume(tokens: Path, tmp_path: Path, windows: str, graph: bool) -> None:
    execution = Execution(compiled=True, windows=windows, cuda_graph=graph)
    spec = replace(demo_spec(), num_layers=3, window_layers=(0, 1), max_context=256, sliding_window=128)
    runs = [Run(spec, SETTINGS, tokens, ranks=cuda(), execution=execution) for _ in range(3)]
    assert runs[0].train(report=silent, report_every=10)
    runs[1].windows, runs[1].module.window_mask = runs[0].windows, runs[0].module.window_mask
    assert not runs[1].train(report=silent, report_every=10, call_seconds=0, save_to=tmp_path)
    assert runs[2].resume(tmp_path)
    assert runs[2].train(report=silent, report_every=10)
    assert runs[0].losses == runs[2].losses
    weights = [run.module.state_dict() for run in runs]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


@pytest.mark.gpu(1)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_a_graph_of_a_step_trains_as_steps_do(tokens: Path) -> None:
    settings = replace(SETTINGS, schedule="cosine", repetition_share=0.25)
    weights, losses = [], []
    for graph in (False, True):
        run = Run(ablation_spec(), settings, tokens, ranks=cuda(), execution=Execution(compiled=True, cuda_graph=graph))
        assert run.train(report=silent, report_every=5)
        weights.append({name: weight.clone() for name, weight in run.module.state_dict().items()})
        losses.append([loss for _, loss in run.losses + run.held_out_losses])
        run.close()
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    for name, weight in weights[0].items():
        assert float((weights[1][name] - weight).norm() / weight.norm()) < 0.01, name


@pytest.mark.gpu(2)
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_two_gpus_train_as_one_does(tokens: Path, tmp_path: Path) -> None:
    settings = ["--model", "ablation", "--steps", "20", "--batch", "8", "--time", "256", "--warmup-steps", "2", "--compile"]
    command = ["-m", "kog_dist.train", "run", "--data", str(tokens), "--device", "cuda", *settings]
    for name, launcher in (("one", []), ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])):
        done = subprocess.run(
            [sys.executable, *launcher, *command, "--state", str(tmp_path / name)], cwd=ROOT, env=os.environ, text=True,
            capture_output=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (load_tensors(tmp_path / name, "weights") for name in ("one", "two"))
    for name, weight in one.items():
        assert float((two[name] - weight).norm() / weight.norm()) < 0.05, name
