"""Folders with quantised weights from end to end: logits of transformers with their library's values, lanes, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus
from safetensors.torch import load_file, save_file
from transformers import AwqConfig, CompressedTensorsConfig, FbgemmFp8Config, FineGrainedFP8Config, GPTQConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from kog_dist.bench.shapes import DENSE, QUANTISED
from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.checkpoint import open_checkpoint, planned_checkpoint
from kog_dist.model.formats.lanes import lane_codes, weight_format
from kog_dist.model.formats.quantisation import read_quantisation
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.layout import is_layer_matrix
from kog_dist.model.published_config import read_config, spec_of_folder
from kog_dist.model.weight_bytes import bytes_per_token, formats, num_quantised
from kog_dist.model.written_checkpoint import write_manifest
from kog_dist.workers.cuda.coded_source import coding_of
from tests.unit.formats.folders import SIZES, expected_logits, logits, made, save
from tests.unit.formats.writers import METHODS, fp8_blocks

PROMPT = np.random.default_rng(3).integers(0, SIZES["vocab_size"], 24).tolist()
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["fp8", "pack-quantized", "awq", "gptq"])
def test_logits_are_those_of_transformers_with_the_librarys_values(tmp_path: Path, method: str, family: str) -> None:
    _, _, model = made(tmp_path, method, family)
    checkpoint = open_checkpoint(tmp_path)
    expected = expected_logits(model, PROMPT)
    assert np.abs(logits(checkpoint, PROMPT) - expected).max() < 1e-5 * np.abs(expected).max()
    oracle = Laneformer.from_checkpoint(tmp_path, torch.float64)
    with torch.no_grad():
        assert np.abs(oracle(torch.tensor([PROMPT]))[0].numpy() - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_from_a_folder(tmp_path: Path, method: str) -> None:
    _, _, model = made(tmp_path, method, dtype=torch.float16)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dtype == "float16"
    expected = expected_logits(model, PROMPT[:4])
    assert np.abs(logits(checkpoint, PROMPT[:4]) - expected).max() < 1e-5 * np.abs(expected).max()
    checkpoint.verify_all()


@pytest.mark.parametrize(
    ("method", "lanes"),
    [("fp8", 4), ("awq", 4), ("float-quantized, channel", 4), ("mxfp4-pack-quantized", 4), ("gptq, one group", 2)],
)
def test_lanes_hold_whole_groups(tmp_path: Path, method: str, lanes: int) -> None:
    """Of 4 KV heads, 256 columns of attention and 256 of the FFN; 128 of them are a group of the last one."""
    made(tmp_path, method)
    assert spec_of_folder(tmp_path).num_lanes == lanes


@pytest.mark.parametrize(("name", "plain", "quantised"), [("llama-3.1-8b", 8, 4), ("qwen3-4b", 8, 4), ("llama-3.2-1b", 4, 2)])
def test_rounded_weights_have_the_lanes_of_published_ones(tmp_path: Path, name: str, plain: int, quantised: int) -> None:
    def lanes(quantize: str, **more: Any) -> int:
        (tmp_path / "config.json").write_text(json.dumps({**DENSE[name], **more}))
        return planned_checkpoint(tmp_path, context=512, quantize=quantize).spec.num_lanes

    assert [lanes("none"), lanes("fp8"), lanes("int4")] == [plain, quantised, quantised]
    assert [lanes("none", quantization_config=QUANTISED[form]) for form in ("fp8", "int4")] == [quantised, quantised]


def test_the_smallest_models_keep_their_lanes_when_they_are_rounded(tmp_path: Path) -> None:
    """Of 256 columns of the FFN; 4 lanes would not have whole groups."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert planned_checkpoint(tmp_path, quantize="int4").spec.num_lanes == spec_of_folder(tmp_path).num_lanes == 4


@pytest.mark.parametrize("method", [name for name in METHODS if name != "gptq, act-order"])
def test_codes_and_scales_of_lanes_are_the_values_that_ranks_read(tmp_path: Path, method: str) -> None:
    made(tmp_path, method, "qwen3")
    checkpoint = open_checkpoint(tmp_path)
    quantised = [name for name in checkpoint.layouts if weight_format(checkpoint, name) is not None]
    assert quantised == [name for name in checkpoint.layouts if is_layer_matrix(checkpoint.layouts, name)]
    for name in quantised:
        layout, form = checkpoint.layouts[name], weight_format(checkpoint, name)
        for lane in range(checkpoint.spec.num_lanes):
            values = np.empty(layout.shape[1:], np.float32)
            checkpoint.read_part(name, lane, values, verify=True)
            coded = lane_codes(checkpoint, name, lane)
            assert coded.form == form
            assert coded.is_regular
            assert coded.codes.shape == layout.shape[1:]
            assert coded.scales.shape[0] == layout.shape[1]
            assert np.array_equal(coded.values(), values)


