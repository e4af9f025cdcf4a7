"""Ranks for the multi-rank tests: real processes, always with a deadline, never any left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kog_dist.collectives.ranks import RankOutcome, run_ranks

RunBody = Callable[..., list[RankOutcome]]
HERE = Path(__file__).parent


@pytest.fixture
def run_body() -> RunBody:
    """`run_body(world_size, name, **arguments)` runs `communicator_bodies.name` on every rank; returns how each rank ended."""

    def run(world_size: int, name: str, *, deadline_s: float = 60.0, **arguments: Any) -> list[RankOutcome]:
        search_path = (HERE, HERE.parents[1])
        outcomes = run_ranks(world_size, f"communicator_bodies:{name}", arguments, deadline_s=deadline_s, search_path=search_path)
        for outcome in outcomes:
            pid = (outcome.result or {}).get("pid") if isinstance(outcome.result, dict) else None
            assert pid is None or not os.path.exists(f"/proc/{pid}"), f"rank {outcome.rank} is still there"
        return outcomes

    return run
