"""How many requests decode together: what may be asked for, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.config import MAX_PARALLEL, LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.target import choose_target
from kog_dist.runtime.abi import MOST_PARALLEL
from tests.unit.delta_models import published


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