@pytest.mark.parametrize(
    "method", ["fp8", "modelopt, channel", "awq", "gptq, act-order", "pack-quantized", "mxfp4-pack-quantized"]
)
def test_ranks_keep_quantised_matrices_in_float32_and_others_in_16_bit(tmp_path: Path, method: str) -> None:
    """The same bits on one rank and on two."""
    made(tmp_path, method)
    checkpoint = open_checkpoint(tmp_path)
    whole = checkpoint.rank_weights(range(4), keeps_halves=True)
    parts = [checkpoint.rank_weights(lanes, keeps_halves=True) for lanes in (range(2), range(2, 4))]
    assert whole.heads[0].dtype.itemsize == 2
    for lane in range(4):
        for ours, theirs in zip(parts[lane // 2].lanes[lane].layers, whole.lanes[lane].layers, strict=True):
            for name in ("wqkv", "wo", "w13", "w2"):
                assert getattr(theirs, name).dtype == np.float32
                assert np.array_equal(getattr(ours, name), getattr(theirs, name))


def test_act_order_runs_on_cpu_ranks_and_has_no_codes(tmp_path: Path) -> None:
    made(tmp_path, "gptq, act-order")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"attn.q_proj.weight, INT4 .* an order of columns of its own .desc_act."):
        lane_codes(checkpoint, "model.layers.0.attention.wq.weight", 0)


def test_lanes_within_a_group_have_no_codes(tmp_path: Path) -> None:
    made(tmp_path, "gptq, one group")
    checkpoint = open_checkpoint(tmp_path)
    file = checkpoint.owner["model.layers.0.attention.wo.weight"]
    matrix = file.matrices["model.layers.0.self_attn.o_proj.weight"]  # type: ignore[attr-defined]
    wider = replace(matrix, form=replace(matrix.form, block_columns=256))
    changed = {**file.matrices, "model.layers.0.self_attn.o_proj.weight": wider}  # type: ignore[attr-defined]
    owner = {**checkpoint.owner, "model.layers.0.attention.wo.weight": replace(file, matrices=changed)}  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match=r"lane 1 has columns 128 to 256 of 256, which are no whole groups of 256"):
        lane_codes(replace(checkpoint, owner=owner), "model.layers.0.attention.wo.weight", 1)


