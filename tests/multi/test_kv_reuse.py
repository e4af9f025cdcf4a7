"""Bits do not depend on whether a prefix came from a kept KV cache: conversations on 1, 2 and 4 ranks against fresh engines.

The coordinator's own books (`KeptCaches`) decide what each request uses, as they do in an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.request import KvUse
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.runtime.control import KvLayout
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.coordinator import kept_caches
from kog_dist.workers.coordinator.kept_caches import KeptCaches
from kog_dist.workers.engines import cpu_blocks
from kog_dist.workers.engines.cpu_blocks import CpuBlocks
from tests.multi.test_bits import SPECS, ThreadExchange, run_ranks

NUM_CACHES = 2
NUM_GENERATED = 4
SAMPLING = SamplingParams(0.8, seed=4)


class Answer(NamedTuple):
    """Tokens of an answer, and the logits that they were chosen from, on rank 0."""

    tokens: tuple[int, ...]
    logits: tuple[bytes, ...]


def decode(engine: Interpreter, prompt: tuple[int, ...], use: KvUse) -> Answer:
    """One request, as CpuEngine runs it."""
    engine.use_cache(use.cache, use.source, use.num_cached)
    assert use.num_cached < len(prompt)
    for position in range(use.num_cached, len(prompt) - 1):
        engine.step(prompt[position], position, None)
    tokens, logits, token = list[int](), list[bytes](), prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + NUM_GENERATED):
        output = engine.step(token, position, SAMPLING, gather_logits=True)
        token = output.token_id
        tokens.append(token)
        logits.append(output.logits.tobytes() if output.logits is not None else b"")
    return Answer(tuple(tokens), tuple(logits))


def make_engine(
    checkpoint: Checkpoint, world_size: int, rank: int, exchange: ThreadExchange | None, kv_dtype: str
) -> Interpreter:
    plan = make_plan(checkpoint.spec, world_size)
    weights = checkpoint.rank_weights(plan.ranks[rank].lanes)
    return Interpreter(plan, rank, weights, exchange, kv_dtype=kv_dtype, num_kv_caches=NUM_CACHES)


def conversations(checkpoint: Checkpoint, kv_dtype: str) -> tuple[list[tuple[int, ...]], list[KvUse], list[Answer]]:
    """Prompts that extend, repeat, shorten and leave one another; what each may use; and its answer from a fresh engine."""
    spec, caches = checkpoint.spec, KeptCaches(KvLayout(NUM_CACHES), None)
    first = (3, 17, 4, 90, 41, 5, 66, 23)
    prompts: list[tuple[int, ...]] = []
    uses: list[KvUse] = []
    answers: list[Answer] = []

    def ask(*prompt: int) -> tuple[int, ...]:
        uses.append(caches.take(prompt, reuse=True))
        answer = decode(make_engine(checkpoint, 1, 0, None, kv_dtype), prompt, KvUse())
        held = len(prompt) + NUM_GENERATED - 1
        caches.give_back(prompt + answer.tokens, held, held, uses[-1].cache)
        prompts.append(prompt)
        answers.append(answer)
        return prompt + answer.tokens

    longer = ask(*ask(*first), 7, 8, 9)  # what is reused is longer than the window
    ask(*first)  # the same prompt again: its last token is decoded
    ask(*first[:5])  # shorter than what is kept, and than the window
    ask(*first[:2], 50, 51, 52, 53)  # a small part: copied
    last = ask(*longer, 10)  # the long one again, of which little is left
    ask(*last[:-3], 30)  # a step back into the answer
    assert max(map(len, prompts)) + NUM_GENERATED <= spec.max_context
    return prompts, uses, answers


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("laneformer", "float32"), ("laneformer", "bfloat16"), ("laneformer", "fp8"), ("delay_0", "float32"),
        ("all_windowed", "float32"), ("no_window", "float32"), ("no_window", "fp8"), ("laneformer", "int4"),
        ("no_window", "int4"),
    ],
)  # fmt: skip
def test_kept_prefixes_give_the_same_bits(name: str, kv_dtype: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPECS[name], random_tensors(SPECS[name], seed=11))
    checkpoint = open_checkpoint(tmp_path)
    prompts, uses, answers = conversations(checkpoint, kv_dtype)
    found = [use.num_cached for use in uses]
    assert found == [0, 11, 7, 4, 2, 5, 21]
    assert any(use.cache != use.source for use in uses), "a prefix is copied"
    assert len({logits for answer in answers for logits in answer.logits}) > NUM_GENERATED * 5, "or differences would be hidden"
    for world_size in (1, 2, 4):

        def work(rank: int, exchange: ThreadExchange, world_size: int = world_size) -> list[Answer]:
            engine = make_engine(checkpoint, world_size, rank, exchange if world_size > 1 else None, kv_dtype)
            return [decode(engine, prompt, use) for prompt, use in zip(prompts, uses, strict=True)]

        ranks = run_ranks(world_size, work)
        assert ranks[0] == answers, f"{world_size} ranks"
        assert all([answer.tokens for answer in rank] == [answer.tokens for answer in answers] for rank in ranks)


def test_what_a_cancelled_prefill_left_can_be_used(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPECS["laneformer"], random_tensors(SPECS["laneformer"], seed=11))
    checkpoint = open_checkpoint(tmp_path)
    prompt = tuple(range(20, 40))
    fresh = decode(make_engine(checkpoint, 1, 0, None, "float32"), prompt, KvUse())

    def work(rank: int, exchange: ThreadExchange) -> Answer:
        engine = make_engine(checkpoint, 2, rank, exchange, "float32")
        for position in range(12):
            stopped = engine.step(prompt[position], position, None, stop=rank == 0 and position == 11).stopped
            assert stopped == (position == 11)
        return decode(engine, prompt, KvUse(1, 0, 12))

    assert run_ranks(2, work)[0] == fresh


@pytest.mark.parametrize(
    ("kv_dtype", "slots", "all_cached"),
    [
        ("float32", 20, [0, 5, 0, 12, 10, 10, 17]),
        ("fp8", 20, [0, 5, 0, 12, 10, 10, 17]),
        ("int4", 20, [0, 5, 0, 12, 10, 10, 17]),
        ("bfloat16", 9, [0, 5, 0, 12, 8, 4, 8]),  # ends of what was not used for long had to go
    ],
)
def test_blocks_of_earlier_conversations_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str, slots: int, all_cached: list[int]
) -> None:
    """Three conversations take turns in one KV cache, on 1 and 2 ranks; what they have left comes from the block pool."""
    monkeypatch.setattr(cpu_blocks, "BLOCK_TOKENS", 4)
    monkeypatch.setattr(kept_caches, "_WORTH", 1)
    spec = SPECS["laneformer"]
    write_checkpoint(tmp_path, spec, random_tensors(spec, seed=11))
    checkpoint = open_checkpoint(tmp_path)
    begin = (3, 17, 4, 90, 41)
    sequences = [(*begin, 5, 66, 23), (*begin, 9), (70, 71, 72, 73, 74, 75)]
    for world_size in (1, 2):

        def work(rank: int, exchange: ThreadExchange, world_size: int = world_size) -> list[tuple[int, Answer]]:
            engine = make_engine(checkpoint, world_size, rank, exchange if world_size > 1 else None, kv_dtype)
            blocks, books = CpuBlocks(engine.memory, slots), KeptCaches(KvLayout(1, 0, 4, slots, 0), None)
            held, found = list(sequences), list[tuple[int, Answer]]()
            for turn in range(7):
                prompt = (*held[turn % 3], 30 + turn)
                use = books.take(prompt, reuse=True)
                blocks.copy(use)
                if use.copies:
                    engine.filled(use.source, use.num_cached)
                answer = decode(engine, prompt, use)
                held[turn % 3] = prompt + answer.tokens
                books.give_back(held[turn % 3], len(held[turn % 3]) - 1, len(held[turn % 3]) - 1, use.cache)
                if (saved := books.save(use.cache)) is not None:
                    blocks.copy(saved)
                found.append((use.num_cached, answer))
            return found

        (found, *_) = run_ranks(world_size, work)
        held = list(sequences)
        for turn, (_, answer) in enumerate(found):
            prompt = (*held[turn % 3], 30 + turn)
            assert decode(make_engine(checkpoint, 1, 0, None, kv_dtype), prompt, KvUse()) == answer, f"turn {turn}"
            held[turn % 3] = prompt + answer.tokens
        assert [num_cached for num_cached, _ in found] == all_cached, f"{world_size} ranks"
