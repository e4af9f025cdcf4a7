"""Engines on CPU ranks with experts: the same tokens and logits on any number of ranks, which compare what they choose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.engine.session import running
from tests.e2e.test_quantised import NUM_TOKENS, PROMPT_IDS, ask
from tests.unit import moe_models


@pytest.mark.timeout(300)
def test_qwen3_moe(tmp_path: Path) -> None:
    model = moe_models.made("qwen3_moe", tmp_path)
    answers = []
    for ranks, flags in ((1, ()), (4, ("--check-experts",))):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}", *flags) as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1]
    tokens, digests = answers[0]
    assert len(set(digests)) == NUM_TOKENS
    logits = moe_models.reference(model, [*PROMPT_IDS, *tokens[:-1]]).logits[len(PROMPT_IDS) - 1 :]
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NUM_TOKENS), tokens] < 1e-4 * np.abs(logits).max()).all(), "transformers chooses the same"


@pytest.mark.timeout(300)
def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    config, stored, _ = moe_models.in_mxfp4()
    moe_models.write_mxfp4(tmp_path, config, stored)
    answers = []
    for ranks, flags in ((1, ()), (2, ("--check-experts",)), (4, ())):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}", *flags) as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0][1])) == NUM_TOKENS