def test_codes_are_verified(tmp_path: Path) -> None:
    folder, tensors, _ = made(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    codes = tensors[f"{Q_PROJ}.weight"].view(torch.uint8).clone()
    codes[0, 0] = 0x7F
    save(folder, tensors | {f"{Q_PROJ}.weight": codes.view(torch.float8_e4m3fn)}, config)
    for verify in (True, False):
        checkpoint = open_checkpoint(folder, verify=verify)
        if verify:
            with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.weight has a code or scale of a value that is not finite"):
                lane_codes(checkpoint, "model.layers.1.attention.wq.weight", 0)
        else:
            assert lane_codes(checkpoint, "model.layers.1.attention.wq.weight", 0).codes[0, 0] == 0x7F


def test_a_manifest_is_over_values(tmp_path: Path) -> None:
    folder, tensors, _ = made(tmp_path, "awq")
    write_manifest(folder)
    checkpoint = open_checkpoint(folder)
    lane_codes(checkpoint, "model.layers.1.attention.wq.weight", 0)
    checkpoint.rank_weights(range(4))
    changed = tensors | {f"{Q_PROJ}.qweight": tensors[f"{Q_PROJ}.qweight"] ^ 1}
    save(folder, changed, json.loads((folder / "config.json").read_text()))
    checkpoint = open_checkpoint(folder)
    for action in (lambda: lane_codes(checkpoint, "model.layers.1.attention.wq.weight", 0), lambda: checkpoint.rank_weights([0])):
        with pytest.raises(CheckpointError, match="differs from its SHA-256"):
            action()


# ---- what files and config must be like ----
def test_modelopts_own_file_says_the_same(tmp_path: Path) -> None:
    folder, tensors, model = made(tmp_path, "modelopt, tensor")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    save(folder, tensors, config)
    (folder / "hf_quant_config.json").write_text(
        json.dumps(
            {
                "producer": {"name": "modelopt", "version": "0.30"},
                "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            }
        )
    )
    expected = expected_logits(model, PROMPT[:3])
    assert np.abs(logits(open_checkpoint(folder), PROMPT[:3]) - expected).max() < 1e-5 * np.abs(expected).max()
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: .*quant_algo 'NVFP4' of ModelOpt is not supported"):
        open_checkpoint(folder)


def test_matrices_that_are_multiplied_as_one_must_be_alike(tmp_path: Path) -> None:
    folder, tensors, _ = made(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    for name, other in (("self_attn.k_proj", "self_attn.q_proj"), ("mlp.up_proj", "mlp.gate_proj")):
        module = f"model.layers.1.{name}"
        half = {end: tensor for end, tensor in tensors.items() if not end.startswith(module)}
        half[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.bfloat16)
        save(folder, half, config)
        with pytest.raises(CheckpointError, match=rf"{module}.weight is not quantised, but model.layers.1.{other}.weight is FP8"):
            open_checkpoint(folder)


def test_matrices_may_be_left_in_16_bit(tmp_path: Path) -> None:
    folder, tensors, model = made(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module = f"model.layers.0.{name}"
        del tensors[f"{module}.weight_scale_inv"]
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.bfloat16)
        model.state_dict()[f"{module}.weight"].copy_(tensors[f"{module}.weight"])
    save(folder, tensors, config)
    expected = expected_logits(model, PROMPT[:4])
    checkpoint = open_checkpoint(folder)
    assert np.abs(logits(checkpoint, PROMPT[:4]) - expected).max() < 1e-5 * np.abs(expected).max()
    assert weight_format(checkpoint, "model.layers.0.attention.wo.weight") is None
    assert weight_format(checkpoint, "model.layers.1.attention.wo.weight") is not None


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("fp8", lambda t: t.pop(f"{Q_PROJ}.weight_scale_inv"), rf"{Q_PROJ}.weight is quantised, but no file has {Q_PROJ}"),
        ("awq", lambda t: t.pop(f"{Q_PROJ}.qweight"), rf"lacks tensor {Q_PROJ}.weight"),
        ("awq", lambda t: t.pop(f"{Q_PROJ}.scales"), rf"{Q_PROJ}.qweight is quantised, but no file has {Q_PROJ}.scales"),
        ("fp8", lambda t: t.update({f"{Q_PROJ}.zero": torch.zeros(3)}), rf"has a tensor '{Q_PROJ}.zero' that a model"),
        ("fp8", lambda t: t.update({"lm_head.weight_scale": torch.zeros(3)}), r"has a tensor 'lm_head.weight_scale' that a"),
    ],
)  # fmt: skip
def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, method: str, change: Any, message: str) -> None:
    folder, tensors, _ = made(tmp_path, method)
    change(tensors)
    save(folder, tensors, json.loads((folder / "config.json").read_text()))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    folder, tensors, model = made(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    save(folder, tensors | {f"{Q_PROJ}.bias": torch.zeros(256)}, config)
    expected = expected_logits(model, PROMPT[:3])
    assert np.abs(logits(open_checkpoint(folder), PROMPT[:3]) - expected).max() < 1e-5 * np.abs(expected).max()
    save(folder, tensors | {f"{Q_PROJ}.bias": torch.ones(256)}, config)
    with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ}.bias is not 0, but the model has no such bias"):
        open_checkpoint(folder).rank_weights([0])


def test_a_head_may_be_quantised_in_its_files_on_cpu_ranks(tmp_path: Path) -> None:
    method = METHODS["float-quantized, channel"]
    folder, tensors, model = made(tmp_path, method)
    head = method.write(tensors.pop("lm_head.weight"))
    save(
        folder,
        tensors | {f"lm_head.{end}": t for end, t in head.tensors.items()},
        json.loads((folder / "config.json").read_text()),
    )
    model.state_dict()["lm_head.weight"].copy_(head.values)
    checkpoint, expected = open_checkpoint(folder), expected_logits(model, PROMPT[:4])
    assert np.abs(logits(checkpoint, PROMPT[:4]) - expected).max() < 1e-5 * np.abs(expected).max()
    with pytest.raises(
        ConfigError, match=r"GPUs run quantised weights of layers alone, and lm_head.weight is quantised, too; use"
    ):
        coding_of(checkpoint)


