"""Bytes per token and the peak that they are compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

from kog_dist.bench.kernel.shapes import DENSE, QUANTISED
from kog_dist.gateway.engine_facts import devices, engine_facts, has_codes, read_format, read_spec
from kog_dist.gateway.engine_metrics import EngineFacts
from kog_dist.hardware.gpus import Gpu
from kog_dist.model.spec import laneformer_2b
from kog_dist.rpc.messages import EngineState, StatusReport
from tests.unit.gguf_files import random_tensors, write_gguf

H200 = Gpu(0, "GPU-0123456789ab", "NVIDIA H200", "0000:01:00.0", peak_bytes_s=4.9e12)
GPUS = (H200, replace(H200, index=1, uuid="GPU-ba9876543210"))
REPORT = StatusReport(EngineState.READY, "one", "demo", "b", 1, 2, (), (), 1.0, None, (), 4, 0, 0, 0, 0, 0, 0, 0)


def on_gpus(*gpus: Gpu) -> StatusReport:
    return replace(REPORT, world_size=len(gpus), rank_places=tuple(f"{gpu}, pinned to CPUs 0-7" for gpu in gpus))


def test_cpu_ranks_read_float32_and_have_no_known_peak() -> None:
    spec = laneformer_2b()
    assert engine_facts(4096, spec, REPORT, GPUS) == EngineFacts(
        4096, 4 * (spec.num_parameters - spec.vocab_size * spec.hidden_size)
    )


def test_gpus_together() -> None:
    facts = engine_facts(4096, laneformer_2b(), on_gpus(*GPUS), GPUS)
    assert facts.bytes_per_token == laneformer_2b().bytes_per_token(2)
    assert facts.peak_bytes_s == 9.8e12
    assert facts.peak_source == "2 x memory clock x bus width (NVML)"
    assert engine_facts(4096, laneformer_2b(), on_gpus(H200), GPUS).peak_source == "memory clock x bus width (NVML)"


def test_of_several_engines_one() -> None:
    report = replace(on_gpus(*GPUS), replica_names=("r0", "r1"))
    assert engine_facts(4096, laneformer_2b(), report, GPUS).peak_bytes_s == 4.9e12


def test_no_peak_without_every_gpu_s_own() -> None:
    for here in ((), (H200,), (H200, replace(GPUS[1], peak_bytes_s=0.0))):
        facts = engine_facts(4096, laneformer_2b(), on_gpus(*GPUS), here)
        assert (facts.bytes_per_token > 0, facts.peak_bytes_s) == (True, 0.0)


def test_unknown_models_have_no_facts(tmp_path: Path) -> None:
    assert read_spec(None) is read_spec(str(tmp_path)) is None
    assert engine_facts(64, None, REPORT, ()) == EngineFacts(64)
    demo = read_spec(str(Path(str(resources.files("kog_dist"))) / "models" / "demo"))
    assert demo is not None
    assert demo.num_lanes == 8


def test_what_a_token_reads_of_quantised_weights_is_not_told(tmp_path: Path) -> None:
    config = {**DENSE["llama-3.1-8b"], "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = str(tmp_path)
    assert not has_codes(folder)
    assert has_codes(folder, "int4")
    plain, rounded = read_spec(folder), read_spec(folder, "int4")
    assert plain is not None
    assert rounded is not None
    assert (plain.num_lanes, rounded.num_lanes) == (8, 4)
    assert engine_facts(4096, rounded, on_gpus(H200), GPUS, has_codes=True) == EngineFacts(4096)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED["fp8"]}))
    assert has_codes(folder)
    assert not has_codes(None)


def test_the_format_is_that_of_most_values(tmp_path: Path) -> None:
    assert read_format(None) is read_format(str(tmp_path)) is None
    assert read_format(str(Path(str(resources.files("kog_dist"))) / "models" / "demo")) == "bfloat16"
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", random_tensors("llama"), form="Q4_1")
    assert read_format(str(path)) == read_format(str(tmp_path)) == "Q4_1"
    path.write_bytes(b"no model")
    assert read_format(str(path)) is None


def test_devices_are_counted_by_name() -> None:
    assert devices(on_gpus(*GPUS)) == {"NVIDIA H200": 2}
    assert devices(on_gpus(H200, replace(H200, index=1, name="NVIDIA H100 80GB HBM3"))) == {
        "NVIDIA H200": 1, "NVIDIA H100 80GB HBM3": 1,
    }  # fmt: skip
    assert devices(replace(REPORT, rank_places=("a GPU that is not here, not pinned",))) == {"GPU": 1}
    assert devices(REPORT) == {"CPU": 2}
    assert devices(replace(REPORT, replica_names=("r0",))) == {}, "a router does not say"
