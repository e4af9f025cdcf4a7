"""Folders as people publish, merge, shard and copy them: loaded with the values of transformers, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError, ConfigError, KogError
from kog_dist.launch.inspection import check
from kog_dist.launch.target import plan_target
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.manifest import read_small_file
from kog_dist.model.shards import INDEX_NAME, SINGLE_NAME
from tests.unit.small_llama import write_small_llama
from tests.unit.test_families import TOLERANCE, interpreted_logits

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 269060552\n"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, as transformers writes it."""
    folder = tmp_path_factory.mktemp("published")
    write_small_llama(folder, 128, torch.bfloat16)
    return folder


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    """One that a test may change."""
    for path in published.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder: Path, *without: str, **changes: Any) -> None:
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in without}
    path.write_text(json.dumps(config | changes))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE_NAME)


def logits(folder: Path) -> np.ndarray[Any, Any]:
    return interpreted_logits(folder, PROMPT)


def expected(folder: Path) -> np.ndarray[Any, Any]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0].numpy()  # type: ignore[no-any-return]


def assert_same(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> None:
    assert np.abs(ours - theirs).max() < TOLERANCE * np.abs(theirs).max()


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(KogError) as caught:
        action()
    return str(caught.value)


# ---- names that nothing knows ----
UNKNOWN: Mapping[str, Any] = {
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}, "unsloth_fixed": True,
    "unsloth_version": "2025.3", "_attn_implementation_autoset": True, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
    "tokenizer_class": "PreTrainedTokenizerFast", "gradient_checkpointing": False, "max_length": 20,
    "num_nextn_predict_layers": 1, "a key of next year": [{"x": None}], "model_max_length": 7, "do_sample": True,
    "rope_type": "none", "mlp_dropout": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_nothing_knows_is_left_out_and_named(published: Path, folder: Path, name: str) -> None:
    edit(folder, **{name: UNKNOWN[name]})
    assert np.array_equal(logits(folder), logits(published))
    assert open_checkpoint(folder).note == f"config.json: '{name}' left out"
    settings = LaunchConfig(model=str(folder), device="cpu", ranks=1)
    assert plan_target(settings)[0].note == f"config.json: '{name}' left out", "the launcher's log says it"
    assert check(settings).endswith(f"; config.json: '{name}' left out")


def test_a_folder_as_published_has_no_note(published: Path) -> None:
    assert open_checkpoint(published).note == ""


def test_a_key_that_is_misspelt_is_no_unknown_name(folder: Path) -> None:
    edit(folder, "rms_norm_eps", rms_norm_epss=1e-3)
    assert "unknown config key 'rms_norm_epss'; is it rms_norm_eps, which is missing?" in refusal(lambda: open_checkpoint(folder))
    edit(folder, rms_norm_eps=1e-6)
    open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits_scaling": 8.0}, "config key logits_scaling is 8.0, only 1 is supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "num_local_experts"),
    ],
)
def test_a_key_that_changes_the_computation_is_refused(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, **changes)
    assert named in refusal(lambda: open_checkpoint(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"logits_scaling": 1.0, "residual_multiplier": 1, "embedding_multiplier": 1.0, "attention_multiplier": 8**-0.5},
        {"final_logit_softcapping": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": 8, "num_experts": 0},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1},
        {"sliding_window": 128, "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1], "use_qk_norm": False},
        {"partial_rotary_factor": 1.0, "mlp_only_layers": [], "hidden_act": "swish", "pretraining_tp": 2, "norm_topk_prob": True},
    ],
)
def test_values_that_change_nothing_stop_no_start(published: Path, folder: Path, changes: dict[str, Any]) -> None:
    edit(folder, **changes)
    assert np.array_equal(logits(folder), logits(published))


# ---- rotary scaling ----
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OWN_FACTOR = 0.1 * float(np.log(4)) + 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"rope_scaling": YARN | {"attn_factor": 0.87}}, YARN | {"attention_factor": OWN_FACTOR * 0.87}),
        ({"rope_scaling": YARN | {"finetuned": True, "extrapolation_factor": 1.0}}, YARN),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, YARN),
        ({"rope_scaling": YARN | {"factor": None}}, YARN),
        ({"rope_scaling": YARN | {"factor": None, "attention_factor": None, "beta_fast": None, "mscale": None}}, YARN),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}, YARN),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}},
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
         {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 500.0}}, YARN | {"rope_theta": 500.0}),
        ({"rope_scaling": YARN | {"rope_theta": 500.0}, "rope_parameters": YARN}, YARN | {"rope_theta": 500.0}),
        ({"rope_scaling": {"rope_type": "default", "factor": None, "mrope_section": [2, 1, 1], "beta_fast": 32}}, {}),
        ({"rope_scaling": {"factor": 1.0}}, {}),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, {"rope_type": "dynamic", "factor": 4.0}),
        ({"rope_scaling": {}}, {}),
        ({"rope_theta": 500, "rope_scaling": None, "rope_parameters": None}, {"rope_theta": 500.0}),
    ],
)  # fmt: skip
def test_scalings_as_people_write_them(folder: Path, changes: dict[str, Any], same: dict[str, Any]) -> None:
    edit(folder, "rope_parameters", **changes)
    found = logits(folder)
    edit(folder, *changes, rope_parameters=ROPE | same)
    assert_same(found, expected(folder))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0, which type default does not have"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 0.5}}, "rope_scaling.attn_factor is 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, "rope_scaling.alpha is 1000.0"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": YARN | {"attn_factor": 0.5, "attention_factor": 2.0}}, "contradicts rope_scaling.attention_factor"),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, "contradicts rope_parameters"),
        (
            {"rope_scaling": YARN | {"rope_theta": 5e5}, "rope_theta": 1e4},
            "rope_theta 10000.0 contradicts",
        ),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 64}, "contradicts original_max_position_embeddings 64"),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}}, "a scaling of its own for 'full_attention'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "'longrope' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_scalings_that_cannot_be_honoured_are_refused(folder: Path, changes: dict[str, Any], named: str) -> None:
    edit(folder, "rope_parameters", **changes)
    assert named in refusal(lambda: open_checkpoint(folder))