def test_biases_of_quantised_matrices_are_read(tmp_path: Path) -> None:
    made(tmp_path, "gptq", "qwen2")
    checkpoint = open_checkpoint(tmp_path)
    assert "model.layers.0.attention.wq.bias" in checkpoint.layouts
    assert checkpoint.tensor("model.layers.0.attention.wq.bias").any()


def test_without_files_the_config_says_what_is_quantised(tmp_path: Path) -> None:
    block = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"num_hidden_layers": 2, "quantization_config": block}))
    checkpoint = planned_checkpoint(tmp_path)
    plain = [name for name in checkpoint.layouts if name.endswith("w2.weight") and weight_format(checkpoint, name) is None]
    assert plain == ["model.layers.0.feed_forward.w2.weight"]
    assert num_quantised(checkpoint) == 2 * (4 * 64 * 64 + 3 * 64 * 64) - 64 * 64


def test_quantised_tensors_without_a_config_are_refused(tmp_path: Path) -> None:
    folder, tensors, _ = made(tmp_path, "float-quantized, channel")
    config = json.loads((folder / "config.json").read_text())
    save(folder, {name: t for name, t in tensors.items() if not name.endswith("_scale")}, config | {"quantization_config": None})
    with pytest.raises(CheckpointError, match=r"q_proj.weight is F8_E4M3, which config.json does not say"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("method", "end"), [("gptq", "qweight"), ("fp8", "weight_scale_inv"), ("mxfp4-pack-quantized", "weight_packed")]
)
def test_codes_without_a_config_ask_for_it(tmp_path: Path, method: str, end: str) -> None:
    """As folders of AutoGPTQ whose `quantize_config.json` alone says how they are quantised."""
    folder, tensors, _ = made(tmp_path, method)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    save(folder, tensors, config)
    cause = (
        rf"{end}' belongs to quantised weights, but config.json has no quantization_config that says how they are quantised; take"
    )
    with pytest.raises(CheckpointError, match=cause):
        open_checkpoint(folder)


def test_a_number_that_is_no_format_is_named(tmp_path: Path) -> None:
    folder, tensors, _ = made(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    save(folder, tensors | {f"{Q_PROJ}.weight": tensors[f"{Q_PROJ}.weight"].view(torch.float8_e5m2)}, config)
    with pytest.raises(CheckpointError, match=rf"'{Q_PROJ}.weight': dtype 'F8_E5M2' is not supported; supported: .* I64$"):
        open_checkpoint(folder)


BASE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "vocab_size": 32,
}  # fmt: skip
AWQ, GPTQ = METHODS["awq"].config, METHODS["gptq"].config
PACKED = METHODS["pack-quantized"].config


