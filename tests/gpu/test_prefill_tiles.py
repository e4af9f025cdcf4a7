"""Our own products on a GPU, with what comes behind them: values against float64, bits of a row wherever it stands.

`test_prefill.py` compares their bits with those of cuBLAS. Times: `kog-bench prefill`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.gemm.gemm_abi import TileShape, tile_shapes
from kog_dist.workers.prefill.gemm.hopper_gemm import Tiles, tiles_on_gpu
from tests.gpu.on_hopper import on_hopper

pytestmark = on_hopper("gemm.cuh")

LANES, LARGEST = 8, 4096
SPEC = laneformer_2b()
SHAPES = tile_shapes(CacheLayout.of(KernelShape(SPEC, range(LANES))), "bfloat16")
SMALL = replace(SPEC, hidden_size=1024, num_heads=16, num_kv_heads=16, num_lanes=4)
LIMIT = 5e-4  # cuBLAS and swiglu have 3.9e-4


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Ours, so that everything is queued in order, and graphs can be captured."""
    import cupy

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        yield
    torch.cuda.synchronize()


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(shape: TileShape, lanes: int, size: int) -> Operands:
    """What is multiplied, the matrix, and 1 / rms."""
    generator = torch.Generator("cuda").manual_seed(size)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.float16, generator=generator)

    x, matrix = values(lanes, size, shape.inner), values(lanes, shape.width, shape.inner) * 0.02
    return x, matrix, torch.rsqrt(x.float().square().mean(-1) + 1e-5)


def multiply(tiles: Tiles, x: torch.Tensor, matrix: torch.Tensor, **tensors: torch.Tensor) -> None:
    """`Tiles.run` with tensors of torch."""
    import cupy

    tiles.run(cupy.asarray(x), cupy.asarray(matrix), **{name: cupy.asarray(tensor) for name, tensor in tensors.items()})


def run(tiles: Tiles, x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Activations, or partial sums."""
    results = tiles.shape.width // (2 if tiles.shape.interleaves else 1)
    found = torch.full((len(matrix), x.shape[1], results), torch.nan, dtype=torch.float16, device="cuda")
    multiply(tiles, x, matrix, inverse_rms=inverse_rms.contiguous(), out=found)
    return found


def wanted(shape: TileShape, x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Of one lane, in float64."""
    sums = x.double() @ matrix.double().T
    if not shape.interleaves:
        return sums
    gate, up = (sums * inverse_rms[:, None]).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("shape", "lanes", "size"),
    [
        (SHAPES["gate_up"], 8, 512),
        (SHAPES["gate_up"], 1, 256),
        (SHAPES["gate_up"], 2, 2048),
        (TileShape("gate_up", 512, 256), 1, 256),  # one tile
        (TileShape("gate_up", 576, 768), 3, 1280),
        (SHAPES["down"], 8, 512),
        (SHAPES["down"], 2, 2048),
        (TileShape("partial", 640, 512), 3, 768),
        (TileShape("partial", 384, 3072), 8, 512),  # fewer steps than eighths
    ],
)
def test_results(shape: TileShape, lanes: int, size: int) -> None:
    tiles = tiles_on_gpu(shape)
    x, matrix, inverse_rms = operands(shape, lanes, size)
    found, errors = run(tiles, x, matrix, inverse_rms), []
    assert torch.equal(found, run(tiles, x, matrix, inverse_rms)), "other bits when run again"
    for lane in range(lanes):
        reference = wanted(shape, x[lane], matrix[lane], inverse_rms[lane])
        errors.append(float((found[lane].double() - reference).norm() / reference.norm()))
    print(shape.kernel, lanes, size, f"{max(errors):.1e}")
    assert max(errors) < LIMIT


@pytest.fixture(scope="module", params=["gate_up", "down"])
def of_2b(request: pytest.FixtureRequest) -> Tiles:
    return tiles_on_gpu(SHAPES[request.param])


def test_a_row_has_the_same_bits_in_every_chunk(of_2b: Tiles) -> None:
    x, matrix, inverse_rms = operands(of_2b.shape, LANES, LARGEST)
    whole = run(of_2b, x, matrix, inverse_rms)
    for start, size in ((0, 2048), (2048, 2048), (1024, 1024), (77, 512), (3584, 512), (3840, 256)):
        rows = slice(start, start + size)
        assert torch.equal(run(of_2b, x[:, rows], matrix, inverse_rms[:, rows]), whole[:, rows]), f"{size} rows at {start}"
    for lanes in (slice(0, 4), slice(6, 8)):  # of several ranks
        assert torch.equal(run(of_2b, x[lanes], matrix[lanes], inverse_rms[lanes]), whole[lanes])


