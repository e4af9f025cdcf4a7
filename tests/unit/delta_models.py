"""Small random models with gated delta nets: as transformers writes them, as they are published, and computed in float64.

`definition` is written from the equations and from published names of tensors; nothing of the engine is in it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.unit.formats.writers import Method

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]
VOCAB = 104
# Odd shapes: key and value heads of other sizes than the model's own, three value heads to a key head, 5 rotated pairs.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 20,
    "max_position_embeddings": 320, "linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 6,
    "linear_value_head_dim": 10, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20, "num_experts": 10, "num_experts_per_tok": 3,
}  # fmt: skip
EIGHT_LANES = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
CONFIGS: dict[str, tuple[Any, Any]] = {
    "qwen3_5": (  # a lane has two key heads
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**SIZES | {"linear_num_key_heads": 8, "linear_num_value_heads": 24}, intermediate_size=60),
    ),
    "qwen3_5, tied, three layers": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SIZES | {"num_hidden_layers": 3, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3}, intermediate_size=56,
            tie_word_embeddings=True, layer_types=["full_attention", "linear_attention", "full_attention"],
        ),
    ),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**SIZES | EXPERTS | EIGHT_LANES)),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig(**SIZES, **EXPERTS)),
    "qwen3_next, some layers dense, weights of all experts": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**SIZES, **EXPERTS, intermediate_size=36, mlp_only_layers=[1], norm_topk_prob=False),
    ),
}  # fmt: skip


# Sizes of whole blocks of 16 rows and columns.
_BLOCKS: dict[str, Any] = SIZES | {
    "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_EXPERTS_OF_BLOCKS = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
OF_BLOCKS: dict[str, tuple[Any, Any]] = {
    "qwen3_5_moe, blocks": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_BLOCKS, **_EXPERTS_OF_BLOCKS)),
    "qwen3_next, blocks": (Qwen3NextForCausalLM, Qwen3NextConfig(**_BLOCKS, **_EXPERTS_OF_BLOCKS)),
    "qwen3_5, blocks": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_BLOCKS, intermediate_size=32)),
}


def _steady(config: Any) -> Any:
    found = copy.deepcopy(config)
    found.rms_norm_eps = 1e-2
    return found


# The same with an epsilon so large that no norm makes roundings of what is nearly 0 larger.
STEADY: dict[str, tuple[Any, Any]] = {
    f"{name}, steady": (kind, _steady(config)) for name, (kind, config) in CONFIGS.items() if "," not in name
}
# Heads as wide as those of all published models, whose outputs are not nearly 0.
_WIDE: dict[str, Any] = SIZES | {
    "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
WIDE: dict[str, tuple[Any, Any]] = {
    "qwen3_5, wide": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_WIDE, intermediate_size=512)),
    "qwen3_5_moe, wide": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_WIDE, **EXPERTS)),
    "qwen3_next, wide": (Qwen3NextForCausalLM, Qwen3NextConfig(**_WIDE, **EXPERTS)),
}
# Sizes that GPUs take: keys of 32 values, lanes of whole groups of 128 columns, nets and attention of as many values.
_ON_DEVICES: dict[str, Any] = SIZES | {
    "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
_EXPERTS_ON_DEVICES = EXPERTS | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
ON_DEVICES: dict[str, tuple[Any, Any]] = {
    "qwen3_5, on devices": (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_ON_DEVICES, intermediate_size=512)),
    "qwen3_5_moe, on devices": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_ON_DEVICES, **_EXPERTS_ON_DEVICES)),
    "qwen3_next, on devices": (Qwen3NextForCausalLM, Qwen3NextConfig(**_ON_DEVICES, **_EXPERTS_ON_DEVICES)),
}
# Modules that Qwen quantises, and those that are left by writers of INT4 who keep delta nets in 16 bit.
QUANTISED = tuple("in_proj_qkv in_proj_z in_proj_qkvz out_proj q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split())
WITHOUT_DELTA = QUANTISED[4:]
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def random_model(name: str) -> Any:
    """A model of these in bfloat16, all of whose tensors differ. Rounding to float32 changes no choice of the tests."""
    kind, config = (CONFIGS | OF_BLOCKS | STEADY | WIDE | ON_DEVICES)[name]
    torch.manual_seed(8 if "some layers dense" in name else 7)
    model = kind(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in key:  # those of delta nets are weights, the others differ from 1
                parameter.copy_(("linear_attn" in key) + 0.2 * noise)
            elif key.endswith("A_log"):
                parameter.copy_(noise.abs())
            elif key.endswith("dt_bias"):
                parameter.copy_(noise - 2)
            else:
                scale = 3.0 if key.endswith(".mlp.gate.weight") else 0.4 if key.endswith(_OUTPUTS) else 1.0
                fan_in = parameter.shape[-1] if "conv1d" not in key else 2
                parameter.copy_(scale * noise * fan_in**-0.5)
    return model.to(torch.bfloat16)


def logits_of(model: Any, prompt: list[int]) -> Array:
    """What transformers makes of it, (positions, vocabulary), in the precision of the model; its delta rule is float32."""
    with torch.no_grad():
        return np.asarray(model(torch.tensor([prompt])).logits[0].float().numpy())


def published(
    name: str, folder: Path, *, stacks_experts: bool = True, method: Method | None = None, ends: Sequence[str] = QUANTISED
) -> Tensors:  # fmt: skip
    """Write a model as Qwen publishes it: names of tensors, a wrapper with a part that sees, and an MTP layer; its tensors by the
    names that a text alone has. `method`: how matrices with these ends of names are quantised, one expert after the other.
    """
    model = random_model(name)
    config = json.loads(model.config.to_json_string())
    tensors = {key: tensor.clone().contiguous() for key, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    written = dict(tensors)
    if name.startswith("qwen3_next") or not stacks_experts or method is not None:
        written = {key: part for name_, tensor in tensors.items() for key, part in _one_by_one(name_, tensor).items()}
    if method is not None:
        config["quantization_config"] = method.config
        for key in [key for key in written if key.endswith(tuple(f"{end}.weight" for end in ends))]:
            made = method.write(written.pop(key))
            written |= {f"{key.removesuffix('.weight')}.{end}": tensor.contiguous() for end, tensor in made.tensors.items()}
            _put(tensors, key, made.values)
    written |= {
        "mtp.fc.weight": torch.zeros(4, 8),
        "mtp.layers.0.mlp.gate.weight": torch.zeros(2, 2),
        "mtp.norm.weight": torch.zeros(4),
    }
    if not name.startswith("qwen3_next"):
        written = {
            key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: tensor
            for key, tensor in written.items()
        }
        written |= {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(6, 2), "model.visual.merger.norm.bias": torch.zeros(3)}
        rope = config["rope_parameters"] | {"mrope_section": [2, 2, 1], "mrope_interleaved": True}
        kind = config["model_type"].removesuffix("_text")
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": kind, "image_token_id": 80,
            "vision_config": {"depth": 2, "model_type": kind}, "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": config | {
                "rope_parameters": rope, "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
                "full_attention_interval": 4,
            },
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    halves = sorted(written)[::2], sorted(written)[1::2]
    index = dict[str, str]()
    for number, names in enumerate(halves, start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: written[key] for key in names}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def _put(tensors: Tensors, key: str, values: torch.Tensor) -> None:
    """Values of a matrix, or of one of a stack of them."""
    if key in tensors:
        tensors[key] = values
        return
    module, expert, part, _ = key.rsplit(".", 3)
    stack = f"{module}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
    tensors[stack] = tensors[stack].float()
    half = tensors[stack].shape[1] // 2
    rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None), "down_proj": slice(None)}[part]
    tensors[stack][int(expert), rows] = values


def _one_by_one(name: str, tensor: torch.Tensor) -> Tensors:
    """Experts as tensors of their own."""
    if name.endswith("experts.gate_up_proj"):
        prefix, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
        made = {f"{prefix}{e}.gate_proj.weight": one[:half].contiguous() for e, one in enumerate(tensor)}
        return made | {f"{prefix}{e}.up_proj.weight": one[half:].contiguous() for e, one in enumerate(tensor)}
    if name.endswith("experts.down_proj"):
        return {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": one.contiguous() for e, one in enumerate(tensor)}
    return {name: tensor}


# ---- the definition ----
def definition(config: Any, tensors: Tensors, prompt: list[int], dtype: Any = np.float64) -> Array:
    """Logits (positions, vocabulary); all values and sums in `dtype`."""
    w = {name: tensor.double().numpy().astype(dtype) for name, tensor in tensors.items()}
    eps = config.rms_norm_eps

    def norm(x: Array, weight: Array) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)

    h = w["model.embed_tokens.weight"][prompt]
    for layer, kind in enumerate(config.layer_types):
        p = f"model.layers.{layer}."
        x = norm(h, 1 + w[f"{p}input_layernorm.weight"])
        h = h + (_attention(config, w, f"{p}self_attn.", x, norm) if kind == "full_attention" else _delta(config, w, p, x, norm))
        x = norm(h, 1 + w[f"{p}post_attention_layernorm.weight"])
        h = h + _ffn(config, w, f"{p}mlp.", x)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return np.asarray(norm(h, 1 + w["model.norm.weight"]) @ head.T)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _attention(config: Any, w: dict[str, Array], p: str, x: Array, norm: Any) -> Array:
    heads, kv_heads, dim, time = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
    both = (x @ w[f"{p}q_proj.weight"].T).reshape(time, heads, 2 * dim)
    query, gate = both[..., :dim], both[..., dim:]
    key, value = ((x @ w[f"{p}{name}_proj.weight"].T).reshape(time, kv_heads, dim) for name in "kv")
    query, key = norm(query, 1 + w[f"{p}q_norm.weight"]), norm(key, 1 + w[f"{p}k_norm.weight"])
    rotary = int(dim * config.rope_parameters["partial_rotary_factor"])
    frequencies = (1 / config.rope_parameters["rope_theta"] ** (np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    angles = (np.arange(time, dtype=np.float32)[:, None] * frequencies).astype(x.dtype)  # rounded, as published models are
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(part: Array) -> Array:
        first, second, rest = part[..., : rotary // 2], part[..., rotary // 2 : rotary], part[..., rotary:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    query, key = turned(query), turned(key)
    out = np.zeros((time, heads, dim), x.dtype)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, shared].T * dim**-0.5
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, shared]
    return np.asarray((out * _sigmoid(gate)).reshape(time, -1) @ w[f"{p}o_proj.weight"].T)


def _delta(config: Any, w: dict[str, Array], p: str, x: Array, norm: Any) -> Array:
    p += "linear_attn."
    time, key_heads, heads = len(x), config.linear_num_key_heads, config.linear_num_value_heads
    dk, dv, each = config.linear_key_head_dim, config.linear_value_head_dim, heads // key_heads
    if f"{p}in_proj_qkvz.weight" in w:
        grouped = (x @ w[f"{p}in_proj_qkvz.weight"].T).reshape(time, key_heads, -1)
        q, k, v, z = (part.reshape(time, -1) for part in np.split(grouped, [dk, 2 * dk, 2 * dk + each * dv], axis=2))
        b, a = (
            part.reshape(time, -1) for part in np.split((x @ w[f"{p}in_proj_ba.weight"].T).reshape(time, key_heads, -1), 2, 2)
        )
        qkv = np.concatenate([q, k, v], axis=1)
    else:
        qkv, z, a, b = (x @ w[f"{p}in_proj_{name}.weight"].T for name in ("qkv", "z", "a", "b"))
    taps = w[f"{p}conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, qkv.shape[1]), x.dtype), qkv])
    conv = np.sum([padded[tap : tap + time] * taps[:, tap] for tap in range(taps.shape[1])], axis=0)
    conv = conv * _sigmoid(conv)
    q, k, v = np.split(conv, [key_heads * dk, 2 * key_heads * dk], axis=1)
    query, key, value = q.reshape(time, -1, dk), k.reshape(time, -1, dk), v.reshape(time, -1, dv)
    query, key = (np.asarray(part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6)) for part in (query, key))
    decay = np.exp(-np.exp(w[f"{p}A_log"]) * np.log1p(np.exp(a + w[f"{p}dt_bias"])))
    out = np.zeros((time, heads, dv), x.dtype)
    for head in range(heads):
        state, shared = np.zeros((dk, dv), x.dtype), head // each
        for t in range(time):
            state = state * decay[t, head]
            wrong = _sigmoid(b[t, head]) * (value[t, head] - key[t, shared] @ state)
            state = state + np.outer(key[t, shared], wrong)
            out[t, head] = query[t, shared] * dk**-0.5 @ state
    gate = (z * _sigmoid(z)).reshape(time, heads, dv)
    return np.asarray((norm(out, w[f"{p}norm.weight"]) * gate).reshape(time, -1) @ w[f"{p}out_proj.weight"].T)


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    gated = x @ gate.T
    return np.asarray((gated * _sigmoid(gated) * (x @ up.T)) @ down.T)


def _ffn(config: Any, w: dict[str, Array], p: str, x: Array) -> Array:
    if f"{p}gate.weight" not in w:
        return _swiglu(x, *(w[f"{p}{name}_proj.weight"] for name in ("gate", "up", "down")))
    logits = x @ w[f"{p}gate.weight"].T
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    out = _swiglu(x, *(w[f"{p}shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    out = out * _sigmoid(x @ w[f"{p}shared_expert_gate.weight"].T)
    width = config.moe_intermediate_size
    for t, row in enumerate(chances):
        chosen = np.argsort(-row, kind="stable")[: config.num_experts_per_tok]
        total = row[chosen].sum() if getattr(config, "norm_topk_prob", True) else 1.0
        for expert in chosen:
            both = w[f"{p}experts.gate_up_proj"][expert]
            out[t] += row[expert] / total * _swiglu(x[t], both[:width], both[width:], w[f"{p}experts.down_proj"][expert])
    return out
