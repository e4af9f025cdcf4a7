"""Attention of CPU ranks in C: its values, and that nothing but a token's position and window decides about its bits."""

from __future__ import annotations

import ctypes
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu import attention, host_library, matrix_products
from tests.unit.host_builds import MARCHES, has_instructions

Array = NDArray[Any]
pytestmark = pytest.mark.skipif(host_library.library() is None, reason="needs a C compiler, and a cache of one's own")


class Case(NamedTuple):
    kv_heads: int
    group: int
    dim: int
    first: int  # position of the first token
    num_tokens: int
    window: int = 10**6
    has_sinks: bool = False


CASES = (
    Case(1, 1, 2, 0, 1), Case(3, 3, 64, 0, 7), Case(2, 4, 128, 190, 70, 100, True), Case(1, 1, 12, 0, 130, 6),
    Case(1, 8, 20, 60, 40, 1), Case(2, 5, 80, 63, 2, 64), Case(1, 7, 16, 127, 9, 128, True), Case(1, 2, 8, 0, 66, 65),
    Case(2, 1, 48, 300, 3, 256),
)  # fmt: skip


class Inputs(NamedTuple):
    queries: Array  # (tokens, heads, dim)
    keys: Array  # (kv_heads, positions, dim)
    values: Array
    sinks: Array | None


def drawn(case: Case, seed: int = 1) -> Inputs:
    """Positions behind the last token hold what a dropped sequence may have left."""
    rng, heads = np.random.default_rng(seed), case.kv_heads * case.group
    positions = case.first + case.num_tokens
    queries = rng.standard_normal((case.num_tokens, heads, case.dim)) * 1.5 * case.dim**-0.5
    keys, values = (np.full((case.kv_heads, positions + 9, case.dim), np.nan, np.float32) for _ in range(2))
    keys[:, :positions] = 2 * rng.standard_normal((case.kv_heads, positions, case.dim))
    values[:, :positions] = rng.standard_normal((case.kv_heads, positions, case.dim))
    sinks = rng.standard_normal(heads).astype(np.float32) if case.has_sinks else None
    return Inputs(queries.astype(np.float32), keys, values, sinks)


def attended(case: Case, inputs: Inputs, sizes: list[int] | None = None) -> Array:
    """Tokens in calls of so many, or in one."""
    mixed = []
    for last, size in zip(accumulate(sizes or [case.num_tokens]), sizes or [case.num_tokens], strict=True):
        queries = inputs.queries[None, last - size : last].copy()
        out = np.full_like(queries, np.nan)
        sinks = None if inputs.sinks is None else inputs.sinks[None]
        operands = attention.AttentionOperands(queries, [inputs.keys[None]], [inputs.values[None]], sinks, out)
        attention.bound(operands, case.window)(0, case.first + last - size, 0, size)
        mixed.append(out[0])
    return np.concatenate(mixed)


def defined(case: Case, inputs: Inputs) -> Array:
    queries, keys, values = (array.astype(np.float64) for array in inputs[:3])
    mixed = np.empty_like(queries)
    for token, head in np.ndindex(mixed.shape[:2]):
        stop = case.first + token + 1
        seen = slice(max(0, stop - case.window), stop)
        scores, sink = keys[head // case.group, seen] @ queries[token, head], -np.inf
        if inputs.sinks is not None:
            sink = np.float64(inputs.sinks[head])
        peak = max(scores.max(), sink)
        weights, rest = np.exp(scores - peak), np.exp(sink - peak)
        mixed[token, head] = weights @ values[head // case.group, seen] / (weights.sum() + rest)
    return mixed


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_definition(case: Case) -> None:
    inputs = drawn(case)
    assert np.abs(attended(case, inputs) - defined(case, inputs)).max() < 2e-6


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_token_has_the_same_bits_alone_and_among_others(case: Case, size: int) -> None:
    inputs = drawn(case)
    sizes = [size] * (case.num_tokens // size) + ([case.num_tokens % size] if case.num_tokens % size else [])
    assert attended(case, inputs, sizes).tobytes() == attended(case, inputs).tobytes()


def test_lanes_and_caches_are_apart() -> None:
    case = Case(2, 2, 16, 70, 3)
    lanes = [drawn(case, seed) for seed in range(3)]
    queries, keys, values = (np.stack([getattr(lane, name) for lane in lanes]) for name in ("queries", "keys", "values"))
    out = np.empty_like(queries)
    caches = (np.zeros_like(keys), keys), (np.zeros_like(values), values)
    run = attention.bound(attention.AttentionOperands(queries, *caches, None, out), 10**6)
    run(1, case.first, 0, 1)
    run(1, case.first + 1, 1, 2)  # as in two calls
    for lane, mixed in zip(lanes, out, strict=True):
        assert mixed.tobytes() == attended(case, lane).tobytes()
    run(0, case.first, 0, 3)
    assert not out.any()


@pytest.mark.parametrize("place", ["queries", "keys", "values"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_does_not_vanish(place: str, value: float) -> None:
    case = Case(1, 1, 16, 80, 1)
    inputs = drawn(case)
    inputs.queries[0, 0, 3] = 1
    getattr(inputs, place)[0, 0, 3] = value
    assert not np.isfinite(attended(case, inputs)[0, 0]).all()


def test_scores_far_apart_and_far_below_the_sink() -> None:
    """Weights that are too small for float32 are 0; the sums of a head whose sink is far larger are, too."""
    case = Case(1, 1, 16, 199, 1, has_sinks=True)
    inputs = drawn(case)
    inputs.keys[:] *= 300
    assert np.allclose(attended(case, inputs), defined(case, inputs), rtol=1e-4, atol=1e-5)
    assert inputs.sinks is not None
    inputs.sinks[:] = 1e6
    assert not attended(case, inputs).any()
    inputs.sinks[:] = -np.inf
    assert attended(case, inputs).tobytes() == attended(case, inputs._replace(sinks=None)).tobytes()


def test_weights_of_equal_scores_are_exact() -> None:
    case = Case(1, 1, 8, 255, 1)
    inputs = drawn(case)
    inputs.keys[:] = 0
    inputs.values[:] = 1
    assert (attended(case, inputs) == 1).all()


@pytest.mark.parametrize("march", MARCHES)
def test_all_instruction_sets_give_the_same_bits(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_instructions(march):
        pytest.skip(f"this processor has less than {march}")
    inputs = [drawn(case) for case in CASES]
    operands = [products_of(dtype, count) for dtype in ("bfloat16", "float16", "float32") for count in (1, 7)]

    def results() -> list[bytes]:
        found = [attended(case, drawn).tobytes() for case, drawn in zip(CASES, inputs, strict=True)]
        for matrix, vectors in operands:
            out = np.empty((len(vectors), len(matrix)), np.float32)
            matrix_products.bound([(matrix, vectors, out)])()
            found.append(out.tobytes())
        return found

    native = results()
    monkeypatch.setattr(host_library, "SOURCES", ("attention.c", "matrix_products.c"))
    path = host_library.built("cc", (*host_library.OPTIONS, "-O1", f"-march={march}"), tmp_path)
    monkeypatch.setattr(attention, "loaded", lambda: ctypes.CDLL(str(path)))
    monkeypatch.setattr(matrix_products, "loaded", lambda: ctypes.CDLL(str(path)))
    assert results() == native


def products_of(dtype: str, count: int) -> tuple[Array, Array]:
    from tests.unit.test_matrix_products import drawn as drawn_matrix

    return drawn_matrix(dtype, 9, 331)[0], np.random.default_rng(4).standard_normal((count, 331)).astype(np.float32)
