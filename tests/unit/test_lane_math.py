"""Attention of one position in NumPy against its definition, with sinks that are larger than every score."""

from __future__ import annotations

import numpy as np
import pytest

from kog_dist.decode.cpu.lane_math import attend


@pytest.mark.parametrize("sink", [None, -3.0, 0.5, 800.0])
def test_attention_of_a_position_is_its_definition(sink: float | None) -> None:
    n, kv_heads, group, positions, head_dim = 2, 3, 2, 5, 4
    chance = np.random.default_rng(2)
    queries = chance.standard_normal((n, kv_heads, group, head_dim))
    keys, values = chance.standard_normal((2, n, kv_heads, positions, head_dim))
    sinks = None if sink is None else np.full((n, kv_heads, group, 1), sink)
    scores, mixed = np.empty((n, kv_heads, group, positions)), np.empty_like(queries)
    peaks, sums = np.empty((2, n, kv_heads, group, 1))
    attend(queries, keys, values, scores, np.ones(positions), peaks, sums, mixed, sinks)
    products = np.einsum("nkgd,nkpd->nkgp", queries, keys)
    peak = np.maximum(products.max(axis=3, keepdims=True), -np.inf if sinks is None else sinks)
    weights = np.exp(products - peak)
    total = weights.sum(axis=3, keepdims=True) + (0.0 if sinks is None else np.exp(sinks - peak))
    np.testing.assert_allclose(mixed, np.einsum("nkgp,nkpd->nkgd", weights / total, values), rtol=1e-12, atol=1e-300)
