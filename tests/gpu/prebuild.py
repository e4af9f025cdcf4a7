"""Builds device programs on all cores, before the steps that need them: `python -m tests.gpu.prebuild GROUP...`. Needs no GPU.

A group is `name:numbers of GPUs`, with a name of `models` or of bench/shapes.py, or `name/FORMAT:numbers` for a KV cache
in another format than bfloat16, `name!FORM:numbers` for what `--quantize` rounds a dense model to. `kernel.name:numbers` is what
decoding and reading the weights alone need, without prefill; `drafts.name:1` what an engine needs that drafts, or runs several
requests together, and what measures its passes. What is not foreseen here the step builds itself, one after the other: it only
takes longer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from kog_dist.bench.fakes.tiny_model import TINY_ON_GPUS, TINY_WITH_EXPERTS
from kog_dist.bench.kernel.stream import stream_cubin
from kog_dist.bench.kernel.yardsticks import build_without_delayed_sums
from kog_dist.bench.shapes import named_shape
from kog_dist.collectives.cuda_kernels import exchange_cubin
from kog_dist.config import MAX_PARALLEL
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.families.dense import rounded_lanes
from kog_dist.model.formats.rounding import ROUNDED_COLUMNS, chosen_format
from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda.build import HEAD_SOURCES, KERNEL_SOURCES, PLAIN_SOURCE, build
from kog_dist.workers.cuda.company_build import company_headers, company_sizes
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import PASS_TOKENS, KernelShape
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.programs import headers_of

_KERNEL, _DRAFTS = "kernel.", "drafts."
_PLAIN = ("benchmarks", "forms", "passes", "pass_ranks", "delta_passes", "delta_company")  # groups of the plain kernel alone
CHUNK_ROWS = {"one_gpu": 128, "ranks": 128}  # rows of prefill's largest chunk, where it is not the default


def models(group: str) -> Iterator[tuple[ModelSpec, dict[str, Any]]]:
    """Models and options of KernelShape."""
    if group == "one_gpu":
        from tests.gpu.test_monokernel import DEMO, DTYPES, HEADS, VARIANTS, attention_options

        for overrides in (*VARIANTS.values(), *HEADS.values()):
            for dtype, kv_dtype in DTYPES:
                spec = ModelSpec(**{**DEMO, **overrides})
                yield spec, {"weight_dtype": dtype, "kv_dtype": kv_dtype, **attention_options(spec)}
    elif group == "ranks":
        from tests.gpu.rank_bodies import KV_OF_VARIANT
        from tests.gpu.rank_bodies import VARIANTS as OF_RANKS

        for name, spec in OF_RANKS.items():
            kv_dtype = KV_OF_VARIANT.get(name, "bfloat16")
            yield from ((spec, {"kv_dtype": kv_dtype, **more}) for more in ({"partition_batches": 1}, {}))
    elif group == "demo":
        checkpoint = open_checkpoint(Path(str(resources.files("kog_dist"))) / "models" / "demo", verify=False)
        dtypes = ({"weight_dtype": checkpoint.dtype, "kv_dtype": kv_dtype} for kv_dtype in ("bfloat16", "float16"))
        yield from ((checkpoint.spec, options) for options in dtypes)
    elif group == "benchmarks":
        for options in ({}, {"traced_step": 8}, {"keeps_hashes": True}):
            yield laneformer_2b(), options
    elif group == "checked":
        yield from ((TINY_WITH_EXPERTS, {"checks_experts": checks}) for checks in (False, True))
    elif group in (others := {"2b": laneformer_2b(), "tiny": TINY_ON_GPUS}):
        yield others[group], {}
    elif group == "passes":
        from tests.gpu.test_passes import options_of_builds

        yield from ((one.pop("spec"), one) for one in options_of_builds())
    elif group == "delta_passes":
        from tests.gpu.test_delta_passes import options_of_builds as of_nets

        yield from ((one.pop("spec"), one) for one in of_nets())
    elif group == "delta_company":
        from tests.gpu.test_delta_company import options_of_builds as in_company

        yield from ((one.pop("spec"), one) for one in in_company())
    elif group == "forms":
        from tests.gpu.test_quantised import FORMS, SPECS

        of_forms = [Coding.of(form) for form in FORMS.values()]
        yield from ((spec, {"kv_dtype": "float16", "coding": one}) for spec in SPECS.values() for one in of_forms)
    elif group == "pass_ranks":
        from tests.gpu.pass_bodies import options_of_builds as of_ranks

        yield from ((one.pop("spec"), one) for one in of_ranks())
    elif group == f"{_DRAFTS}few_layers":
        from tests.gpu.pass_bodies import ENGINE_SPEC

        yield ENGINE_SPEC, {}
    else:
        name, _, kv_dtype = group.removeprefix(_KERNEL).removeprefix(_DRAFTS).partition("/")
        name, _, rounded_to = name.partition("!")
        spec, codings = named_shape(name)
        if form := chosen_format(rounded_to, "bfloat16"):
            spec, codings = replace(spec, num_lanes=rounded_lanes(spec, ROUNDED_COLUMNS)), {**codings, "coding": Coding.of(form)}
        yield spec, {**codings, "kv_dtype": kv_dtype or "bfloat16"}


def builds(shape: KernelShape, group: str) -> Iterator[partial[Any]]:
    spec = shape.spec
    if group.startswith(_DRAFTS):
        sizes = company_sizes(shape, MAX_PARALLEL)
        yield from (partial(build, company_headers(shape, size), PLAIN_SOURCE) for size in sizes)
        of_passes = [replace(shape, tokens=tokens) for tokens in PASS_TOKENS]
        yield from (partial(build, headers(one), PLAIN_SOURCE) for one in (replace(shape, drafts=True), *of_passes))
        yield from (partial(stream_cubin, one) for one in of_passes)
    if shape.num_ranks > 1:
        yield partial(exchange_cubin, shape.num_ranks)
    if group in _PLAIN or group.startswith(_KERNEL) or misfit(spec, shape.coding):
        yield partial(build, headers(shape), PLAIN_SOURCE)
        if group.startswith(_KERNEL):
            yield partial(stream_cubin, shape)
        if group == "benchmarks" and shape.num_ranks > 1:
            yield partial(build_without_delayed_sums, shape)
        return
    without_prefill = group == "checked"
    sources = KERNEL_SOURCES if without_prefill else (*KERNEL_SOURCES, *HEAD_SOURCES)
    yield from (partial(build, headers(shape), source) for source in sources)
    if without_prefill:
        return
    yield from (partial(compiled.build, *one) for one in headers_of(shape, CHUNK_ROWS.get(group, 0)))


def builds_of(groups: Sequence[str]) -> list[partial[Any]]:
    """Each once: ranks may differ in nothing."""
    found: dict[str, partial[Any]] = {}
    for name, _, numbers in (group.partition(":") for group in groups):
        for spec, options in models(name):
            for rank, count in _ranks(numbers):
                shape = KernelShape(spec, spec.lanes_of_rank(rank, count), num_ranks=count, **options)
                found |= {f"{one.func}{one.args}": one for one in builds(shape, name)}
    return list(found.values())


def _ranks(numbers: str) -> list[tuple[int, int]]:
    return [(rank, count) for count in map(int, numbers.split(",")) for rank in range(count)]


def main(groups: Sequence[str]) -> int:
    begin_s, cores = time.monotonic(), len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        done = [pool.submit(one) for one in builds_of(groups)]
    errors = [error for future in done if (error := future.exception())]
    print(f"{len(done)} device programs, {len(errors)} errors, {time.monotonic() - begin_s:.1f} s on {cores} cores")
    print(*errors, sep="\n", end="\n" if errors else "")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
