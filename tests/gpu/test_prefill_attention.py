"""Our own attention on a GPU: values against float64, and bits of a row wherever it stands. Times: `kog-bench prefill`."""

from __future__ import annotations

import itertools

import pytest
import torch

from kog_dist.cuda.driver import Graph
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.attention.hopper_attention import Attention, attention_on_gpu
from tests.gpu.on_hopper import on_hopper

pytestmark = on_hopper("attention.cu")

MAX_CONTEXT, LARGEST, LONG_CONTEXT = 4096, 2048, 23000
SHAPE_2B = AttentionShape(96, num_heads=32, num_kv_heads=16, lane_heads=4)
SHAPE_4B = AttentionShape(128, num_heads=32, num_kv_heads=8, lane_heads=4)
SHAPES = [
    SHAPE_2B,
    AttentionShape(96, 8, 4, 4),  # of one rank of four
    AttentionShape(64, 8, 4, 2),
    AttentionShape(32, 4, 4, 1),  # no heads share keys
    AttentionShape(48, 8, 2, 4),
    AttentionShape(16, 6, 2, 6),  # three do: not packed
    AttentionShape(128, 8, 1, 8),
    AttentionShape(112, 2, 1, 2),
]
WINDOWS = (3, 37, 512, 1500, None)
PLACES = ((1, 0), (1, 2047), (16, 5), (64, 0), (128, 1000), (300, 1700), (128, 3900))  # rows, position of the first
LIMIT = 5e-4  # flash attention has 2.5e-4 to 3.5e-4


