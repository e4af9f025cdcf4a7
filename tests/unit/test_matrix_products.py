"""Products in C: their values, their bits, and what happens where the library cannot be built."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.bench.fakes.tiny_model import TINY
from kog_dist.decode.cpu import host_library, matrix_products
from kog_dist.decode.cpu.cpu_weights import matrix_bytes
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.safetensors_file import narrow, widen
from kog_dist.model.weights import BFLOAT16
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.system.files import is_ours_alone

DTYPES = {"bfloat16": "BF16", "float16": "F16"}
ALL_DTYPES = (*DTYPES, "float32")
needs_library = pytest.mark.skipif(host_library.library() is None, reason="needs a C compiler, and a cache of one's own")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is known of the library is forgotten before and after; without optimisation it is built in a third of the time."""
    if not is_ours_alone(tmp_path):
        pytest.skip("others can write to the folders of tests")
    options = tuple("-O0" if option == "-O3" else option for option in host_library.OPTIONS)
    assert "-O0" in options
    monkeypatch.setattr(host_library, "OPTIONS", options)
    host_library.library.cache_clear()
    yield
    host_library.library.cache_clear()


def drawn(dtype: str, rows: int, columns: int) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """A matrix as it is kept, and the same in float32: of all sizes that float16 has, subnormal ones among them."""
    rng = np.random.default_rng(rows * 1000 + columns)
    values = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-18, 14, (rows, columns))
    if dtype == "float32":
        return (single := values.astype(np.float32)), single
    words = narrow(values.astype(np.float32), DTYPES[dtype]).reshape(rows, columns)
    exact = np.empty(rows * columns, np.float32)
    widen(words.reshape(-1).view(np.uint8), DTYPES[dtype], exact)
    return words.view(BFLOAT16 if dtype == "bfloat16" else np.float16), exact.reshape(rows, columns)


