"""What `kog-bench requests` computes from what its client was told."""

from __future__ import annotations

from kog_dist.bench.request_client import Answer


def test_speed_is_that_of_the_tokens_behind_the_first() -> None:
    assert Answer("a", 0.0, arrivals=[(1.0, 1), (1.25, 4), (1.5, 5)]).tokens_per_s == 8


def test_tokens_that_a_busy_machine_hands_over_at_once_have_no_speed() -> None:
    assert Answer("a", 0.0, arrivals=[(1.0, 24)]).tokens_per_s is None
