"""The same tokens, and bitwise the same logits, whatever the number of ranks; and the oracle's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kog_dist.bench.session import EngineSession

NUM_TOKENS = 256
PROMPT_IDS = (17, 300, 42, 7, 99, 1024)
WORLD_SIZES = (1, 2, 4, 8)


def answer(session: EngineSession, model: Path, ranks: int, *arguments: str) -> tuple[list[int], list[str]]:
    """Token ids and logit digests of one `kog-launch --prompt-ids --json`."""
    ids = ",".join(map(str, PROMPT_IDS))
    done = session.run(
        "kog_dist.launch.cli",
        [str(model), f"--ranks={ranks}", f"--prompt-ids={ids}", "--ignore-eos", "--json", "--logit-digests", *arguments],
        timeout_s=150.0,
    )
    assert done.returncode == 0, done.stderr
    assert session.leftovers() == []
    whole = json.loads(done.stdout)
    assert whole["finish_reason"] == "length"
    assert len(whole["logit_digests"]) == len(whole["token_ids"])
    return whole["token_ids"], whole["logit_digests"]


def oracle_greedy(model: Path) -> list[int]:
    import torch

    from kog_dist.model.laneformer import KvCache, Laneformer

    oracle = Laneformer.from_checkpoint(model, torch.float64)
    cache = KvCache()
    ids: list[int] = []
    feed = list(PROMPT_IDS)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids.append(int(oracle(torch.tensor([feed]), cache)[0, -1].argmax()))
            feed = ids[-1:]
    return ids


@pytest.mark.timeout(400)  # eight ranks on two busy cores take their time
def test_greedy_tokens_and_logits(session: EngineSession, demo_model: Path) -> None:
    first, *others = [answer(session, demo_model, ranks, f"--max-tokens={NUM_TOKENS}") for ranks in WORLD_SIZES]
    assert len(first[0]) == NUM_TOKENS
    assert len(set(first[1])) == NUM_TOKENS, "every step has other logits"
    for ranks, other in zip(WORLD_SIZES[1:], others, strict=True):
        assert other == first, f"{ranks} ranks differ from one"
    assert first[0] == oracle_greedy(demo_model)


@pytest.mark.timeout(400)
def test_sampled_tokens_and_logits(session: EngineSession, demo_model: Path) -> None:
    flags = ["--max-tokens=64", "--temperature=0.8", "--seed=7"]
    first, *others = [answer(session, demo_model, ranks, *flags) for ranks in WORLD_SIZES]
    for ranks, other in zip(WORLD_SIZES[1:], others, strict=True):
        assert other == first, f"{ranks} ranks differ from one"
    other_seed = answer(session, demo_model, 1, "--max-tokens=64", "--temperature=0.8", "--seed=8")
    assert other_seed[0] != first[0]


def test_shaped_tokens_and_logprobs(session: EngineSession, demo_model: Path) -> None:
    ids = ",".join(map(str, PROMPT_IDS))
    flags = ["--ignore-eos", "--json", "--max-tokens=32", "--temperature=1.2", "--seed=9", "--top-p=0.9", "--top-k=200"]
    flags += ["--min-p=0.001", "--repetition-penalty=1.1", "--presence-penalty=0.2", "--logit-bias=300=-4", "--logprobs=3"]
    answers = []
    for ranks in (1, 4):
        done = session.run(
            "kog_dist.launch.cli", [str(demo_model), f"--ranks={ranks}", f"--prompt-ids={ids}", *flags], timeout_s=100.0
        )
        assert done.returncode == 0, done.stderr
        whole = json.loads(done.stdout)
        answers.append((whole["token_ids"], whole["logprobs"]))
    assert answers[0] == answers[1]
    token_ids, logprobs = answers[0]
    assert [token["token_id"] for token in logprobs] == token_ids
    assert 300 not in token_ids
    for token in logprobs:
        assert len(token["top"]) == 3
        assert token["logprob"] <= token["top"][0]["logprob"] <= 0
