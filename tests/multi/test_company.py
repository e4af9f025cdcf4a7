"""A request that shares its passes with others leaves what it leaves alone: ids, logits, keys, values and states."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.cursor import PassPart
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.decode.sampling import Sampler
from kog_dist.errors import PlanError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.multi.test_bits import SPECS, SWEPT, ThreadExchange, run_ranks
from tests.multi.test_drafts import DRAWN, GREEDY, PENALISED
from tests.multi.test_passes import LONG, saved
from tests.sweeps import cases
from tests.unit.delta_models import published

NUM_GENERATED = 12


class Asked(NamedTuple):
    prompt: list[int]
    sampling: SamplingParams


ASKED = (
    Asked([3, 17, 4, 90, 41], GREEDY),
    Asked([7, 7, 30], DRAWN),
    Asked([50, 2, 61, 60, 59, 58, 9, 1, 12, 80, 33], PENALISED),
    Asked([99], SamplingParams(0.8, seed=3)),
)


@dataclass
class Told:
    """What is known of a request on one rank."""

    ids: list[int]
    logits: list[bytes] = field(default_factory=list)
    left: list[bytes] = field(default_factory=list)


def answers(
    checkpoint: Checkpoint, world_size: int, asked: Sequence[tuple[int, Asked]], seed: int | None, kv_dtype: str = "float32"
) -> dict[int, Told]:
    """Of the requests, by the KV cache of each. They come, and go on, as a random sequence says; without a `seed` one by one.

    With a seed passes have drafts, too: right ones, wrong ones, none.
    """
    plan = make_plan(checkpoint.spec, world_size, num_tokens=16)
    check(plan)

    def work(rank: int, exchange: ThreadExchange) -> dict[int, Told]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
        engine = Interpreter(plan, rank, weights, exchange, kv_dtype=kv_dtype, num_kv_caches=len(ASKED))
        told, rng = {cache: Told(list(one.prompt)) for cache, one in asked}, random.Random(seed)
        samplers = {cache: Sampler(checkpoint.spec.vocab_size, one.prompt, one.sampling) for cache, one in asked}
        num_read, open_ones = {cache: 0 for cache, _ in asked}, dict(asked)
        while open_ones:
            chosen = [cache for cache in open_ones if seed is not None and rng.random() < 0.7] or [next(iter(open_ones))]
            parts = []
            for cache in chosen:
                one, found = open_ones[cache], told[cache]
                num_left = len(one.prompt) - 1 - num_read[cache]
                if num_left:
                    size = num_left if seed is None else rng.randint(1, num_left)
                    part = PassPart(one.prompt[num_read[cache] :][:size], num_read[cache], None, cache)
                    assert not engine.run((part,))[0][0].stopped
                    num_read[cache] += size
                    continue
                num_more = len(one.prompt) + NUM_GENERATED - len(found.ids) - 1
                drafts = [] if seed is None else rng.choices(range(90), k=rng.randrange(4))[:num_more]
                parts.append(PassPart([found.ids[-1], *drafts], len(found.ids) - 1, one.sampling, cache))
                if rank == 0 and one.sampling.has_processors:
                    parts[-1].choose = chooser(samplers[cache])
            if not parts:
                continue
            for part, outputs in zip(parts, engine.run(parts, True, word=9 if rank == 0 else 4), strict=True):
                found = told[part.cache]
                found.ids += [output.token_id for output in outputs]
                found.logits += [output.logits.tobytes() for output in outputs if output.logits is not None]
                num_held = part.position + len(outputs)
                if len(found.ids) == len(open_ones[part.cache].prompt) + NUM_GENERATED:
                    engine.go_back(num_held, part.cache)
                    found.left = left_in(engine, part.cache, num_held)
                    del open_ones[part.cache]
            assert engine.heard == 9, "what rank 0 says"
        return told

    ranks: list[dict[int, Told]] = run_ranks(world_size, work)
    for cache, found in ranks[0].items():
        assert all(rank[cache].ids == found.ids for rank in ranks)
        found.left = [part for rank in ranks for part in rank[cache].left]
    return ranks[0]


def chooser(sampler: Sampler) -> Callable[..., Any]:
    def choose(logits: np.ndarray, position: int) -> Any:
        best = sampler.choose(logits, position)
        sampler.accept(best.token_id)
        return best

    return choose


def left_in(engine: Interpreter, cache: int, num_held: int) -> list[bytes]:
    left = [layer[cache][:, :, :num_held].tobytes() for layer in (*engine.memory.keys, *engine.memory.values)]
    return left + [array.tobytes() for layer in engine.memory.states for array in layer[cache]]


def check_company(folder: Path, world_sizes: Sequence[int], kv_dtype: str = "float32") -> None:
    checkpoint, together = open_checkpoint(folder), list(enumerate(ASKED))
    for world_size in world_sizes:
        alone = {cache: answers(checkpoint, world_size, [(cache, one)], None, kv_dtype)[cache] for cache, one in together}
        assert answers(checkpoint, world_size, together, world_size, kv_dtype) == alone, world_size


@pytest.mark.parametrize("name", cases(SPECS, SWEPT))
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    check_company(saved(SPECS[name], tmp_path), (1, 2))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_5, tied, three layers"])
def test_states_of_delta_nets(name: str, tmp_path: Path) -> None:
    published(name, tmp_path)
    check_company(tmp_path, (1, 2))


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "fp8", "int4"])
def test_every_type_of_caches(kv_dtype: str, tmp_path: Path) -> None:
    check_company(saved(LONG, tmp_path), (1, 4), kv_dtype)


def test_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    for name in ("laneformer", "experts_with_biases"):
        check_company(saved(SPECS[name], tmp_path / name), (2,))


def test_a_stop_ends_one_request_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(LONG, tmp_path))
    plan = make_plan(checkpoint.spec, 2, num_tokens=4)

    def work(rank: int, exchange: ThreadExchange) -> list[list[tuple[int, bool]]]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
        engine = Interpreter(plan, rank, weights, exchange, num_kv_caches=3, is_checked=True)
        parts = [PassPart([5 + cache, 6], 0, GREEDY, cache, stop=rank == 0 and cache == 1) for cache in range(2)]
        found = [[(output.token_id, output.stopped) for output in outputs] for outputs in engine.run(parts)]
        for wrong in ([PassPart([5], 1, GREEDY, 0), PassPart([5], 1, GREEDY, 0)], [parts[0], PassPart([5], 0, None, 2)]):
            with pytest.raises(PlanError, match="different KV caches, and each chooses"):
                engine.run(wrong)
        return found

    for (first, *_), second in run_ranks(2, work):
        assert not first[1]
        assert [stopped for _, stopped in second] == [True]
