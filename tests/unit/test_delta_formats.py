"""Models with gated delta nets in quantised folders: the bits of a folder with the values that their library finds there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint, planned_checkpoint
from kog_dist.model.formats.lanes import lane_codes
from kog_dist.model.formats.quantisation import read_quantisation
from tests.multi.test_passes import read
from tests.unit.delta_configs import CONFIGS
from tests.unit.delta_models import OF_BLOCKS, QUANTISED, WITHOUT_DELTA, Tensors, definition, published
from tests.unit.formats.writers import INT4 as INT4_CODES
from tests.unit.formats.writers import METHODS, Method, compressed
from tests.unit.test_delta_families import PROMPT, run

NEXT, MOE, DENSE = (f"{name}, blocks" for name in ("qwen3_next", "qwen3_5_moe", "qwen3_5"))


def write_values(tensors: Tensors, coded: Path, folder: Path) -> None:
    """A folder without codes: `tensors`, and the config of `coded` without what it says of codes."""
    folder.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((coded / "config.json").read_text())
    del config.get("text_config", config)["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "method", "ends"),
    [
        (DENSE, "fp8, bfloat16 scales", QUANTISED),
        (MOE, "float-quantized, channel", WITHOUT_DELTA),
        (NEXT, "float-quantized, block", QUANTISED),
        (MOE, "pack-quantized", WITHOUT_DELTA),
        (DENSE, "pack-quantized, zero points", (*WITHOUT_DELTA, "out_proj")),
        (NEXT, "awq", WITHOUT_DELTA),
        (DENSE, "awq", WITHOUT_DELTA),
        (MOE, "gptq", WITHOUT_DELTA),
        (NEXT, "gptq, act-order", (*WITHOUT_DELTA, "out_proj")),
    ],
)
def test_a_folder_has_the_bits_of_its_values(name: str, method: str, ends: tuple[str, ...], tmp_path: Path) -> None:
    """On one rank and on two; and in float64 what the definition makes of the values."""
    coded, values = tmp_path / "coded", tmp_path / "values"
    tensors = published(name, coded, method=METHODS[method], ends=ends)
    write_values(tensors, coded, values)
    checkpoint = open_checkpoint(coded)
    assert checkpoint.spec == open_checkpoint(values).spec
    assert {tensors[key].dtype for key in tensors if key.endswith("in_proj_a.weight")} <= {torch.bfloat16}
    expected = definition(OF_BLOCKS[name][1], tensors, PROMPT[:6])
    assert np.abs(run(checkpoint, PROMPT[:6], np.float64) - expected).max() < 1e-6 * np.abs(expected).max()
    logits = [read(folder, ranks, [3, 9]).logits for folder, ranks in ((values, 1), (coded, 1), (coded, 2))]
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize(("name", "method"), [(DENSE, "fp8, bfloat16 scales"), (NEXT, "fp8, bfloat16 scales"), (DENSE, "awq")])
def test_lanes_have_the_codes_of_their_values(name: str, method: str, tmp_path: Path) -> None:
    """Rows of a lane lie apart in files: of queries and gates head by head, of a delta net's inputs below each other."""
    published(name, tmp_path, method=METHODS[method])
    checkpoint = open_checkpoint(tmp_path)
    for tensor in checkpoint.forms:
        values = checkpoint.tensor(tensor)
        for lane in range(checkpoint.spec.num_lanes):
            assert np.array_equal(lane_codes(checkpoint, tensor, lane).values(), values[lane]), tensor


