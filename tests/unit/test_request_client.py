"""What `kog-bench requests` computes from what its client was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kog_dist.bench.engine.request_client import RequestClient, TimedAnswer
from kog_dist.bench.engine.request_measures import KINDS, Measures, Workload
from kog_dist.model.spec import ModelSpec
from kog_dist.rpc.messages import Done, FinishReason
from tests.unit.prefill.models import SMALL


def test_speed_is_that_of_the_tokens_behind_the_first() -> None:
    assert TimedAnswer("a", 0.0, arrivals=[(1.0, 1), (1.25, 4), (1.5, 5)]).tokens_per_s == 8


def test_tokens_that_a_busy_machine_hands_over_at_once_have_no_speed() -> None:
    assert TimedAnswer("a", 0.0, arrivals=[(1.0, 24)]).tokens_per_s is None


class PlayedClient:
    """Answers at once, each token after so many milliseconds, and notes the kinds of sampling."""

    def __init__(self, ms_of: dict[str, float]) -> None:
        self.ms_of, self.asked = ms_of, list[str]()

    def ask(self, prompt_ids: Sequence[int], *, max_tokens: int, **options: Any) -> TimedAnswer:
        kind = next(name for name, wanted in KINDS.items() if wanted == options)
        self.asked.append(kind)
        answer = TimedAnswer("a", 0.0, arrivals=[(0.0, 1), (1.0, max_tokens)])
        rate = 1e3 / self.ms_of[kind]
        answer.end = Done("a", FinishReason.LENGTH, len(prompt_ids), max_tokens, 0.0, 1.0, tokens_per_s=rate)
        return answer


def test_each_round_begins_with_another_kind_of_sampling() -> None:
    greedy, *others = KINDS
    client = PlayedClient({greedy: 1.0, others[0]: 1.5, others[1]: 2.0})
    workload = Workload((16,), kept=0, new=0, context=16, tokens=8, repeats=4)
    figures = Measures(cast(RequestClient, client), ModelSpec(**{**SMALL, "vocab_size": 64}), workload).kinds()
    order = [greedy, *others]
    assert client.asked == [*order, *order[1:], order[0], order[2], *order[:2], *order]
    assert [figure["kind"] for figure in figures] == order
    assert [figure["of_greedy"] for figure in figures] == pytest.approx([1.0, 1.5, 2.0])
    assert figures[1]["each_us"] == pytest.approx([1500.0] * 4)
