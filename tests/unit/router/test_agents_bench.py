"""`kog-bench router --agents`: what its fake replicas keep, and that a router in front of them makes use of it."""

from __future__ import annotations

import json

import pytest

from kog_dist.bench.engine import router_agents
from kog_dist.bench.engine.router_agents import Turn, summary
from kog_dist.bench.fakes.fake_replica import KeptPrompts
from kog_dist.router.affinity import IDS_BLOCK


def test_a_fake_replica_keeps_beginnings_within_its_memory() -> None:
    kept = KeptPrompts(4 * IDS_BLOCK)
    first, second = list(range(3 * IDS_BLOCK)), [*range(2 * IDS_BLOCK), *[7] * IDS_BLOCK]
    assert kept.num_cached(first) == 0
    kept.keep(first)
    assert [kept.num_cached(ids) for ids in (first, second, [7, *first])] == [3 * IDS_BLOCK, 2 * IDS_BLOCK, 0]
    kept.keep(second)
    assert [kept.num_cached(ids) for ids in (first, second)] == [3 * IDS_BLOCK, 3 * IDS_BLOCK], "they share two blocks"
    kept.keep([8] * IDS_BLOCK)
    assert [kept.num_cached(ids) for ids in (first, second)] == [2 * IDS_BLOCK, 3 * IDS_BLOCK], "the oldest end was forgotten"


def test_turns_are_added_up() -> None:
    figures = summary([Turn(100, 0, 0, 0.3), Turn(200, 150, 120, 0.1)])
    assert figures["hit_rate"] == pytest.approx(0.4)
    assert figures["share_of_possible"] == pytest.approx(0.8)
    assert figures["first_p99_ms"] == pytest.approx(300.0)


def test_agents_find_what_they_have_sent_before(capsys: pytest.CaptureFixture[str]) -> None:
    router_agents.run(2, 2, 3)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["requests"] == 6
    own = sum(router_agents.SHARED + router_agents.OWN + turn * (router_agents.NEW + router_agents.ANSWER) for turn in range(2))
    assert figures["cached_tokens"] >= 2 * own - 6 * IDS_BLOCK, "each turn finds all of the one before it"
