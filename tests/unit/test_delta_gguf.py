"""GGUF files of models with gated delta nets: names from llama.cpp's package, and what its converter does to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from tests.multi.test_passes import read
from tests.unit.delta_models import CONFIGS, OF_BLOCKS, Tensors, definition, published, random_model
from tests.unit.test_delta_families import PROMPT, run

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
Values = NDArray[np.float32]


def keys_of(config: Any, architecture: str, **changes: Any) -> dict[str, Any]:
    """As the converter writes them."""
    keys = {
        "block_count": config.num_hidden_layers, "embedding_length": config.hidden_size,
        "context_length": config.max_position_embeddings, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"], "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads, "full_attention_interval": 4,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
    }  # fmt: skip
    if architecture != "qwen3next":
        keys["rope.dimension_sections"] = [2, 2, 1, 0]
    if architecture == "qwen35":
        return keys | {"feed_forward_length": config.intermediate_size} | changes
    return keys | {
        "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    } | changes  # fmt: skip


def converted(config: Any, architecture: str, tensors: Tensors, *, is_old: bool = False) -> dict[str, Values]:
    """The tensors of a file, by the names that the package gives them. `is_old`: of Qwen3-Next as it was first written."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[{"qwen3next": "QWEN3NEXT"}.get(architecture, architecture.upper())], 8)
    key_heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def tiled(values: Values, axis: int, size: int) -> Values:
        """The first value head of every key head, then the second of each: one head after the other."""
        heads = np.split(values, key_heads * each, axis)
        assert heads[0].shape[axis] == size
        return np.concatenate([heads[key * each + which] for which in range(each) for key in range(key_heads)], axis)

    found: dict[str, Values] = {}
    for name, tensor in tensors.items():
        values, keys = tensor.float().numpy(), config.linear_key_head_dim * key_heads
        size = config.linear_value_head_dim
        if architecture != "qwen3next" and ".linear_attn." in name:
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                values = np.concatenate([values[: 2 * keys], tiled(values[2 * keys :], 0, size)])
            elif name.endswith("in_proj_z.weight"):
                values = tiled(values, 0, size)
            elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
                values = tiled(values, 0, 1)
            elif name.endswith("out_proj.weight"):
                values = tiled(values, 1, size)
        if name.endswith("A_log"):
            values = -np.exp(values)
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif name.endswith("conv1d.weight"):
            values = values[:, 0]
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        if name.endswith("in_proj_qkvz.weight") and not is_old:
            cuts = np.cumsum([config.linear_key_head_dim] * 2 + [each * size])
            groups = np.split(values.reshape(key_heads, -1, values.shape[1]), cuts, axis=1)
            *qkv, z = (part.reshape(-1, values.shape[1]) for part in groups)
            block = name.split(".")[2]
            found |= {f"blk.{block}.attn_qkv.weight": np.concatenate(qkv), f"blk.{block}.attn_gate.weight": z}
            continue
        stacks = {name.replace("gate_up_proj", "gate_proj"): 0, name.replace("gate_up_proj", "up_proj"): 1}
        halves = {f"{stack}.weight": np.split(values, 2, 1)[half] for stack, half in stacks.items()} if len(stacks) == 2 else {}
        for theirs, part in (halves or {name + ".weight" * name.endswith("down_proj"): values}).items():
            mapped = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, theirs
            found[mapped] = np.ascontiguousarray(part)
    return found


def write(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Values], form: str = "BF16") -> Tensors:
    """With matrices in `form`, where their rows are whole blocks; the values that llama.cpp finds in them."""
    writer, values = gguf.GGUFWriter(path, architecture), {}
    for key, value in {f"{architecture}.{key}": value for key, value in keys.items()}.items():
        kind = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    for name, array in tensors.items():
        plain = array.ndim == 1 or "ssm_conv1d" in name or array.shape[-1] % 32
        stored_as = gguf.GGMLQuantizationType["F32" if plain else form]
        raw = array if plain else gguf.quants.quantize(array, stored_as)
        exact = gguf.quants.dequantize(raw, stored_as)
        values[name] = torch.from_numpy(exact if form == "BF16" or plain else exact.astype(np.float16).astype(np.float32))
        writer.add_tensor(name, raw, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def model(name: str, folder: Path) -> tuple[Any, str, Tensors]:
    tensors = published(name, folder)
    return (CONFIGS | OF_BLOCKS)[name][1], ARCHITECTURES[name.split(",")[0]], tensors


@pytest.mark.parametrize(
    ("name", "is_old"),
    [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_next", False), ("qwen3_next", True)],
)
def test_a_file_is_the_folder_it_was_made_from(name: str, is_old: bool, tmp_path: Path) -> None:
    """Every tensor to the bit, but for `A_log`, which went through an exponential."""
    config, architecture, tensors = model(name, tmp_path / "folder")
    path = tmp_path / "model.gguf"
    write(path, architecture, keys_of(config, architecture), converted(config, architecture, tensors, is_old=is_old), "F32")
    ours, theirs = open_checkpoint(path), open_checkpoint(tmp_path / "folder")
    spec, same = ours.spec, theirs.spec
    assert (spec.layers, spec.num_lanes, spec.rope_theta, spec.tied_embeddings) == (same.layers, same.num_lanes, 1000.0, False)
    for layout in theirs.layouts:
        found, expected = ours.tensor(layout), theirs.tensor(layout)
        if layout.endswith("delta.decay"):
            assert np.abs(found - expected).max() < 1e-6
        else:
            assert np.array_equal(found, expected), layout


@pytest.mark.parametrize("name", [name for name in OF_BLOCKS if name != "qwen3_next, blocks"])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_0"])
def test_a_quantised_file_computes_its_values(name: str, form: str, tmp_path: Path) -> None:
    """What llama.cpp finds in it, in the definition; the same bits on one rank and on two."""
    config, architecture, tensors = model(name, tmp_path / "folder")
    path = tmp_path / "model.gguf"
    write(path, architecture, keys_of(config, architecture), converted(config, architecture, tensors), form)
    found = open_checkpoint(path)
    expected = definition(config, {key: as_stored(key, tensor, config, form) for key, tensor in tensors.items()}, PROMPT[:6])
    assert np.abs(run(found, PROMPT[:6], np.float64) - expected).max() < 1e-6 * np.abs(expected).max()
    assert read(path, 1, [4]).logits == read(path, 2, [4]).logits


def as_stored(name: str, tensor: torch.Tensor, config: Any, form: str) -> torch.Tensor:
    """The values of a matrix in `form`, read as float16. Columns of `out_proj` are quantised in the file's order."""
    values = tensor.float().numpy()
    if values.ndim == 1 or values.shape[-1] % 32:
        return tensor.float()
    heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    is_out = name.endswith("out_proj.weight")
    if is_out:
        values = values.reshape(len(values), heads, each, -1).swapaxes(1, 2).reshape(values.shape)
    kind = gguf.GGMLQuantizationType[form]
    values = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(values), kind), kind).astype(np.float16)
    if is_out:
        values = values.reshape(len(values), each, heads, -1).swapaxes(1, 2).reshape(values.shape)
    return torch.from_numpy(values.astype(np.float32))


