"""Device programs that no CPU twin compiles are compiled by nvcc where it is installed: a name that is gone is noticed here."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kog_dist.model.spec import laneformer_2b
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.attention import hopper_attention as attention
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.exchange.sums_abi import sums_header
from kog_dist.workers.prefill.gemm import gemm_abi as tiles_abi
from kog_dist.workers.prefill.gemm import hopper_gemm as tiles
from kog_dist.workers.prefill.lanes.prefill_abi import prefill_header

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.mark.parametrize("program", ["prefill", "attention", "allreduce", "gate_up"])
def test_prefill_compiles(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = laneformer_2b()
    shape = KernelShape(spec, range(spec.num_lanes))
    layout = CacheLayout.of(shape)
    if program == "prefill":
        header = prefill_header(layout, num_positions=4096, weight_dtype=shape.weight_dtype, kv_dtype=shape.kv_dtype)
        cubin = compiled.build("prefill", header)
    elif program == "attention":
        heads = layout.num_lanes * spec.lane_heads
        cubin = attention.build(AttentionShape(spec.head_dim, heads, layout.heads, spec.lane_heads))
    elif program == "allreduce":
        cubin = compiled.build("allreduce", sums_header(2))
    else:
        found = tiles_abi.tile_shapes(layout, shape.kv_dtype)
        cubin = tiles.build(next(one for one in found.values() if one.kernel == program))
    assert cubin.path.stat().st_size > 0
    assert cubin.path.is_relative_to(tmp_path)