def test_yarn_is_asked_for_as_many_positions_as_it_stretches(folder: Path) -> None:
    edit(folder, rope_parameters=YARN | {"original_max_position_embeddings": 128, "rope_theta": 1e4})
    assert open_checkpoint(folder).spec.max_context == 128, "what the model has without being asked"
    assert open_checkpoint(folder, context=512).spec.max_context == 512
    with pytest.raises(ConfigError, match="context 513 exceeds the 512 tokens of the model"):
        open_checkpoint(folder, context=513)
    edit(folder, rope_parameters=ROPE)
    with pytest.raises(ConfigError, match="context 129 exceeds the 128 tokens of the model"):
        open_checkpoint(folder, context=129)


# ---- types ----
@pytest.mark.parametrize("said", ["float32", "float16", "float8_e4m3fn", "auto", ["bfloat16"], 7, None])
def test_files_decide_about_types(published: Path, folder: Path, said: object) -> None:
    edit(folder, dtype=said)
    assert open_checkpoint(folder).dtype == "bfloat16"
    assert np.array_equal(logits(folder), logits(published))
    announced = isinstance(said, str) and said.startswith("float") and "e4m3" not in said
    assert open_checkpoint(folder).note == (
        f"config.json says {said}, but most weights are bfloat16: they are taken as they are stored" if announced else ""
    )


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_each_tensor_is_as_it_is_stored(folder: Path, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(9)
    most, some = dtypes
    names = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight", HEAD, "model.norm.weight")
    tensors = {
        name: torch.randn(tensor.shape).mul(0.3).to(some if name in names else most) for name, tensor in stored(folder).items()
    }
    save_file(tensors, folder / SINGLE_NAME)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.dtype == str(most).removeprefix("torch.")
    assert_same(logits(folder), expected(folder))
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), keeps_halves=True)
    first = np.concatenate([lane.layers[0].wk for lane in weights.lanes.values()])
    halves = tensors[names[0]].float().numpy().reshape(2, 2, 4, 32).swapaxes(1, 2).reshape(-1, 32)  # rotary pairs side by side
    assert first.dtype == np.float32, "queries are stored otherwise, and multiplied with it"
    assert np.array_equal(first, halves)
    assert ("GPUs round them" in checkpoint.note) == (some is not torch.float32)


