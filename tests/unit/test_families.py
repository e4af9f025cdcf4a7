"""Every family against transformers in float64: random models of odd shapes, read from a folder as transformers writes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.errors import CheckpointError, ConfigError, KogError
from kog_dist.launch.inspection import check as inspection_check
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.prediction import most_tokens_per_s
from kog_dist.launch.target import Target, plan_target
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.published_config import read_config
from kog_dist.runtime import memfd
from kog_dist.sampling_params import SamplingParams

PROMPT_TOKENS = 300
TOLERANCE = 1e-5  # of the largest logit
SIZES = {"vocab_size": 97, "num_hidden_layers": 3, "max_position_embeddings": 320}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 80}


def sizes(hidden: int, heads: int, kv_heads: int, ffn: int, **others: Any) -> dict[str, Any]:
    return SIZES | {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
    } | others  # fmt: skip


MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**sizes(64, 8, 2, 88))),
    "llama, tied, llama3": (
        LlamaForCausalLM,
        LlamaConfig(**sizes(64, 8, 8, 96), tie_word_embeddings=True, rope_parameters=LLAMA3),
    ),
    "llama, 3 heads of 12, linear": (
        LlamaForCausalLM,
        LlamaConfig(**sizes(36, 3, 3, 50), rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
    ),
    "llama, biases": (LlamaForCausalLM, LlamaConfig(**sizes(64, 8, 4, 64, attention_bias=True))),
    "llama, head_dim of its own": (LlamaForCausalLM, LlamaConfig(**sizes(60, 10, 2, 48, head_dim=24))),
    "mistral, windows": (MistralForCausalLM, MistralConfig(**sizes(48, 4, 4, 64), sliding_window=17)),
    "qwen2, 7 queries per KV head": (Qwen2ForCausalLM, Qwen2Config(**sizes(112, 14, 2, 72))),
    "qwen2, windows, yarn": (
        Qwen2ForCausalLM,
        Qwen2Config(**sizes(64, 4, 4, 64), use_sliding_window=True, sliding_window=33, max_window_layers=1, rope_parameters=YARN),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**sizes(48, 8, 4, 80, head_dim=16), tie_word_embeddings=True)),
    "qwen3, biases": (Qwen3ForCausalLM, Qwen3Config(**sizes(48, 4, 2, 40, head_dim=16, attention_bias=True))),
    "qwen3, 5 queries per KV head, yarn": (
        Qwen3ForCausalLM,
        Qwen3Config(**sizes(40, 10, 2, 56, head_dim=10), rope_parameters=YARN | {"beta_fast": 16, "truncate": False}),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder as transformers writes it, and the model in float64."""
    kind, config = MODELS[request.param]
    torch.manual_seed(7)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("families") / "model"
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    return folder, kind.from_pretrained(folder, dtype=torch.float64).eval()  # its rotary frequencies in float32


def expected_logits(model: Any, prompt: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()  # type: ignore[no-any-return]


def interpreted_logits(folder: Path, prompt: list[int]) -> np.ndarray[Any, Any]:
    checkpoint = open_checkpoint(folder)
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), dtype=np.float64)
    plan = make_plan(checkpoint.spec, 1)
    check(plan)
    engine = Interpreter(plan, 0, weights, None, dtype=np.float64, kv_dtype="float64")
    rows = []
    for position, token in enumerate(prompt):
        output = engine.step(token, position, SamplingParams(), gather_logits=True)
        assert output.logits is not None
        rows.append(output.logits.copy())
    return np.stack(rows)


def test_logits_are_those_of_transformers_at_every_position(case: tuple[Path, Any]) -> None:
    folder, model = case
    prompt = np.random.default_rng(3).integers(0, SIZES["vocab_size"], PROMPT_TOKENS).tolist()
    expected = expected_logits(model, prompt)
    scale = np.abs(expected).max()
    assert np.abs(interpreted_logits(folder, prompt) - expected).max() < TOLERANCE * scale
    oracle = Laneformer.from_checkpoint(folder, torch.float64)
    with torch.no_grad():
        assert np.abs(oracle(torch.tensor([prompt]))[0].numpy() - expected).max() < TOLERANCE * scale


