"""`kog-bench peers` with engines that are there: our own, and transformers behind the server that comes with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kog_dist.bench.engine.session import engine_session

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 640, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
TEXT = "def add(left, right):\n    return left + right\n\n\ndef subtract(first, second):\n    return first - second\n"


@pytest.mark.sweep  # transformers takes most of it, and seldom changes
def test_ours_and_transformers_write_the_same(tmp_path: Path) -> None:
    """With drafts and without, and what each takes is told."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "answer.txt").write_text(TEXT)
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "Write it.", "max_tokens": 40}\n{"prompt": "And again!", "max_tokens": 20}\n')
    model = tmp_path / "made"
    make = ["make-model", f"--spec={tmp_path / 'config.json'}", f"--chain={tmp_path / 'answer.txt'}", f"--out={model}"]
    measure = ["peers", f"--model={model}", "--threads=1", "--against=transformers", f"--loads={asked},64+8", "--requests=1"]
    with engine_session() as session:
        made = session.run("kog_dist.bench.cli", make)
        assert made.returncode == 0, made.stderr
        done = session.run("kog_dist.bench.cli", measure, timeout_s=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert session.survivors() == []
    rows = json.loads(done.stdout.splitlines()[-1])["figures"]
    engines = [(engine, drafts) for engine in ("kog_dist", "transformers") for drafts in ("none", "lookup")]
    assert [(row["load"], row["engine"], row["drafts"]) for row in rows] == [
        (load, *engine) for load in ("asked", "64+8") for engine in engines
    ]
    for row in rows:
        assert row["memory_gb"] > 0.01
        if row["load"] == "asked":
            assert (row["differs_at"], row["total_tokens_per_s"] > 0) == (None, True)
        else:
            assert abs(row["prompt_tokens"] - 64) < 8
            assert row["answer_tokens"] == 8
