"""What `--dry-run` and `--check` say of published models with gated delta nets, against sums by hand."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kog_dist.config import LaunchConfig
from kog_dist.decode.plan.recipes import position_values, state_bytes
from kog_dist.errors import KogError
from kog_dist.launch import inspection
from kog_dist.launch.inspection import check, cpu_rank_bytes, dry_run
from kog_dist.launch.target import Target, plan_target
from kog_dist.model.checkpoint import planned_checkpoint
from kog_dist.model.layers import DeltaNet
from kog_dist.model.weight_bytes import bytes_per_token
from kog_dist.runtime import memfd
from tests.unit.delta_configs import CONFIGS

MIB = 2**20
FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc", "model.language_model.layers.0.linear_attn.in_proj_a"],
}  # fmt: skip
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": ["re:.*linear_attn.*", "re:model.visual.*", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}},
}  # fmt: skip
# Per code: of FP8 a 16-bit scale for 128 x 128, of INT4 one for 32 columns.
BITS = {"none": 16.0, "fp8": 8 + 16 / 128**2, "int4": 4 + 16 / 32}


def by_hand(config: dict[str, Any], form: str) -> float:
    """Bytes of the weights that a token reads."""
    text = config.get("text_config", config)
    d, layers = text["hidden_size"], text["num_hidden_layers"]
    full = layers // 4
    keys, values = (text[f"linear_num_{kind}_heads"] * 128 for kind in ("key", "value"))
    delta = (2 * keys + 2 * values) * d + values * d
    plain = (layers - full) * (2 * text["linear_num_value_heads"] * d + 4 * (2 * keys + values))
    attention = 3 * 256 * text["num_attention_heads"] * d + 2 * 256 * text["num_key_value_heads"] * d
    if "num_experts" in text:
        width = text["num_experts_per_tok"] * text["moe_intermediate_size"] + text["shared_expert_intermediate_size"]
        plain += layers * (text["num_experts"] + 1) * d
    else:
        width = text["intermediate_size"]
    coded = full * attention + layers * 3 * width * d
    if form == "int4":
        plain += (layers - full) * delta
    else:
        coded += (layers - full) * delta
    return float(coded * BITS[form] / 8 + 2 * (plain + text["vocab_size"] * d))


FORMS = [(name, "none") for name in CONFIGS] + [
    ("Qwen3.5-35B-A3B", "fp8"), ("Qwen3.5-35B-A3B", "int4"), ("Qwen3.5-27B", "fp8"), ("Qwen3.5-27B", "int4"),
    ("Qwen3.5-9B", "fp8"), ("Qwen3-Next-80B-A3B", "fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_bytes_of_a_token(name: str, form: str, tmp_path: Path) -> None:
    """To a thousandth: norms and the smallest tensors are not in the sum. Published figures are within 2 %."""
    said: dict[str, Any] = {"none": {}, "fp8": {"quantization_config": FP8}, "int4": {"quantization_config": INT4}}
    config = CONFIGS[name] | said[form]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = planned_checkpoint(tmp_path)
    expected = by_hand(config, form)
    assert abs(bytes_per_token(checkpoint) - expected) < 1e-3 * expected
    nets = [layer.mixer for layer in checkpoint.spec.layers if isinstance(layer.mixer, DeltaNet)]
    heads = config.get("text_config", config)["linear_num_value_heads"]
    assert state_bytes(checkpoint.spec) == len(nets) * 4 * (heads * 128 * 128 + 3 * (2 * 16 * 128 + heads * 128))
    published = {("Qwen3.5-35B-A3B", "none"): 6.02e9, ("Qwen3.5-35B-A3B", "fp8"): 3.61e9, ("Qwen3.5-27B", "none"): 51.5e9,
                 ("Qwen3.5-27B", "fp8"): 27.2e9, ("Qwen3.5-9B", "none"): 16.0e9, ("Qwen3.5-9B", "fp8"): 9.05e9,
                 ("Qwen3-Next-80B-A3B", "none"): 7.27e9, ("Qwen3-Next-80B-A3B", "fp8"): 4.07e9}.get((name, form))  # fmt: skip
    if published is not None:
        assert abs(expected + 2 * state_bytes(checkpoint.spec) - published) < 0.02 * published


@pytest.mark.parametrize("name", CONFIGS)
def test_a_dry_run_counts_states_and_their_copies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of config.json alone, whatever this machine has; with a context of 32,768 on two ranks where it can be divided."""
    ranks = ranks_of(name)
    monkeypatch.setattr(inspection, "_read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**50)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    targets = list[Target]()

    def noted(settings: LaunchConfig, *, needs_weights: bool) -> tuple[Target, tuple[KogError, ...]]:
        planned_target = plan_target(settings, needs_weights=needs_weights)
        targets.append(planned_target[0])
        return planned_target

    monkeypatch.setattr(inspection, "plan_target", noted)
    text = dry_run(LaunchConfig(model=str(tmp_path), device="cpu", ranks=ranks, context=32_768, pin=False))
    (planned,) = targets
    spec, uses = planned.checkpoint.spec, [cpu_rank_bytes(planned, rank) for rank in range(ranks)]
    layers = spec.num_layers // 4
    lanes = spec.num_lanes
    kv = 4 * layers * 2 * max(spec.num_kv_heads, lanes) * 256  # float32; lanes beyond the KV heads have copies
    assert position_values(spec) * 4 == kv
    for of_rank in uses:
        assert of_rank["cache"] == kv * 32_768 // ranks
        assert of_rank["state"] == state_bytes(spec) // ranks
    assert f"4 x {uses[0]['state'] / MIB:.1f} MiB state, read and written per token, " in text
    copies = 16 + 11 * (planned.parallel - 1)
    tokens = copies * uses[0]["state"] // 3 // (64 * kv // ranks) * 64  # a quarter of the pool is blocks
    assert f" for kept prefixes ({copies} copies of the state, {tokens} tokens)" in text
    assert planned.kept_bytes == -(-copies * uses[0]["state"] * 4 // 3)
    read = sum(of_rank["read"] + 2 * of_rank["state"] for of_rank in uses)
    ceiling = 1e10 / read
    assert f"ceiling    {ceiling:.2f} tokens/s here: {read / MIB:.1f} MiB per token" in text
    assert "GPUs cannot run this model" not in text


def ranks_of(name: str) -> int:
    """Two, but for the smallest, whose layers are one lane."""
    return 1 if name == "Qwen3.5-0.8B" else 2


KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig), "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
}  # fmt: skip


