"""Prompts in passes of many tokens leave the bits that they leave token by token, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.cpu.passes import pass_sizes
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.errors import PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.multi.test_bits import SPECS, SWEPT, ThreadExchange, run_ranks
from tests.sweeps import cases

LONG = replace(SPECS["laneformer"], max_context=96, sliding_window=20)
TOKENS = [int(token) for token in np.random.default_rng(8).integers(0, 101, 90)]


class Read(NamedTuple):
    """What a prompt leaves behind: logits of its last token, and the KV cache of every rank."""

    logits: bytes
    caches: list[bytes]


def read(
    folder: Path,
    world_size: int,
    sizes: Sequence[int],
    *,
    kv_dtype: str = "float32",
    checks_experts: bool = False,
    start: int = 0,
) -> Read:  # fmt: skip
    """Read the prompt up to `start` token by token into another cache, go on behind it in passes of these sizes, then a token."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(checkpoint.spec, world_size, checks_experts=checks_experts)
    check(plan)  # once: ranks are threads here, and what they find is kept

    def work(rank: int, exchange: ThreadExchange) -> tuple[bytes, list[bytes]]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes, keeps_halves=host_library.library() is not None)
        engine = Interpreter(plan, rank, weights, exchange, kv_dtype=kv_dtype, num_kv_caches=2)
        for position in range(start):
            engine.step(TOKENS[position], position, None)
        if start:
            engine.step(1, start, None)  # dropped: another sequence went on so
            engine.use_cache(1, 0, start)
        position = start
        for size in sizes:
            output = engine.read(TOKENS[position : position + size], position)
            assert (output.token_id, output.logits, output.finite, output.stopped) == (-1, None, True, False)
            position += size
        logits = engine.step(TOKENS[position], position, SamplingParams(), gather_logits=True).logits
        cache = int(start > 0)
        layers = [layer[cache][:, :, : position + 1] for layer in (*engine.memory.keys, *engine.memory.values)]
        return b"" if logits is None else logits.tobytes(), [layer.tobytes() for layer in layers]

    ranks = run_ranks(world_size, work)
    return Read(ranks[0][0], [cache for _, caches in ranks for cache in caches])


def saved(spec: ModelSpec, folder: Path, dtype: str = "float32") -> Path:
    write_checkpoint(folder, spec, random_tensors(spec, seed=11), dtype=dtype)
    return folder


@pytest.mark.parametrize("name", cases(SPECS, SWEPT))
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    folder = saved(SPECS[name], tmp_path)
    one_by_one = read(folder, 1, [1] * 20)
    assert one_by_one == read(folder, 1, [2, 3, 15]) == read(folder, 1, [16, 4])
    for world_size in (2, 4):
        assert read(folder, world_size, [3, 16, 1]).logits == one_by_one.logits
    assert read(folder, 2, [20]) == read(folder, 2, [1] * 20)


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_of_weights_and_caches(kv_dtype: str, dtype: str, tmp_path: Path) -> None:
    folder = saved(LONG, tmp_path, dtype)
    one_by_one = read(folder, 1, [1] * 85, kv_dtype=kv_dtype)
    for size in (3, 64):
        assert read(folder, 1, [*pass_sizes(85, size)] if size == 64 else [size] * 28 + [1], kv_dtype=kv_dtype) == one_by_one


def test_behind_a_kept_prefix(tmp_path: Path) -> None:
    folder = saved(LONG, tmp_path)
    one_by_one = read(folder, 1, [1] * 70)
    for start in (1, 33, 64):
        assert read(folder, 1, [70 - start], start=start) == one_by_one


def test_experts_are_compared_token_by_token(tmp_path: Path) -> None:
    folder = saved(SPECS["experts"], tmp_path)
    one_by_one = read(folder, 2, [1] * 12)
    assert read(folder, 2, [8, 4], checks_experts=True) == one_by_one


def test_without_a_library_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    for name in ("laneformer", "experts_with_biases"):
        folder = saved(SPECS[name], tmp_path / name)
        assert read(folder, 2, [1] * 20) == read(folder, 2, [16, 4])


def test_a_stop_reaches_all_ranks_behind_the_pass(tmp_path: Path) -> None:
    folder = saved(LONG, tmp_path)
    plan = make_plan(LONG, 2)
    check(plan)

    def work(rank: int, exchange: ThreadExchange) -> tuple[list[bool], int]:
        engine = Interpreter(plan, rank, open_checkpoint(folder).rank_weights(plan.ranks[rank].lanes), exchange)
        stops = [engine.read(TOKENS[at : at + 8], at, stop=rank == 0 and at == 8).stopped for at in (0, 8)]
        return stops, engine.num_positions

    assert run_ranks(2, work) == [([False, True], 16)] * 2


def test_passes_that_cannot_follow_are_refused(tmp_path: Path) -> None:
    engine = Interpreter(make_plan(LONG, 1), 0, open_checkpoint(saved(LONG, tmp_path)).rank_weights(range(8)), None)
    with pytest.raises(PlanError, match="token id 104 is outside"):
        engine.read([1, LONG.vocab_size, 2], 0)
    with pytest.raises(PlanError, match="position 2 cannot follow: the KV cache holds 0"):
        engine.read([1, 2], 2)
    engine.read(TOKENS[:90], 0)
    with pytest.raises(PlanError, match="position 96 exceeds the model's context of 96"):
        engine.read(TOKENS[:7], 90)
    assert engine.num_positions == 90