# ---- copies and parts ----
def sharded(folder: Path, *, index: bool = True) -> dict[str, str]:
    """The folder's tensors in two files; where each is."""
    tensors = stored(folder)
    (folder / SINGLE_NAME).unlink()
    place = {name: f"model-0000{1 + idx % 2}-of-00002.safetensors" for idx, name in enumerate(sorted(tensors))}
    for file_name in set(place.values()):
        save_file({name: tensors[name] for name in tensors if place[name] == file_name}, folder / file_name)
    if index:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": place, "generator": "x"}))
    return place


def test_the_index_decides_which_copy_counts(published: Path, folder: Path) -> None:
    place = sharded(folder)
    other = next(file_name for file_name in place.values() if file_name != place[EMBEDDING])
    stale = {EMBEDDING: torch.zeros(61, 32, dtype=torch.bfloat16)}
    save_file(load_file(folder / other) | stale, folder / other)
    assert np.array_equal(logits(folder), logits(published))
    assert open_checkpoint(folder).note == f"copies of '{EMBEDDING}' outside the files of {INDEX_NAME} are left out"


def test_a_tensor_that_the_index_does_not_name_is_not_lost(published: Path, folder: Path) -> None:
    place = sharded(folder)
    index = {"weight_map": {name: file_name for name, file_name in place.items() if name != EMBEDDING}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert np.array_equal(logits(folder), logits(published))
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    save_file(load_file(folder / place[EMBEDDING]) | extra, folder / place[EMBEDDING])
    assert "has a tensor 'model.layers.0.self_attn.q_proj.bias' that a model of this config" in refusal(
        lambda: open_checkpoint(folder)
    )


def test_parts_without_an_index_are_all_read(published: Path, folder: Path) -> None:
    place = sharded(folder, index=False)
    assert np.array_equal(logits(folder), logits(published))
    first, second = sorted(set(place.values()))
    kept = (folder / second).read_bytes()
    (folder / second).unlink()
    assert f"{second} is missing, one of 2 parts" in refusal(lambda: open_checkpoint(folder))
    (folder / second).write_bytes(kept)
    save_file(load_file(folder / first) | load_file(folder / second), folder / first)
    assert "both have tensor" in refusal(lambda: open_checkpoint(folder))
    (folder / "other-00001-of-00001.safetensors").write_bytes(kept)
    (folder / first).rename(folder / "third-00001-of-00002.safetensors")
    (folder / second).unlink()
    assert "parts of 2 files" in refusal(lambda: open_checkpoint(folder))


# ---- tied embeddings ----
def test_a_head_of_its_own_counts_although_the_config_ties_it(published: Path, folder: Path) -> None:
    untied = logits(published)
    edit(folder, tie_word_embeddings=True)
    assert np.array_equal(logits(folder), untied), "the files' head"
    tensors = stored(folder)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / SINGLE_NAME)
    copied = logits(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != HEAD}, folder / SINGLE_NAME)
    assert np.array_equal(logits(folder), copied)
    assert_same(copied, expected(folder))


# ---- pointers ----
@pytest.mark.parametrize("name", [SINGLE_NAME, "config.json", "tokenizer.json", "generation_config.json", "model.gguf"])
def test_a_pointer_of_git_lfs_is_called_one(folder: Path, name: str) -> None:
    (folder / name).write_bytes(POINTER)
    if name == "model.gguf":
        (folder / SINGLE_NAME).unlink()
        (folder / "config.json").unlink()
    action = (lambda: read_small_file(folder, name, None)) if name.endswith(".json") else (lambda: open_checkpoint(folder))
    said = refusal(action)
    assert said.startswith(f"{folder / name} is a Git LFS pointer, not the file itself; `git lfs pull`")


def test_a_short_file_is_no_pointer(folder: Path) -> None:
    (folder / SINGLE_NAME).write_bytes(b"version")
    with pytest.raises(CheckpointError, match="ends inside the header's length"):
        open_checkpoint(folder)
