"""A Llama in lane form computes what transformers computes; regrouping units keeps it so; healing changes the delay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.safetensors_file import write_safetensors
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.train.affinity import exchange, module_inputs, regroup
from kog_dist.train.llama import convert_llama, llama_spec
from kog_dist.train.start import healing_start, start_weights, write_start

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "pretraining_tp": 1, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
TOKEN_IDS = [[(7 * n * n + 3) % 61 for n in range(40)]]
# LlamaForCausalLM of transformers 5.23 (float64, eager attention) with the weights of `llama_tensors`: logits of the last
# token, ids 0 to 5, and the sum of the squares of all logits.
EXPECTED_LAST = {
    False: [-0.189666, 1.339681, -0.795343, 1.514375, -0.212203, -1.479569],
    True: [-1.478216, 1.206215, 0.22942, -3.147226, -0.074361, -2.187261],
}
EXPECTED_SQUARES = {False: 3607.462508684608, True: 2947.8356815695315}


def llama_tensors(tied: bool) -> dict[str, NDArray[np.float32]]:
    """Random weights under transformers' names, equal everywhere."""
    d, ffn, kv, vocab = 32, 48, 16, 61
    shapes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    if not tied:
        shapes["lm_head.weight"] = (vocab, d)
    for i in range(3):
        for name, shape in (
            ("self_attn.q_proj", (d, d)), ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)),
            ("self_attn.o_proj", (d, d)), ("mlp.gate_proj", (ffn, d)), ("mlp.up_proj", (ffn, d)), ("mlp.down_proj", (d, ffn)),
            ("input_layernorm", (d,)), ("post_attention_layernorm", (d,)),
        ):  # fmt: skip
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    rng = np.random.default_rng(5)
    return {
        name: (rng.standard_normal(shape) * 0.2 + (1.0 if len(shape) == 1 else 0.0)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


def write_llama(folder: Path, *, tied: bool = False, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied, **config}))
    stored = {name: ("F32", values.shape, values) for name, values in llama_tensors(tied).items()}
    write_safetensors(folder / "model.safetensors", stored)
    return folder


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    logits: torch.Tensor = Laneformer.from_checkpoint(folder, torch.float64)(torch.tensor(TOKEN_IDS))
    return logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_lane_form_has_the_logits_of_transformers(tmp_path: Path, num_lanes: int, tied: bool) -> None:
    llama = write_llama(tmp_path / "llama", tied=tied)
    (llama / "tokenizer.json").write_text("{}")
    spec = convert_llama(llama, tmp_path / "lanes", num_lanes, dtype="float32")
    assert (spec.num_lanes, spec.delay, spec.tied_embeddings) == (num_lanes, 0, tied)
    assert (tmp_path / "lanes" / "tokenizer.json").read_text() == "{}"
    logits = logits_of(tmp_path / "lanes")
    assert logits[0, -1, :6].tolist() == pytest.approx(EXPECTED_LAST[tied], abs=2e-5)
    assert float(logits.square().sum()) == pytest.approx(EXPECTED_SQUARES[tied], rel=1e-5)


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    llama = write_llama(tmp_path / "llama")
    with pytest.raises(ConfigError, match="only checkpoints of model_type 'llama'"):
        llama_spec({**CONFIG, "model_type": "gemma"}, 4)
    with pytest.raises(ConfigError, match="attention_bias"):
        llama_spec({**CONFIG, "attention_bias": True}, 4)
    with pytest.raises(ConfigError, match="quantised"):
        llama_spec({**CONFIG, "quantization_config": {}}, 4)
    with pytest.raises(ConfigError, match="cannot be split over 8 lanes"):
        convert_llama(llama, tmp_path / "out", 8)
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        convert_llama(tmp_path, tmp_path / "out", 4)
    config = {**CONFIG, "num_hidden_layers": 2}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has tensors that cannot be kept: model\.layers\.2"):
        convert_llama(llama, tmp_path / "out", 4)
    (llama / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"has shape \(48, 32\), but config\.json asks for \(64, 32\)"):
        convert_llama(llama, tmp_path / "out", 4)


