"""What `KernelShape` counts of a thread block's shared memory is what the compiler makes of `Shared` in phases/layout.cuh."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kog_dist.bench.shapes import named_shape
from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda.build import device_sources
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES
from tests.unit.cpu_compiler import BOTH_TWINS, build, needs_compiler

TWIN = Path(__file__).parent / "decode_twin"
PROGRAM = (
    '#define KOG_PROCESSORS 1\n#include "layout.cuh"\n#include <cstdio>\nint main() { std::printf("%zu", sizeof(kog::Shared)); }'
)


def shape_of(spec: ModelSpec, num_ranks: int) -> KernelShape:
    return KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks)


def coded(name: str, tokens: int) -> KernelShape:
    spec, codings = named_shape(name)
    return KernelShape(spec, range(spec.num_lanes), tokens=tokens, **codings)


SHAPES = {
    "2b on 8": shape_of(laneformer_2b(), 8),
    "wide heads": shape_of(ModelSpec(2560, 3, 10, 10, 8, 6000, max_context=64, num_lanes=2), 1),
    "many lanes": shape_of(ModelSpec(4096, 3, 16, 16, 12800, 320, max_context=64, num_lanes=16, delay=2), 2),
    "scores by themselves": shape_of(ModelSpec(256, 3, 16, 8, 1024, 100_000, max_context=64, num_lanes=8), 1),
    "four tokens, FP8": coded("llama-3.1-8b+fp8", tokens=4),
    "two tokens, an LM head in INT8": coded("qwen3-4b+fp8+head8", tokens=2),
    "two tokens, experts in INT4": coded("qwen3-30b-a3b+int4", tokens=2),
    "four tokens, experts in MXFP4": coded("gpt-oss-120b", tokens=4),
}


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shared_memory_is_counted_to_the_last_member(shape: KernelShape, tmp_path: Path) -> None:
    sources = {**device_sources(), **headers(shape), "ptx.cuh": (TWIN / "ptx.cuh").read_text(), "size.cpp": PROGRAM}
    sources["e4m3_on_cpu.h"] = (TWIN.parent / "e4m3_on_cpu.h").read_text()
    sources |= {path.name: path.read_text() for path in BOTH_TWINS.iterdir()}
    for name, text in sources.items():
        (tmp_path / name).write_text(re.sub(r"static_assert\(sizeof\(Shared\).*", "", text) if name == "layout.cuh" else text)
    program = build(tmp_path / "size.cpp", "size", "-O0")
    found = int(subprocess.run([program], capture_output=True, check=True, timeout=20).stdout)
    per_tile = 16 * shape.ring.num_pieces + 4 * shape.ring.is_packed
    counted = shape.shared.bytes_besides + shape.ring.num_bytes + shape.ring.num_slots * per_tile
    assert found <= counted <= found + 64, shape.ring.is_packed
    assert counted <= SHARED_BYTES
