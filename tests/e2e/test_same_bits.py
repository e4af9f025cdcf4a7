"""The same tokens, and bitwise the same logits, whatever the number of ranks; and the oracle's tokens.

One engine of each size answers all questions; nothing is taken from the cache of an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kog_dist.bench.engine.session import running
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, FinishReason, Tokens

NUM_TOKENS = 256  # with the prompt more than the windowed layers keep; tests/multi/test_bits.py has that on eight ranks
PROMPT_IDS = (17, 300, 42, 7, 99, 1024)
WORLD_SIZES = (1, 2, 4, 8)
LONG_ON = (1, 2, 4)  # eight ranks on two cores take their time
PROCESSED = {
    "max_tokens": 16, "temperature": 1.2, "seed": 9, "top_p": 0.9, "top_k": 200, "min_p": 0.001, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "logit_bias": {300: -4.0}, "logprobs": 3,
}  # fmt: skip
QUESTIONS: dict[str, dict[str, Any]] = {
    "long": {"max_tokens": NUM_TOKENS, "logit_digests": True},
    "greedy": {"max_tokens": 32, "logit_digests": True},
    "sampled": {"max_tokens": 16, "temperature": 0.8, "seed": 7, "logit_digests": True},
    "other seed": {"max_tokens": 16, "temperature": 0.8, "seed": 8, "logit_digests": True},
    "processed": PROCESSED,
}


class Answer(NamedTuple):
    """All that can differ: tokens, SHA-256 of each step's logits, log-probabilities, and those of the most likely tokens."""

    token_ids: list[int]
    digests: list[str]
    logprobs: list[float]
    top: list[tuple[int, float]]


def ask(client: Client, keywords: Mapping[str, Any]) -> Answer:
    *events, last = client.generate(prompt_ids=PROMPT_IDS, ignore_eos=True, reuse_kv=False, timeout_s=150.0, **keywords)
    assert isinstance(last, Done)
    assert (last.finish_reason, last.num_cached_tokens) == (FinishReason.LENGTH, 0)
    answer = Answer([], [], [], [])
    for event in events:
        if isinstance(event, Tokens):
            answer.token_ids.extend(event.token_ids)
            answer.digests.extend(event.digests)
            answer.logprobs.extend(event.logprobs)
            answer.top.extend(zip(event.top_ids, event.top_logprobs, strict=True))
    assert len(answer.token_ids) == keywords["max_tokens"]
    return answer


@pytest.fixture(scope="module")
def answers(demo_model: Path) -> dict[int, dict[str, Answer]]:
    """World size -> question -> answer."""
    found = {}
    for ranks in WORLD_SIZES:
        with running(str(demo_model), "--device=cpu", f"--ranks={ranks}") as (session, client):
            assert client.status().world_size == ranks
            asked = {name: keywords for name, keywords in QUESTIONS.items() if name != "long" or ranks in LONG_ON}
            found[ranks] = {name: ask(client, keywords) for name, keywords in asked.items()}
        assert session.leftovers() == []
    return found


def oracle_choices(model: Path, token_ids: list[int]) -> list[int]:
    """What the oracle chooses after the prompt and after each beginning of an answer: the answer, if it is the oracle's."""
    import torch

    from kog_dist.model.laneformer import Laneformer

    oracle = Laneformer.from_checkpoint(model, torch.float64)
    with torch.no_grad():
        logits = oracle(torch.tensor([[*PROMPT_IDS, *token_ids[:-1]]]))
    choices: list[int] = logits[0, len(PROMPT_IDS) - 1 :].argmax(-1).tolist()
    return choices


@pytest.mark.timeout(500)  # the first one waits for the engines: eight ranks on two busy cores take their time
@pytest.mark.parametrize("question", QUESTIONS)
def test_every_number_of_ranks_gives_the_same(answers: dict[int, dict[str, Answer]], question: str) -> None:
    first = answers[1][question]
    if "logit_digests" in QUESTIONS[question]:
        assert len(set(first.digests)) == len(first.token_ids), "every step has other logits"
    for ranks in LONG_ON if question == "long" else WORLD_SIZES:
        assert answers[ranks][question] == first, f"{ranks} ranks differ from one"


@pytest.mark.timeout(400)
def test_greedy_tokens_are_the_oracle_s(answers: dict[int, dict[str, Answer]], demo_model: Path) -> None:
    token_ids = answers[1]["long"].token_ids
    assert token_ids == oracle_choices(demo_model, token_ids)


@pytest.mark.timeout(400)
def test_seeds_and_processors_matter(answers: dict[int, dict[str, Answer]]) -> None:
    assert answers[1]["other seed"].token_ids != answers[1]["sampled"].token_ids != answers[1]["greedy"].token_ids[:16]
    processed = answers[1]["processed"]
    assert 300 not in processed.token_ids
    assert len(processed.logprobs) == len(processed.token_ids) == len(processed.top) / 3
    assert all(own <= best <= 0 for own, (_, best) in zip(processed.logprobs, processed.top[::3], strict=True))
