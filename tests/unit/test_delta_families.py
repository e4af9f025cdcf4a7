"""Models with gated delta nets: their files, and what CPU ranks make of them against a definition and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from kog_dist.decode.coding import Coding
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.errors import CheckpointError, ConfigError, PlanError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.layers import DeltaNet
from kog_dist.model.published_config import read_config
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.delta_configs import CONFIGS as DELTA
from tests.unit.delta_models import CONFIGS, OF_BLOCKS, STEADY, VOCAB, WIDE, definition, logits_of, published, random_model
from tests.unit.formats.writers import METHODS

PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 300)]
NAMES = list(CONFIGS)
Array = NDArray[Any]


def engine_of(checkpoint: Checkpoint, dtype: Any = np.float32) -> Interpreter:
    plan = make_plan(checkpoint.spec, 1)
    check(plan)
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), dtype=dtype)
    return Interpreter(plan, 0, weights, None, dtype=dtype, kv_dtype=np.dtype(dtype).name, num_kv_caches=2)


def run(checkpoint: Checkpoint, prompt: list[int], dtype: Any = np.float32) -> Array:
    """Logits at every position."""
    engine = engine_of(checkpoint, dtype)
    rows = [engine.step(token, at, SamplingParams(), gather_logits=True).logits for at, token in enumerate(prompt)]
    return np.array(rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_published_folder_computes_its_definition_at_every_position(name: str, tmp_path: Path) -> None:
    """In float64 to the rounding of rotary tables; in float32 within 1e-5, but for the positions at which float32 cannot be.

    With heads as small as these some outputs are nearly 0, and the norm behind the rule makes their roundings up to 1,000 times
    as large: transformers is off by 7e-5, and the definition itself in float32 has as many such positions.
    """
    tensors = published(name, tmp_path / "published")
    checkpoint = open_checkpoint(tmp_path / "published")
    expected = definition(CONFIGS[name][1], tensors, PROMPT)
    scale = np.abs(expected).max()
    found = run(checkpoint, PROMPT)
    assert np.abs(run(checkpoint, PROMPT, np.float64) - expected).max() < 1e-6 * scale
    errors = np.abs(found - expected).max(axis=1) / scale
    assert np.median(errors) < 2e-6
    assert errors.max() < 1e-4
    in_float32 = np.abs(definition(CONFIGS[name][1], tensors, PROMPT, np.float32) - expected).max(axis=1) / scale
    assert (errors > 1e-5).sum() <= (10 if in_float32.max() > 1e-5 else 0), "of 300 positions"
    random_model(name).save_pretrained(tmp_path / "saved")
    theirs = CONFIGS[name][0].from_pretrained(tmp_path / "saved", dtype=torch.float32, attn_implementation="eager").eval()
    assert np.abs(found - logits_of(theirs, PROMPT)).max() < 1e-4 * scale
    again = run(open_checkpoint(tmp_path / "saved"), PROMPT[:8])
    assert np.array_equal(again, found[:8]), "the names that transformers writes lead to the same values"


@pytest.mark.parametrize("name", [*STEADY, *WIDE])
def test_float32_is_near_the_definition_where_no_head_is_nearly_0(name: str, tmp_path: Path) -> None:
    """At every position: with heads of 128, as published models have, and with small ones and a large epsilon."""
    tensors = published(name, tmp_path)
    expected = definition((STEADY | WIDE)[name][1], tensors, PROMPT)
    assert np.abs(run(open_checkpoint(tmp_path), PROMPT) - expected).max() < 1e-5 * np.abs(expected).max()


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    assert open_checkpoint(tmp_path).note == "tensors left out: 2 of images, 3 of multi-token prediction"


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_experts_in_one_tensor_or_in_many(name: str, tmp_path: Path) -> None:
    published(name, tmp_path / "a")
    published(name, tmp_path / "b", stacks_experts=name == "qwen3_next")
    random_model(name).save_pretrained(tmp_path / "c")
    first, *others = (run(open_checkpoint(tmp_path / folder), PROMPT[:3]) for folder in "abc")
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_fp8_as_qwen_publishes_it(name: str, tmp_path: Path) -> None:
    """Some matrices of a delta net in codes, others of the same product in 16 bit."""
    tensors = published(name, tmp_path, method=METHODS["fp8, bfloat16 scales"])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.num_lanes == 2
    expected = definition(OF_BLOCKS[name][1], tensors, PROMPT[:20])
    assert np.abs(run(checkpoint, PROMPT[:20], np.float64) - expected).max() < 1e-6 * np.abs(expected).max()


def test_a_state_goes_on_behind_its_end_or_anew(tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    engine = engine_of(open_checkpoint(tmp_path))

    def logits(token: int, position: int) -> Array:
        found = engine.step(token, position, SamplingParams(), gather_logits=True).logits
        assert found is not None
        return found.copy()

    first = [logits(token, at) for at, token in enumerate(PROMPT[:6])]
    with pytest.raises(PlanError, match="position 3 cannot follow a state of 6 positions"):
        engine.step(1, 3, None)
    with pytest.raises(PlanError, match="holds a state of 6 positions, which cannot go to 4"):
        engine.use_cache(1, 0, 4)
    with pytest.raises(PlanError, match="a pass of 2 tokens has more drafts than the plan"):
        engine.verify([1, 2], 6, SamplingParams())
    engine.use_cache(1, 0, 6)
    copied = logits(PROMPT[6], 6)
    engine.use_cache(0, 0, 6)
    assert np.array_equal(logits(PROMPT[6], 6), copied)
    engine.use_cache(1, 1, 0)
    engine.read(PROMPT[:5], 0)
    assert np.array_equal(logits(PROMPT[5], 5), first[5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"in_proj_qkv": None}, r"lacks tensor model.layers.0.linear_attn.in_proj_qkv.weight, which its config.json asks for"),
        ({"conv1d": (2, 1, 4)}, r"conv1d.weight has shape \(2, 1, 4\), but config.json asks for \(336, 1, 4\)"),
        ({"A_log": (3,)}, r"A_log has shape \(3,\), but config.json asks for \(24,\)"),
        ({"q_proj": (40, 40)}, r"q_proj.weight has shape \(40, 40\), but config.json asks for \(320, 40\)"),
    ],
)
def test_files_that_are_not_as_the_config_says(damage: dict[str, Any], message: str, tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    (part, shape) = next(iter(damage.items()))
    (tmp_path / "model.safetensors.index.json").unlink()
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if part in name]:
            tensors.pop(name)
            if shape is not None:
                tensors[name] = torch.zeros(shape)
        save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


REAL = DELTA["Qwen3.5-35B-A3B"]


def changed(**changes: Any) -> dict[str, Any]:
    return REAL | {"text_config": REAL["text_config"] | changes}


def test_the_config_of_35b_a3b() -> None:
    spec = read_config(REAL)
    nets = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNet)]
    assert (len(nets), spec.num_lanes, spec.rotary_dim, spec.head_dim, spec.rope_theta) == (30, 4, 64, 256, 1e7)
    assert [number for number, layer in enumerate(spec.layers) if layer.mixer not in nets] == list(range(3, 40, 4))
    assert 34.6e9 < spec.num_parameters < 34.8e9
    assert 5.88e9 < spec.bytes_per_token() < 5.90e9, "6.02 GB with the state, read and written"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False, only True is supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16', only 'float32' is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', only 'swish' is supported"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be between 1 and 64, got 0"),
        ({"layer_types": ["mamba"] * 40}, "must be linear_attention or full_attention for each of 40 layers"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval must be at least 1"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor 0.25 contradicts partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor 2.0 of head_dim 256 must leave"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be at least 1"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, which qwen3_5_moe does not have"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok must be between 1 and the 256 experts"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(changed(**changes))


def test_numbers_that_a_config_leaves_out_are_transformers_own() -> None:
    """It writes no key whose value is its class's."""
    for name, kind in (("Qwen3.5-35B-A3B", "qwen3_5_moe"), ("Qwen3.5-9B", "qwen3_5"), ("Qwen3-Next-80B-A3B", "qwen3_next")):
        config = json.loads(json.dumps(DELTA[name]))
        text = config.get("text_config", config)
        for key in ("num_key_value_heads", "num_experts_per_tok"):
            text.pop(key, None)
        spec, theirs = read_config(config), type(CONFIGS[kind][1])()
        assert spec.num_kv_heads == theirs.num_key_value_heads
        if spec.experts is not None:
            assert spec.experts.per_token == theirs.num_experts_per_tok


def test_a_wrapper_that_is_none() -> None:
    with pytest.raises(ConfigError, match="text_config must be an object"):
        read_config(REAL | {"text_config": 3})


def test_gpus_refuse_a_shared_expert_of_another_kind_by_name() -> None:
    spec = read_config(REAL)
    with pytest.raises(ConfigError, match=r"it has a shared expert in 16 bit beside quantised ones \(in the same codes\)"):
        KernelShape(spec, spec.lanes_of_rank(0, 1), coding=Coding("E4M3", 1, "BF16", is_of_experts=True))
    odd = read_config({**REAL, "text_config": REAL["text_config"] | {"shared_expert_intermediate_size": 320}})
    with pytest.raises(ConfigError, match=r"a shared expert with \d+ columns in a lane \(whole groups of 128\)"):
        KernelShape(odd, odd.lanes_of_rank(0, 1), coding=Coding("E4M3", 1, "BF16"))


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    tensors = load_file(tmp_path / index[name])
    tensors[name][30, 2] = float("nan")
    save_file(tensors, tmp_path / index[name])
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"in_proj_qkv.weight.* has a value that is not finite"):
        checkpoint.rank_weights(range(checkpoint.spec.num_lanes))
