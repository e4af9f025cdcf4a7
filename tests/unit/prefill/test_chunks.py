"""Which positions are computed together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kog_dist.bench.shapes import named_spec
from kog_dist.model.spec import laneformer_2b
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES, MOST_FLOP, Chunk, chunks, sizes_within, work_of


def test_chunks_cover_every_position_once_and_waste_little() -> None:
    for start in (0, 1, 128, 500, 3900):
        for end in range(start, start + 1300, 7):
            found = chunks(start, end)
            assert [p for chunk in found for p in range(chunk.start, chunk.end)] == list(range(start, end))
            assert all(chunk.size in CHUNK_SIZES and 0 < chunk.num_tokens <= chunk.size for chunk in found)
            assert all(chunk.num_tokens == chunk.size for chunk in found[:-1]), "only the last one is padded"
            wasted = found[-1].size - found[-1].num_tokens if found else 0
            assert wasted < 128


def test_going_on_at_the_end_of_a_chunk_gives_the_same_chunks() -> None:
    for end in (64, *range(1, 9000, 13)):
        whole = chunks(0, end, exact_size=64)
        for done, chunk in enumerate(whole):
            assert chunks(chunk.start, end, exact_size=64) == whole[done:]


@pytest.mark.parametrize(
    ("end", "sizes"),
    [
        (50, [128]),
        (128, [128]),
        (129, [256]),
        (300, [384]),
        (385, [512]),
        (512, [512]),
        (600, [640]),
        (769, [896]),
        (1100, [1024, 128]),
        (1300, [1024, 384]),
        (1408, [1024, 384]),
        (1409, [1536]),
        (1500, [1536]),
        (1800, [1536, 384]),
        (2047, [2048]),
        (2900, [2048, 896]),
        (3000, [3072]),
        (3968, [3072, 896]),
        (3969, [4096]),
        (3999, [4096]),
        (5800, [4096, 1536, 256]),
        (6000, [4096, 1536, 384]),
    ],
)
def test_sizes(end: int, sizes: list[int]) -> None:
    assert [chunk.size for chunk in chunks(0, end)] == sizes


@pytest.mark.parametrize("max_context", [60, 128, 300, 1408, 1409, 2048, 3968, 3969, 4096])
def test_a_context_has_the_sizes_that_its_prompts_need(max_context: int) -> None:
    sizes = sizes_within(replace(laneformer_2b(), max_context=max_context))
    needed = {chunk.size for end in range(1, max_context + 1) for chunk in chunks(0, end)}
    assert needed == set(sizes)
    assert all(chunks(0, end) == chunks(0, end, sizes) for end in range(1, max_context + 1, 7))


def test_a_chunk_knows_its_padding() -> None:
    assert chunks(3900, 3950) == [Chunk(3900, 128, 50)]
    assert chunks(7, 7) == []


def test_chunks_far_into_a_context_have_parts() -> None:
    """A stop waits for what is queued: of a large model, and behind many positions, that is fewer layers, never fewer rows."""
    spec = named_spec("llama-3.1-8b@131072")
    work, sizes = work_of(spec), sizes_within(spec)
    found = chunks(0, 131072, sizes, 0, work)
    assert {chunk.size for chunk in found} == {max(sizes)} == {4096}
    assert {chunk.num_parts for chunk in found} == {28}
    near = replace(spec, max_context=9216)
    assert [chunk.num_parts for chunk in chunks(0, 1024 + 8192, sizes_within(near), 0, work_of(near))] == [7, 7, 1]
    for chunk in found:
        flop = work.of(chunk.start, chunk.size)
        assert chunk.num_parts == (1 if flop <= MOST_FLOP else work.parts(chunk.size))
        assert flop / chunk.num_parts <= MOST_FLOP * (1 if chunk.num_parts == 1 else 0.5)
    for chunk in found[::7]:
        assert chunks(chunk.start, 131072, sizes, 0, work) == found[found.index(chunk) :]
    assert chunks(0, 4096, work=work_of(laneformer_2b())) == chunks(0, 4096), "2B has its chunks as before"


def test_chunks_far_into_a_context_are_small_where_layers_keep_rings() -> None:
    spec = replace(named_spec("llama-3.1-8b@131072"), sliding_window=4096, window_layers=(0,))
    work, sizes = work_of(spec), sizes_within(spec)
    found = chunks(0, 131072, sizes, 0, work)
    assert [found[i].size for i in (0, -2)] == [1536, 256]
    assert {chunk.num_parts for chunk in found} == {1}
    assert all(work.of(chunk.start, chunk.size) <= MOST_FLOP for chunk in found)
    assert [chunk.size for chunk in found] == sorted((chunk.size for chunk in found), reverse=True)


@pytest.mark.parametrize("name", ["qwen3-4b@40960", "llama-3.1-8b@131072", "qwen3-8b@9216"])
def test_a_chunk_has_parts_only_where_graphs_have_them(name: str) -> None:
    spec = named_spec(name)
    work, sizes = work_of(spec), sizes_within(spec)
    for start in range(0, spec.max_context, 777):
        for end in range(start + 1, min(start + 2500, spec.max_context), 97):
            for chunk in chunks(start, end, sizes, 0, work):
                assert chunk.num_parts in (1, work.parts(chunk.size))
                assert chunk.num_parts <= spec.num_layers
