"""The `config.json` and `generation_config.json` that a GGUF file's metadata and tensors stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from kog_dist.late_numpy import NDArray, np
from kog_dist.model.families.computation import differs_by_one
from kog_dist.model.families.fields import Number
from kog_dist.model.gguf import delta_nets
from kog_dist.model.gguf.header import GgufHeader
from kog_dist.model.rope_scaling import Llama3Scaling
from kog_dist.quoting import short

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", *delta_nets.MODEL_TYPES)
NO_TOKEN: Final = 2**32 - 1  # how older files write that there is none
ROPE_FACTORS: Final = "rope_freqs.weight"  # by what each rotary frequency is divided: how Llama 3's scaling is stored
_HEAD: Final = "output.weight"
# key of the metadata -> key of config.json
_SIZES: Final = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_OF_A_LAYER: Final = frozenset(("attention.head_count", "attention.head_count_kv", "feed_forward_length"))  # may be lists
_READ: Final = frozenset(
    """attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.freq_base
    rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned
    rope.scale_linear vocab_size""".split()
)
# Keys that change the computation and that are not read, with the values that do not change it; others are left out.
_CHANGING: Final[Mapping[str, tuple[object, ...]]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "leading_dense_block_count"), (0,)),
    **dict.fromkeys(("attention.sliding_window", "attention.chunk_size", "attention.max_alibi_bias"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.q_lora_rank", "attention.kv_lora_rank"), (0,)),
    **dict.fromkeys(("attention.shared_kv_layers", "no_rope_layer_step", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.scale", "use_parallel_residual"), (0,)),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), (0, 1)),  # 0: none
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.freq_base_swa": (),
    "attention.temperature_scale": (0, 1),
}
_OF_YARN: Final = {
    "attn_factor": "attn_factor",
    "yarn_attn_factor": "attn_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_SAMPLING: Final = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def read_config(header: GgufHeader, rope_factors: Callable[[], NDArray[np.float32]]) -> dict[str, Any]:
    """In Hugging Face's terms. Raises ValueError naming the key that is missing, unknown or not supported.

    `rope_factors` reads the tensor of that name, if the file has it.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture {short(architecture)} is not supported; supported: {known}")
    prefix = f"{architecture}."
    given = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    has_nets = architecture in delta_nets.MODEL_TYPES
    read = _READ | delta_nets.READ if has_nets else _READ
    changing = {key: neutral for key, neutral in _CHANGING.items() if key not in read}
    changing |= delta_nets.CHANGING if has_nets else {}
    for key, neutral in changing.items():
        if key in given and given[key] not in neutral:
            raise ValueError(f"{short(prefix + key)} {short(given[key])} is not supported")
    unread = sorted(set(given) - set(_SIZES) - read - set(changing))
    missing = [prefix + key for key in {*_SIZES, *read} - set(given)]
    for key in header.metadata:
        if (meant := next((name for name in missing if differs_by_one(key, name)), None)) is not None:
            raise ValueError(f"unknown key {short(key)}; is it {meant}, which is missing?")
    model_type = delta_nets.MODEL_TYPES.get(architecture, architecture)
    config: dict[str, Any] = {"model_type": model_type} | {prefix + key: given[key] for key in unread}  # to be left out
    if has_nets:
        given["attention.head_count_kv"] = delta_nets.kv_heads(given, "attention.head_count_kv")
    of_layers = {key: values for key in _OF_A_LAYER if isinstance(values := given.get(key), list)}
    given |= {key: _of_all_layers(given, key, values, prefix) for key, values in of_layers.items()}
    has_experts = architecture in delta_nets.WITH_EXPERTS
    sizes = {key: name for key, name in _SIZES.items() if key in given or key != "feed_forward_length" or not has_experts}
    config |= {name: _number(given, key, int, None, prefix) for key, name in sizes.items()}
    heads = config["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"{prefix}attention.head_count is {heads}")
    config["num_key_value_heads"] = _number(given, "attention.head_count_kv", int, heads, prefix)
    config["head_dim"] = _head_dim(given, config["hidden_size"], heads, prefix, turns_all=not has_nets)
    if has_nets:
        config |= delta_nets.read_delta_nets(architecture, given, partial(_number, given, prefix=prefix), config["head_dim"])
    config["rms_norm_eps"] = _number(given, "attention.layer_norm_rms_epsilon", float, None, prefix)
    config["rope_theta"] = _number(given, "rope.freq_base", float, 1e4, prefix)
    config["vocab_size"] = _vocab_size(header, given)
    config["tie_word_embeddings"] = _HEAD not in header.tensors
    scaling = _rope_scaling(given, prefix)
    if ROPE_FACTORS in header.tensors:
        if scaling is not None:
            raise ValueError(f"it has both {ROPE_FACTORS} and {prefix}rope.scaling")
        scaling = _llama3_scaling(rope_factors(), config["head_dim"], config["rope_theta"])
    return config if scaling is None else config | {"rope_scaling": scaling}


def read_generation_config(metadata: Mapping[str, object]) -> dict[str, object]:
    """Ids that end an answer, and the model's own sampling where the file has one. Raises ValueError."""
    ids = [_number(metadata, f"tokenizer.ggml.{name}_token_id", int, NO_TOKEN) for name in ("eos", "eot", "eom")]
    config: dict[str, object] = {"eos_token_id": list(dict.fromkeys(i for i in ids if i != NO_TOKEN))}
    if not config["eos_token_id"]:
        del config["eos_token_id"]
    for key, name in _SAMPLING.items():
        if f"general.sampling.{key}" in metadata:
            kind: type[float] = int if name == "top_k" else float
            config[name] = _number(metadata, f"general.sampling.{key}", kind, None)
    return config


def _number(values: Mapping[str, object], key: str, kind: type[Number], default: Number | None, prefix: str = "") -> Number:
    """A number; float32 as its shortest decimal: 1e-05 stays 1e-05."""
    value: Any = values.get(key, default)
    if value is None:
        raise ValueError(f"{prefix}{key} is missing")
    if type(value) not in ((int, float) if kind is float else (int,)) or not math.isfinite(value):
        raise ValueError(f"{prefix}{key} must be {'a number' if kind is float else 'an integer'}, got {short(value)}")
    return kind(float(str(np.float32(value))) if kind is float and abs(value) < 1e30 else value)


def _of_all_layers(given: Mapping[str, object], key: str, values: list[object], prefix: str) -> object:
    """The one number of a list that has it for each layer."""
    if len(values) != _number(given, "block_count", int, None, prefix) or len(set(map(repr, values))) != 1:
        raise ValueError(f"{prefix}{key} must be an integer, or the same one for each layer, got {short(values)}")
    return values[0]


def _head_dim(given: Mapping[str, object], hidden_size: int, heads: int, prefix: str, *, turns_all: bool) -> int:
    size: int = _number(given, "attention.key_length", int, hidden_size // heads, prefix)
    for key in ("attention.value_length", *(("rope.dimension_count",) if turns_all else ())):
        other = _number(given, key, int, size, prefix)
        if other != size:
            raise ValueError(f"{prefix}{key} {other} is not the head size {size}, which is not supported")
    return size


def _vocab_size(header: GgufHeader, given: Mapping[str, object]) -> int:
    """Rows of the embedding: files name fewer tokens where it is padded."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no tensor token_embd.weight")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    rows, named = embedding.shape[0], len(tokens) if isinstance(tokens, list) else 0  # what else they are, the tokenizer says
    told = _number(given, "vocab_size", int, rows)
    if told > rows or named > rows:
        raise ValueError(f"it has {max(told, named)} tokens, but only {rows} rows of token_embd.weight")
    return rows


def _rope_scaling(given: Mapping[str, object], prefix: str) -> dict[str, object] | None:
    kind = given.get("rope.scaling.type", "none")
    factor = _number(given, "rope.scaling.factor", float, 1.0, prefix)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        old = _number(given, "rope.scale_linear", float, 1.0, prefix)
        return None if old == 1.0 else {"rope_type": "linear", "factor": old}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{prefix}rope.scaling.type {short(kind)} is not supported; supported: none, linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key, name in _OF_YARN.items():
            if f"rope.scaling.{key}" in given:
                scaling[name] = _number(given, f"rope.scaling.{key}", float, None, prefix)
        original = _number(given, "rope.scaling.original_context_length", int, None, prefix)
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(factors: NDArray[np.float32], head_dim: int, theta: float) -> dict[str, object]:
    """The scaling whose factors these are: Llama 3's share all constants but one. Raises ValueError if there is none."""
    pairs = head_dim // 2
    largest = float(factors.max(initial=0.0))
    if factors.shape == (pairs,) and math.isfinite(largest) and largest >= 1 and theta > 0:
        scaling = Llama3Scaling(float(str(np.float32(largest))), 1.0, 4.0, 8192)
        plain = theta ** -(np.arange(pairs, dtype=np.float64) * 2 / head_dim)
        expected = plain / scaling.scaled(plain.astype(np.float32), theta)
        if np.allclose(factors, expected, rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    raise ValueError(f"{ROPE_FACTORS} is not how Llama 3 scales its rotary frequencies, which alone is supported")