def quantise_outputs(folder: Path, tensors: Tensors, method: Method) -> Any:
    """`out_proj` of the folder's delta nets in groups of their own, its values in `tensors`; the folder's config."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"]["config_groups"]["group_1"] = method.config["config_groups"]["group_0"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path, written = folder / "out.safetensors", Tensors()
    for name in [name.removesuffix(".weight") for name in tensors if name.endswith("linear_attn.out_proj.weight")]:
        made = method.write(tensors[f"{name}.weight"])
        tensors[f"{name}.weight"] = made.values
        theirs = name.replace("model.", "model.language_model.")
        written |= {f"{theirs}.{end}": tensor.contiguous() for end, tensor in made.tensors.items()}
        del index["weight_map"][f"{theirs}.weight"]
    save_file(written, path)
    index["weight_map"] |= dict.fromkeys(written, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_groups_of_several_sizes(tmp_path: Path) -> None:
    """As where `out_proj` alone has smaller ones; scales tell which. Other differences are refused."""
    large = compressed("pack-quantized", **INT4_CODES, strategy="group", group_size=32)
    small = compressed("pack-quantized", **INT4_CODES, strategy="group", group_size=16)
    tensors = published(DENSE, tmp_path, method=large, ends=("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"))
    config = quantise_outputs(tmp_path, tensors, small)
    groups = config["text_config"]["quantization_config"]["config_groups"]
    checkpoint = open_checkpoint(tmp_path)
    found = {form.block_columns for form in checkpoint.forms.values()}
    assert found == {16, 32}
    expected = definition(OF_BLOCKS[DENSE][1], tensors, PROMPT[:6])
    assert np.abs(run(checkpoint, PROMPT[:6], np.float64) - expected).max() < 1e-6 * np.abs(expected).max()
    groups["group_1"]["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="config_groups have 2 schemes"):
        open_checkpoint(tmp_path)


def parts_of_lanes(name: str, shape: tuple[int, ...], config: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Rows and columns of what a lane rounds by itself."""
    rows, columns = np.arange(shape[0]), np.arange(shape[1])
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return [(rows, part) for part in np.split(columns, 2)]
    if name.endswith("q_proj.weight"):  # of every head the query, then the gate
        sections = list(rows.reshape(config.num_attention_heads, 2, -1).swapaxes(0, 1).reshape(2, -1))
    elif name.endswith("in_proj_qkv.weight"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        sections = np.split(rows, [keys, 2 * keys])
    else:
        sections = [rows]
    return [(part, columns) for section in sections for part in np.split(section, 2)]


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_matrices_are_rounded_at_the_start(quantize: str, tmp_path: Path) -> None:
    """By hand: of int4 a scale for each row of a lane's part, of fp8 one for all of it; fewer than 128 rows and columns."""
    tensors, config = published(DENSE, tmp_path), OF_BLOCKS[DENSE][1]
    checkpoint = open_checkpoint(tmp_path, quantize=quantize)
    assert checkpoint.spec.num_lanes == 2
    for name in [name for name in tensors if name.endswith(tuple(f"{end}.weight" for end in QUANTISED))]:
        values = tensors[name].float().clone()
        for rows, columns in parts_of_lanes(name, tuple(values.shape), config):
            where = np.ix_(rows, columns)
            block = values[where]
            if quantize == "int4":
                scale = (block.abs().amax(1, keepdim=True) / 7).to(torch.bfloat16).float()
                values[where] = torch.round(block / scale).clamp(-7, 7) * scale
            else:
                scale = block.abs().amax() / 448
                values[where] = (block / scale).to(torch.float8_e4m3fn).float() * scale
        tensors[name] = values
    expected = definition(config, tensors, PROMPT[:6])
    assert np.abs(run(checkpoint, PROMPT[:6], np.float64) - expected).max() < 1e-6 * np.abs(expected).max()


def test_lanes_of_real_models_that_are_rounded(tmp_path: Path) -> None:
    """A dense one has those of a published FP8 folder, one with experts its own; both have whole groups of 128 columns."""
    for name, lanes in (("Qwen3.5-27B", 4), ("Qwen3.5-9B", 4)):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
        assert planned_checkpoint(tmp_path).spec.num_lanes == 8
        assert {planned_checkpoint(tmp_path, quantize=form).spec.num_lanes for form in ("fp8", "int4")} == {lanes}


@pytest.mark.parametrize(
    ("rule", "module", "is_left"),
    [
        ("model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", True),
        ("linear_attn", "model.layers.0.linear_attn.out_proj", True),
        ("attn", "model.layers.0.linear_attn.out_proj", False),
        ("re:.*linear_attn.*", "model.layers.0.linear_attn.out_proj", True),
        (r"re:model\.layers\.\d+\.linear_attn\.out_proj$", "model.layers.12.linear_attn.out_proj", True),
        ("re:.*self_attn.*", "model.layers.0.linear_attn.out_proj", False),
        ("re:(a+)+$", "a" * 60 + "b", False),
        ("re:" + ".*" * 9 + "x", "a" * 200, False),
        ("re:[", "x", False),
    ],
)
def test_modules_that_a_config_leaves_out(rule: str, module: str, is_left: bool) -> None:
    """Where there are no files; an expression that could take for ever is not looked at."""
    config = {"quantization_config": {"quant_method": "fp8", "ignored_layers": [rule]}}
    found = read_quantisation(config)
    assert found is not None
    assert found.leaves_out(module) is is_left


def test_rules_of_gptqmodel_are_such(tmp_path: Path) -> None:
    dynamic = {"-:.*linear_attn.*": {}, "+:.*mlp.*": {"bits": 4}}
    found = read_quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": dynamic}})
    assert found is not None
    assert found.leaves_out("model.layers.0.linear_attn.in_proj_z")
    assert not found.leaves_out("model.layers.0.mlp.up_proj")
