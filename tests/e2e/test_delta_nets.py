"""Engines on CPU ranks with gated delta nets: a folder as published answers, with the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.engine.session import running
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, Tokens
from tests.e2e.test_quantised import NUM_TOKENS, PROMPT_IDS, ask
from tests.unit.delta_models import CONFIGS, OF_BLOCKS, VOCAB, WITHOUT_DELTA, definition, published
from tests.unit.formats.writers import METHODS
from tests.unit.test_delta_gguf import converted, keys_of, write


def answer(client: Client, prompt: tuple[int, ...], cache_salt: str | None = None) -> tuple[list[int], list[str], int]:
    """Ids of an answer, digests of its logits, and how much of the prompt was there."""
    *events, done = client.generate(
        prompt_ids=prompt, max_tokens=12, ignore_eos=True, logit_digests=True, cache_salt=cache_salt, timeout_s=60.0
    )
    assert isinstance(done, Done)
    told = [event for event in events if isinstance(event, Tokens)]
    ids = [token for event in told for token in event.token_ids]
    return ids, [digest for event in told for digest in event.digests], done.num_cached_tokens


@pytest.mark.timeout(300)
def test_conversations_take_turns_in_one_cache(tmp_path: Path) -> None:
    """Copies of states and blocks bring each back, for those with its salt alone; drafts change nothing."""
    published("qwen3_5", tmp_path)
    first = tuple(int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 100))
    second, found = first[::-1], []
    for ranks, pool, speculate in ((2, "auto", "auto"), (1, "off", "off")):
        flags = (f"--ranks={ranks}", "--kv-caches=1", f"--prefix-cache={pool}", f"--speculate={speculate}")
        with running(str(tmp_path), "--device=cpu", *flags) as (_, client):
            answers = [answer(client, first), answer(client, second)]
            answers += [answer(client, (*first, *answers[0][0], 5)), answer(client, first, "another"), answer(client, second)]
            status = client.status()
        found.append([(ids, digests) for ids, digests, _ in answers])
        assert [num_cached for _, _, num_cached in answers] == ([0, 0, 111, 0, 99] if pool == "auto" else [0] * 5)
        assert (status.kept_states_used > 5, status.kept_states > 16) == (pool == "auto",) * 2
    assert found[0] == found[1]


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["pack-quantized", "gguf", "--quantize=int4"])
def test_quantised_weights_answer(form: str, tmp_path: Path) -> None:
    """On one rank and on two, where lanes are two: codes as published, a GGUF file, and rounded at the start."""
    name, folder = "qwen3_5_moe, blocks", tmp_path / "model"
    method, flags = METHODS.get(form), (form,) if form.startswith("--") else ()
    tensors = published(name, folder, method=method, ends=WITHOUT_DELTA)
    if form == "gguf":
        folder, config = tmp_path / "model.gguf", OF_BLOCKS[name][1]
        write(folder, "qwen35moe", keys_of(config, "qwen35moe"), converted(config, "qwen35moe", tensors), "Q8_0")
    answers = []
    for ranks in (1, 2):
        with running(str(folder), "--device=cpu", f"--ranks={ranks}", "--quantize-cache=off", *flags) as (_, client):
            answers.append(ask(client))
    assert answers[0] == answers[1]
    if form != "pack-quantized":
        return
    logits = definition(OF_BLOCKS[name][1], tensors, [*PROMPT_IDS, *answers[0][0][:-1]])[len(PROMPT_IDS) - 1 :]
    best = logits.max(axis=1)
    assert (best - logits[np.arange(NUM_TOKENS), answers[0][0]] < 1e-4 * np.abs(logits).max()).all(), "the definition's choices"
