"""Every file of configs/ through `kog-launch --config FILE --dry-run`, on whatever machine this is, and what dry runs say."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from kog_dist.launch import gpu_choice, inspection
from kog_dist.launch.flags import run
from tests.unit.eight_lanes import write_config
from tests.unit.fake_nvml import FakeGpu, FakeNvml, node

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPES = {  # launcher, ranks, device
    "laptop": ("local", 2, "cpu"), "gpu1": ("local", 1, "cuda"), "gpu2": ("local", 2, "cuda"), "gpu4": ("local", 4, "cuda"),
    "gpu8": ("local", 8, "cuda"), "mpi": ("mpi", 4, "cpu"), "ray": ("ray", 2, "cpu"), "replicas": ("local", 2, "cpu"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KOG_", "OMPI_", "PMI_", "SLURM_", "RAY_", "CUDA_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(inspection, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=12))


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments, "--dry-run"]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_every_shape_has_a_file() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_config_file_can_be_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher, num_ranks, device = SHAPES[name]
    is_for_more = num_ranks == 8  # GPUs than the demo model can run on
    model = [str(write_config(tmp_path))] if is_for_more else []
    text = dry_run(capsys, *model, "--config", str(CONFIGS / f"{name}.toml"))
    assert re.search(rf"^launcher   {launcher}, because ", text, re.M)
    assert re.search(rf"^ranks      {num_ranks} on {device}, {8 // num_ranks} lanes? each$", text, re.M)
    assert [int(rank) for rank in re.findall(r"^rank (\d+) ", text, re.M)] == list(range(num_ranks))
    assert re.search(r"^ceiling    [\d.,]+ tokens/s", text, re.M)
    assert ("2 engines" in text) == (name == "replicas")
    if device == "cuda":
        assert "a GPU that is not here" in text
        assert "refused    on this machine now: --gpus" in text
    written = tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))
    assert written["instance"] == name
    code = 3 if is_for_more else 0
    assert run(["--config", str(CONFIGS / f"{name}.toml"), "--check"]) == code, "no GPU is needed to look at a checkpoint"


def test_a_dry_run_shows_the_gpus_that_are_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", node())
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    text = dry_run(capsys, "--gpus", "5,0")
    assert re.search(r"^rank 0     lanes 0-3 on GPU 5 \(NVIDIA H200, GPU-00000005\)", text, re.M)
    assert re.search(r"^rank 1     lanes 4-7 on GPU 0 \(NVIDIA H200, GPU-00000000\), pinned to CPUs \d", text, re.M)
    assert "at 4.9 TB/s for each GPU\n           (from memory clock x bus width)" in text
    assert "refused" not in text
    assert "not pinned" in dry_run(capsys, "--gpus", "1", "--no-pin")
    assert "refused" not in dry_run(capsys, "--gpus", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6")
    assert "on GPU 6 (" in dry_run(capsys, "--gpus", "all")


def test_a_dry_run_says_why_prompts_go_token_by_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(_index: int, gpu: FakeGpu) -> None:
        gpu.free = round(1.3 * 2**30)

    monkeypatch.setitem(sys.modules, "pynvml", node(8, fill))
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    text = dry_run(capsys, "--gpus", "1")
    assert re.search(r"^note       prompts go token by token: prefill takes 0\.\d GiB, which do not fit$", text, re.M)
    assert "weights of prefill" not in text
    assert "refused" not in text
    assert "for prefill, which --prefill off does without" in dry_run(capsys, "--gpus", "1", "--prefill", "on")


def test_a_wrong_configuration_is_refused_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (
        (["--gpus", "3"], 2),
        (["--gpus", "one"], 2),
        (["--gpus", "all"], 3),
        (["--gpus", "2", "--ranks", "4"], 2),
    ):
        assert run([*arguments, "--dry-run"]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
