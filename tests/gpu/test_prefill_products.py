"""Our own matrix products beside cuBLAS: values, bits of a row wherever it stands, and times (`-s` prints them)."""

from __future__ import annotations

import itertools

import pytest
import torch

from kog_dist.workers.prefill.gpu import exact_products
from kog_dist.workers.prefill.products import Products

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(60)]

# lanes, rows, depth, columns; tiles may be cut in every dimension
SHAPES = [
    (1, 256, 64, 256), (2, 100, 72, 40), (3, 130, 200, 264), (1, 700, 1000, 520), (8, 512, 384, 3072), (8, 999, 1536, 3072),
    (8, 128, 1536, 3072), (1, 127, 1000, 520),
]  # fmt: skip
GATED = [(1, 256, 64, 128), (2, 100, 72, 40), (3, 130, 200, 200), (8, 512, 3072, 1536), (8, 128, 3072, 1536)]
LIMIT = 1e-3


@pytest.fixture(scope="module")
def products() -> Products:
    return Products()


def values(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", dtype=torch.float16, generator=generator)


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < LIMIT, f"wrong by {error:.1e}"


def swiglu(x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ matrix.float().transpose(1, 2) * inverse_rms[..., None]).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("shape", SHAPES)
def test_products(products: Products, shape: tuple[int, int, int, int]) -> None:
    lanes, rows, depth, columns = shape
    x, matrix = values(lanes, rows, depth), values(lanes, columns, depth)
    out = torch.full((lanes, rows, columns), torch.nan, device="cuda", dtype=torch.float16)
    products.product(x, matrix, out)
    check(out, x.float() @ matrix.float().transpose(1, 2))


def test_rows_of_larger_arrays(products: Products) -> None:
    lanes, rows, depth, columns = 2, 300, 96, 320
    matrix, kept = values(lanes, columns, depth), values(lanes, rows, columns)
    x, out = values(rows, lanes, depth).transpose(0, 1), kept.clone()  # as attention leaves its outputs
    products.product(x[:, 100:230], matrix, out[:, 100:230])
    check(out[:, 100:230], x[:, 100:230].float() @ matrix.float().transpose(1, 2))
    assert torch.equal(out[:, :100], kept[:, :100])
    assert torch.equal(out[:, 230:], kept[:, 230:])


@pytest.mark.parametrize("shape", GATED)
def test_gated_products(products: Products, shape: tuple[int, int, int, int]) -> None:
    lanes, rows, depth, columns = shape
    x, matrix, inverse_rms = values(lanes, rows, depth), values(lanes, 2 * columns, depth), torch.rand(lanes, rows, device="cuda")
    inverse_rms *= depth**-0.5
    out = torch.full((lanes, rows, columns), torch.nan, device="cuda", dtype=torch.float16)
    products.gated(x, matrix, inverse_rms, out)
    check(out, swiglu(x, matrix, inverse_rms))


def test_a_row_has_the_same_bits_everywhere(products: Products) -> None:
    x, matrix = values(8, 1024, 768), values(8, 512, 768)
    outs = {}
    for lanes, rows in itertools.product((8, 4, 2), (128, 256, 512, 1024)):
        outs[lanes, rows] = torch.empty(lanes, rows, 512, device="cuda", dtype=torch.float16)
        products.product(x[:lanes, 1024 - rows :], matrix[:lanes], outs[lanes, rows])
    whole = outs[8, 1024]
    for (lanes, rows), out in outs.items():
        assert torch.equal(out, whole[:lanes, 1024 - rows :]), f"{rows} rows of {lanes} lanes"


def test_times(products: Products) -> None:
    """Of the 2B shape; nothing is asked but that they end."""
    for name, depth, columns in (("out", 384, 3072), ("down", 1536, 3072), ("gate_up", 3072, 3072)):
        for rows in (128, 256, 512, 1024, 2048):
            x, matrix = values(8, rows, depth), values(8, columns, depth)
            out, gated = (torch.empty(8, rows, n, device="cuda", dtype=torch.float16) for n in (columns, columns // 2))
            inverse_rms = torch.rand(8, rows, device="cuda") * depth**-0.5
            calls = {
                "cublas": lambda x=x, matrix=matrix, out=out: torch.bmm(x, matrix.transpose(1, 2), out=out),
                "own": lambda x=x, matrix=matrix, out=out: products.product(x, matrix, out),
                "own gated": lambda x=x, matrix=matrix, r=inverse_rms, out=gated: products.gated(x, matrix, r, out),
            }
            cells = []
            for way, call in calls.items():
                us = _us(call)
                cells.append(f"{way} {us:.1f} us ({2 * 8 * rows * depth * columns / us / 1e6:.0f} TFLOP/s)")
            print(f"{name} of {rows} rows: " + ", ".join(cells), flush=True)


def _us(call: object, repeats: int = 20) -> float:
    assert callable(call)
    with exact_products():
        call()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
    return 1000 * float(begin.elapsed_time(end)) / repeats
