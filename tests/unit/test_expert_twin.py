"""The monokernel with experts on a CPU (test_decode_twin.py), against the oracle: 16-bit experts of both families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from tests.unit.test_decode_twin import PROMPT, RUNS_ALL, SPEC, Model, answer, pytestmark  # noqa: F401

QWEN3 = replace(
    SPEC, shared_norm_scale=True, delay=0, num_heads=8, own_head_dim=16, intermediate_size=48, qk_norm=True,
    experts=ExpertsSpec(10, 2),
)  # fmt: skip
VARIANTS = {
    "qwen3_moe": QWEN3,
    "qwen3_moe, weights of all": replace(QWEN3, experts=ExpertsSpec(40, 4, is_normalised=False)),
    "gpt_oss": replace(
        QWEN3, qk_norm=False, qkv_bias=True, out_bias=True, attention_sinks=True, num_layers=3, num_heads=16, max_context=64,
        sliding_window=4, window_layers=(0, 2),
        experts=ExpertsSpec(6, 2, router_bias=True, bias=True, clamp=ClampedSwiglu(1.702, 0.8)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_oracle_with_equal_bits(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(VARIANTS[variant], "bfloat16", monkeypatch)
    tokens, logits = answer(model, 2, tmp_path / "2", max_ctas=4)
    wanted = model.logits([*PROMPT, *tokens[:-1]])
    error = np.linalg.norm(logits - wanted[-1]) / np.linalg.norm(wanted[-1])
    print(variant, error)
    assert error < 2e-3
    assert tokens == wanted[len(PROMPT) - 1 :].argmax(axis=1).tolist()
    for num_ranks in (1, 4) if RUNS_ALL else (1,):
        others, other_logits = answer(model, num_ranks, tmp_path / str(num_ranks), max_ctas=4)
        assert others == tokens
        assert other_logits.tobytes() == logits.tobytes(), f"{num_ranks} ranks"