def test_other_ways_to_write_the_same(tmp_path: Path) -> None:
    """Experts in one tensor for gates and up, kinds of layers and KV heads in lists, a layer for multi-token prediction."""
    config, architecture, tensors = model("qwen3_5_moe, blocks", tmp_path / "folder")
    made, path = converted(config, architecture, tensors), tmp_path / "model.gguf"
    for layer in range(config.num_hidden_layers):
        both = [made.pop(f"blk.{layer}.ffn_{which}_exps.weight") for which in ("gate", "up")]
        made[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    made |= {"blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32), "blk.4.attn_norm.weight": np.ones(64, np.float32)}
    is_net = [kind == "linear_attention" for kind in config.layer_types]
    changes = {
        "block_count": 5, "nextn_predict_layers": 1, "attention.recurrent_layers": [*is_net, False],
        "attention.head_count_kv": [0, 0, 0, 2, 2], "expert_weights_norm": True, "expert_gating_func": 1,
    }  # fmt: skip
    write(path, architecture, keys_of(config, architecture, **changes), made, "F32")
    ours, theirs = open_checkpoint(path), open_checkpoint(tmp_path / "folder")
    assert ours.spec.layers == theirs.spec.layers
    assert ours.note == "tensors left out: 2 of multi-token prediction"
    for layout in theirs.layouts:
        assert np.allclose(ours.tensor(layout), theirs.tensor(layout), rtol=0, atol=1e-6), layout


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"ssm.inner_size": 63}, {}, "qwen35moe.ssm.inner_size 63 is not a multiple of ssm.time_step_rank 8"),
        ({"ssm.group_count": 3}, {}, "linear_num_value_heads 8 is not a multiple of linear_num_key_heads 3"),
        ({"rope.dimension_count": 18}, {}, "rope.dimension_count 18 must be between 1 and the head size 16"),
        ({"nextn_predict_layers": 4}, {}, "nextn_predict_layers 4 must be less than block_count 4"),
        ({"attention.recurrent_layers": [True]}, {}, "must say of each of 4 layers whether it is recurrent"),
        ({"expert_weights_norm": False}, {}, "expert_weights_norm' False is not supported"),
        ({"expert_gating_func": 2}, {}, "expert_gating_func' 2 is not supported"),
        ({"ssm.v_head_reordered": False}, {}, "ssm.v_head_reordered' False is not supported"),
        ({}, {"blk.0.attn_qkv.weight": (72, 64)}, r"in_proj_qkv.weight has shape \(72, 64\), but the header's metadata asks for"),
        (
            {},
            {"blk.0.attn_gate.weight": (72, 64)},
            r"in_proj_z.weight has shape \(72, 64\), which is not that of its value heads",
        ),
        ({}, {"blk.0.ssm_new.weight": (2, 64)}, "has a tensor 'blk.0.ssm_new.weight' that a model of this config"),
        ({}, {"blk.0.ffn_gate_up_exps.weight": (4, 64, 64)}, "holds what another tensor has, too"),
    ],
)
def test_what_a_file_cannot_mean_is_refused_by_name(
    keys: dict[str, Any], tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    config = OF_BLOCKS["qwen3_5_moe, blocks"][1]
    made = converted(config, "qwen35moe", dict(random_model("qwen3_5_moe, blocks").state_dict()))
    made |= {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    write(tmp_path / "model.gguf", "qwen35moe", keys_of(config, "qwen35moe", **keys), made, "F32")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "model.gguf")