def test_streams_that_are_kept_once(of_2b: Tiles) -> None:
    x, matrix, inverse_rms = operands(of_2b.shape, LANES, 512)
    shared, scales = x[:1].expand(LANES, -1, -1), inverse_rms[:1].expand(LANES, -1)
    assert shared.stride(0) == 0
    assert torch.equal(run(of_2b, shared, matrix, scales), run(of_2b, shared.contiguous(), matrix, scales))


def test_it_waits_for_what_is_queued_before_it_in_a_graph(of_2b: Tiles) -> None:
    x, matrix, inverse_rms = operands(of_2b.shape, LANES, 1024)
    others = [operands(of_2b.shape, LANES, 1024 + i)[0][:, :1024].contiguous() for i in (1, 2)]
    expected = [run(of_2b, other, matrix, inverse_rms) for other in others]
    read, found, graph = torch.empty_like(x), torch.empty_like(expected[0]), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        torch.mul(x, 1, out=read)  # a kernel
        multiply(of_2b, read, matrix, inverse_rms=inverse_rms, out=found)
    for other, reference in zip(others * 3, expected * 3, strict=True):
        x.copy_(other)
        graph.replay()
        assert torch.equal(found, reference)


def test_values_that_are_not_finite_are_not_hidden(of_2b: Tiles) -> None:
    x, matrix, inverse_rms = operands(of_2b.shape, LANES, 512)
    before = run(of_2b, x, matrix, inverse_rms)
    x[3, 200, 1000] = torch.nan
    after = run(of_2b, x, matrix, inverse_rms)
    assert not bool(after[3, 200].isfinite().any())
    after[3, 200] = before[3, 200]
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    ("spec", "lanes", "size", "start", "kv_dtype"),
    [
        (SPEC, 8, 2048, 0, "bfloat16"),
        (SPEC, 8, 2048, 2048, "float16"),
        (SPEC, 2, 4096, 3000, "bfloat16"),  # padding stands behind the context
        (SMALL, 4, 256, 5, "bfloat16"),
    ],
)
def test_queries_keys_and_values(spec: ModelSpec, lanes: int, size: int, start: int, kv_dtype: str) -> None:
    layout = CacheLayout.of(KernelShape(SPEC, range(lanes)))
    shape = tile_shapes(CacheLayout(spec, lanes, kv_dtype, layout.splits, layout.max_ctas), kv_dtype)["qkv"]
    x, matrix, inverse_rms = operands(shape, lanes, size)
    heads, kv_heads, width = spec.lane_heads, spec.lane_kv_heads, spec.head_dim
    angles = torch.rand(spec.max_context, width // 2, device="cuda") * 6
    rope = torch.stack((angles.cos(), angles.sin()), dim=-1)
    place, overflow = (torch.full((1,), value, dtype=torch.int32, device="cuda") for value in (start, 0))

    def empty(rows: int, heads: int) -> torch.Tensor:
        return torch.full((rows, lanes, heads, width), torch.nan, dtype=torch.float16, device="cuda")

    query, keys, values = empty(size, heads), empty(start + size, kv_heads), empty(start + size, kv_heads)
    tiles = tiles_on_gpu(shape)
    fields = {"rope": rope, "place": place, "query": query, "keys": keys, "values": values, "overflow": overflow}
    multiply(tiles, x, matrix, inverse_rms=inverse_rms, **fields)
    positions = torch.arange(start, start + size, device="cuda").clamp(max=spec.max_context - 1)
    cos, sin = rope[positions].double()[:, None].unbind(-1)  # (size, 1, head_dim / 2)
    rounding = 3e-3 if kv_dtype == "bfloat16" else LIMIT
    for lane in range(lanes):
        sums = (x[lane].double() @ matrix[lane].double().T * inverse_rms[lane][:, None]).view(size, -1, width)
        even, odd = sums[:, : heads + kv_heads, 0::2], sums[:, : heads + kv_heads, 1::2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        pairs = (query[:, lane], turned[:, :heads], LIMIT), (keys[start:, lane], turned[:, heads:], rounding)
        for found, reference, limit in (*pairs, (values[start:, lane], sums[:, heads + kv_heads :], rounding)):
            assert float((found.double() - reference).norm() / reference.norm()) < limit
    assert bool(keys[:start].isnan().all())
    assert bool(values[:start].isnan().all()), "what stands before the chunk is left alone"
    assert int(overflow) == 0
    x[lanes - 1, 17, 3] = torch.inf
    multiply(tiles, x, matrix, inverse_rms=inverse_rms, **fields)
    assert int(overflow) == 1
