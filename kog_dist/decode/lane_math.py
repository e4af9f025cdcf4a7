"""The arithmetic of a decode step in NumPy, lane by lane, so that its bits never depend on how many lanes a rank hosts.

What NumPy and BLAS do not round exactly (matrix products, sums along a vector, exp) is done once per lane, with shapes that
the model alone decides; vecdot and matmul do that in a loop of their own. What IEEE defines exactly (+, -, *, /, sqrt, maximum)
may run over several lanes at once: `n` below.
BLAS must run on one thread (OPENBLAS_NUM_THREADS=1, set by the launcher): it is faster so, and the same everywhere.
All results go to arrays that the caller allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode import matrix_products

Array = NDArray[Any]  # float32; float64 for checks


def rms_norm(streams: Array, weight: Array, eps: float, inverse: Array, normed: Array) -> None:
    """`normed` (..., D) = streams (..., D) / sqrt(mean of squares + eps) * weight (D, or as streams).

    `inverse` (..., 1) is scratch.
    """
    width = streams.shape[-1]
    np.vecdot(streams, streams, out=inverse[..., 0])  # one BLAS dot per lane, or head
    np.add(inverse, width * eps, out=inverse)
    np.divide(width, inverse, out=inverse)
    np.sqrt(inverse, out=inverse)
    np.multiply(streams, inverse, out=normed)
    np.multiply(normed, weight, out=normed)


def products(triples: Sequence[tuple[Array, Array, Array]]) -> Callable[[], None]:
    """A call that does product (rows,) = matrix (rows, K) @ vector (K,) for each lane's (matrix, vector, product).

    One BLAS call for each; matrices of 16 bit by `matrix_products`.
    """
    if triples and triples[0][0].dtype.itemsize == 2:
        return matrix_products.bound(triples)

    def run() -> None:
        for matrix, vector, product in triples:
            np.dot(matrix, vector, out=product)

    return run


def rotate_pairs(pairs: Array, cos: Array, sin: Array, scratch: Array, rotated: Array) -> None:
    """Turn adjacent pairs: `pairs` and `rotated` are (n, heads, head_dim / 2, 2), (x, y) -> (x cos - y sin, y cos + x sin).

    cos, sin: (head_dim / 2, 2), one angle's (cos, cos) and (-sin, sin). Products are rounded before they are added: a complex
    multiplication may use fused operations, whose bits depend on the place in the array.
    """
    np.multiply(pairs, cos, out=rotated)
    np.multiply(pairs[..., ::-1], sin, out=scratch)
    np.add(rotated, scratch, out=rotated)


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    scores: Array,
    ones: Array,
    peaks: Array,
    sums: Array,
    mixed: Array,
    sinks: Array | None = None,
) -> None:
    """Softmax attention of one position, with `group` query heads to a KV head, already scaled by head_dim ** -0.5.

    queries: (n, kv_heads, group, head_dim); keys, values: (n, kv_heads, positions, head_dim); ones: (positions,), all 1.
    scores (n, kv_heads, group, positions), peaks and sums (n, kv_heads, group, 1) are scratch; mixed is the result, shaped as
    queries. matmul and vecdot call BLAS once per lane and KV head. `sinks`, as sums: one more logit of each head, from which
    nothing is mixed; its term is the last of the sum.
    """
    np.matmul(queries, keys.swapaxes(2, 3), out=scores)
    np.maximum.reduce(scores, axis=3, keepdims=True, out=peaks)
    if sinks is not None:
        np.maximum(peaks, sinks, out=peaks)
    np.subtract(scores, peaks, out=scores)
    for lane_scores in scores:
        np.exp(lane_scores, out=lane_scores)
    np.vecdot(scores, ones, out=sums[..., 0])
    if sinks is not None:
        np.subtract(sinks, peaks, out=peaks)
        for lane_peaks in peaks:
            np.exp(lane_peaks, out=lane_peaks)
        np.add(sums, peaks, out=sums)
    np.matmul(scores, values, out=mixed)
    np.divide(mixed, sums, out=mixed)


def swiglu(gate_up: Array, activation: Array) -> None:
    """`activation` (n, F) = silu(gate) * up, with `gate_up` (n, 2F) = gate columns, then up columns. Overwrites `gate_up`."""
    width = activation.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    np.negative(gate, out=activation)
    for lane_row in activation:
        np.exp(lane_row, out=lane_row)
    np.add(activation, 1, out=activation)
    np.divide(gate, activation, out=activation)
    np.multiply(activation, up, out=activation)


def clamped_swiglu(gate_up: Array, activation: Array, alpha: float, limit: float) -> None:
    """`swiglu` of (u + 1) * g / (1 + exp(-alpha * g)), with g at most `limit` and u within -limit .. limit."""
    width = activation.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    np.minimum(gate, limit, out=gate)
    np.clip(up, -limit, limit, out=up)
    np.multiply(gate, -alpha, out=activation)
    for lane_row in activation:
        np.exp(lane_row, out=lane_row)
    np.add(activation, 1, out=activation)
    np.divide(gate, activation, out=activation)
    np.add(up, 1, out=up)
    np.multiply(activation, up, out=activation)


def select(logits: Array, scores: Array, is_normalised: bool, choice: Array) -> None:
    """`choice` (2, K) = numbers of the experts with the largest `logits` (E,), ascending, and their weights.

    Of equal logits the smaller numbers are chosen. Weights are those of a softmax over the chosen ones, or over all. `scores`
    (E,) is scratch.
    """
    chosen = np.sort(np.argsort(-logits, kind="stable")[: choice.shape[1]])
    np.subtract(logits, np.maximum.reduce(logits), out=scores)
    np.exp(scores, out=scores)
    terms = scores[chosen] if is_normalised else scores
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    choice[0] = chosen
    np.divide(scores[chosen], total, out=choice[1])


def chosen_products(operands: Sequence[tuple[Array, Array, Array]]) -> Callable[[Sequence[int]], None]:
    """A call with the numbers of K experts, which does product (rows,) = matrix (rows, columns) @ vector (columns,) for each.

    Each lane's (matrices (E, rows, columns), vectors (K, columns), products (K, rows)); otherwise as `products`.
    """
    if operands[0][0].dtype.itemsize == 2:
        return matrix_products.bound_to_experts(operands)

    def run(chosen: Sequence[int]) -> None:
        for matrices, vectors, results in operands:
            for expert, vector, result in zip(chosen, vectors, results, strict=True):
                np.dot(matrices[expert], vector, out=result)

    return run


def tree_sum(terms: Array, scratch: Array, total: Array) -> None:
    """`total` (D,) = sum of terms (n, D) as a binary tree of adjacent pairs; n is a power of two. `scratch` is (n / 2, D)."""
    rows = len(terms)
    if rows == 1:
        np.copyto(total, terms[0])
        return
    level = terms
    while rows > 2:
        np.add(level[0:rows:2], level[1:rows:2], out=scratch[: rows // 2])
        level, rows = scratch, rows // 2
    np.add(level[0], level[1], out=total)


def round_to(values: Array, storage: str) -> None:
    """Round float values in place to what `storage` ("float32", "float16", "bfloat16") can hold, ties to even."""
    if storage == "float16":
        values[...] = values.astype(np.float16)
    elif storage == "bfloat16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
        np.copyto(values, rounded.view(np.float32), where=np.isfinite(values))
    elif storage == "float32" and values.dtype != np.float32:
        values[...] = values.astype(np.float32)