def product(matrix: NDArray[np.generic], vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of one vector, (rows,), or of several, (vectors, rows)."""
    vectors = vector.reshape(-1, vector.shape[-1])
    out = np.full((len(vectors), len(matrix)), np.nan, np.float32)
    matrix_products.bound([(matrix, vectors, out)])()
    return out.reshape(*vector.shape[:-1], len(matrix))


@needs_library
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 95, 576, 800])
def test_products_are_those_of_the_widened_matrix(dtype: str, columns: int) -> None:
    matrix, exact = drawn(dtype, 7, columns)
    vector = (np.random.default_rng(1).standard_normal(columns) * 2.0 ** np.arange(columns).clip(0, 30)).astype(np.float32)
    terms = exact.astype(np.float64) * vector
    error = np.abs(product(matrix, vector) - terms.sum(axis=1)) / np.abs(terms).sum(axis=1)
    assert error.max() < 2e-7 * math.sqrt(columns)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_times_one_is_itself(dtype: str) -> None:
    """Whatever its exponent: zeros of both signs, and the smallest and largest values of the type."""
    words = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16 if dtype == "bfloat16" else np.float16).reshape(-1, 1)
    exact = np.empty(1 << 16, np.float32)
    widen(words.reshape(-1).view(np.uint8), DTYPES[dtype], exact)
    is_normal = np.isfinite(exact) & ((exact == 0) | (np.abs(exact) >= np.finfo(np.float32).tiny))
    found = product(words, np.ones(1, np.float32))
    assert np.array_equal(found[is_normal], exact[is_normal])


@needs_library
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str) -> None:
    matrix, _ = drawn(dtype, 9, 100)
    vector = np.random.default_rng(2).standard_normal(100).astype(np.float32)
    whole = product(matrix, vector)
    for row in range(9):
        assert product(matrix[row : row + 1].copy(), vector.copy()).tobytes() == whole[row : row + 1].tobytes()


@needs_library
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 6, 50])
@pytest.mark.parametrize("columns", [1, 32, 95, 800, 1700])
def test_a_vector_has_the_same_bits_alone_and_among_others(dtype: str, rows: int, columns: int) -> None:
    matrix, _ = drawn(dtype, rows, columns)
    vectors = np.random.default_rng(3).standard_normal((33, columns)).astype(np.float32)
    alone = [product(matrix, vector) for vector in vectors]
    for count in (1, 2, 3, 4, 5, 6, 12, 13, 17, 33):
        assert product(matrix, vectors[:count]).tobytes() == np.stack(alone[:count]).tobytes()


@needs_library
def test_several_products_are_one_call() -> None:
    matrices = [drawn("bfloat16", rows, 40)[0] for rows in (3, 1, 8)]
    vectors = [np.random.default_rng(i).standard_normal(40).astype(np.float32) for i in range(3)]
    outs = [np.empty((1, len(matrix)), np.float32) for matrix in matrices]
    matrix_products.bound([(matrix, vector[None], out) for matrix, vector, out in zip(matrices, vectors, outs, strict=True)])()
    for matrix, vector, out in zip(matrices, vectors, outs, strict=True):
        assert out.tobytes() == product(matrix, vector).tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_matrices_are_kept_as_they_are_stored(dtype: str, is_tied: bool, tmp_path: Path) -> None:
    spec = replace(TINY, tied_embeddings=is_tied)
    write_checkpoint(tmp_path, spec, random_tensors(spec, seed=1), dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    plain = checkpoint.rank_weights(range(spec.num_lanes))
    kept = checkpoint.rank_weights(range(spec.num_lanes), keeps_halves=True)
    pairs: list[tuple[NDArray[Any], NDArray[Any]]] = [(plain.heads[0], kept.heads[0]), (plain.embedding, kept.embedding)]
    for weights in (plain, kept):
        assert np.may_share_memory(weights.heads[0], weights.embedding) == is_tied
    for lane in range(spec.num_lanes):
        for layer, layer_kept in zip(plain.lanes[lane].layers, kept.lanes[lane].layers, strict=True):
            pairs += [(getattr(layer, name), getattr(layer_kept, name)) for name in ("wqkv", "wo", "w13", "w2")]
            assert layer_kept.ffn_norm.dtype == np.float32
    for whole, half in pairs:
        assert half.dtype == {"bfloat16": BFLOAT16, "float16": np.float16, "float32": np.float32}[dtype]
        exact = np.empty(half.size, np.float32)
        if dtype == "float32":
            exact[:] = half.reshape(-1)
        else:
            widen(half.reshape(-1).view(np.uint8), DTYPES[dtype], exact)
        assert np.array_equal(exact.reshape(half.shape), whole)


def test_without_a_compiler_weights_are_float32(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write_checkpoint(tmp_path / "model", TINY, random_tensors(TINY, seed=1))
    assert host_library.library() is None
    assert matrix_bytes(open_checkpoint(tmp_path / "model")) == 4


@needs_library
@pytest.mark.parametrize("fault", ["no folder", "broken compiler", "no library"])
def test_what_cannot_be_built_or_kept_is_done_without(
    fault: str, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no folder":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        says = (
            "exit 1"
            if fault == "broken compiler"
            else 'for last; do :; done; test "$1" = --version || echo > "${last%/*}/out.so"'
        )
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert host_library.library() is None


@needs_library
@pytest.mark.parametrize("what", ["folder", "parent", "library"])
def test_what_others_can_write_is_not_run(what: str, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = host_library.library()
    assert path is not None
    host_library.library.cache_clear()
    {"folder": path.parent, "parent": path.parent.parent, "library": path}[what].chmod(0o777)
    assert host_library.library() is None


@needs_library
def test_it_is_built_once(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = host_library.library()
    assert first is not None
    stamp = first.stat().st_mtime_ns
    host_library.library.cache_clear()
    assert host_library.library() == first
    assert first.stat().st_mtime_ns == stamp
    assert cpu_matrix_bytes_of_bfloat16(tmp_path) == 2


def cpu_matrix_bytes_of_bfloat16(folder: Path) -> int:
    write_checkpoint(folder / "model", TINY, random_tensors(TINY, seed=1), dtype="bfloat16")
    return matrix_bytes(open_checkpoint(folder / "model"))
