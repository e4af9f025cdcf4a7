"""Our own gates and ups on a GPU: values against float64, bits of a row wherever it stands. Times: `kog-bench prefill`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kog_dist.workers.prefill.gate_up import GateUp, gate_up_on_gpu
from kog_dist.workers.prefill.gate_up_abi import GateUpShape
from kog_dist.workers.prefill.hopper_abi import HOPPER

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != HOPPER, reason="gate_up.cu is made for Hopper"
    ),
]

LANES, LARGEST = 8, 4096
SHAPE_2B = GateUpShape(3072, 1536)
LIMIT = 5e-4  # cuBLAS and swiglu have 3.9e-4


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Ours, so that everything is queued in order, and graphs can be captured."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        yield
    torch.cuda.synchronize()


def tensors(shape: GateUpShape, lanes: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams, the matrix, and 1 / rms."""
    generator = torch.Generator("cuda").manual_seed(size)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.float16, generator=generator)

    x, matrix = values(lanes, size, shape.hidden_size), values(lanes, 2 * shape.ffn, shape.hidden_size) * 0.02
    return x, matrix, torch.rsqrt(x.float().square().mean(-1) + 1e-5)


def run(gate_up: GateUp, x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    found = torch.full((len(matrix), x.shape[1], gate_up.shape.ffn), torch.nan, dtype=torch.float16, device="cuda")
    gate_up.run(x, matrix, inverse_rms.contiguous(), found)
    return found


def wanted(x: torch.Tensor, matrix: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Of one lane, in float64."""
    gate, up = (x.double() @ matrix.double().T * inverse_rms[:, None]).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("shape", "lanes", "size"),
    [
        (SHAPE_2B, 8, 512),
        (SHAPE_2B, 1, 256),
        (SHAPE_2B, 2, 2048),
        (GateUpShape(512, 128), 1, 256),  # one tile
        (GateUpShape(576, 384), 3, 1280),
        (GateUpShape(4096, 1024), 4, 768),
    ],
)
def test_activations(shape: GateUpShape, lanes: int, size: int) -> None:
    gate_up = gate_up_on_gpu(shape)
    x, matrix, inverse_rms = tensors(shape, lanes, size)
    found = run(gate_up, x, matrix, inverse_rms)
    assert torch.equal(found, run(gate_up, x, matrix, inverse_rms)), "other bits when run again"
    for lane in range(lanes):
        reference = wanted(x[lane], matrix[lane], inverse_rms[lane])
        error = float((found[lane].double() - reference).norm() / reference.norm())
        assert error < LIMIT, f"lane {lane}"
    print(shape, lanes, size, f"{error:.1e}")


@pytest.fixture(scope="module")
def of_2b() -> GateUp:
    return gate_up_on_gpu(SHAPE_2B)


def test_a_row_has_the_same_bits_in_every_block(of_2b: GateUp) -> None:
    x, matrix, inverse_rms = tensors(SHAPE_2B, LANES, LARGEST)
    whole = run(of_2b, x, matrix, inverse_rms)
    for start, size in ((0, 2048), (2048, 2048), (1024, 1024), (77, 512), (3584, 512), (3840, 256)):
        rows = slice(start, start + size)
        assert torch.equal(run(of_2b, x[:, rows], matrix, inverse_rms[:, rows]), whole[:, rows]), f"{size} rows at {start}"
    for lanes in (slice(0, 4), slice(6, 8)):  # of several ranks
        assert torch.equal(run(of_2b, x[lanes], matrix[lanes], inverse_rms[lanes]), whole[lanes])


def test_streams_that_are_kept_once(of_2b: GateUp) -> None:
    x, matrix, inverse_rms = tensors(SHAPE_2B, LANES, 512)
    shared, scales = x[:1].expand(LANES, -1, -1), inverse_rms[:1].expand(LANES, -1)
    assert shared.stride(0) == 0
    assert torch.equal(run(of_2b, shared, matrix, scales), run(of_2b, shared.contiguous(), matrix, scales))


def test_it_waits_for_what_is_queued_before_it_in_a_graph(of_2b: GateUp) -> None:
    x, matrix, inverse_rms = tensors(SHAPE_2B, LANES, 1024)
    others = [tensors(SHAPE_2B, LANES, 1024 + i)[0][:, :1024].contiguous() for i in (1, 2)]
    expected = [run(of_2b, other, matrix, inverse_rms) for other in others]
    found, graph = torch.empty_like(expected[0]), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        x.mul_(1)  # a kernel
        of_2b.run(x, matrix, inverse_rms, found)
    for other, reference in zip(others * 3, expected * 3, strict=True):
        x.copy_(other)
        graph.replay()
        assert torch.equal(found, reference)


def test_values_that_are_not_finite_are_not_hidden(of_2b: GateUp) -> None:
    x, matrix, inverse_rms = tensors(SHAPE_2B, LANES, 512)
    before = run(of_2b, x, matrix, inverse_rms)
    x[3, 200, 1000] = torch.nan
    after = run(of_2b, x, matrix, inverse_rms)
    assert not bool(after[3, 200].isfinite().any())
    after[3, 200] = before[3, 200]
    assert torch.equal(after, before)
