"""Bytes per token and the peak that they are compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from kog_dist.bench.shapes import DENSE
from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.gateway.engine_facts import devices, engine_facts, read_checkpoint
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.hardware.gpus import Gpu
from kog_dist.launch.banner import facts_of
from kog_dist.launch.inspection import check, cpu_rank_bytes, dry_run
from kog_dist.launch.target import choose_target
from kog_dist.model.checkpoint import Checkpoint, planned_checkpoint
from kog_dist.model.spec import laneformer_2b
from kog_dist.model.weight_bytes import bytes_per_token
from kog_dist.rpc.messages import EngineState, StatusReport
from tests.unit.gguf_files import random_tensors, write_gguf

H200 = Gpu(0, "GPU-0123456789ab", "NVIDIA H200", "0000:01:00.0", peak_bytes_s=4.9e12)
GPUS = (H200, replace(H200, index=1, uuid="GPU-ba9876543210"))
REPORT = StatusReport(EngineState.READY, "one", "demo", "b", 1, 2, (), (), 1.0, None, (), 4, 0, 0, 0, 0, 0, 0, 0)


def on_gpus(*gpus: Gpu) -> StatusReport:
    return replace(REPORT, world_size=len(gpus), rank_places=tuple(f"{gpu}, pinned to CPUs 0-7" for gpu in gpus))


@pytest.fixture
def laneformer(tmp_path: Path) -> Checkpoint:
    (tmp_path / "config.json").write_text(json.dumps({**laneformer_2b().to_config(), "dtype": "bfloat16"}))
    return planned_checkpoint(tmp_path)


@pytest.mark.parametrize("library", [None, Path("x.so")])
def test_cpu_ranks_read_what_they_keep_and_have_no_known_peak(
    library: Path | None, laneformer: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_library, "library", lambda: library)
    spec, width = laneformer.spec, 2 if library else 4
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    read = spec.num_parameters - spec.vocab_size * spec.hidden_size - norms
    assert engine_facts(4096, laneformer, REPORT, GPUS) == EngineFacts(4096, width * read + 2 * 4 * norms), (
        "each rank has the norms"
    )


def test_gpus_together(laneformer: Checkpoint) -> None:
    facts = engine_facts(4096, laneformer, on_gpus(*GPUS), GPUS)
    assert facts.bytes_per_token == laneformer_2b().bytes_per_token(2)
    assert facts.peak_bytes_s == 9.8e12
    assert facts.peak_source == "2 x memory clock x bus width (NVML)"
    assert engine_facts(4096, laneformer, on_gpus(H200), GPUS).peak_source == "memory clock x bus width (NVML)"


def test_of_several_engines_one(laneformer: Checkpoint) -> None:
    report = replace(on_gpus(*GPUS), replica_names=("r0", "r1"))
    assert engine_facts(4096, laneformer, report, GPUS).peak_bytes_s == 4.9e12


def test_no_peak_without_every_gpu_s_own(laneformer: Checkpoint) -> None:
    for here in ((), (H200,), (H200, replace(GPUS[1], peak_bytes_s=0.0))):
        facts = engine_facts(4096, laneformer, on_gpus(*GPUS), here)
        assert (facts.bytes_per_token > 0, facts.peak_bytes_s) == (True, 0.0)


def test_unknown_models_have_no_facts(tmp_path: Path) -> None:
    assert read_checkpoint(None) is read_checkpoint(str(tmp_path)) is None
    assert engine_facts(64, None, REPORT, ()) == EngineFacts(64)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"no model")
    assert read_checkpoint(str(path)) is None
    demo = read_checkpoint(str(Path(str(resources.files("kog_dist"))) / "models" / "demo"))
    assert demo is not None
    assert (demo.spec.num_lanes, demo.stored_format) == (8, "bfloat16")
    assert engine_facts(64, demo, replace(REPORT, world_size=3), ()) == EngineFacts(64), "no engine of this model"


def test_what_a_token_reads_of_quantised_weights(tmp_path: Path) -> None:
    config = {**DENSE["llama-3.1-8b"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = str(tmp_path)
    plain, rounded = read_checkpoint(folder), read_checkpoint(folder, "int4")
    assert plain is not None
    assert rounded is not None
    assert (plain.spec.num_lanes, rounded.spec.num_lanes) == (8, 4)
    reads = [engine_facts(4096, model, on_gpus(H200), GPUS).bytes_per_token for model in (plain, rounded)]
    assert reads == [bytes_per_token(plain), bytes_per_token(rounded)]
    assert reads[1] < 0.4 * reads[0]


@pytest.mark.parametrize(("form", "said"), [("Q4_1", "Q4_1 (read as float16)"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_all_say_the_same_of_a_gguf_file(tmp_path: Path, form: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Banner, --check, --dry-run, page and /kog/info: how it is stored, and what a token reads."""
    monkeypatch.setattr(host_library, "library", lambda: Path("x.so"))
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_tensors("llama"), form=form)
    settings = LaunchConfig(model=str(path), device="cpu", ranks=1)
    checkpoint = read_checkpoint(str(path))
    assert checkpoint is not None
    assert checkpoint.stored_format == said.partition(" ")[0]
    facts = engine_facts(256, checkpoint, replace(REPORT, world_size=1), ())
    assert facts_of(choose_target(settings))["model"].endswith(f"parameters, {said}")
    checked, planned = check(settings), dry_run(settings)
    assert f"parameters, {said}, 1 file" in checked
    assert f"parameters, {said} on disk" in planned
    assert f"{facts.bytes_per_token / 2**10:.1f} KiB read per token" in planned
    assert (f"({facts.bytes_per_token / 2**20:.1f} MiB read per token)" in checked) == (form == "Q4_1")
    assert facts.bytes_per_token == cpu_rank_bytes(choose_target(settings), 0)["read"]


def test_devices_are_counted_by_name() -> None:
    assert devices(on_gpus(*GPUS)) == {"NVIDIA H200": 2}
    assert devices(on_gpus(H200, replace(H200, index=1, name="NVIDIA H100 80GB HBM3"))) == {
        "NVIDIA H200": 1, "NVIDIA H100 80GB HBM3": 1,
    }  # fmt: skip
    assert devices(replace(REPORT, rank_places=("a GPU that is not here, not pinned",))) == {"GPU": 1}
    assert devices(REPORT) == {"CPU": 2}
    assert devices(replace(REPORT, replica_names=("r0",))) == {}, "a router does not say"