def lane_model(tmp_path: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    convert_llama(write_llama(tmp_path / "llama"), tmp_path / "lanes", 4, dtype="float32")
    return start_weights(tmp_path / "lanes")


@torch.no_grad()
def test_regrouping_moves_units_and_keeps_the_function(tmp_path: Path) -> None:
    spec, tensors = lane_model(tmp_path)
    module = Laneformer(spec, seed=None)
    module.load_state_dict(tensors)
    inputs = module_inputs(module, torch.tensor(TOKEN_IDS))
    assert set(inputs) == {(layer, sublayer) for layer in range(3) for sublayer in Sublayer}
    found = regroup(spec, tensors, inputs, delay=2)
    assert 0.15 < found.share_before < 0.35  # four lanes of random weights: a quarter
    assert found.share_after > found.share_before + 0.02
    name = "model.layers.1.feed_forward.w1.weight"
    assert not torch.equal(found.tensors[name], tensors[name])
    write_start(tmp_path / "moved", spec, found.tensors)
    torch.testing.assert_close(logits_of(tmp_path / "moved"), logits_of(tmp_path / "lanes"), rtol=1e-9, atol=1e-9)
    with pytest.raises(ConfigError, match="only a model of delay 0"):
        regroup(healing_start(spec, 2), tensors, inputs, delay=2)


@torch.no_grad()
def test_units_that_belong_together_find_each_other(tmp_path: Path) -> None:
    """Each lane's units write and read their own eight values of the stream; shuffled, they are put back."""
    spec, tensors = lane_model(tmp_path)
    for name, weight in tensors.items():
        if weight.ndim == 3:
            own = torch.zeros(4, spec.hidden_size)
            for lane in range(4):
                own[lane, 8 * lane : 8 * lane + 8] = 1.0
            weight *= own[:, :, None] if name.endswith(("wo.weight", "w2.weight")) else own[:, None, :]
    inputs = {(i, part): torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in range(3) for part in Sublayer}
    assert regroup(spec, tensors, inputs, delay=2).share_before == pytest.approx(1.0)
    shuffled = dict(tensors)
    for kind in ("w1", "w3", "w2"):
        name = f"model.layers.1.feed_forward.{kind}.weight"
        shuffled[name] = tensors[name][[1, 0, 3, 2]]
    found = regroup(spec, shuffled, inputs, delay=2)
    assert found.share_before < 0.9
    assert found.share_after == pytest.approx(1.0)
    name = "model.layers.1.feed_forward.w2.weight"
    for lane in range(4):
        assert torch.count_nonzero(found.tensors[name][lane, 8 * lane : 8 * lane + 8])


def test_exchanges_keep_lanes_equally_full() -> None:
    affinity = np.random.default_rng(0).random((24, 4))
    lane_of = np.repeat(np.arange(4), 6)
    before = affinity[np.arange(24), lane_of].sum()
    assert exchange(lane_of, affinity) > 0
    assert np.bincount(lane_of).tolist() == [6] * 4
    assert affinity[np.arange(24), lane_of].sum() > before + 3
    assert exchange(lane_of, affinity) == 0


def test_start_weights_come_back_without_a_changed_bit(tmp_path: Path) -> None:
    spec, tensors = lane_model(tmp_path)
    healed = healing_start(spec, 2)
    assert (healed.delay, healed.num_lanes) == (2, 4)
    write_start(tmp_path / "start", healed, tensors)
    read_spec, read_tensors = start_weights(tmp_path / "start")
    assert read_spec == healed
    assert read_tensors.keys() == tensors.keys() == Laneformer(healed, seed=None).state_dict().keys()
    assert all(torch.equal(read_tensors[name], tensors[name]) for name in tensors)
    open_checkpoint(tmp_path / "start").verify_all()
    for delay in (0, 3):
        with pytest.raises(ConfigError, match="must be from 1 to 2"):
            healing_start(spec, delay)
    with pytest.raises(ConfigError, match="delay 0, this one has delay 2"):
        healing_start(healed, 1)
