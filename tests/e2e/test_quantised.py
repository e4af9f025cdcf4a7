"""Engines on CPU ranks with quantised weights: the same tokens and logits on any number of ranks, and those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.engine.session import running
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from tests.unit.formats.folders import expected_logits, made

PROMPT_IDS = (17, 3, 42, 7, 96)
NUM_TOKENS = 24


def ask(client: Client) -> tuple[list[int], list[str]]:
    *events, last = client.generate(
        prompt_ids=PROMPT_IDS, max_tokens=NUM_TOKENS, ignore_eos=True, reuse_kv=False, logit_digests=True, timeout_s=60.0
    )
    assert isinstance(last, Done)
    told = [event for event in events if isinstance(event, Tokens)]
    return [token for event in told for token in event.token_ids], [digest for event in told for digest in event.digests]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fp8", "gptq, act-order"])
def test_published_weights(tmp_path: Path, method: str) -> None:
    _, _, model = made(tmp_path, method, "qwen3")
    answers = []
    for ranks in (1, 4):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}") as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1]
    tokens, digests = answers[0]
    assert len(set(digests)) == NUM_TOKENS
    logits = expected_logits(model, [*PROMPT_IDS, *tokens[:-1]])[len(PROMPT_IDS) - 1 :]
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NUM_TOKENS), tokens] < 1e-4 * np.abs(logits).max()).all(), "transformers chooses the same"


@pytest.mark.timeout(300)
def test_weights_that_are_quantised_at_the_start(demo_model: Path) -> None:
    answers = {}
    for quantize, ranks, head in (
        ("none", 2, "none"), ("fp8", 1, "none"), ("fp8", 4, "none"), ("int4", 1, "none"), ("int4", 2, "none"),
        ("none", 1, "int8"), ("none", 4, "int8"), ("int4", 2, "int8"),
    ):  # fmt: skip
        options = (f"--ranks={ranks}", f"--quantize={quantize}", f"--quantize-head={head}")
        with running(str(demo_model), "--device=cpu", *options) as (_, client):
            answers[quantize, ranks, head] = ask(client)
    assert answers["fp8", 1, "none"] == answers["fp8", 4, "none"]
    assert answers["int4", 1, "none"] == answers["int4", 2, "none"]
    assert answers["none", 1, "int8"] == answers["none", 4, "int8"]
    different = (("none", 2, "none"), ("fp8", 1, "none"), ("int4", 1, "none"), ("none", 1, "int8"), ("int4", 2, "int8"))
    assert len({answers[key][1][0] for key in different}) == len(different)
