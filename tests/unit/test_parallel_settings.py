"""How many requests decode together: what may be asked for, and where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.config import MAX_PARALLEL, LaunchConfig
from kog_dist.errors import ConfigError, LaunchError
from kog_dist.hardware.gpus import Inventory
from kog_dist.launch import gpu_choice
from kog_dist.launch.gpu_choice import BESIDES_BYTES, asked_together, choose_gpus, gpu_rank_bytes, gpu_rank_shape
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.kept_prefixes import kept_on_gpus
from kog_dist.launch.target import choose_target
from kog_dist.model.checkpoint import Checkpoint, planned_checkpoint
from kog_dist.runtime.abi import MOST_PARALLEL
from kog_dist.workers.cuda.company_build import company_bytes
from tests.unit.delta_models import published
from tests.unit.eight_lanes import write_config
from tests.unit.test_launch_limits import inventory_with


@pytest.mark.parametrize(
    ("asked", "kv_caches", "found"), [(0, 0, (4, 4)), (1, 0, (1, 4)), (8, 0, (8, 8)), (0, 2, (2, 2)), (2, 6, (2, 6))]
)
def test_cpu_ranks_have_a_cache_for_each(asked: int, kv_caches: int, found: tuple[int, int]) -> None:
    target = choose_target(LaunchConfig(device="cpu", ranks=1, parallel=asked, kv_caches=kv_caches))
    assert (target.parallel, target.num_kv_caches) == found


def test_more_than_there_are_caches_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel 3 needs a KV cache for each request, and kv_caches is 2; ask for 3"):
        choose_target(LaunchConfig(device="cpu", ranks=1, parallel=3, kv_caches=2))
    with pytest.raises(ConfigError, match="parallel must be between 1 and 8"):
        LaunchConfig(parallel=9)
    assert MAX_PARALLEL == MOST_PARALLEL


@pytest.mark.parametrize("has_state", [False, True])
def test_a_dry_run_says_it(has_state: bool, tmp_path: Path) -> None:
    if has_state:
        published("qwen3_5", tmp_path)
    for asked, kv_caches, found in ((0, 0, (4, 4)), (6, 0, (6, 6)), (0, 2, (2, 2))):
        model = str(tmp_path) if has_state else LaunchConfig().model
        settings = LaunchConfig(model, device="cpu", ranks=1, parallel=asked, kv_caches=kv_caches)
        target = choose_target(settings)
        assert (target.parallel, target.num_kv_caches) == found
        together = f"together   {found[0]} requests at most, in passes of the weights that they share; more wait"
        assert together in dry_run(settings).splitlines()


def test_one_gpu_has_as_many_as_memory_allows(tmp_path: Path) -> None:
    """Where nobody asks: four, two or one, with room for another whole context that is kept; and no shorter context for more."""
    dense = planned_checkpoint(write_config(tmp_path))
    one, two, four = (_uses(dense, n, n) for n in (1, 2, 4))
    assert four["cache"] == 2 * two["cache"] == 4 * one["cache"]
    shape = gpu_rank_shape(dense, 0, 1, "bfloat16")
    builds = company_bytes(shape, 2) + company_bytes(shape, 4)
    for number, uses in ((2, two), (4, four)):
        assert uses["slots"] == builds + (number - 1) * (12 * dense.spec.max_context + 12 * dense.spec.vocab_size)
    assert {name: size for name, size in four.items() if name != "slots"} == {**one, "cache": four["cache"]}
    needs = [sum(uses.values()) + BESIDES_BYTES + (uses is not one) * one["cache"] for uses in (one, two, four)]
    found = list[tuple[int, int, int]]()
    for free in (needs[0] - 1, needs[0], needs[1] - 1, needs[1], needs[2] - 1, needs[2]):
        choice = choose_gpus(LaunchConfig(gpus="1", prefill="off"), dense, {}, inventory_with(free, 1))
        assert choice is not None
        found.append((choice.parallel, choice.num_caches, choice.context))
    assert found[1:] == [(1, 1, 0), (1, 1, 0), (2, 2, 0), (2, 2, 0), (4, 4, 0)]
    assert found[0][:2] == (1, 1)
    assert found[0][2] > 0, "a shorter context"


def test_what_is_asked_for_is_had_or_refused(tmp_path: Path) -> None:
    dense = planned_checkpoint(write_config(tmp_path))
    need = sum(_uses(dense, 4, 5).values()) + BESIDES_BYTES
    settings = LaunchConfig(gpus="1", parallel=4, kv_caches=5, prefill="off", context=dense.spec.max_context)
    fits, lacks = (choose_gpus(settings, dense, {}, inventory_with(need - less, 1)) for less in (0, 1))
    assert fits is not None
    assert lacks is not None
    assert len(lacks.obstacles) == len(fits.obstacles) + 1
    assert (fits.parallel, fits.num_caches) == (4, 5)
    assert asked_together(LaunchConfig(parallel=3)) == (3, 3)
    assert asked_together(LaunchConfig(kv_caches=3)) == (1, 3)
    assert asked_together(LaunchConfig(parallel=1)) == (1, 1)
    for asked, cause in (
        (LaunchConfig(parallel=4, kv_caches=3), "needs a KV cache for each request, and kv_caches is 3; ask for 4"),
        (LaunchConfig(parallel=4, check_experts=True), "contradicts --check-experts"),
    ):
        with pytest.raises(ConfigError, match=cause):
            asked_together(asked)


def test_several_leave_room_for_what_is_kept(tmp_path: Path) -> None:
    """For what is asked for, else for a context; whoever asks for several requests is believed."""
    dense = planned_checkpoint(write_config(tmp_path))
    one, two, four = (_uses(dense, n, n) for n in (1, 2, 4))
    context = one["cache"]
    needs = {n: sum(uses.values()) + BESIDES_BYTES for n, uses in ((1, one), (2, two), (4, four))}
    for free, asked, parallel in (
        (needs[4] + context, "auto", 4),
        (needs[4] + context, "off", 4),
        (needs[4], "off", 4),
        (needs[4] + context, "5", 2),
        (needs[2] + (5 << 30), "5", 2),
        (needs[2] + (5 << 30) - 1, "5", 1),
    ):
        settings = LaunchConfig(gpus="1", prefill="off", prefix_cache=asked)
        choice = choose_gpus(settings, dense, {}, inventory_with(free, 1))
        assert choice is not None
        assert choice.parallel == parallel
        kept, _ = kept_on_gpus(settings, choice.spare_bytes, 1, least=choice.kept_bytes)
        assert kept >= {"off": 0, "5": 5 << 30}.get(asked, context)
    for settings in (LaunchConfig(gpus="1", prefill="off", parallel=2), LaunchConfig(gpus="1", prefill="off", kv_caches=2)):
        choice = choose_gpus(settings, dense, {}, inventory_with(needs[2], 1))
        assert choice is not None
        assert (choice.parallel, choice.num_caches, choice.context) == (2, 2, 0)


def test_gpus_that_are_not_here_are_planned_with_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, nothing = planned_checkpoint(write_config(tmp_path)), Inventory((), ("no driver",))
    uses = [gpu_rank_bytes(dense, 0, 1, "bfloat16", prefill=True, drafts=True, parallel=n, num_caches=n) for n in (1, 2)]
    needs = [sum(one.values()) + BESIDES_BYTES for one in uses]
    for planned, parallel in ((139 << 30, 4), (needs[1] + uses[0]["cache"], 2), (needs[0], 1), (1, 1)):
        monkeypatch.setattr(gpu_choice, "_PLANNED_BYTES", planned)
        choice = choose_gpus(LaunchConfig(gpus="1"), dense, {}, nothing)
        assert choice is not None
        assert (choice.parallel, choice.prefill) == (parallel, "auto")


def test_prefill_that_does_not_fit_is_said_where_nobody_asks_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "find_spec", lambda name: True)
    dense = planned_checkpoint(write_config(tmp_path))
    without = inventory_with(sum(_uses(dense, 1, 1).values()) + BESIDES_BYTES, 1)
    settings = LaunchConfig(prefill="on", context=dense.spec.max_context)
    with pytest.raises(LaunchError, match="for prefill, which --prefill off does without"):
        choose_gpus(settings, dense, {}, without)


def test_a_dry_run_for_gpus_says_it(tmp_path: Path) -> None:
    dense = LaunchConfig(str(write_config(tmp_path)), device="cuda", ranks=1)
    shared, one = "in passes of the weights that they share; more wait", "together   1 request at a time; others wait"
    for settings, wanted in (
        (dense, f"together   4 requests at most, {shared}"),
        (replace(dense, parallel=2), f"together   2 requests at most, {shared}"),
        (replace(dense, parallel=1), one),
        (replace(dense, ranks=2), f"together   4 requests at most, {shared}"),
        (replace(dense, ranks=4), one),
        (LaunchConfig(device="cuda", ranks=1), one),  # a Laneformer
    ):
        lines = dry_run(settings).splitlines()
        assert wanted in lines
        assert any(" for requests that run together" in line for line in lines) is (shared in wanted)
    (together,) = (
        line for line in dry_run(LaunchConfig(device="cuda", ranks=1, parallel=2)).splitlines() if "together" in line[:8]
    )
    assert together.startswith(
        "together   2 requests at most, in turns, since the CUDA kernel cannot run this model with 2 tokens"
    )


def _uses(checkpoint: Checkpoint, parallel: int, num_caches: int, *, prefill: bool = False) -> dict[str, int]:
    return gpu_rank_bytes(checkpoint, 0, 1, "bfloat16", prefill=prefill, drafts=True, parallel=parallel, num_caches=num_caches)


def test_a_shorter_context_is_of_a_way_that_fits(tmp_path: Path) -> None:
    """Where prefill leaves no room for the least context, prompts go token by token."""
    dense = planned_checkpoint(write_config(tmp_path))
    least = replace(dense, spec=dense.spec.with_context(gpu_choice.LEAST_CONTEXT))
    with_it, without = (_uses(least, 1, 1, prefill=prefill) for prefill in (True, False))
    free = sum(with_it.values()) + BESIDES_BYTES - 1
    assert sum(without.values()) + BESIDES_BYTES <= free
    (need,) = gpu_choice._shorter(LaunchConfig(gpus="1"), dense, 1, "bfloat16", free)
    assert (need.prefill, need.num_bytes <= free) == ("off", True)
