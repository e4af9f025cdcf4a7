"""What is read from configs of models that people run, and what a start of them would need: pinned as text (pinning.py)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kog_dist.bench.shapes import DENSE, MOE, QUANTISED
from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.errors import KogError
from kog_dist.hardware.gpus import inventory_from
from kog_dist.launch import gpu_choice, inspection
from kog_dist.model.families.dense import lanes_of
from kog_dist.model.formats.quantisation import read_quantisation
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.published_config import family_of, read_config, read_config_file
from kog_dist.model.rope import rope_frequencies, rope_table
from kog_dist.model.spec import laneformer_2b
from kog_dist.runtime import memfd
from tests.unit.fake_nvml import node
from tests.unit.pinning import compare, digest

LLAMA, OSS = DENSE["llama-3.2-1b"], MOE["gpt-oss-20b"]
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with all": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16, "beta_slow": 2,
        "attention_factor": 1.2, "truncate": False,
    },
}  # fmt: skip
CONFIGS = {
    **DENSE, **MOE, "laneformer": laneformer_2b().to_config(),
    **{f"llama, {name}": {**LLAMA, "rope_scaling": scaling} for name, scaling in SCALINGS.items()},
    "mistral, windows": {**DENSE["mistral-7b"], "sliding_window": 4096},
    "qwen2, windows": {**DENSE["qwen2.5-0.5b"], "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 20},
}  # fmt: skip
STARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "laneformer on GPUs": (CONFIGS["laneformer"], {"device": "cuda", "gpus": "4"}),
    "laneformer on CPUs": (CONFIGS["laneformer"], {"device": "cpu", "ranks": 2}),
    "llama-8b on a GPU": (dict(DENSE["llama-3.1-8b"]), {"device": "cuda", "gpus": "1", "context": 32768}),
    "llama-8b on CPUs": (dict(DENSE["llama-3.1-8b"]), {"device": "cpu", "ranks": 2}),
    "qwen3 rounded": (dict(DENSE["qwen3-8b"]), {"device": "cuda", "gpus": "2", "quantize": "int4", "quantize_head": "int8"}),
    "mistral in fp8": ({**DENSE["mistral-7b"], "quantization_config": QUANTISED["fp8"]}, {"device": "cuda", "gpus": "1"}),
    "qwen2 in int4": ({**DENSE["qwen2.5-0.5b"], "quantization_config": QUANTISED["int4"]}, {"device": "cpu", "ranks": 1}),
    "gpt-oss on a GPU": (dict(OSS), {"device": "cuda", "gpus": "1", "kv_dtype": "fp8"}),
    "gpt-oss on CPUs": (dict(OSS), {"device": "cpu", "ranks": 2, "context": 4096, "kv_caches": 2}),
    "gpt-oss checked": (dict(OSS), {"device": "cuda", "gpus": "2", "check_experts": True, "prefill": "off"}),
    "replicas": (dict(DENSE["smollm2-135m"]), {"device": "cuda", "gpus": "1", "replicas": 4}),
    "a few replicas": (dict(DENSE["smollm2-135m"]), {"device": "cpu", "ranks": 1, "min_replicas": 1, "max_replicas": 3}),
    "too deep": ({**DENSE["llama-3.1-8b"], "num_hidden_layers": 400}, {"device": "cuda", "gpus": "1"}),
    "too large for CPUs": ({**DENSE["llama-3.1-8b"], "num_hidden_layers": 80}, {"device": "cpu", "ranks": 1, "context": 4096}),
}  # fmt: skip


def of_config(config: dict[str, Any]) -> Iterator[str]:
    spec, family = read_config(config), family_of(config)
    yield str(spec)
    yield f"{spec.num_parameters} parameters, {spec.bytes_per_token(2)} bytes per token, lanes for codes {lanes_of(spec, 128)}"
    layouts = tensor_layouts(spec)
    yield f"{len(layouts)} tensors {digest(repr(sorted(layouts.items())))}"
    yield f"names {digest(repr(sorted(family.stored_names(spec, layouts).items())))}"
    for name in [name for name in layouts if ".1." in name or "layers" not in name]:
        yield f"  {name}: {layouts[name]}"
    frequencies = rope_frequencies(spec)
    yield f"frequencies {[f'{value:.5g}' for value in frequencies[:: len(frequencies) // 6]]}"
    cosines, sines = rope_table(spec, 300)
    yield f"turns {[f'{table[row, pair]:.4f}' for table in (cosines, sines) for row in (7, 299) for pair in (1, -1)]}"


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_say_what_they_said(name: str) -> None:
    compare(f"configs/{name}", list(of_config(dict(CONFIGS[name]))))


def test_quantised_configs_say_what_they_said() -> None:
    found = {name: read_quantisation({"quantization_config": said}) for name, said in QUANTISED.items()}
    found["gpt-oss"] = read_quantisation(OSS)
    compare("configs/quantised", [f"{name}: {said}" for name, said in found.items()])


@pytest.mark.parametrize("name", STARTS)
def test_starts_need_what_they_needed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, settings = STARTS[name]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    monkeypatch.setattr(memfd, "available_bytes", lambda: 200 * 2**30)
    monkeypatch.setattr(host_library, "library", lambda: None)
    monkeypatch.setattr(inspection, "_read_bandwidth", lambda: 1.25e10)
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_choice, "read_inventory", lambda: inventory_from(node(8)))
    try:
        text = inspection.dry_run(LaunchConfig(model=str(folder), pin=False, quantize_cache="off", **settings))
    except KogError as error:
        text = f"{type(error).__name__}: {error}"
    compare(f"starts/{name}", text.replace(str(tmp_path), "").splitlines())


def test_settings_have_the_limits_that_they_had() -> None:
    def line(field: dataclasses.Field[Any]) -> str:
        return f"{field.name} = {field.default!r}: { ({key: value for key, value in field.metadata.items() if key != 'help'}) }"

    compare("settings", [line(field) for field in dataclasses.fields(LaunchConfig)])


def test_a_folder_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "torch_dtype": "float16", "unheard_of": 1}))
    found = read_config_file(tmp_path)
    assert (found.spec, found.dtype, found.quantisation) == (read_config(LLAMA), "float16", None)
    assert found.note == "config.json: 'unheard_of' left out"
