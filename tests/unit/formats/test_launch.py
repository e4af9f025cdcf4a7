"""Engines of quantised weights: what `--check` and `--dry-run` say of them, refusals on GPUs, and CPU ranks that answer alike."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kog_dist.config import LaunchConfig
from kog_dist.decode.coding import Coding
from kog_dist.decode.cpu import host_library
from kog_dist.errors import ConfigError
from kog_dist.launch.gpu_choice import gpu_rank_bytes
from kog_dist.launch.inspection import check, cpu_rank_bytes, dry_run
from kog_dist.launch.target import plan_target
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.weight_bytes import bytes_per_token, num_quantised
from kog_dist.runtime import memfd
from kog_dist.runtime.topology import RankInfo
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.cuda_device import kernel_shapes
from tests.unit.formats.folders import made, save
from tests.unit.formats.writers import gptq

QWEN3_4B_FP8 = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936, "max_position_embeddings": 40960,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
}  # fmt: skip


def test_a_check_says_the_format_and_what_a_token_reads(tmp_path: Path) -> None:
    made(tmp_path, "fp8")
    text = check(LaunchConfig(model=str(tmp_path), device="cpu", ranks=2), deep=True)
    per_token = bytes_per_token(open_checkpoint(tmp_path)) / 2**20
    said = "parameters, FP8 (E4M3) in blocks of 16 x 16, F32 scales, as published (fp8), the rest bfloat16, 2 files, "
    assert said in text
    assert f"MiB ({per_token:.1f} MiB per token as they are), 4 lanes" in text


def test_a_dry_run_of_config_json_alone_counts_codes_and_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "available_bytes", lambda: 64 * 2**30)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B_FP8))
    text = dry_run(LaunchConfig(model=str(tmp_path), device="cpu", ranks=1))
    layers = 36 * (2560 * 128 * (2 * 32 + 2 * 8) + 3 * 2560 * 9728)
    read = layers * (1 + 2 / 128**2) + 2 * 2560 * 151936
    assert (
        "FP8 (E4M3) in blocks of 128 x 128, BF16 scales, as published (fp8), the rest bfloat16; the folder has no weights" in text
    )
    assert "4 lanes with delay 0" in text
    assert "GPUs do not run" not in text
    found = re.search(r"1 GPU .*H200 at most ([0-9,]+) tokens/s", text)
    assert found is not None
    assert abs(int(found[1].replace(",", "")) - 4.57e12 / read) < 2
    assert "weights in float32" in text


def test_cpu_ranks_are_said_to_keep_float32(tmp_path: Path) -> None:
    made(tmp_path, "awq")
    settings = LaunchConfig(model=str(tmp_path), device="cpu", ranks=2)
    target = plan_target(settings)[0]
    weights = [target.checkpoint.rank_weights(range(2 * rank, 2 * rank + 2), keeps_halves=True) for rank in range(2)]
    for rank, kept in enumerate(weights):
        assert cpu_rank_bytes(target, rank)["weights"] <= kept.num_bytes <= cpu_rank_bytes(target, rank)["weights"] + 10_000
    width = 4 if host_library.library() is None else 2
    assert num_quantised(target.checkpoint) * 4 < sum(kept.num_bytes for kept in weights)
    assert width * num_quantised(target.checkpoint) < sum(kept.num_bytes for kept in weights)


def test_gpus_refuse_what_the_kernel_does_not_read(tmp_path: Path) -> None:
    made(tmp_path, "pack-quantized")
    message = (
        "GPUs do not run INT4 in groups of 16, BF16 scales: groups have 32, 64 or a multiple of 128 columns; use --device cpu"
    )
    with pytest.raises(ConfigError, match=message):
        kernel_shapes(open_checkpoint(tmp_path), "bfloat16", 1)
    with pytest.raises(ConfigError, match=message):
        plan_target(LaunchConfig(model=str(tmp_path), device="cuda"))


def test_gpus_refuse_act_order_before_anything_starts(tmp_path: Path) -> None:
    """By what the files say of each column: with `desc_act` they may be in order all the same."""
    folder, tensors, _ = made(tmp_path, gptq(32, ordered=True))
    reason = (
        "GPUs do not run INT4 in groups of 32, F16 scales and zero points, act-order: the columns of a group are no neighbours"
    )
    with pytest.raises(ConfigError, match=f"{reason}; use --device cpu"):
        plan_target(LaunchConfig(model=str(folder), device="cuda"))
    assert plan_target(LaunchConfig(model=str(folder), device="auto", ranks=1))[0].note == f"CPU ranks: {reason}"
    assert "zero points, act-order, as published (gptq)" in check(LaunchConfig(model=str(folder), device="cpu"), deep=False)
    in_order = {name: torch.arange(t.numel(), dtype=torch.int32) // 32 for name, t in tensors.items() if name.endswith("g_idx")}
    save(folder, tensors | in_order, json.loads((folder / "config.json").read_text()))
    assert kernel_shapes(open_checkpoint(folder), "bfloat16", 1)[0].coding == Coding("INT4", 4, "F16", has_zeros=True)


def test_gpus_have_prefill_of_quantised_weights_without_a_second_copy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B_FP8))
    settings = LaunchConfig(model=str(tmp_path), device="cuda")
    target = plan_target(settings, needs_weights=False)[0]
    assert (target.device, target.prefill) == ("cuda", "auto")
    assert "token by token" not in target.note
    assert kernel_shapes(target.checkpoint, "bfloat16", 1)[0].coding == Coding("E4M3", 1, "BF16")
    uses = gpu_rank_bytes(target.checkpoint, 0, 1, "bfloat16", prefill=True)
    assert 0 < uses["prefill weights"] < 0.1 * uses["tape"]
    obstacles = plan_target(replace(settings, prefill="on"), needs_weights=False)[1]
    assert not any("prefill" in str(one) for one in obstacles)


def test_who_did_not_ask_for_cpu_ranks_hears_why_there_are_some(tmp_path: Path) -> None:
    made(tmp_path, "pack-quantized")
    reason = "CPU ranks: GPUs do not run INT4 in groups of 16, BF16 scales: groups have 32, 64 or a multiple of 128 columns"
    for device, told in (("auto", reason), ("cpu", "")):
        target, obstacles = plan_target(LaunchConfig(model=str(tmp_path), device=device, ranks=1))
        assert (target.device, target.note, obstacles) == ("cpu", told, ())


def test_workers_are_told_how_to_round() -> None:
    args = WorkerArgs(RankInfo(0, 1, 0, "x"), "/model", "cpu", "float32", True, 1.0, 1.0, quantize="int4")
    assert WorkerArgs.from_json(args.to_json()).quantize == "int4"
    with pytest.raises(ConfigError, match="the worker's argument quantize must be one of none, fp8, int4, got 'int3'"):
        WorkerArgs(RankInfo(0, 1, 0, "x"), "/model", "cpu", "float32", True, 1.0, 1.0, quantize="int3")