REAL: dict[str, dict[str, Any]] = {  # as published
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
        "use_cache": True, "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen2.5-coder-7b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.44.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    },
    "mistral-7b-v0.3": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": True,
        "vocab_size": 32768,
    },
}  # fmt: skip
PARAMETERS = {"llama-3.2-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360,
              "qwen2.5-coder-7b": 7_615_616_512, "mistral-7b-v0.3": 7_248_023_552}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_published_configs_are_read(name: str) -> None:
    spec = read_config(REAL[name])
    assert spec.num_parameters == PARAMETERS[name]
    assert spec.num_lanes == {"llama-3.2-1b": 4, "qwen3-0.6b": 1, "qwen2.5-coder-7b": 4}.get(name, 8)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mistral-7b-v0.3", {"attention_bias": True}, "attention_bias"),
        ("llama-3.2-1b", {"mlp_bias": True}, "mlp_bias"),
        ("llama-3.2-1b", {"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not supported"),
        ("llama-3.2-1b", {"num_experts": 8}, "config key num_experts is 8"),
        ("llama-3.2-1b", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama-3.2-1b", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope' is not supported"),
        ("llama-3.2-1b", {"model_type": "gemma3"}, "model_type 'gemma3' is not supported; supported: laneformer_tp, laneformer"),
        ("llama-3.2-1b", {"attention_bias": 1}, "attention_bias"),
        ("qwen3-0.6b", {"layer_types": ["sliding_attention"] * 28}, "without use_sliding_window"),
        ("qwen3-0.6b", {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 27}, "layer_types"),
        ("mistral-7b-v0.3", {"sliding_window": 0}, "sliding_window"),
    ],
)
def test_what_is_not_run_is_named(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(REAL[name] | changes)
    assert named in str(caught.value)


def test_files_may_have_a_copy_of_a_tied_head_and_the_rotary_table(case: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = case
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    others = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.bfloat16)}
    if model.config.tie_word_embeddings:
        others["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | others, tmp_path / "model.safetensors")
    prompt = [3, 1, 4]
    assert np.array_equal(interpreted_logits(tmp_path, prompt), interpreted_logits(folder, prompt))
    save_file(tensors | {"model.layers.0.self_attn.sinks": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has a tensor 'model\.layers\.0\.self_attn\.sinks' that a model of this config"):
        open_checkpoint(tmp_path)


def test_a_file_of_another_shape_is_refused_by_its_own_names(case: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = case
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    name = "model.layers.2.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].T.contiguous()[:-1]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape .* but config.json asks for"):
        open_checkpoint(tmp_path)
    tensors[name][0, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {name} has a value that is not finite"):
        open_checkpoint(tmp_path).verify_all()


def test_specs_of_families_travel_as_configs(case: tuple[Path, Any]) -> None:
    spec = open_checkpoint(case[0]).spec
    assert read_config(json.loads(json.dumps(spec.to_config()))) == spec


@pytest.mark.parametrize("name", REAL)
def test_a_dry_run_needs_config_json_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what it would take and reach: 16-bit weights over what an H200 was measured to read."""
    monkeypatch.setattr(memfd, "available_bytes", lambda: 64 * 2**30)
    (tmp_path / "config.json").write_text(json.dumps(REAL[name]))
    spec = read_config(REAL[name])
    text = dry_run(LaunchConfig(model=str(tmp_path), device="cpu", ranks=1))
    assert f"{PARAMETERS[name]:,} parameters, bfloat16; the folder has no weights, only what config.json says" in text
    assert f"{spec.num_layers} layers of {spec.hidden_size}, {spec.num_heads} query and {spec.num_kv_heads} KV heads" in text
    assert f"context {REAL[name]['max_position_embeddings']}" in text
    embedding = 0 if REAL[name]["tie_word_embeddings"] else spec.vocab_size * spec.hidden_size
    reached = 4.57e12 / (2 * (PARAMETERS[name] - embedding))
    assert "predicted  1 GPU " in text
    assert f"H200 at most {reached:,.0f} tokens/s" in text
    assert (f"{spec.num_lanes} GPUs" in text) == (spec.num_lanes > 1)
    assert f"{2 * spec.num_lanes} GPUs" not in text
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor .* --dry-run shows what config\.json alone"):
        inspection_check(LaunchConfig(model=str(tmp_path), device="cpu", ranks=1))


def test_a_tiny_model_is_not_promised_what_memory_alone_would_allow() -> None:
    spec = replace(read_config(REAL["llama-3.2-1b"]), num_layers=5)
    assert most_tokens_per_s(spec, 1e6, 4.57e12) == pytest.approx(1 / 32e-6), "6 us a layer, and 2"
    assert most_tokens_per_s(spec, 4.57e9, 4.57e12) == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("library", "kept"),
    [(None, "4.6 GiB of weights in float32, and 4.6"), (Path("x.so"), "2.3 GiB of weights in 16 bit, and 2.3")],
)
def test_the_context_follows_the_memory_that_is_free(
    library: Path | None, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL["llama-3.2-1b"]))
    spec = read_config(REAL["llama-3.2-1b"])
    per_position = 2 * 16 * 8 * 64 * 4 * 4  # float32, four caches
    kept_prefixes = 64 << 20
    monkeypatch.setattr(host_library, "library", lambda: library)
    weights = (2 if library else 4) * spec.num_parameters

    def target(free_bytes: int, **settings: Any) -> tuple[Target, tuple[KogError, ...]]:
        monkeypatch.setattr(memfd, "available_bytes", lambda: weights + free_bytes)
        return plan_target(LaunchConfig(model=str(tmp_path), device="cpu", ranks=1, **settings), needs_weights=False)

    short, obstacles = target(kept_prefixes + per_position * 10_000)
    assert (short.checkpoint.spec.max_context, obstacles) == (7936, ())  # 80 % of 10,000, in steps of 256
    assert short.note.startswith("context of 7936 tokens, of the model's 131072: 4 KV caches")
    whole, _ = target(kept_prefixes + per_position * 200_000)
    assert (whole.checkpoint.spec.max_context, whole.note) == (131_072, "")
    asked, _ = target(per_position * 10_000, context=9000)
    assert (asked.checkpoint.spec.max_context, asked.note) == (9000, "")
    _, (obstacle,) = target(-1)
    assert f"CPU ranks would keep {kept} GiB of memory are free here" in str(obstacle)
    with pytest.raises(ConfigError, match="context 131073 exceeds the 131072 tokens of the model"):
        target(0, context=131_073)
