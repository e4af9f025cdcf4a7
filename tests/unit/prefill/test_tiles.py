"""Products for Hopper: what fits; and the kernels themselves, run on a CPU, copies and products in plain C++."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.gemm.gemm_abi import CLUSTER, TILE_PARAMS, TileShape, tile_shapes
from kog_dist.workers.prefill.gemm.hopper_gemm import Tiles, build
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu
from tests.unit.prefill.models import SMALL, layout_of

SHAPES_2B = tile_shapes(CacheLayout.of(KernelShape(laneformer_2b(), range(8))), "bfloat16")
NUM_CLUSTERS = 66


def test_shapes_of_2b() -> None:
    assert {name: (shape.inner, shape.width) for name, shape in SHAPES_2B.items()} == {
        "gate_up": (3072, 3072), "down": (1536, 3072), "qkv": (3072, 768),
    }  # fmt: skip
    assert all(shape.shared_bytes <= 227 << 10 for shape in SHAPES_2B.values())


def test_other_shapes_are_named() -> None:
    assert "192 values" in TileShape("partial", 192, 256).misfit
    assert "800 values" in TileShape("partial", 800, 256).misfit
    assert TileShape("partial", 520, 320).misfit.count(";") == 1
    assert tile_shapes(layout_of(ModelSpec(**SMALL), 2), "bfloat16") == {}


def test_chunks_that_are_worth_it() -> None:
    def never(*_: object) -> None:
        raise AssertionError

    gate_up = Tiles(SHAPES_2B["gate_up"], NUM_CLUSTERS, never, map_on_cpu)
    sizes = (64, 128, 256, 512, 1024, 2048, 4096)
    assert [size for size in sizes if gate_up.is_worth(8, size)] == [512, 1024, 2048, 4096]
    assert [size for size in sizes if gate_up.is_worth(2, size)] == [2048, 4096]
    assert not gate_up.is_worth(8, 1000)


LANES, SIZE = 2, 512


def emulated(folder: Path, shape: TileShape) -> Callable[[int], Tiles]:
    """The kernel on a CPU, with so many clusters at once."""
    path = compiled(folder, shape.kernel, shape.constants(), [shape.kernel], "kog::TileLaunch", optimize="-O2", cluster=CLUSTER)
    launch = launcher(ctypes.CDLL(str(path)), shape.kernel, TILE_PARAMS.size_bytes)
    return lambda num_clusters: Tiles(shape, num_clusters, launch, map_on_cpu)


def operands(shape: TileShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams, matrix, 1 / rms."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LANES, SIZE, shape.inner, generator=generator).half()
    matrix = (torch.randn(LANES, shape.width, shape.inner, generator=generator) * 0.05).half()
    return x, matrix, 1 + 0.2 * torch.rand(LANES, SIZE, generator=generator)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@needs_compiler
def test_gates_and_ups(tmp_path: Path) -> None:
    shape = TileShape("gate_up", 576, 512)
    tiles = emulated(tmp_path, shape)
    x, matrix, inverse_rms = operands(shape)

    def run(x: torch.Tensor, inverse_rms: torch.Tensor, num_clusters: int) -> torch.Tensor:
        found = torch.full((LANES, x.shape[1], shape.width // 2), torch.nan, dtype=torch.float16)
        tiles(num_clusters).run(x.numpy(), matrix.numpy(), inverse_rms=inverse_rms.contiguous().numpy(), out=found.numpy())
        return found

    found = run(x, inverse_rms, 3)  # some clusters take one tile more
    gate, up = ((x.float() @ matrix.float().transpose(1, 2)).half().double() * inverse_rms[..., None]).chunk(2, dim=-1)
    assert error(found, torch.nn.functional.silu(gate) * up) < 1e-3
    assert torch.equal(run(x[:, 128:384], inverse_rms[:, 128:384], 1), found[:, 128:384]), "a row has other bits elsewhere"
    part = inverse_rms[:, :256]
    shared = run(x[:1, :256].expand(LANES, -1, -1), part, 2)
    assert torch.equal(shared, run(x[:1, :256].repeat(LANES, 1, 1), part, 2)), "streams kept once"


@needs_compiler
@pytest.mark.parametrize("inner", [512, 384], ids=lambda inner: f"{inner // 64} steps")
def test_partial_sums(tmp_path: Path, inner: int) -> None:
    shape = TileShape("partial", inner, 256)
    tiles = emulated(tmp_path, shape)
    x, matrix, _ = operands(shape)
    found = torch.full((LANES, SIZE, shape.width), torch.nan, dtype=torch.float16)
    tiles(2).run(x.numpy(), matrix.numpy(), out=found.numpy())
    wanted = x.float() @ matrix.float().transpose(1, 2)
    assert error(found, wanted.double()) < 3e-4
    assert (found != wanted.half()).float().mean() < 0.01


@needs_compiler
def test_queries_keys_and_values(tmp_path: Path) -> None:
    size, max_context, start = 256, 500, 300  # the last rows stand behind the context
    sizes = {"hidden_size": 768, "num_heads": 8, "num_kv_heads": 4, "num_lanes": LANES, "max_context": max_context}
    spec = ModelSpec(**{**SMALL, **sizes})
    heads, kv_heads, width = spec.lane_heads, spec.lane_kv_heads, spec.head_dim
    shape = tile_shapes(layout_of(spec, LANES), "bfloat16")["qkv"]
    assert (heads, kv_heads, width, shape.width) == (4, 2, 96, 768)
    tiles = emulated(tmp_path, shape)
    x, matrix, inverse_rms = operands(shape)
    x, inverse_rms = x[:, :size], inverse_rms[:, :size].contiguous()
    rope = torch.randn(max_context, width // 2, 2, generator=torch.Generator().manual_seed(2))
    place, overflow = torch.tensor([start], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    query = torch.full((size, LANES, heads, width), torch.nan, dtype=torch.float16)
    keys, values = (torch.full((start + size, LANES, kv_heads, width), 7, dtype=torch.float16) for _ in range(2))
    named = {"rope": rope, "place": place, "query": query, "keys": keys, "values": values, "overflow": overflow}
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in {**named, "inverse_rms": inverse_rms}.items()}
    tiles(1).run(x.numpy(), matrix.numpy(), **arrays)
    scaled = (x.float() @ matrix.float().transpose(1, 2) * inverse_rms[..., None]).view(LANES, size, -1, width).transpose(0, 1)
    cos, sin = rope[torch.arange(start, start + size).clamp(max=max_context - 1)][:, None, None].unbind(-1)
    even, odd = scaled[:, :, : heads + kv_heads, 0::2], scaled[:, :, : heads + kv_heads, 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    assert error(query, turned[:, :, :heads].double()) < 3e-4
    for found, wanted in ((keys, turned[:, :, heads:]), (values, scaled[:, :, heads + kv_heads :])):
        rounded = wanted.bfloat16().half()
        assert bool((found[:start] == 7).all()), "what stands before the chunk is left alone"
        assert (found[start:] != rounded).float().mean() < 0.01
        assert error(found[start:], wanted.double()) < 3e-3
    assert int(overflow) == 0
    inverse_rms[1, 77] = torch.inf
    tiles(1).run(x.numpy(), matrix.numpy(), **arrays)
    assert int(overflow) == 1


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernels_build_without_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for shape in SHAPES_2B.values():
        log = build(shape).log
        assert log.count("0 bytes spill stores") == 1
        assert "serialized" not in log, "products wait for each other"
