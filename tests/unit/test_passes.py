"""How prompts are divided into passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kog_dist.bench.fakes.tiny_model import TINY
from kog_dist.decode.cpu.passes import MOST_TOKENS, most_tokens, pass_mailboxes, pass_sizes
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.experts import ExpertsSpec


@pytest.mark.parametrize(
    ("num_tokens", "most", "sizes"),
    [(0, 64, []), (1, 64, [1]), (64, 64, [64]), (150, 64, [64, 64, 16, 4, 2]), (7, 8, [4, 2, 1]), (3, 1, [1, 1, 1])],
)
def test_sizes(num_tokens: int, most: int, sizes: list[int]) -> None:
    assert [*pass_sizes(num_tokens, most)] == sizes


def test_large_models_have_shorter_passes() -> None:
    plan = make_plan(TINY, 1)
    sizes = [
        most_tokens(replace(plan, spec=replace(TINY, hidden_size=width, intermediate_size=width))) for width in (64, 8192, 65536)
    ]
    assert sizes[0] == MOST_TOKENS > sizes[1] > sizes[2] == 8


def test_messages_of_a_pass_have_a_place() -> None:
    """Ranks of many layers and values hear less at a time."""
    spec = replace(TINY, delay=0)
    plan = make_plan(spec, 2)
    large = replace(plan, mailboxes=tuple(replace(box, length=box.length * 2000) for box in plan.mailboxes))
    assert most_tokens(large) < most_tokens(plan)


def test_what_a_pass_says_of_each_token() -> None:
    assert pass_mailboxes(make_plan(TINY, 2)) == {"attention", "mlp"}
    assert pass_mailboxes(make_plan(TINY, 1)) == set()
    experts = replace(TINY, delay=0, sliding_window=None, window_layers=(), experts=ExpertsSpec(4, 2))
    assert pass_mailboxes(make_plan(experts, 2, checks_experts=True)) == {"attention", "mlp", "experts"}
