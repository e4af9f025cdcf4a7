"""`convert`: a Llama checkpoint in lane form with delay 0, which computes exactly the same function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.late_numpy import Array
from kog_dist.model.layout import EMBEDDING, tensor_layouts
from kog_dist.model.manifest import read_json, read_small_file
from kog_dist.model.published_config import read_config
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import narrow_finite, write_stored_checkpoint

_NAMES = {  # ours -> transformers' LlamaForCausalLM, behind model.layers.{i}.
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
}
_OUTER_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def llama_spec(config: Mapping[str, Any], num_lanes: int) -> ModelSpec:
    """The lane form, with delay 0, of a `config.json` of LlamaForCausalLM. Raises ConfigError for what cannot be converted."""
    if config.get("model_type") != "llama":
        raise ConfigError(f"model_type is {config.get('model_type')!r}; only checkpoints of model_type 'llama' are converted")
    if config.get("pretraining_tp", 1) != 1:
        raise ConfigError(f"pretraining_tp is {config['pretraining_tp']}, only 1 is converted")
    own = {key: value for key, value in config.items() if key not in ("pretraining_tp", "quantization_config")}
    if "quantization_config" in config:
        raise ConfigError("the checkpoint is quantised; convert one with float weights")
    defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6}  # of transformers' LlamaConfig
    return read_config({**defaults, **own, "model_type": "laneformer", "num_lanes": num_lanes, "broadcast_delay": 0})


def convert_llama(
    folder: Path, out: Path, num_lanes: int, *, dtype: str = "bfloat16", max_shard_bytes: int = 4 * 2**30
) -> ModelSpec:
    """Write `out`, a published lane checkpoint with delay 0 of the Llama in `folder`; tokenizer files are copied.

    Heads and FFN columns go to the lanes in their order. Values are rounded to `dtype` once; nothing else changes but the order
    in which the lanes' sums are added. One tensor is in memory at a time, besides one shard of what is written.
    Raises ConfigError or CheckpointError.
    """
    config = read_json(folder, "config.json", None)
    if config is None:
        raise CheckpointError(f"{folder} has no config.json; give the folder of a Llama checkpoint")
    spec = llama_spec(config, num_lanes)
    read = _reader(folder, {llama_name(name) for name in tensor_layouts(spec)})
    stored_dtype = {name: key for key, (name, _) in DTYPES.items()}[dtype]

    def stored(name: str) -> Array:
        return narrow_finite(name, lane_tensor(spec, name, read), stored_dtype)

    write_stored_checkpoint(out, spec, stored, dtype=dtype, max_shard_bytes=max_shard_bytes, manifest=False)
    for file_name in _COPIED_FILES:
        content = read_small_file(folder, file_name, None)
        if content is not None:
            (out / file_name).write_bytes(content)
    return spec


def llama_name(name: str) -> str:
    """transformers' name of one of our tensors."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    model, layers, layer_idx, kind = name.split(".", 3)
    return f"{model}.{layers}.{layer_idx}.{_NAMES[kind]}"


def lane_tensor(spec: ModelSpec, name: str, read: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
    """A tensor of the lane form, made of what `read` gives for transformers' name. Raises CheckpointError for a wrong shape."""
    whole, shape = read(llama_name(name)), tensor_layouts(spec)[name].shape
    module = name.split(".")[-2]
    columns_divided = module in ("wo", "w2")
    lanes = spec.num_lanes
    if len(shape) < 3:
        expected = shape
    elif columns_divided:
        expected = (shape[1], lanes * shape[2])
    else:
        expected = (lanes * shape[1], shape[2])
    if whole.shape != expected:
        raise CheckpointError(f"tensor {llama_name(name)} has shape {whole.shape}, but config.json asks for {expected}")
    if len(shape) < 3:
        return whole
    if module in ("wq", "wk"):
        whole = adjacent_pairs(whole, spec.head_dim)
    if columns_divided:
        return np.ascontiguousarray(whole.reshape(len(whole), lanes, -1).transpose(1, 0, 2))
    return whole.reshape(shape)


def adjacent_pairs(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of query or key heads, reordered for rotary pairs that lie side by side.

    transformers turns value i of a head with value i + head_dim / 2; here 2i turns with 2i + 1, by the same angle. Queries and
    keys are reordered alike, so their products stay the same.
    """
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return halves.transpose(0, 2, 1, 3).reshape(rows.shape)


def _reader(folder: Path, wanted: set[str]) -> Callable[[str], NDArray[np.float32]]:
    """Reads tensors of all safetensors files of a folder by name, as float32, checked to be finite.

    Raises CheckpointError if there are tensors that would be left out (biases, say), or if some are missing.
    """
    files = [SafetensorsFile.open(path) for path in sorted(folder.glob("*.safetensors"))]
    owner = {name: file for file in files for name in file.tensors}
    ignored = {name for name in owner if name.endswith("rotary_emb.inv_freq")} | {"lm_head.weight"}  # present though tied
    for problem, names in (("lacks", wanted - set(owner)), ("has tensors that cannot be kept:", set(owner) - wanted - ignored)):
        if names:
            raise CheckpointError(f"{folder} {problem} {', '.join(sorted(names)[:3])} ({len(names)} in all)")

    def read(name: str) -> NDArray[np.float32]:
        shape = owner[name].tensors[name].shape
        out = np.empty(shape, np.float32)
        owner[name].read(name, 0, shape[0], out, verify=True)
        return out

    return read
