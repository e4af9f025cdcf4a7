"""What kernels are built with, and how much they take, for models that people run: `tests/unit/pinned` has it as text.

A GPU would notice a wrong number of a header; a machine without one has no other test of most of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from functools import cached_property

import pytest

from kog_dist.bench.shapes import named_shape
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.recipes import share_stream
from kog_dist.decode.plan.word_check import Read, Write
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_abi import abi_header
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import TokenEvents, tokens_to_check
from kog_dist.workers.prefill.attention.choice import heads_of
from kog_dist.workers.prefill.attention.hopper_attention import plan
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.gemm.gemm_abi import tile_shapes
from tests.gpu.prebuild import builds
from tests.gpu.rank_bodies import KV_OF_VARIANT, VARIANTS
from tests.unit.pinning import compare, digest

MODELS = {
    "laneformer": ("2b", 0, 1, "bfloat16"),
    "laneformer-ranks": ("2b", 3, 8, "float16"),
    "llama-ranks": ("llama-3.2-1b@8192", 1, 2, "bfloat16"),
    "gpt-oss": ("gpt-oss-20b", 0, 1, "fp8"),
    "gpt-oss-ranks": ("gpt-oss-20b", 1, 4, "bfloat16"),
    "qwen3-fp8": ("qwen3-8b+fp8", 0, 1, "bfloat16"),
    "qwen2-int4-head8": ("qwen2.5-0.5b+int4+head8", 0, 1, "float16"),
    "qwen3-moe-ranks": ("qwen3-30b-a3b", 0, 2, "bfloat16"),
    "mistral-mxfp4-ranks": ("mistral-7b+mxfp4", 3, 4, "bfloat16"),
}
CHUNKS = [(size, window, 4096) for size in (1, 64, 192, 512, 1024, 2048, 4096) for window in (None, 128)]
MULTIPROCESSORS = 132  # of an H100


def text_of(value: object) -> str | None:
    """Numbers, names and collections of them; None of anything else."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str, range)):
        return repr(value)
    if isinstance(value, Mapping):
        found = [(text_of(key), text_of(one)) for key, one in value.items()]
        return None if any(None in pair for pair in found) else f"{{{', '.join(f'{key}: {one}' for key, one in found)}}}"
    if isinstance(value, (tuple, list)):
        parts = [text_of(one) for one in value]
        return None if None in parts else f"({', '.join(part for part in parts if part is not None)})"
    return None


def numbers_of(name: str, made: object) -> Iterator[str]:
    """A line for every field and property that is a number, or made of numbers."""
    fields = {field.name for field in dataclasses.fields(made)}  # type: ignore[arg-type]
    for attribute in sorted(fields | {one for one in dir(type(made)) if not one.startswith("_")}):
        is_number = attribute in fields or isinstance(getattr(type(made), attribute), (property, cached_property))
        if is_number and (text := text_of(getattr(made, attribute))) is not None:
            yield f"{name}.{attribute} = {text}"


def numbers_of_all(shape: KernelShape) -> Iterator[str]:
    """The same of a shape and its members."""
    members = ("head", "tape", "shared", "ring", "words", "sets", "geometry", "experts")
    parts = {"shape": shape} | {name: getattr(shape, name) for name in members}
    parts |= {"boxes": shape.words.boxes, "cache": CacheLayout.of(shape)}
    for name, made in parts.items():
        if made is not None:
            yield from numbers_of(name, made)


def numbers_in(header: str) -> Iterator[str]:
    """What a header says of a model: no structs and no instructions."""
    return (
        line for line in header.splitlines() if line.startswith(("constexpr", "#define", "__constant__", "using", "namespace"))
    )


def lines_of(name: str, rank: int, num_ranks: int, kv_dtype: str) -> Iterator[str]:
    spec, codings = named_shape(name)
    shape = KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks, kv_dtype=kv_dtype, **codings)
    yield f"{name}, rank {rank} of {num_ranks}, {kv_dtype}: {spec}"
    yield from numbers_of_all(shape)
    for header, text in headers(shape).items():
        yield from (f"{header}: {line}" for line in numbers_in(text) if header != "abi.cuh")
    for one in builds(shape, name):
        for argument in one.args:
            if isinstance(argument, str) and "\n" in argument:
                yield from (f"{one.args[0]}: {line}" for line in numbers_in(argument))
    layout = CacheLayout.of(shape)
    heads, tiles = heads_of(layout), {} if share_stream(spec) or num_ranks > 1 else tile_shapes(layout, kv_dtype)
    for made in (heads, *tiles.values()):
        yield from numbers_of(type(made).__name__, made)
    for size, window, end in CHUNKS:
        cut = plan(heads, size, window, end, MULTIPROCESSORS)
        yield f"attention of {size} rows, window {window}: {text_of(cut)}, {cut.parts_bytes(heads)} bytes"


def of_variant(spec: ModelSpec, num_ranks: int, kv_dtype: str) -> Iterator[str]:
    """Digests of the programs of a small model, for a CPU and for a GPU, and of the words of the latter."""
    for options in ({}, {"num_ctas": 7}, {"checks_experts": spec.experts is not None}):
        yield f"plan {options} {make_plan(spec, num_ranks, **options).digest()[:16]}"
    for rank in sorted({0, num_ranks - 1}):
        shape = KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks, kv_dtype=kv_dtype)
        yield f"headers {rank} {digest(repr(headers(shape)))}"
        yield f"numbers {rank} {digest(repr(list(numbers_of_all(shape))))}"
    yield f"words {digest(repr(list(words_of(shape))))}"


def words_of(shape: KernelShape) -> Iterator[object]:
    """Every event of some tokens; and where the first words of each kind stand, of two layers."""
    made, seen = TokenEvents(shape), set[tuple[str, int]]()
    for event in made.of(tokens_to_check(shape)):
        yield event.name, event.token, event.is_of_some, [(before.name, scope) for before, scope in event.after]
        yield event.start and event.start.name
        both: tuple[Read | Write, ...] = (*event.reads, *event.writes)
        for one in both:
            yield one.version, getattr(one, "scope", None), getattr(one, "by_all", None)
            if (key := (one.version.kind.name, one.version.tag % 2)) not in seen:
                seen.add(key)
                yield [(word.offset, word.writer, sorted(word.readers), word.source) for word in made.words_of(one.version, 1)]


def variant_lines(name: str) -> Iterator[str]:
    for num_ranks in (1, 2):
        for line in of_variant(VARIANTS[name], num_ranks, KV_OF_VARIANT.get(name, "bfloat16")):
            yield f"{num_ranks} ranks: {line}"


@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_of_a_published_model_is_built_as_before(name: str) -> None:
    compare(name, list(lines_of(*MODELS[name])))


def test_structs_are_as_before() -> None:
    compare("abi", abi_header().splitlines())


@pytest.mark.parametrize("name", VARIANTS)
def test_programs_of_small_models_are_as_before(name: str) -> None:
    """By digests: of those, `make_plan`, `headers`, `KernelShape` and `TokenEvents` tell more."""
    compare(f"variants/{name}", list(variant_lines(name)))
