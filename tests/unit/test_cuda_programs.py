"""What a GPU rank compiles before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kog_dist.bench.shapes import named_shape
from kog_dist.cuda.build import Program
from kog_dist.decode.coding import Coding
from kog_dist.model.published_config import read_config
from kog_dist.runtime.topology import RankInfo
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.engines import cuda_programs
from tests.unit.delta_configs import CONFIGS

OF_KERNEL, BEHIND_PREFILL = ["decode", "decode_processors"], ["head", "head_processors", "last_streams"]
OF_PREFILL = {
    "2b": ["attention", "gate_up", "partial", "prefill", "qkv"],
    "llama-3.1-8b+fp8@9216": ["attention", "dense", "expand", "tape"],
    "gpt-oss-20b": ["attention", "dense", "experts"],
    "Qwen3.5-35B-A3B": ["delta", "dense", "expand", "experts", "gates", "rule", "wide_attention"],
}


def shape_of(name: str) -> KernelShape:
    if name in CONFIGS:
        spec = read_config(CONFIGS[name]).with_context(4096)
        return KernelShape(spec, range(spec.num_lanes), coding=Coding("E4M3", 1, "BF16"))
    spec, codings = named_shape(name)
    return KernelShape(spec, range(spec.num_lanes), **codings)


@pytest.mark.parametrize("name", OF_PREFILL)
def test_a_start_compiles_side_by_side_all_that_a_rank_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = RankInfo(0, 1, 0, "test", control_fd=0, rendezvous_fd=0)
    for prefill, wanted in (("off", OF_KERNEL), ("auto", [*OF_KERNEL, *BEHIND_PREFILL, *OF_PREFILL[name]])):
        found = list[Program]()
        monkeypatch.setattr(cuda_programs, "prebuild", found.extend)
        args = WorkerArgs(info, "", "cuda:0", "bfloat16", False, 1.0, 1.0, prefill=prefill)
        cuda_programs.compile_ahead([shape_of(name)], args)
        assert sorted(Path(one.kernel).stem for one in found) == sorted(wanted)
        own = {one.kernel: one.sources for one in found if Path(one.kernel).stem in OF_PREFILL[name]}
        assert all(f"{Path(kernel).stem}_shape.cuh" in sources for kernel, sources in own.items())


def test_builds_of_requests_with_processors_and_drafts_are_compiled_where_engines_have_them() -> None:
    info = RankInfo(0, 1, 0, "test", control_fd=0, rendezvous_fd=0)
    for drafts, count in ((False, 1), (True, 3)):
        args = WorkerArgs(info, "", "cuda:0", "bfloat16", False, 1.0, 1.0, prefill="off", drafts=drafts)
        sources = [source for _, source in cuda_programs.kernel_builds(shape_of("gpt-oss-20b"), args)]
        assert sources.count("decode_processors.cu") == count
