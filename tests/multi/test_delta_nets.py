"""Models with delta nets have the same bits on any number of ranks, and in passes of any number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.decode.cpu import host_library
from kog_dist.model.checkpoint import open_checkpoint
from tests.multi.test_passes import read
from tests.unit.delta_models import published


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next, some layers dense, weights of all experts"])
def test_bits(name: str, tmp_path: Path) -> None:
    published(name, tmp_path)
    num_lanes = open_checkpoint(tmp_path).spec.num_lanes
    assert num_lanes == (8 if name == "qwen3_5_moe" else 4), "two KV heads are fewer than lanes"
    one_by_one = read(tmp_path, 1, [1] * 21)
    assert one_by_one == read(tmp_path, 1, [2, 3, 16])
    for world_size in (2, num_lanes):
        assert read(tmp_path, world_size, [3, 16, 2]).logits == one_by_one.logits


def test_bits_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    published("qwen3_5_moe", tmp_path)
    assert read(tmp_path, 2, [9]).logits == read(tmp_path, 1, [1] * 9).logits


def test_choices_are_compared(tmp_path: Path) -> None:
    published("qwen3_5_moe", tmp_path)
    assert read(tmp_path, 4, [5], checks_experts=True).logits == read(tmp_path, 1, [5]).logits
