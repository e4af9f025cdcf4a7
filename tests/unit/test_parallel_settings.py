"""How many requests decode together: what may be asked for, and where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kog_dist.config import MAX_PARALLEL, LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.launch import gpu_choice
from kog_dist.launch.gpu_choice import BESIDES_BYTES, choose_gpus, gpu_rank_bytes, gpu_rank_shape, together_on_gpus
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.target import choose_target
from kog_dist.model.checkpoint import planned_checkpoint
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


def test_gpus_decode_one_and_refuse_more_by_name() -> None:
    with pytest.raises(ConfigError, match="parallel 2 cannot be had on GPUs yet: the kernel decodes one request at a time"):
        dry_run(LaunchConfig(device="cuda", ranks=1, parallel=2))
    lines = dry_run(LaunchConfig(device="cuda", ranks=1)).splitlines()
    assert "together   1 request: the kernel of GPUs decodes one at a time, and others wait" in lines


def test_what_several_on_one_gpu_would_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they have run there."""
    dense = planned_checkpoint(write_config(tmp_path))
    one, four = (gpu_rank_bytes(dense, 0, 1, "bfloat16", drafts=True, parallel=n, num_caches=n + (n > 1)) for n in (1, 4))
    assert four["cache"] == 5 * one["cache"]
    shape = gpu_rank_shape(dense, 0, 1, "bfloat16")
    builds = company_bytes(shape, 2) + company_bytes(shape, 4)
    assert four["slots"] == builds + 3 * (12 * dense.spec.max_context + 12 * dense.spec.vocab_size)
    assert {name: size for name, size in four.items() if name != "slots"} == {**one, "cache": four["cache"]}
    monkeypatch.setattr(gpu_choice, "MOST_TOGETHER", 8)
    enough, too_few = (inventory_with(sum(four.values()) + BESIDES_BYTES - less, 1) for less in (0, 1))
    settings = LaunchConfig(gpus="1", parallel=4, kv_caches=5, prefill="off")
    fits, lacks = (choose_gpus(replace(settings, context=dense.spec.max_context), dense, {}, free) for free in (enough, too_few))
    assert fits is not None
    assert lacks is not None
    assert len(lacks.obstacles) == len(fits.obstacles) + 1
    assert together_on_gpus(settings, 1) == (4, 5)
    assert together_on_gpus(LaunchConfig(parallel=3), 1) == (3, 3)
    for asked, count, cause in (
        (LaunchConfig(parallel=4, kv_caches=3), 1, "needs a KV cache for each request, and kv_caches is 3; ask for 4"),
        (LaunchConfig(parallel=4), 2, "is for one GPU, and there are 2; ask for --gpus 1, or for --replicas"),
        (LaunchConfig(parallel=4, check_experts=True), 1, "contradicts --check-experts"),
    ):
        with pytest.raises(ConfigError, match=cause):
            together_on_gpus(asked, count)
    lines = dry_run(LaunchConfig(device="cuda", ranks=1, parallel=4)).splitlines()
    assert "together   4 requests at most, in passes of the weights that they share; more wait" in lines
    assert any(" for requests that run together" in line for line in lines)


@pytest.mark.parametrize("kv_caches", [2, 5])
def test_gpus_have_one_kv_cache(kv_caches: int) -> None:
    with pytest.raises(ConfigError, match=f"kv_caches {kv_caches} cannot be had on GPUs yet: the kernel has one KV cache"):
        dry_run(LaunchConfig(device="cuda", ranks=1, kv_caches=kv_caches))