def tensors(
    shape: AttentionShape, num_queries: int, max_context: int = MAX_CONTEXT
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, and keys and values of all positions."""
    generator = torch.Generator("cuda").manual_seed(num_queries)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, shape.head_dim, device="cuda", dtype=torch.float16, generator=generator)

    positions = max_context + LARGEST
    return values(num_queries, shape.num_heads), values(positions, shape.num_kv_heads), values(positions, shape.num_kv_heads)


def place(start: int, size: int) -> torch.Tensor:
    return torch.tensor([start, 0, start + size], dtype=torch.int32, device="cuda")


def run(
    attention: Attention, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: torch.Tensor, window: int | None
) -> torch.Tensor:
    """A copy of the outputs, by the default stream of both libraries."""
    import cupy

    arrays = [cupy.asarray(tensor) for tensor in (query, keys, values, where)]
    found = attention.run(arrays[0], arrays[1], arrays[2], arrays[3], window)
    return torch.as_tensor(found, device="cuda").clone()


def reference(
    shape: AttentionShape, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """(lanes, size, heads of a lane * head_dim) in float64."""
    size, end = len(query), start + len(query)
    positions, others = torch.arange(start, end, device="cuda")[:, None], torch.arange(end, device="cuda")
    seen = (others <= positions) & (others > positions - (window or end + 1))
    mixed = []
    for head in range(shape.num_heads):
        key, value = (x[:end, head // shape.share].double() for x in (keys, values))
        scores = query[:, head].double() @ key.T * shape.head_dim**-0.5
        mixed.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value)
    by_lane = torch.stack(mixed, dim=1).view(size, -1, shape.lane_heads * shape.head_dim)
    return by_lane.transpose(0, 1)


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.num_heads} heads of {shape.head_dim}, {shape.num_kv_heads} KV"
)
def test_outputs(shape: AttentionShape) -> None:
    attention = attention_on_gpu(shape, MAX_CONTEXT)
    errors = {}
    for window, (size, start) in itertools.product(WINDOWS, PLACES):
        query, keys, values = tensors(shape, size)
        wanted = reference(shape, query, keys, values, start, window)
        found = run(attention, query, keys, values, place(start, size), window)
        assert torch.equal(found, run(attention, query, keys, values, place(start, size), window)), "other bits when run again"
        errors[window, size, start] = float((found.double() - wanted).norm() / wanted.norm())
    print(shape, f"{max(errors.values()):.1e}")
    assert max(errors.values()) < LIMIT, errors


@pytest.fixture(scope="module")
def of_2b() -> Attention:
    return attention_on_gpu(SHAPE_2B, MAX_CONTEXT)


@pytest.mark.parametrize("window", [512, None])
def test_a_row_has_the_same_bits_in_every_chunk(of_2b: Attention, window: int | None) -> None:
    query, keys, values = tensors(SHAPE_2B, MAX_CONTEXT)

    def rows(start: int, size: int) -> torch.Tensor:
        return run(of_2b, query[start : start + size], keys, values, place(start, size), window)

    whole = torch.cat([rows(0, LARGEST), rows(LARGEST, LARGEST)], dim=1)
    for start, size in (
        (0, 1024), (0, 128), (3900, 128), (77, 256), (3001, 512), (3333, 1), (0, 1), (1023, 1), (2048, 64), (1000, 64),
        (1555, 2048), (4095, 1), (0, 4096),
    ):  # fmt: skip
        assert torch.equal(rows(start, size), whole[:, start : start + size]), f"{size} rows at {start}"


@pytest.mark.parametrize("shape", [SHAPE_4B, AttentionShape(64, 8, 2, 2)], ids=["4B", "heads of 64"])
def test_a_row_far_into_a_context_has_the_same_bits_in_every_chunk(shape: AttentionShape) -> None:
    """Partitions are short and long ones, and items have all of their rows' partitions, one each, or the first ones together."""
    attention, max_context, first = attention_on_gpu(shape, LONG_CONTEXT), LONG_CONTEXT, LONG_CONTEXT - LARGEST
    query, keys, values = tensors(shape, LARGEST, max_context)

    def rows(start: int, size: int) -> torch.Tensor:
        return run(attention, query[start : start + size], keys, values, place(first + start, size), None)

    whole = rows(0, LARGEST)
    part = slice(1900, 1964)
    wanted = reference(shape, query[part], keys, values, first + part.start, None)
    assert float((whole[:, part].double() - wanted).norm() / wanted.norm()) < LIMIT
    assert torch.equal(whole, rows(0, LARGEST)), "other bits when run again"
    for start, size in (
        (0, 1024), (77, 128), (1024, 256), (600, 384), (1, 512), (1311, 640), (3, 768), (1152, 896), (2047, 1), (64, 64),
        (512, 1536),
    ):  # fmt: skip
        assert torch.equal(rows(start, size), whole[:, start : start + size]), f"{size} rows at {start}"


def test_heads_of_a_rank_have_the_bits_of_all(of_2b: Attention) -> None:
    some = attention_on_gpu(AttentionShape(96, 8, 4, 4), MAX_CONTEXT)
    query, keys, values = tensors(SHAPE_2B, 512)
    for window, start in itertools.product((512, None), (0, 3000)):
        found = run(
            some, query[:, 8:16].contiguous(), keys[:, 4:8].contiguous(), values[:, 4:8].contiguous(), place(start, 512), window
        )
        assert torch.equal(found, run(of_2b, query, keys, values, place(start, 512), window)[2:4])


def test_positions_are_read_when_a_graph_is_replayed(of_2b: Attention) -> None:
    import cupy

    query, keys, values = tensors(SHAPE_2B, 128)
    where, stream, graph = place(0, 128), cupy.cuda.Stream(non_blocking=True), Graph()
    run(of_2b, query, keys, values, where, None)  # makes its memory
    arrays = [cupy.asarray(tensor) for tensor in (query, keys, values, where)]
    torch.cuda.synchronize()
    with stream, graph.captured_from(stream.ptr):
        outputs = of_2b.run(arrays[0], arrays[1], arrays[2], arrays[3], None)
    for start in (0, 1000, 3900):
        where.copy_(place(start, 128))
        torch.cuda.synchronize()
        graph.launch(stream.ptr)
        stream.synchronize()
        found = torch.as_tensor(outputs, device="cuda").clone()
        assert torch.equal(found, run(of_2b, query, keys, values, place(start, 128), None)), start


def test_what_no_row_sees_changes_nothing(of_2b: Attention) -> None:
    query, keys, values = tensors(SHAPE_2B, 100)
    before = [run(of_2b, query, keys, values, place(1000, 100), window) for window in (512, None)]
    keys[1100:], values[1100:] = torch.inf, 60000
    keys[:480], values[:480] = -torch.inf, 60000
    assert torch.equal(run(of_2b, query, keys, values, place(1000, 100), 512), before[0])
    keys[:480], values[:480] = tensors(SHAPE_2B, 100)[1][:480], tensors(SHAPE_2B, 100)[2][:480]
    assert torch.equal(run(of_2b, query, keys, values, place(1000, 100), None), before[1])


def test_values_that_are_not_finite_are_not_hidden(of_2b: Attention) -> None:
    query, keys, values = tensors(SHAPE_2B, 64)
    for changed in (query, keys, values):
        kept = changed[40].clone()
        changed[40] = torch.nan
        assert not bool(run(of_2b, query, keys, values, place(0, 64), None)[:, 40].isfinite().any())
        changed[40] = kept
