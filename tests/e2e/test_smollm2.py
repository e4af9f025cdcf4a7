"""A real model, of `make model`: the greedy tokens of transformers with the same weights in float32, and how fast both are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kog_dist.bench import quality
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.generation_config import read_eos_ids
from kog_dist.model.gguf.folder import published_file
from kog_dist.model.safetensors_file import narrow, write_safetensors
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.sampling_params import SamplingParams

FOLDER = Path(__file__).parents[2] / "build" / "models" / "SmolLM2-135M-Instruct"
NUM_TOKENS = 200
TIE = 1e-3  # logits that are nearer than that may be chosen in either order
PROMPTS = (
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis to a child.", "def fibonacci(n):",
    "List three uses of copper.", "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Why is the sky blue?",
    "Summarise the plot of Cinderella.", "What is 17 + 25?", "Name four mammals that live in water.", "class Stack:",
    "How do I boil an egg?", "Describe a sunset in one paragraph.", "What does HTTP stand for?", "Once upon a time",
    "Give me a recipe for pancakes.", "What is the tallest mountain?", "SELECT name FROM", "The quick brown fox",
)  # fmt: skip

pytestmark = [
    pytest.mark.service, pytest.mark.timeout(1800), pytest.mark.skipif(not FOLDER.is_dir(), reason="needs `make model`"),
]  # fmt: skip


def with_transformers(checkpoint: Any) -> Any:
    """The same weights, by the names that the files have."""
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_context, rms_norm_eps=spec.norm_eps, tie_word_embeddings=spec.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    make: Any = LlamaForCausalLM
    model = make(config).eval()
    weights = {}
    for name, stored in checkpoint.names.items():
        shape = checkpoint.owner[name].tensors[stored.name].shape
        values = np.empty(shape, np.float32)
        checkpoint.owner[name].read(stored.name, 0, shape[0], values, verify=True)
        weights[stored.name] = torch.from_numpy(values)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def test_greedy_tokens_are_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = open_checkpoint(FOLDER)
    tokenizer = Tokenizer.from_folder(FOLDER)
    assert tokenizer is not None
    weights = checkpoint.rank_weights([0], keeps_halves=host_library.library() is not None)  # as CPU ranks do
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None)
    model = with_transformers(checkpoint)
    num_ties, our_s, their_s = 0, 0.0, 0.0
    for prompt in PROMPTS:
        ids = list(tokenizer.encode(prompt))
        for position, token in enumerate(ids[:-1]):
            engine.step(token, position, None)
        token, ours, gaps = ids[-1], list[int](), list[float]()
        begin_s = time.perf_counter()
        for position in range(len(ids) - 1, len(ids) - 1 + NUM_TOKENS):
            output = engine.step(token, position, SamplingParams(), gather_logits=True)
            assert output.logits is not None
            best, second = np.sort(output.logits)[:-3:-1]
            token = output.token_id
            ours.append(token)
            gaps.append(float(best - second))
        our_s += time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        with torch.no_grad():
            theirs = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(ids) :].tolist()
        their_s += time.perf_counter() - begin_s
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            if own != other:  # what follows is another text
                assert gaps[index] < TIE, f"{prompt!r}, token {index}: {own} and {other}, {gaps[index]:.4f} apart"
                num_ties += 1
                break
    total = NUM_TOKENS * len(PROMPTS)
    with capsys.disabled():
        print(f"{total} tokens, {num_ties} prompts with a tie; {total / our_s:.1f} tokens/s, transformers {total / their_s:.1f}")
    assert their_s > our_s, "as fast as transformers in float32"


def test_a_folder_with_its_files_is_the_same_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FOLDER)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        content = published_file(FOLDER, name)
        assert content is not None
        (tmp_path / name).write_bytes(content)
    tensors = {}
    for name, stored in checkpoint.names.items():
        in_file = checkpoint.owner[name].tensors[stored.name]
        values = np.empty(in_file.shape, np.float32)
        checkpoint.owner[name].read(stored.name, 0, in_file.shape[0], values, verify=True)
        tensors[stored.name] = (in_file.dtype, in_file.shape, narrow(values, in_file.dtype))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    folder = open_checkpoint(tmp_path)
    assert folder.spec == checkpoint.spec
    for name in checkpoint.names:
        assert folder.part_digests(name) == checkpoint.part_digests(name)
    for prompt in PROMPTS:
        tokenizers = (Tokenizer.from_folder(FOLDER), Tokenizer.from_folder(tmp_path))
        first, second = (tokenizer.encode(prompt) for tokenizer in tokenizers if tokenizer is not None)
        assert first == second
    assert read_eos_ids(tmp_path) == read_eos_ids(FOLDER)


def test_quantised_weights_lose_what_docs_formats_says() -> None:
    """A part of the text of the table there; bounds are wide, since the machine's products decide the last bits."""
    tokenizer = Tokenizer.from_folder(FOLDER)
    assert tokenizer is not None
    ids = list(tokenizer.encode((Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")))[:300]
    losses = {}
    for choice, head in (("none", "none"), ("fp8", "none"), ("int4", "none"), ("none", "int8")):
        checkpoint = open_checkpoint(FOLDER, quantize=choice, quantize_head=head)
        weights = checkpoint.rank_weights([0], keeps_halves=host_library.library() is not None)
        scores = quality._scores(Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None), ids)
        losses[choice, head] = sum(quality._losses(scores, ids)) / len(scores)
    lost = {key: loss - losses["none", "none"] for key, loss in losses.items()}
    assert abs(lost["fp8", "none"]) < 0.1
    assert 0.1 < lost["int4", "none"] < 0.8
    assert 0 < abs(lost["none", "int8"]) < 0.02
