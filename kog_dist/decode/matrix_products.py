"""Products of 16-bit and MXFP4 matrices for CPU ranks, in C (matrix_products.c).

A decode step is bounded by the bytes of the weights, and NumPy multiplies nothing narrower than float32. Values are widened to
float32 as they are read, so results differ from NumPy's by the order of additions alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.host_library import loaded
from kog_dist.model.formats.mxfp4 import GROUP, STEP
from kog_dist.model.weights import BFLOAT16

Array = NDArray[Any]
_SCRATCH: Final = 34  # values that the library wants beside the longest vector: 2 * (kWidth + 1)


class _Product(ctypes.Structure):
    _fields_ = (
        ("matrix", ctypes.c_void_p), ("vector", ctypes.c_void_p), ("product", ctypes.c_void_p),
        ("rows", ctypes.c_uint64), ("columns", ctypes.c_uint64),
    )  # fmt: skip


class _CodedProduct(ctypes.Structure):
    _fields_ = (
        ("codes", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("vector", ctypes.c_void_p), ("product", ctypes.c_void_p),
        ("rows", ctypes.c_uint64), ("columns", ctypes.c_uint64), ("skew", ctypes.c_uint64), ("steps", ctypes.c_uint64),
    )  # fmt: skip


class CodedOperands(NamedTuple):
    """One lane's experts in MXFP4, as `mxfp4.kept` makes them: codes (E, rows, bytes), scales (E, rows, groups), and how
    many columns come before the first one; vectors (K, columns) and products (K, rows).
    """

    codes: Array
    scales: Array
    skew: int
    vectors: Array
    products: Array


def bound(triples: Sequence[tuple[Array, Array, Array]]) -> Callable[[], None]:
    """A call that does product (rows,) = matrix (rows, columns) @ vector (columns,) for each (matrix, vector, product).

    Matrices are all float16, or all bfloat16 (`BFLOAT16`); vectors and products float32. All are C-contiguous, and stay where
    they are.
    """
    run, _ = _bound(triples)
    return run


def bound_to_experts(operands: Sequence[tuple[Array, Array, Array]]) -> Callable[[Sequence[int]], None]:
    """A call with the numbers of K experts: for each lane's (matrices, vectors, products) the product of each with its vector.

    Matrices are (experts, rows, columns), vectors (K, columns), products (K, rows); otherwise as of `bound`.
    """
    assert all(matrices.flags.c_contiguous for matrices, _, _ in operands)
    triples = [
        (matrices[0], vector, product)
        for matrices, vectors, products in operands
        for vector, product in zip(vectors, products, strict=True)
    ]
    multiply, table = _bound(triples)
    places = [  # by lane: its first entry in the table, and where experts lie
        (lane * len(operands[0][1]), matrices.ctypes.data, matrices.strides[0]) for lane, (matrices, _, _) in enumerate(operands)
    ]
    kept = [matrices for matrices, _, _ in operands]

    def run(chosen: Sequence[int]) -> None:
        assert kept
        for first, base, stride in places:
            for at, expert in enumerate(chosen, first):
                table[at].matrix = base + expert * stride
        multiply()

    return run


def bound_to_coded_experts(operands: Sequence[CodedOperands]) -> Callable[[Sequence[int]], None]:
    """`bound_to_experts` of MXFP4."""
    function = loaded().kog_mxfp4_products
    function.restype = None
    chosen_count = len(operands[0].vectors)
    table = (_CodedProduct * (len(operands) * chosen_count))()
    for idx, entry in enumerate(table):
        one, place = operands[idx // chosen_count], idx % chosen_count
        vector, product = one.vectors[place], one.products[place]
        steps = -(-(len(vector) + one.skew) // STEP)
        assert one.codes.shape[1:] == (len(product), steps * STEP // 2)
        assert one.scales.shape[1:] == (len(product), steps * STEP // GROUP)
        assert all(array.flags.c_contiguous for array in (one.codes, one.scales, vector, product))
        assert len(vector) % 8 == one.skew % 8 == 0
        entry.vector, entry.product, entry.skew = vector.ctypes.data, product.ctypes.data, one.skew
        entry.rows, entry.columns, entry.steps = len(product), len(vector), steps
    scratch = np.empty(max(one.codes.shape[2] * 2 for one in operands), np.float32)
    at, count, kept = ctypes.c_void_p(scratch.ctypes.data), ctypes.c_size_t(len(table)), (scratch, *operands)
    bases = [(one.codes.ctypes.data, one.codes.strides[0], one.scales.ctypes.data, one.scales.strides[0]) for one in operands]

    def run(chosen: Sequence[int]) -> None:
        assert kept
        for lane, (codes, codes_stride, scales, scales_stride) in enumerate(bases):
            for place, expert in enumerate(chosen, lane * chosen_count):
                table[place].codes, table[place].scales = codes + expert * codes_stride, scales + expert * scales_stride
        function(table, count, at)

    return run


def _bound(triples: Sequence[tuple[Array, Array, Array]]) -> tuple[Callable[[], None], ctypes.Array[_Product]]:
    """The call, and its table: an entry for each triple, whose matrix may be replaced by another of the same shape."""
    dtype = triples[0][0].dtype
    function = loaded().kog_bfloat16_products if dtype == BFLOAT16 else loaded().kog_float16_products
    function.restype, count = None, ctypes.c_size_t(len(triples))
    table = (_Product * len(triples))()
    for entry, (matrix, vector, product) in zip(table, triples, strict=True):
        assert matrix.dtype == dtype
        assert vector.dtype == product.dtype == np.float32
        assert matrix.shape == (*product.shape, *vector.shape)
        assert all(array.flags.c_contiguous for array in (matrix, vector, product))
        entry.matrix, entry.vector, entry.product = matrix.ctypes.data, vector.ctypes.data, product.ctypes.data
        entry.rows, entry.columns = matrix.shape
    scratch = np.empty(max(len(vector) for _, vector, _ in triples) + _SCRATCH, np.float32)
    at, kept = ctypes.c_void_p(scratch.ctypes.data), (scratch, *triples)  # the table knows addresses alone

    def run() -> None:
        assert kept
        function(table, count, at)

    return run, table
