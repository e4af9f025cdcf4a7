"""`--check-experts`: a choice of experts that differs on one rank is found, with its layer; one that does not costs nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu import lane_math
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.errors import PlanError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.multi.test_bits import SPECS, ThreadExchange, run_ranks

SPEC = SPECS["experts"]
TOKENS = (3, 17, 4)


def logits_of(folder: Path, world_size: int, *, planted: tuple[int, int] | None = None) -> list[bytes]:
    """Logits of rank 0 for TOKENS, compared in every layer. `planted`: a rank and a layer that chooses wrongly at the end."""
    checkpoint = open_checkpoint(folder)
    plan = make_plan(SPEC, world_size, checks_experts=True)
    check(plan)  # in one thread; an Interpreter then finds it done

    def work(rank: int, exchange: ThreadExchange) -> list[bytes]:
        weights = checkpoint.rank_weights(plan.ranks[rank].lanes)
        found = []
        engine = Interpreter(plan, rank, weights, exchange)
        for position, token in enumerate(TOKENS):
            if planted is not None and rank == planted[0] and position == len(TOKENS) - 1:
                router = weights.lanes[plan.ranks[rank].lanes[0]].layers[planted[1]].experts
                assert router is not None
                router.router[:] = -router.router
            output = engine.step(token, position, SamplingParams(), gather_logits=True)
            found.append(b"" if output.logits is None else output.logits.tobytes())
        return found

    ranks: list[list[bytes]] = run_ranks(world_size, work)
    return ranks[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, SPEC, random_tensors(SPEC, seed=11))
    return tmp_path


def test_equal_choices_change_no_bit(folder: Path) -> None:
    assert logits_of(folder, 4) == logits_of(folder, 2) == logits_of(folder, 1)


@pytest.mark.parametrize(("world_size", "rank", "layer"), [(4, 2, 0), (4, 0, 3), (8, 7, 5), (2, 1, 4)])
def test_a_wrong_choice_of_one_rank_is_found_with_its_layer(folder: Path, world_size: int, rank: int, layer: int) -> None:
    with pytest.raises(PlanError, match=rf"rank {rank} chose experts \d+, \d+ in layer {layer} at position 2, but rank \d \d+,"):
        logits_of(folder, world_size, planted=(rank, layer))


def test_every_rank_sees_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So none of them goes on and publishes what it makes of its own choice."""
    select, seen, lock = lane_math.select, threading.Event(), threading.Lock()

    def selected(logits: NDArray[Any], scores: NDArray[Any], is_normalised: bool, choice: NDArray[Any]) -> None:
        select(logits, scores, is_normalised, choice)
        with lock:
            is_first = not seen.is_set()
            seen.set()
        if is_first:
            choice[0] = np.sort((choice[0] + 1) % len(logits))

    monkeypatch.setattr(lane_math, "select", selected)
    plan, errors = make_plan(SPEC, 2, checks_experts=True), list[str]()
    check(plan)

    def work(rank: int, exchange: ThreadExchange) -> None:
        engine = Interpreter(plan, rank, open_checkpoint(folder).rank_weights(plan.ranks[rank].lanes), exchange)
        with pytest.raises(PlanError, match="in layer 0 at position 0") as caught:
            engine.step(1, 0, SamplingParams())
        errors.append(str(caught.value))

    run_ranks(2, work)
    assert len(errors) == 2
    assert errors[0] == errors[1]
