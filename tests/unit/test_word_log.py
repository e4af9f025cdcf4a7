"""The declared protocol of words is the kernel's: who stores and who finds which word, with which tag, when it runs on a CPU.

The twin (decode_twin/) logs all accesses of a few tokens. Stores must be those of the declaration, one for each word and tag.
Each declared read must have happened, and who looks at a word without reading it then must be one who reads a later one there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import Token, TokenEvents
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import HEAD_ONLY, NAMES, OF_EXPERTS, SPEC, Model, build_twin, command_of, twin_sources
from tests.unit.test_expert_twin import VARIANTS as OF_MODELS_WITH_EXPERTS

pytestmark = needs_compiler
ACCESS = np.dtype([(name, np.uint32) for name in ("memory", "offset", "cta", "rank", "is_store", "tag", "upper", "pad")])
TOKENS = 4


@dataclass(frozen=True)
class Case:
    """Four tokens from position `first` on; the first two are inner ones of a prompt."""

    spec: ModelSpec
    first: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "experts, windows and sinks": Case(OF_MODELS_WITH_EXPERTS["gpt_oss"], 3, {"max_ctas": 4, "splits": 15}),
    "four experts of forty": Case(OF_MODELS_WITH_EXPERTS["qwen3_moe, weights of all"], 0, {"max_ctas": 4}),
    "lanes with a delay": Case(SPEC),
    "lanes that share products": Case(replace(SPEC, shared_norm_scale=True, delay=0, intermediate_size=432)),
    "partitions that are reached, beside windows": Case(
        replace(SPEC, num_layers=3, max_context=400, sliding_window=40, window_layers=(0, 2)), 126, {"partition_batches": 1}
    ),
}


def shape_of(case: Case) -> KernelShape:
    options: dict[str, Any] = {"max_ctas": 5, **case.options}
    return KernelShape(
        case.spec, range(case.spec.num_lanes), "bfloat16", "bfloat16", copies=2, max_slots=6, keeps_hashes=True, **options
    )


def log_of(
    case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[[Mapping[str, str]], dict[str, str]] = dict
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """The accesses of the case's tokens, of sources that `changed` has changed."""
    shape, model = shape_of(case), Model(case.spec, "bfloat16", monkeypatch)
    sources = twin_sources(headers(shape))
    layout = sources["layout.cuh"].replace(HEAD_ONLY, "inline bool kHeadOnly;").replace("constexpr u32 first_p", "u32 first_p")
    build_twin("decode", changed({**sources, "layout.cuh": layout}), folder)
    prompt = np.random.default_rng(1).integers(0, case.spec.vocab_size, case.first + TOKENS - 1).astype(np.uint32)
    prompt.tofile(folder / "prompt.bin")
    weights = model.weights(shape)
    for name in (*NAMES, *OF_EXPERTS):
        held = getattr(weights.experts, OF_EXPERTS[name], None) if name in OF_EXPERTS else getattr(weights, name)
        np.ascontiguousarray(np.zeros(0, np.uint16) if held is None else held).tofile(folder / f"{name}.0.bin")
    weights.embedding.tofile(folder / "embedding.bin")
    np.ascontiguousarray(weights.rope, np.float32).tofile(folder / "rope.bin")
    program, there, _, *sizes = command_of(shape)
    environ = {**os.environ, "LOG": "1", "FIRST": f"{case.first}", "LIMIT_US": "100000"}
    done = subprocess.run([program, there, "2", *sizes], cwd=folder, env=environ, timeout=100, check=False, capture_output=True)
    assert done.returncode == 0, "see decode.cpp"
    return np.fromfile(folder / "accesses.bin", ACCESS)


def differences(case: Case, log: np.ndarray[tuple[int], np.dtype[np.void]]) -> list[str]:
    """Between the log of one rank's words and the declaration."""
    shape = shape_of(case)
    events = TokenEvents(shape, heads=range(shape.spec.lane_kv_heads))
    stores, reads = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    kinds, values = dict[int, str](), set[int]()  # by offset; of words with tags of 32 bits
    for number in range(TOKENS):
        position = case.first + number
        for event in events.of([Token(position, has_head=number + 2 >= TOKENS)]):
            for write in event.writes:
                for word in events.words_of(write.version, position):
                    stores.add((word.offset, write.version.tag, word.writer))
                    kinds[word.offset] = write.version.kind.name
                    values |= {word.offset} if word.is_value else set()
            for read in event.reads:
                for word in events.words_of(read.version, position):
                    reads |= {(word.offset, read.version.tag, reader) for reader in word.readers}
    last = dict[tuple[int, int], int]()  # the last tag that somebody reads there
    for offset, tag, cta in reads:
        last[offset, cta] = max(last.get((offset, cta), 0), tag)
    found_stores, found_reads = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    for access in log[log["memory"] == 0]:
        offset, cta = int(access["offset"]), int(access["cta"])
        tag = int(access["upper" if offset in values else "tag"])
        (found_stores if access["is_store"] else found_reads).add((offset, tag, cta))

    def listed(what: str, triples: set[tuple[int, int, int]]) -> list[str]:
        return [
            f"{what}: {kinds.get(o, 'a word of no kind')} at {o}, tag {tag}, thread block {cta}"
            for o, tag, cta in sorted(triples)
        ]

    stray = {(offset, tag, cta) for offset, tag, cta in found_reads - reads if tag >= last.get((offset, cta), 0)}
    return [
        *listed("stored and not declared", found_stores - stores),
        *listed("declared and not stored", stores - found_stores),
        *listed("declared and not read", reads - found_reads),
        *listed("read and not declared", stray),
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_stores_and_reads_the_declared_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = differences(CASES[name], log_of(CASES[name], tmp_path, monkeypatch))
    assert not found, "\n".join([f"{len(found)} differences", *found[:10]])
