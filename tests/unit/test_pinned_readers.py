"""What readers of configs and messages make of each value that differs from the usual one: pinned as text (varied.py).

Nobody can say of each of these lines that it is right; but who changes what is taken, refused or meant sees it here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from kog_dist.bench.shapes import DENSE, MOE, QUANTISED
from kog_dist.errors import ConfigError
from kog_dist.model.families import FAMILIES
from kog_dist.model.families.computation import COMPUTATION
from kog_dist.model.families.fields import unread_of_rope
from kog_dist.model.formats.quantisation import KEY, read_quantisation, unread_of_quantisation
from kog_dist.model.gguf import config as gguf_config
from kog_dist.model.gguf.header import FORMATS, GgufHeader, GgufTensor
from kog_dist.model.published_config import family_of, read_config
from kog_dist.model.spec import laneformer_2b
from kog_dist.rpc.messages import (
    EVENTS,
    MAGIC,
    PROTOCOL_VERSION,
    REQUESTS,
    BadMessage,
    EngineState,
    ErrorCode,
    FinishReason,
    decode_event,
    decode_request,
)
from kog_dist.rpc.messages.checks import CHECKS, TAG_OF
from kog_dist.runtime.stages import STAGES
from tests.unit.delta_configs import CONFIGS as DELTA
from tests.unit.pinning import compare
from tests.unit.test_pinned_models import SCALINGS
from tests.unit.varied import around

OF_FAMILIES: dict[str, Any] = {
    "llama": DENSE["llama-3.2-1b"], "mistral": DENSE["mistral-7b"], "qwen2": DENSE["qwen2.5-0.5b"], "qwen3": DENSE["qwen3-0.6b"],
    "qwen3_moe": MOE["qwen3-30b-a3b"], "gpt_oss": MOE["gpt-oss-20b"], "laneformer": laneformer_2b().to_config(),
    "qwen3_next": DELTA["Qwen3-Next-80B-A3B"], "qwen3_5": DELTA["Qwen3.5-9B"], "qwen3_5_moe": DELTA["Qwen3.5-35B-A3B"],
}  # fmt: skip
QUANTISATIONS: dict[str, Any] = {
    **QUANTISED,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "static_groups": False},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": None},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "of experts": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


def test_every_family_has_its_config() -> None:
    assert {family_of(config).model_types for config in OF_FAMILIES.values()} == {
        family.model_types for family in FAMILIES.values()
    }


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_a_family_takes_what_it_took(family: str) -> None:
    config = OF_FAMILIES[family]
    names = sorted({*family_of(config).keys, *COMPUTATION})
    compare(f"readers/{family}", list(around(config, _read, names=names, refusals=(ConfigError,))))


def _read(config: Any) -> object:
    """All of a spec: what it says of itself leaves out layers that it stores."""
    spec = read_config(config)
    return (spec, spec.mixed_layers) if spec.mixed_layers else spec


@pytest.mark.parametrize("name", SCALINGS)
def test_a_rotary_scaling_is_what_it_was(name: str) -> None:
    def read(scaling: Any) -> object:
        config = {**DENSE["llama-3.2-1b"], "rope_scaling": scaling}
        return read_config(config), unread_of_rope(config)

    names = [
        "rope_theta",
        "type",
        "mscale",
        "mscale_all_dim",
        "attn_factor",
        "attention_factor",
        "beta_fast",
        "truncate",
        "other",
    ]
    compare(f"readers/rope {name}", list(around(SCALINGS[name], read, names=names, refusals=(ConfigError,))))


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_quantisation_is_what_it_was(name: str) -> None:
    def read(said: Any) -> object:
        return read_quantisation({KEY: said}), unread_of_quantisation({KEY: said})

    names = """bits w_bit q_group_size format checkpoint_format desc_act static_groups sym lm_head dynamic activation_scheme fmt
        weight_block_size ignored_layers dequantize scale_fmt kv_cache_scheme modules_to_convert expert_dtype
        quantization_status quant_algo group_size rotation sparsity_config other""".split()
    compare(f"readers/quantised {name}", list(around(QUANTISATIONS[name], read, names=names, refusals=(ConfigError,))))


METADATA: dict[str, Any] = {
    "block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 4, "attention.head_count_kv": 2,
    "context_length": 256, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 5e5, "rope.dimension_count": 16,
    "attention.key_length": 16, "attention.value_length": 16, "vocab_size": 300,
}  # fmt: skip
OF_YARN: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_attn_factor": 1.5, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0,
}  # fmt: skip
OF_TEXTS: dict[str, Any] = {
    **{f"tokenizer.ggml.{name}_token_id": number for number, name in enumerate(("eos", "eot", "eom"), 5)},
    **{f"general.sampling.{name}": 1 for name in ("temp", "top_p", "top_k", "min_p", "penalty_repeat")},
}  # fmt: skip


def of_gguf(metadata: dict[str, Any], *tensors: str) -> object:
    rows = GgufTensor(FORMATS[0], (300, 64), 0, 0)
    header = GgufHeader(Path("m.gguf"), metadata, dict.fromkeys(("token_embd.weight", *tensors), rows), "", (0, 0, 0, 0))
    config = gguf_config.read_config(header, lambda: np.ones(8, np.float32))
    return config, gguf_config.read_generation_config(metadata)


@pytest.mark.parametrize("more", [{}, OF_YARN], ids=["plain", "yarn"])
def test_a_gguf_file_says_what_it_said(more: dict[str, Any], request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    base = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in {**METADATA, **more}.items()}}
    names = [f"llama.{key}" for key in (*gguf_config._CHANGING, "rope.scale_linear", "rope.scaling.finetuned", "other")]
    compare(f"readers/gguf {name}", list(around(base, of_gguf, names=() if more else names, refusals=(ValueError,))))


def test_a_gguf_file_ends_answers_where_it_did() -> None:
    compare("readers/gguf ends", list(around(OF_TEXTS, gguf_config.read_generation_config, refusals=(ValueError,))))
    of_older_files = {"tokenizer.ggml.eos_token_id": 0xFFFFFFFF, "tokenizer.ggml.eot_token_id": 7}
    assert gguf_config.read_generation_config(of_older_files) == {"eos_token_id": [7]}, "the largest number is none"


# ---- messages between processes ----
PLAIN = ("a", 3, 2.0, True, [3], ["a"], [], {}, "ab" * 32, ["ab" * 32], *map(str, (*EngineState, *FinishReason, *ErrorCode)))


MEANT: dict[str, dict[str, Any]] = {
    "Generate": {
        "prompt": None, "regex": None, "grammar": None, "prompt_logprobs": False, "sampling": {"temperature": 1.0, "logprobs": 2},
    },
    "Done": {"stages_s": [0.5] * len(STAGES)},
}  # fmt: skip


def usual_body(cls: type[Any]) -> dict[str, Any]:
    """A value for every field of a message, the first of a few that it takes."""

    def is_taken(check: Any, value: Any) -> bool:
        try:
            check(value)
        except (ValueError, TypeError):
            return False
        return True

    found = {name: next((value for value in PLAIN if is_taken(check, value)), None) for name, check, _ in CHECKS[cls]}
    return found | MEANT.get(cls.__name__, {})


@pytest.mark.parametrize("cls", [*REQUESTS.values(), *EVENTS.values()], ids=lambda cls: cls.__name__)
def test_a_message_is_taken_as_it_was(cls: type[Any]) -> None:
    decode = decode_request if cls in REQUESTS.values() else decode_event

    def read(body: Any) -> object:
        return decode(MAGIC + bytes((PROTOCOL_VERSION,)) + msgpack.packb([TAG_OF[cls], body]))

    compare(f"readers/messages/{cls.__name__}", list(around(usual_body(cls), read, names=["other"], refusals=(BadMessage,))))
