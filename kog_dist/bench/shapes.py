"""Shapes that benchmarks of GPUs know by name, and checkpoints of them with random weights."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kog_dist.decode.coding import HEAD_CODING, Coding, Codings
from kog_dist.errors import ConfigError
from kog_dist.model.formats.quantisation import KEY, read_quantisation
from kog_dist.model.published_config import read_config, read_config_file
from kog_dist.model.spec import ModelSpec, laneformer_2b


def _config(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **others: Any) -> Any:
    return {
        "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, **others,
    }  # fmt: skip


def _gpt_oss(layers: int, num_experts: int) -> Any:
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": layers, "num_local_experts": num_experts,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
        "vocab_size": 201088, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


# What the configs of models that people run say of their shape.
DENSE: dict[str, Mapping[str, Any]] = {
    "smollm2-135m": _config("llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "smollm2-1.7b": _config("llama", 2048, 24, 32, 32, 8192, 49152, tie_word_embeddings=True),
    "llama-3.2-1b": _config("llama", 2048, 16, 32, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-3.2-3b": _config("llama", 3072, 28, 24, 8, 8192, 128256, tie_word_embeddings=True),
    "llama-3.1-8b": _config("llama", 4096, 32, 32, 8, 14336, 128256),
    "mistral-7b": _config("mistral", 4096, 32, 32, 8, 14336, 32768, sliding_window=None),
    "qwen2.5-0.5b": _config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True),
    "qwen2.5-coder-7b": _config("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen3-0.6b": _config("qwen3", 1024, 28, 16, 8, 3072, 151936, tie_word_embeddings=True),
    "qwen3-1.7b": _config("qwen3", 2048, 28, 16, 8, 6144, 151936, tie_word_embeddings=True),
    "qwen3-4b": _config("qwen3", 2560, 36, 32, 8, 9728, 151936, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 4096, 36, 32, 8, 12288, 151936),
}
MOE: dict[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": _config(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True,
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
_NETS: dict[str, Any] = {
    "max_position_embeddings": 262_144, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "attn_output_gate": True,
    "rope_theta": 1e7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
DELTA_NETS: dict[str, Mapping[str, Any]] = {
    "qwen3.5-4b": _config(
        "qwen3_5_text", 2560, 32, 16, 4, 9216, 248320, **_NETS, linear_num_value_heads=32, tie_word_embeddings=True
    ),
    "qwen3.5-9b": _config("qwen3_5_text", 4096, 32, 16, 4, 12288, 248320, **_NETS, linear_num_value_heads=32),
    "qwen3.5-27b": _config("qwen3_5_text", 5120, 64, 24, 4, 17408, 248320, **_NETS, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": _config(
        "qwen3_5_moe_text", 2048, 40, 16, 2, 512, 248320, **_NETS, linear_num_value_heads=32, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
    ),
}  # fmt: skip
SHAPES = DENSE | MOE | DELTA_NETS
# What they say of quantised weights, by the name that follows a shape's.
_INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
_ROWS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
QUANTISED: dict[str, Mapping[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    **{
        name: {
            "quant_method": "compressed-tensors",
            "format": kind,
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        for name, kind, weights in (
            ("fp8-rows", "float-quantized", _ROWS),
            ("int4", "pack-quantized", _INTEGERS),
            ("mxfp4", "mxfp4-pack-quantized", _FLOATS),
        )
    },
}
_HEAD = re.compile(r"\+head8(?=[:@]|$)")  # of an LM head in INT8
_DENSE_CONTEXT = 4096
SEED = 1
_TMPFS = Path("/dev/shm")


def named_spec(name: str, *, others: Sequence[str] = ()) -> ModelSpec:
    """The spec of a name, or of a `config.json` or its folder.

    All but 2b may say how many lanes they have and for how many tokens their caches are: NAME:LANES, NAME@TOKENS,
    NAME:LANES@TOKENS; else as many lanes as their family has, for 4,096 tokens.

    Raises ConfigError listing the known ones, and `others` that the caller knows.
    """
    if name == "2b":
        return laneformer_2b()
    base, at, tokens = name.partition("@")
    base, colon, lanes = base.partition(":")
    wrong = (colon and lanes not in ("1", "2", "4", "8")) or (at and not tokens.isdecimal())
    if base in SHAPES and not wrong:
        spec = read_config(SHAPES[base])
    elif Path(base).exists() and not wrong:
        path = Path(base)
        spec = read_config_file(path.parent if path.is_file() else path).spec
    else:
        known = ", ".join((*others, "2b", *SHAPES))
        raise ConfigError(
            f"--spec {name!r} is not known; known: {known}, or a config.json; NAME:1@8192 has one lane, 8,192 tokens"
        )
    spec = spec.with_context(int(tokens) if tokens else min(_DENSE_CONTEXT, spec.max_context))
    return replace(spec, num_lanes=int(lanes)) if lanes else spec


def named_shape(name: str) -> tuple[ModelSpec, Codings]:
    """The same of a shape whose layers may be quantised, its LM head, or both: NAME+FORMAT, NAME+head8, NAME+FORMAT+head8, with
    lanes and tokens behind it as above. A folder is as its config.json says, or with +fp8 or +int4 as `--quantize` rounds it.
    """
    without_head = _HEAD.sub("", name)
    spec, coding = _of_layers(without_head)
    return spec, {"coding": coding, "head_coding": None if without_head == name else HEAD_CODING}


def _of_layers(name: str) -> tuple[ModelSpec, Coding | None]:
    base, plus, form = name.partition("+")
    end = next((i for i, character in enumerate(form) if character in ":@"), len(form))
    form, behind = form[:end], form[end:]
    folder = base if plus else base.partition("@")[0].partition(":")[0]
    if folder not in SHAPES and Path(folder).exists():
        return _of_folder(Path(folder), form if plus else "none", behind if plus else name[len(folder) :])
    if not plus:
        said = read_quantisation(MOE.get(base.partition("@")[0].partition(":")[0], {}))
        return named_spec(name), None if said is None else Coding.of(said.form, is_of_experts=said.is_of_experts)
    if base not in DENSE | MOE or form not in QUANTISED:
        raise ConfigError(
            f"--spec {name!r} is not known; quantised are NAME+FORMAT with a format of {', '.join(QUANTISED)}, "
            f"for {', '.join((*DENSE, *MOE))}; and with an LM head in INT8 what ends in +head8"
        )
    config = {**(DENSE | MOE)[base], KEY: QUANTISED[form]}
    said = read_quantisation(config)
    assert said is not None
    lanes = "" if behind.startswith(":") else f":{read_config(config).num_lanes}"
    return named_spec(f"{base}{lanes}{behind}"), Coding.of(said.form)


def _of_folder(path: Path, form: str, behind: str) -> tuple[ModelSpec, Coding | None]:
    """Of a folder or its config.json. `behind`: lanes and tokens. Raises CheckpointError, and ConfigError for codes that no GPU
    has.
    """
    from kog_dist.model.checkpoint import planned_checkpoint
    from kog_dist.workers.cuda.coded_source import coding_of

    if form not in ("none", "fp8", "int4"):
        raise ConfigError(f"--spec: {path} is rounded to fp8 or int4, not to {form[:20]!r}; leave out what follows +")
    checkpoint = planned_checkpoint(path.parent if path.is_file() else path, quantize=form)
    if form != "none" and checkpoint.quantisation is not None:
        raise ConfigError(f"--spec: {path} has {checkpoint.quantisation} already; leave out +{form}")
    lanes = "" if behind.startswith(":") else f":{checkpoint.spec.num_lanes}"
    return named_spec(f"{path}{lanes}{behind}"), coding_of(checkpoint)


@contextmanager
def random_checkpoint(spec: ModelSpec, parent: Path | None) -> Iterator[Path]:
    """A folder with a bfloat16 checkpoint and its manifest, made on the GPU; removed at the end.

    It lies in `parent`; None: in memory (/dev/shm) if there is room, else where temporary files go.
    """
    from kog_dist.model.written_checkpoint import write_stored_checkpoint
    from kog_dist.workers.cuda.random_weights import random_tensor

    with model_folder(spec, parent) as folder:
        write_stored_checkpoint(folder, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30)
        yield folder


@contextmanager
def model_folder(spec: ModelSpec, parent: Path | None = None, *, num_bytes: int | None = None) -> Iterator[Path]:
    """An empty folder with room for a checkpoint of `num_bytes`, by default a 16-bit one of `spec`; removed at the end.

    `parent` as above.
    """
    num_bytes = (2 * spec.num_parameters if num_bytes is None else num_bytes) + 2**28
    if parent is None and _TMPFS.is_dir() and shutil.disk_usage(_TMPFS).free > num_bytes:
        parent = _TMPFS
    with tempfile.TemporaryDirectory(prefix="kog-model-", dir=parent) as name:
        free = shutil.disk_usage(name).free
        if free < num_bytes:
            raise ConfigError(f"{name} has room for {free / 1e9:.1f} GB, the model needs {num_bytes / 1e9:.1f} GB; give --folder")
        yield Path(name)
