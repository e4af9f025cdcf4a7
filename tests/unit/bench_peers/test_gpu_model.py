"""The folder that engines on GPUs are compared with, and the prompts that go with it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kog_dist.bench.made_models.chain import mark_of
from kog_dist.bench.peers import run
from kog_dist.bench.service.prompts import prompts_from_file
from kog_dist.bench.shapes import DENSE, SHAPES
from kog_dist.hardware.gpus import Gpu
from tests.gpu import peer_model
from tests.gpu.chains import LINES, texts
from tests.gpu.peer_gguf import pre_tokenizer, with_a_merge


def test_every_load_asks_for_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 1}
    monkeypatch.setitem(SHAPES, "llama-3.2-1b", {**DENSE["llama-3.2-1b"], **small, "intermediate_size": 64})
    peer_model.write("llama-3.2-1b", tmp_path / "made", 2)
    assert json.loads((tmp_path / "made" / "model" / "config.json").read_text())["hidden_size"] == 64
    for index, (kind, (quoted, _)) in enumerate(texts().items()):
        first, second = prompts_from_file(tmp_path / "made" / f"{kind}.jsonl")
        assert first.text.endswith(f"{quoted}\n{mark_of(index)}")
        assert first.text[:8] != second.text[:8]
    assert index + 1 == len(LINES)
    with pytest.raises(FileExistsError):
        peer_model.write("llama-3.2-1b", tmp_path / "made", 2)


def test_memory_is_that_of_the_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, f"GPU-{index}", "H200", f"{index}", memory_bytes=100, free_bytes=90 - index) for index in range(3)]
    monkeypatch.setattr(run, "read_inventory", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert run.used_gpu_bytes() == 33
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert run.used_gpu_bytes() == 11


def test_what_llama_cpp_refuses_of_made_vocabularies_is_allowed() -> None:
    def known_ones(model: object, tokenizer: str) -> str:
        if tokenizer != "llama":
            raise NotImplementedError
        return "llama-bpe"

    assert [pre_tokenizer(known_ones)(None, name) for name in ("llama", "made")] == ["llama-bpe", "gpt-2"]
    written = list[list[str]]()
    add = with_a_merge(lambda vocabulary, file: written.append(vocabulary.merges))
    for merges in ([], ["a b"]):
        add(SimpleNamespace(merges=merges), "file")
    assert [len(merges) for merges in written] == [1, 1]
    assert written[1] == ["a b"]
