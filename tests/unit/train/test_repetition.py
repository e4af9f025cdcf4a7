"""Loops for training: where they stand, what is penalised, and that a model unlearns them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kog_dist.errors import ConfigError
from kog_dist.train.model import TrainingModel
from kog_dist.train.repetition import STRETCH, loop_loss, with_loops
from kog_dist.train.run import Run
from kog_dist.train.settings import RunSettings
from kog_dist.train.specs import nano_spec
from tests.unit.train.tokens import write_tokens

SETTINGS = RunSettings(
    num_steps=10, batch=8, time=256, decay_share=0.5, function_share=0.5, repetition_share=0.25, optimizer="adamw",
    learning_rate=3e-3, adam_learning_rate=3e-3, warmup_steps=1,
)  # fmt: skip


def test_rows_become_loops_that_close_where_the_text_did() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (3, 600)))
    looped, before = with_loops(rows, 2, np.random.default_rng(1))
    places = torch.arange(600).expand(3, 600)
    repeated = before != places
    assert torch.equal(looped.gather(1, before)[repeated], looped[repeated])  # what is repeated equals what it repeats
    assert not repeated[2].any()
    assert torch.equal(looped[2], rows[2])
    for row in range(2):
        for start in range(0, 512, STRETCH):
            stretch = repeated[row, start : start + STRETCH]
            first = int(stretch.int().argmax())
            assert 32 + 1 <= first < 128 + 64
            assert torch.equal(looped[row, start : start + first], rows[row, start : start + first])
            assert stretch[first:].all()
            period = (places - before)[row, start + first]
            assert rows[row, start + first] == rows[row, start + first - period]  # the text went on as the loop does
    again, _ = with_loops(rows, 2, np.random.default_rng(1))
    assert torch.equal(again, looped)


def test_the_penalty_is_lowest_at_half_the_probability_of_the_round_before() -> None:
    def loss(chances: list[float]) -> float:
        """Of a target 0 that repeats target 0 one place before, with these probabilities."""
        logits = torch.tensor([[[math.log(chance), math.log(1 - chance)] for chance in chances]])
        return float(loop_loss(logits, torch.zeros(1, 2, dtype=torch.long), torch.tensor([[0, 0]])))

    first = -math.log(0.8)
    assert loss([0.8, 0.4]) == pytest.approx(first / 2)  # no penalty
    assert loss([0.8, 0.9]) == pytest.approx((first - math.log(0.5)) / 2)
    assert loss([0.8, 0.2]) == pytest.approx((first - math.log(0.8)) / 2)
    plain = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    targets, own = torch.ones(2, 5, dtype=torch.long), torch.arange(5).expand(2, 5)
    expected = torch.nn.functional.cross_entropy(plain.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loop_loss(plain, targets, own), expected)


def with_functions(folder: Path) -> Path:
    """Tokens of files (from 7 on), and functions of three tokens (2, 3, 4) behind a 0."""
    write_tokens(folder)
    np.save(folder / "functions-000.npy", np.tile(np.array([0, 2, 3, 4], np.uint16), 200), allow_pickle=False)
    return folder


def test_functions_and_loops_are_part_of_the_decay_alone(tmp_path: Path) -> None:
    run = Run(nano_spec(), SETTINGS, with_functions(tmp_path))
    for step in (0, 5):
        run.step_idx = step
        rows, before = run.drawn_rows()
        assert before is not None
        loops = (before != torch.arange(257)).any(1)
        functions = (rows[:, :4] == torch.tensor([2, 3, 4, 0])).all(1)  # from the beginning of one
        assert loops.tolist() == [step == 5] * 2 + [False] * 6
        assert functions.tolist() == [step == 5, False, False, False] + [step == 5] * 4
    run.step_idx = 0
    assert run.held_out_loss() == pytest.approx(
        Run(nano_spec(), replace(SETTINGS, repetition_share=0.0), tmp_path).held_out_loss()
    )


def test_a_model_learns_the_text_of_loops_and_not_to_go_on() -> None:
    """The same rows with and without the penalty: what is said once gets as likely, what is repeated does not."""
    rows, before = with_loops(torch.arange(257).expand(2, 257) * 7 % 320, 2, np.random.default_rng(7))
    own = torch.arange(256).expand(2, 256)
    repeated = before[:, 1:] - 1 != own

    def chances(before: torch.Tensor) -> torch.Tensor:
        model = TrainingModel(nano_spec(), seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            model.loss(rows[:, :-1], rows[:, 1:], before).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            return torch.softmax(model(rows[:, :-1]), -1).gather(2, rows[:, 1:, None])[..., 0]

    plain, penalised = chances(own), chances(before[:, 1:] - 1)
    assert plain[~repeated].mean() > 0.8
    assert penalised[~repeated].mean() > 0.8
    assert plain[repeated].mean() > 0.8
    assert penalised[repeated].mean() < 0.4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="together more than 1"):
        replace(SETTINGS, function_share=0.8)
    with pytest.raises(ConfigError, match="repetition_share must be from 0 to 1"):
        replace(SETTINGS, repetition_share=-0.1)
    run = Run(nano_spec(), replace(SETTINGS, decay_share=1.0), write_tokens(tmp_path))
    with pytest.raises(ConfigError, match="run `prepare --functions`"):
        run.train_step()
