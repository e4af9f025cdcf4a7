"""Folders of made models: every family is read by transformers and by the engine, answers are sane, chains write their texts."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

from kog_dist.bench.made_models import published
from kog_dist.bench.made_models.chain import TextChain, mark_of
from kog_dist.bench.made_models.command import run
from kog_dist.bench.made_models.published import ARCHITECTURES, write_published
from kog_dist.bench.shapes import DELTA_NETS, DENSE, MOE
from kog_dist.errors import ConfigError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.tokenizer import Tokenizer

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
SMALL: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192,
    "vocab_size": 400, "max_position_embeddings": 512,
}  # fmt: skip
SMALL_NETS: dict[str, Any] = SMALL | {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
SMALL_EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 3}
SHAPES = {
    "llama": {**DENSE["llama-3.2-1b"], **SMALL},
    "mistral": {**DENSE["mistral-7b"], **SMALL},
    "qwen2": {**DENSE["qwen2.5-0.5b"], **SMALL},
    "qwen3": {**DENSE["qwen3-4b"], **SMALL, "head_dim": 32},
    "qwen3_moe": {**MOE["qwen3-30b-a3b"], **SMALL, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8},
    "gpt_oss": {**MOE["gpt-oss-20b"], **SMALL, "head_dim": 32, "num_local_experts": 4},
    "qwen3_5_text": {**DELTA_NETS["qwen3.5-4b"], **SMALL_NETS},
    "qwen3_5_moe_text": {**DELTA_NETS["qwen3.5-35b-a3b"], **SMALL_NETS, **SMALL_EXPERTS},
    "qwen3_next": {**DELTA_NETS["qwen3.5-35b-a3b"], **SMALL_NETS, **SMALL_EXPERTS, "model_type": "qwen3_next"},
}
NOT_OF_THE_ORACLE = {"gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}  # codes, delta nets: e2e/test_moe.py has them
MOST_ALIKE = 8  # tokens one after the other


def written(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens."""
    with torch.no_grad():
        ids: list[int] = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()  # type: ignore[operator]
    return ids[len(prompt) :]


def peer(folder: Path) -> torch.nn.Module:
    is_coded = "quantization_config" in json.loads((folder / "config.json").read_text())
    form = {"quantization_config": Mxfp4Config(dequantize=True)} if is_coded else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **form)
    assert isinstance(model, torch.nn.Module)
    return model


def test_every_family_has_an_architecture() -> None:
    assert {config["model_type"] for config in SHAPES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("family", SHAPES)
def test_a_chain_is_written_by_transformers(family: str, tmp_path: Path) -> None:
    made = write_published(tmp_path, SHAPES[family], chain=TextChain.of([CODE, "two\n"]))
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), peer(tmp_path)
    end = made.spec.vocab_size - 1
    for prompt, text in (("What is it?", CODE), ("hello" + mark_of(1), "two\n")):
        asked = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
        ids = written(model, tokenizer.encode(asked), 64)
        assert tokenizer.decode(ids[: ids.index(end)]) == text
    assert made.num_tokens[0] == 1 + len(tokenizer.encode(CODE))


@pytest.mark.parametrize("family", sorted(set(SHAPES) - NOT_OF_THE_ORACLE))
def test_a_chain_is_written_by_the_oracle(family: str, tmp_path: Path) -> None:
    write_published(tmp_path, SHAPES[family], chain=TextChain.of([CODE]))
    assert written_by_the_oracle(tmp_path, Laneformer.from_checkpoint(tmp_path)) == CODE


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_chain_is_written_where_layers_are_rounded(form: str, tmp_path: Path) -> None:
    write_published(tmp_path, SHAPES["llama"], chain=TextChain.of([CODE]))
    checkpoint = open_checkpoint(tmp_path, quantize=form)
    assert checkpoint.forms
    model = Laneformer(checkpoint.spec, seed=None)
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name)) for name in model.state_dict()})
    assert written_by_the_oracle(tmp_path, model) == CODE


def written_by_the_oracle(folder: Path, model: Laneformer) -> str:
    """Greedily, up to the end token."""
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    ids = tokenizer.encode("Please.")
    begin = len(ids)
    with torch.no_grad():
        while ids[-1] != model.spec.vocab_size - 1 and len(ids) < 100:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tokenizer.decode(ids[begin:-1])


@pytest.mark.parametrize("family", SHAPES)
def test_random_answers_are_sane(family: str, tmp_path: Path) -> None:
    write_published(tmp_path, SHAPES[family])
    ids = written(peer(tmp_path), [1, 2, 3], 256)
    assert len(ids) == 256 or ids[-1] == SMALL["vocab_size"] - 1
    assert max(len(list(run)) for _, run in groupby(ids)) <= MOST_ALIKE
    assert len(set(ids)) > 3


def test_all_weights_of_a_chain_have_values(tmp_path: Path) -> None:
    """Other engines skip nothing, and read as many bytes as of the real model."""
    write_published(tmp_path, SHAPES["qwen3"], chain=TextChain.of([CODE]))
    for name, values in peer(tmp_path).state_dict().items():
        assert torch.isfinite(values).all()
        assert "norm" in name or len(values.unique()) > 1, name


def test_large_models_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_SHARD_BYTES", 200_000)
    write_published(tmp_path, SHAPES["llama"], chain=TextChain.of([CODE]))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    model = peer(tmp_path)
    assert set(index) == set(model.state_dict())


@pytest.mark.parametrize("name", ["spec", "chain", "exists"])
def test_what_cannot_be_made_is_said(name: str, tmp_path: Path) -> None:
    texts = [tmp_path / "absent.txt"] if name == "chain" else []
    out = tmp_path if name == "exists" else tmp_path / "new"
    with pytest.raises(ConfigError, match={"exists": "--out"}.get(name, f"--{name}")):
        run("none-such" if name == "spec" else "smollm2-135m", out, texts, 1)
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_has_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama"]))
    (tmp_path / "code.txt").write_text(CODE)
    run(str(tmp_path / "config.json"), tmp_path / "made", [tmp_path / "code.txt"], 1)
    said = capsys.readouterr().out
    assert f"writes {tmp_path / 'code.txt'} in" in said
    assert "behind <|text_0|>, and behind all but its texts" in said