def write_sparse(config: dict[str, Any], folder: Path) -> int:
    """A folder with the tensors that transformers' model has, and those of images and drafts; all 0, and none on the disk. Their
    bytes.
    """
    kind, of_text = KINDS[config["model_type"]]
    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape) for name, tensor in kind(of_text(**config.get("text_config", config))).state_dict().items()
        }
    if config.get("tie_word_embeddings"):
        del shapes["lm_head.weight"]  # which is the embedding, and not stored twice
    if "text_config" in config:
        shapes = {name.replace("model.", "model.language_model.", 1): shape for name, shape in shapes.items()}
        shapes |= {"model.visual.merger.norm.bias": (8,), "mtp.norm.weight": (8,)}
    header, place, begin = dict[str, Any](), dict[str, str](), 0
    for name, shape in shapes.items():
        end = begin + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        place[name], begin = "model-00001-of-00001.safetensors", end
    raw = json.dumps(header).encode()
    path = folder / "model-00001-of-00001.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + begin)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": begin}, "weight_map": place}))
    (folder / "config.json").write_text(json.dumps(config))
    return begin


@pytest.mark.parametrize("name", CONFIGS)
def test_a_check_of_the_published_tensors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and shapes as transformers has them; without their values."""
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2**50)
    num_bytes = write_sparse(CONFIGS[name], tmp_path)
    said = check(LaunchConfig(model=str(tmp_path), device="cpu", ranks=ranks_of(name), context=4096, pin=False))
    planned = planned_checkpoint(tmp_path, context=4096)  # of the spec that was checked: its tensors are listed once
    assert f"{planned.spec.num_parameters:,} parameters, bfloat16, 1 file, {num_bytes / MIB:.1f} MiB" in said
    assert 2 * planned.spec.num_parameters == num_bytes - (32 if "text_config" in CONFIGS[name] else 0)
    if "A3B" in name:
        assert f"({bytes_per_token(planned) / MIB:.1f} MiB per token as they are)" in said
    if "text_config" in CONFIGS[name]:
        assert said.endswith("tensors left out: 1 of images, 1 of multi-token prediction")