def packed(**weights: Any) -> dict[str, Any]:
    group = PACKED["config_groups"]["group_0"]
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (3, "quantization_config must be an object"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported: fp8, fbgemm_fp8, modelopt"),
        ({"quant_method": "mxfp4"}, "quant_method mxfp4 is supported for gpt_oss alone"),
        ({}, "quant_method None is not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be rows and columns"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be rows and columns"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported; supported: fp8"),
        ({"quant_method": "fp8", "modules_to_convert": ["model.layers.0"]}, "modules_to_convert ['model.layers.0'] is not"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        ({"quant_method": "fp8", "activation_scheme": "magic"}, "activation_scheme"),
        ({"quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of ModelOpt is not supported; supported: FP8"),
        (AWQ | {"bits": 8}, "bits 8 of AWQ is not supported; supported: 4"),
        (AWQ | {"bits": 4.0}, "bits 4.0 of AWQ is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' of AWQ is not supported"),
        (AWQ | {"format": "gemv_fast"}, "format 'gemv_fast' of AWQ is not supported"),
        (AWQ | {"dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic '+:.*q_proj' of AWQ has {'bits': 8}"),
        (AWQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (AWQ | {"zero_point": False}, "AWQ without zero_point"),
        (AWQ | {"group_size": 0}, "group_size must be a number of columns, or -1, got 0"),
        (AWQ | {"group_size": True}, "group_size must be a number of columns, or -1, got True"),
        (GPTQ | {"bits": 3}, "bits 3 of GPTQ is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        (GPTQ | {"dynamic": {r"-:.*lm_head": {}, r".*\.18\..*gate.*": {"group_size": 32}}}, "has {'group_size': 32}"),
        (GPTQ | {"dynamic": {"+:.*": {"desc_act": True}}}, "has {'desc_act': True}"),
        (GPTQ | {"dynamic": {".*": 4}}, "dynamic '.*' of GPTQ has 4"),
        (GPTQ | {"dynamic": ["-:.*"]}, "must be an object"),
        (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (PACKED | {"format": "marlin-24"}, "format 'marlin-24' of 4-bit 'int' is not supported"),
        (PACKED | {"quantization_status": "initialized"}, "quantization_status 'initialized'"),
        (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {'format'"),
        (PACKED | {"transform_config": {"config_groups": {}}}, "transform_config {'config_groups': {}} is not supported"),
        (PACKED | {"config_groups": {}}, "config_groups"),
        (packed(num_bits=8), "format 'pack-quantized' of 8-bit 'int' is not supported"),
        (packed(actorder="group"), "actorder 'group' is not supported"),
        (packed(dynamic=True), "dynamic weights"),
        (packed(strategy="tensor"), "strategy 'tensor' of pack-quantized"),
        (
            PACKED | {"config_groups": PACKED["config_groups"] | {"b": packed(symmetric=False)["config_groups"]["group_0"]}},
            "config_groups have 2 schemes",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "has no weights"),
    ],
)  # fmt: skip
def test_schemes_that_are_not_known_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(BASE | {"quantization_config": config})
    assert message in str(caught.value)


def test_published_configs_are_read() -> None:
    """As Qwen3-8B-FP8, Qwen2.5-7B-Instruct-AWQ and -GPTQ-Int4, and RedHat's w4a16 and FP8-dynamic models have them."""
    qwen = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
        "vocab_size": 151936, "num_hidden_layers": 36, "model_type": "qwen3",
    }  # fmt: skip
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read_config(qwen).num_lanes == 8
    assert read_config(qwen | {"quantization_config": fp8}).num_lanes == 4, "512 columns of attention's output are too few"
    small = qwen | {"hidden_size": 2560, "intermediate_size": 9728}
    assert read_config(small).num_lanes == 8
    assert read_config(small | {"quantization_config": fp8}).num_lanes == 4, "1216 columns are no whole groups of 128"
    awq = {
        "bits": 4,
        "group_size": 128,
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    gptq = {
        "bits": 4, "checkpoint_format": "gptq", "damp_percent": 0.01, "desc_act": False, "group_size": 128,
        "model_file_base_name": None, "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True,
        "true_sequential": True,
    }  # fmt: skip
    for config in (awq, gptq):
        assert read_config(qwen | {"quantization_config": config}).num_lanes == 4
    dynamic = {
        "config_groups": {
            "group_0": {
                "input_activations": {"actorder": None, "dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float",
                },
            }
        },
        "format": "float-quantized", "global_compression_ratio": 1.46, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip
    assert read_config(qwen | {"quantization_config": dynamic}).num_lanes == 4


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (FineGrainedFP8Config(), "FP8 (E4M3) in blocks of 128 x 128 (fp8)"),
        (FineGrainedFP8Config("static", weight_block_size=None), "FP8 (E4M3) with one scale (fp8)"),
        (FbgemmFp8Config(), "FP8 (E4M3) with a scale for each row (fbgemm_fp8)"),
        (AwqConfig(4), "INT4 in groups of 128 (awq)"),
        (GPTQConfig(4), "INT4 in groups of 128 (gptq)"),
        (
            CompressedTensorsConfig(
                {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
                "float-quantized", QuantizationStatus.COMPRESSED,
            ),
            "FP8 (E4M3) with a scale for each row (compressed-tensors float-quantized)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_configs_that_transformers_writes_are_read(config: QuantizationConfigMixin, form: str) -> None:
    """With all of the keys that this version of it writes when it saves a model."""
    written = json.loads(config.to_json_string(use_diff=False))
    assert str(read_quantisation({"quantization_config": written})) == form


def test_what_early_compressed_tensors_called_frozen_is_compressed(tmp_path: Path) -> None:
    """As nm-testing/Meta-Llama-3.1-8B-Instruct-FP8-hf, the example of transformers' documentation."""
    folder, tensors, model = made(tmp_path, "float-quantized, tensor")
    config = json.loads((folder / "config.json").read_text())
    early = {"format": "naive-quantized", "quantization_status": "frozen"}
    save(folder, tensors, config | {"quantization_config": config["quantization_config"] | early})
    expected = expected_logits(model, PROMPT[:3])
    assert np.abs(logits(open_checkpoint(folder), PROMPT[:3]) - expected).max() < 1e-5 * np.abs(expected).max()
    plain = {f"{name}.weight": torch.zeros(256, 128, dtype=torch.bfloat16) for name in (Q_PROJ,)}
    save(folder, plain, config | {"quantization_config": config["quantization_config"] | early})
    with pytest.raises(CheckpointError, match=r"config.json says FP8 .* but no file has a tensor .weight with its codes"):
        open_checkpoint(folder)


# ---- what is said of them ----
@pytest.mark.parametrize(
    ("method", "bits", "scale_bytes"),
    [("fp8", 8, 4 / 256), ("awq", 4, 2.5 / 16), ("mxfp4-pack-quantized", 4, 1 / 32), ("float-quantized, tensor", 8, 0)],
)
def test_bytes_per_token_are_those_of_codes_scales_and_the_rest(
    tmp_path: Path, method: str, bits: int, scale_bytes: float
) -> None:
    made(tmp_path, method)
    checkpoint = open_checkpoint(tmp_path)
    count = num_quantised(checkpoint)
    assert count == 2 * (2 * 128 * (256 + 128) + 3 * 128 * 256)
    others = checkpoint.spec.bytes_per_token() - 2 * count
    expected = others + count * (bits / 8 + scale_bytes)
    assert abs(bytes_per_token(checkpoint) - expected) < 100
    assert formats(checkpoint).endswith("the rest bfloat16")


def test_a_block_of_all_rows_and_columns_is_one_scale(tmp_path: Path) -> None:
    method = METHODS["float-quantized, tensor"]
    plain = {"quant_method": "fp8", "activation_scheme": "static"}
    made(tmp_path, method._replace(config=plain))
    checkpoint = open_checkpoint(tmp_path)
    assert formats(checkpoint) == "FP8 (E4M3) with one scale, BF16 scales, as published (fp8), the rest bfloat16"
    made(tmp_path / "blocks", fp8_blocks(16, 16))
    assert "blocks of 16 x 16, F32 scales, as published (fp8)" in formats(open_checkpoint(tmp_path / "blocks"))


@pytest.mark.parametrize(
    ("method", "changes", "tensor", "left_out"),
    [
        ("gptq, one group", {"dynamic": {"-:.*lm_head.*": {}, "+:.*": {"bits": 4, "damp_percent": 0.1}}}, "", ""),
        ("gptq, one group", {"quantizer": ["gptqmodel:9"], "checkpoint_format": None}, "", "quantization_config.quantizer"),
        ("awq", {"dynamic": {"-:.*lm_head.*": {}}, "backend": "auto"}, "", "quantization_config.backend"),
        ("fp8", {"magic": 1, "fmt": None}, "self_attn.kv_scale", "quantization_config.magic"),
        ("fp8", {}, "self_attn.k_scale", ""),
        ("pack-quantized", {"a name of next year": {}}, "", "quantization_config.a name of next year"),
    ],
)  # fmt: skip
def test_notes_of_writers_change_nothing(tmp_path: Path, method: str, changes: Any, tensor: str, left_out: str) -> None:
    plain, noted = tmp_path / "plain", tmp_path / "noted"
    for folder in (plain, noted):
        folder.mkdir()
        made(folder, method)
    path = noted / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | changes}))
    if tensor:
        weights = next(noted.glob("*.safetensors"))
        save_file(load_file(weights) | {f"model.layers.0.{tensor}": torch.ones(1)}, weights)
    one, other = open_checkpoint(plain), open_checkpoint(noted)
    assert other.note == (f"config.json: '{left_out}' left out" if left_out else "")
    for name in one.layouts:
        assert np.array_equal(one.tensor(name), other.tensor(name))


@pytest.mark.parametrize(
    ("fields", "is_ordered"),
    [
        ({"desc_act": True}, True),
        ({"desc_act": True, "static_groups": True}, False),
        ({"static_groups": True}, False),
        ({}, False),
    ],
)
def test_gptq_has_an_order_of_its_own_unless_its_groups_are_static(fields: dict[str, Any], is_ordered: bool) -> None:
    config = {key: value for key, value in GPTQ.items() if key not in ("desc_act", "static_groups")}
    found = read_quantisation({"quantization_config": config | fields})
    assert found is not None
    assert found.form.is_ordered is is_ordered
