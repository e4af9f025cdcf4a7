"""Damaged and odd configs, indexes and GGUF headers: refused in a sentence, or loaded as transformers and gguf read them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kog_dist.errors import KogError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.families.computation import COMPUTATION
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from tests.fuzz.json_mutation import mutate_json
from tests.unit.gguf_files import random_tensors, write_gguf
from tests.unit.small_llama import write_small_llama
from tests.unit.test_families import TOLERANCE, interpreted_logits

PROMPT = [3, 1, 4, 1, 5]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 4, 0.5, 1.0, 2.0, 1e-9, 1e9, 2**70, "x", "", "silu", "yarn", "default", [], [1], [1, 1], {},
    {"a": 1}, {"rope_type": "linear", "factor": 2.0}, ["full_attention"] * 2, ["sliding_attention"] * 2,
]  # fmt: skip
ROPE: dict[str, tuple[Any, ...]] = {
    "factor": (None, 1.0, 2.0, 4.0), "beta_fast": (4.0, None), "beta_slow": (0.5, 1.0), "mscale": (0.5, 1.0),
    "mscale_all_dim": (0.7, 2.0), "attention_factor": (0.8, None), "truncate": (False, True), "rope_theta": (1e4, 500.0),
    "original_max_position_embeddings": (16, 32), "low_freq_factor": (1.0,), "high_freq_factor": (4.0, 2.0),
    "partial_rotary_factor": (0.5, 1.0), "finetuned": (True,), "unknown": (3,),
}  # fmt: skip
YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "rope_theta",
        "original_max_position_embeddings", "finetuned")  # fmt: skip
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta")
OF_KIND = {"yarn": YARN, "linear": ("factor", "rope_theta"), "dynamic": ("factor", "rope_theta"), "llama3": LLAMA3}
NUM_QUICK, NUM_ALL = 120, 1000
how_many = pytest.mark.parametrize(
    ("first", "last"), [(0, NUM_QUICK), pytest.param(NUM_QUICK, NUM_ALL, marks=[pytest.mark.service, pytest.mark.timeout(1200)])]
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_small_llama(folder, 64)
    return folder


def accepted(folder: Path) -> Checkpoint | None:
    """None if an error of ours refuses it; any other ends the test."""
    try:
        return open_checkpoint(folder)
    except KogError:
        return None


def configs(intact: dict[str, Any], first: int, last: int) -> Iterator[dict[str, Any]]:
    """Values, keys that are gone, misspelt or new, and rotary scalings as nobody would write them."""
    for number in range(first, last):
        rng = random.Random(number)
        config = json.loads(json.dumps(intact))
        key = rng.choice(sorted(config))
        match number % 8:
            case 0:
                config[key] = rng.choice(VALUES)
            case 1:
                del config[key]
            case 2:
                config[rng.choice([*COMPUTATION, "a_name_of_next_year"])] = rng.choice(VALUES)
            case 3:
                at = rng.randrange(len(key))
                config[key[:at] + rng.choice("abz_") + key[at + rng.randrange(2) :]] = config.pop(key)
            case _:
                kind = rng.choice(("yarn", "yarn", "yarn", "linear", "llama3", "dynamic", "default", "longrope", None))
                own = {name: rng.choice(ROPE[name]) for name in OF_KIND.get(str(kind), ()) if rng.random() < 0.75}
                foreign = {name: rng.choice(ROPE[name]) for name in ROPE if rng.random() < 0.03}
                config.pop("rope_parameters", None)
                config[rng.choice(["rope_scaling", "rope_parameters"])] = {"rope_type": kind, **own, **foreign}
        yield config


def logits_of_transformers(config: dict[str, Any], plain: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """None where it reads the same as of `plain`, or says nothing: of a head of its own, and of other families."""
    theirs = LlamaConfig.from_dict(config)
    changed = {key for key, value in theirs.to_dict().items() if plain.get(key) != value}
    if not changed or "tie_word_embeddings" in changed or theirs.model_type != "llama":
        return None
    model = LlamaForCausalLM(theirs)
    model.load_state_dict(state)
    with torch.no_grad():
        return model.double().eval()(torch.tensor([PROMPT]), use_cache=False).logits[0].numpy()


@how_many
def test_a_config_is_read_as_transformers_reads_it_or_refused(published: Path, tmp_path: Path, first: int, last: int) -> None:
    (tmp_path / SINGLE_NAME).symlink_to(tmp_path / "weights")
    (tmp_path / "weights").write_bytes((published / SINGLE_NAME).read_bytes())
    intact, state = json.loads((published / "config.json").read_text()), load_file(published / SINGLE_NAME)
    plain = LlamaConfig.from_dict(intact).to_dict()
    num_accepted = num_compared = 0
    for config in configs(intact, first, last):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if (checkpoint := accepted(tmp_path)) is None:
            continue
        num_accepted += 1
        try:
            expected = logits_of_transformers(json.loads(json.dumps(config)), plain, state)
        except Exception:  # transformers refuses it, in one of many ways
            continue
        if expected is None or checkpoint.spec.max_context < len(PROMPT):
            continue
        num_compared += 1
        found = interpreted_logits(tmp_path, PROMPT)
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max(), (config, checkpoint.spec)
    assert num_accepted > (last - first) // 10
    assert num_compared > (last - first) // 40


@how_many
def test_an_index_places_tensors_or_is_refused(published: Path, tmp_path: Path, first: int, last: int) -> None:
    tensors = load_file(published / SINGLE_NAME)
    place = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(sorted(tensors))}
    for file_name in set(place.values()):
        save_file({name: tensors[name] for name in tensors if place[name] == file_name}, tmp_path / file_name)
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    raw = json.dumps({"metadata": {"total_size": 1}, "weight_map": place}).encode()
    (tmp_path / INDEX_NAME).write_bytes(raw)
    whole = open_checkpoint(tmp_path)
    num_accepted = 0
    for number in range(first, last):
        rng = random.Random(number)
        flipped = bytearray(raw)
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (tmp_path / INDEX_NAME).write_bytes((mutate_json(raw, rng) if number % 2 else None) or bytes(flipped))
        if (checkpoint := accepted(tmp_path)) is None:
            continue
        num_accepted += 1
        assert checkpoint.spec == whole.spec
        name = rng.choice(sorted(whole.layouts))
        assert np.array_equal(checkpoint.tensor(name), whole.tensor(name)), name
    assert num_accepted > 0


@how_many
def test_a_gguf_header_says_what_the_package_reads_or_is_refused(tmp_path: Path, first: int, last: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", random_tensors("qwen3"), form="Q8_0")
    intact = path.read_bytes()
    begin = gguf.GGUFReader(path).data_offset
    num_accepted = num_compared = 0
    for number in range(first, last):
        rng = random.Random(number)
        raw = bytearray(intact)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            raw[rng.randrange(begin)] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        if (checkpoint := accepted(path)) is None:
            continue
        num_accepted += 1
        try:
            reader = gguf.GGUFReader(path)
            said = {key: field.contents() for key, field in reader.fields.items()}
        except Exception:  # a text of the vocabulary, which is read with the tokenizer
            continue
        num_compared += 1
        spec = checkpoint.spec
        numbers = {
            "block_count": spec.num_layers, "embedding_length": spec.hidden_size, "attention.head_count": spec.num_heads,
            "attention.head_count_kv": spec.num_kv_heads, "context_length": spec.max_context, "rope.freq_base": spec.rope_theta,
            "attention.layer_norm_rms_epsilon": spec.norm_eps,
        }  # fmt: skip
        for key, ours in numbers.items():
            assert ours == pytest.approx(said[f"qwen3.{key}"], rel=1e-6), key
        tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        name = "model.layers.1.feed_forward.w2.weight"
        found = checkpoint.tensor(name).swapaxes(0, 1).reshape(values.shape)
        assert np.array_equal(found, values)
    assert num_accepted > (last - first) // 10
    assert num_compared > (last - first) // 40
