"""The arithmetic of a decode step in NumPy, lane by lane, so that its bits never depend on how many lanes a rank hosts.

What NumPy and BLAS do not round exactly (matrix products, sums along a vector, exp) is done once per lane and token, with shapes
that the model alone decides; vecdot and matmul do that in a loop of their own. What IEEE defines exactly (+, -, *, /, sqrt,
maximum) may run over several lanes and tokens at once: `n` below. What is in C has an order of its own (`matrix_products`,
`attention`).
BLAS must run on one thread (OPENBLAS_NUM_THREADS=1, set by the launcher): it is faster so, and the same everywhere.
All results go to arrays that the caller allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.cpu import host_library, matrix_products
from kog_dist.decode.cpu.scratch import Scratch
from kog_dist.model.experts import ClampedSwiglu

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


def products(triples: Sequence[tuple[Array, Array, Array]], scratch: Scratch | None = None) -> Callable[[], None]:
    """A call that does products (m, rows) = vectors (m, K) @ matrix (rows, K).T for each lane's (matrix, vectors, products).

    By `matrix_products` where that can be, else one BLAS call for each vector.
    """
    if triples and is_in_c(triples[0][0], triples[0][1]):
        return matrix_products.bound(triples, scratch)

    def run() -> None:
        for matrix, vectors, results in triples:
            for vector, result in zip(vectors, results, strict=True):
                np.dot(matrix, vector, out=result)

    return run


def is_in_c(matrix: Array, vectors: Array) -> bool:
    """Whether products of such a matrix are computed in C."""
    return vectors.dtype == np.float32 and (matrix.dtype != np.float32 or host_library.library() is not None)


def sigmoid(values: Array, out: Array) -> None:
    """`out` (n, m, ...) = 1 / (1 + exp(-values))."""
    np.negative(values, out=out)
    for tokens in out:
        for row in tokens:
            np.exp(row, out=row)
    np.add(out, 1, out=out)
    np.divide(1, out, out=out)


def silu(values: Array, out: Array) -> None:
    """`out` (n, m, ...) = values / (1 + exp(-values)); another array than `values`."""
    np.negative(values, out=out)
    for tokens in out:
        for row in tokens:
            np.exp(row, out=row)
    np.add(out, 1, out=out)
    np.divide(values, out, out=out)


def rotate_pairs(pairs: Array, cos: Array, sin: Array, scratch: Array, rotated: Array) -> None:
    """Turn adjacent pairs: `pairs` and `rotated` are (n, m, heads, head_dim / 2, 2), (x, y) -> (x cos - y sin, y cos + x sin).

    cos, sin: (m, 1, head_dim / 2, 2), one angle's (cos, cos) and (-sin, sin). Products are rounded before they are added: a
    complex multiplication may use fused operations, whose bits depend on the place in the array.
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


def activation(gate_up: Array, activations: Array, clamp: ClampedSwiglu | None = None) -> Callable[[], None]:
    """A call that does `activations` (n, F) = silu(gate) * up, with `gate_up` (n, 2F) = gate columns, then up columns.

    With a clamp (u + 1) * g / (1 + exp(-alpha * g)), g at most `limit` and u within -limit .. limit. May overwrite `gate_up`.
    In C where there is a library and values are float32.
    """
    if gate_up.dtype == np.float32 and host_library.library() is not None:
        return _activation_in_c(gate_up, activations, clamp)
    return partial(_swiglu, gate_up, activations) if clamp is None else partial(_clamped_swiglu, gate_up, activations, clamp)


def _activation_in_c(gate_up: Array, activations: Array, clamp: ClampedSwiglu | None) -> Callable[[], None]:
    assert gate_up.flags.c_contiguous
    assert activations.flags.c_contiguous
    rows, width = activations.shape
    function = host_library.loaded().kog_activate
    function.argtypes = (*(ctypes.c_void_p,) * 2, *(ctypes.c_size_t,) * 2, ctypes.c_int, *(ctypes.c_float,) * 2)
    function.restype = None
    alpha, limit = (1.0, 0.0) if clamp is None else (clamp.alpha, clamp.limit)
    arguments = gate_up.ctypes.data, activations.ctypes.data, rows, width, int(clamp is not None), alpha, limit
    kept = gate_up, activations

    def run() -> None:
        assert kept
        function(*arguments)

    return run


def _swiglu(gate_up: Array, activations: Array) -> None:
    width = activations.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    np.negative(gate, out=activations)
    for row in activations:
        np.exp(row, out=row)
    np.add(activations, 1, out=activations)
    np.divide(gate, activations, out=activations)
    np.multiply(activations, up, out=activations)


def _clamped_swiglu(gate_up: Array, activations: Array, clamp: ClampedSwiglu) -> None:
    width = activations.shape[1]
    gate, up = gate_up[:, :width], gate_up[:, width:]
    np.minimum(gate, clamp.limit, out=gate)
    np.clip(up, -clamp.limit, clamp.limit, out=up)
    np.multiply(gate, -clamp.alpha, out=activations)
    for row in activations:
        np.exp(row, out=row)
    np.add(activations, 1, out=activations)
    np.divide(gate, activations, out=activations)
    np.add(up, 1, out=up)
    np.multiply(activations, up, out=activations)


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


def chosen_products(
    operands: Sequence[matrix_products.ExpertOperands], scratch: Scratch | None = None
) -> Callable[[Array], None]:
    """A call with the numbers (m, K) of the experts of m tokens: for each lane the products of these with their vectors.

    Otherwise as `products`.
    """
    if is_in_c(operands[0].matrices, operands[0].vectors):
        return matrix_products.bound_to_experts(operands, scratch)

    def run(chosen: Array) -> None:
        for one in operands:
            per_vector = len(one.products) // len(one.vectors)
            for slot, expert in enumerate(chosen.reshape(-1).tolist()):
                np.dot(one.matrices[expert], one.vectors[slot // per_vector], out=one.products[slot])

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
