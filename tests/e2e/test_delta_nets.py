"""Engines on CPU ranks with gated delta nets: a folder as published answers, with the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.engine.session import running
from kog_dist.rpc.messages import Done, Tokens
from tests.e2e.test_quantised import NUM_TOKENS, PROMPT_IDS, ask
from tests.unit.delta_models import CONFIGS, definition, published


@pytest.mark.timeout(300)
def test_a_published_folder_answers(tmp_path: Path) -> None:
    tensors = published("qwen3_5_moe", tmp_path)
    answers: list[tuple[list[Any], ...]] = []
    for ranks, flags in ((1, ()), (2, ("--check-experts",))):
        with running(str(tmp_path), "--device=cpu", f"--ranks={ranks}", *flags) as (_, client):
            answers.append(ask(client))
            tokens = answers[-1][0]
            # The next turn goes on behind the state that the answer left; a turn that begins otherwise finds nothing of it.
            for prompt, num_cached in (((*PROMPT_IDS, *tokens, 7), len(PROMPT_IDS) + NUM_TOKENS - 1), ((9, *PROMPT_IDS), 0)):
                *events, done = client.generate(prompt_ids=prompt, max_tokens=3, ignore_eos=True, logit_digests=True)
                assert isinstance(done, Done)
                told = [event for event in events if isinstance(event, Tokens)]
                answers[-1] += ([token for event in told for token in event.token_ids],)
                assert done.num_cached_tokens == num_cached
    assert answers[0] == answers[1]
    logits = definition(CONFIGS["qwen3_5_moe"][1], tensors, [*PROMPT_IDS, *answers[0][0][:-1]])[len(PROMPT_IDS) - 1 :]
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NUM_TOKENS), answers[0][0]] < 1e-4 * np.abs(logits).max()).all(), "the definition's choices"
