"""Products of matrices and vectors for CPU ranks, in C (matrix_products.c): of 16 bit, float32 and MXFP4, one vector or many.

A decode step is bounded by the bytes of the weights, and NumPy multiplies nothing narrower than float32. Values are widened to
float32 as they are read, so results differ from NumPy's by the order of additions alone. That order is a row's own: a product has
the same bits whatever it is computed with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from kog_dist.decode.cpu.host_library import loaded
from kog_dist.decode.cpu.scratch import Scratch
from kog_dist.late_numpy import Array
from kog_dist.model.formats.mxfp4 import GROUP, STEP
from kog_dist.model.weights import BFLOAT16, MXFP4_CODES

_FORMATS: Final = {BFLOAT16: 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2, MXFP4_CODES: 3}


class _Product(ctypes.Structure):
    _fields_ = (
        ("matrix", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("vectors", ctypes.c_void_p), ("products", ctypes.c_void_p),
        ("sources", ctypes.c_void_p), ("targets", ctypes.c_void_p), ("rows", ctypes.c_uint64), ("columns", ctypes.c_uint64),
        ("skew", ctypes.c_uint64), ("vector_stride", ctypes.c_uint64), ("product_stride", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )  # fmt: skip


_Table: TypeAlias = ctypes.Array[_Product]


class ExpertOperands(NamedTuple):
    """One lane's experts, (E, rows, columns), and what they are multiplied with.

    In MXFP4 `matrices` are codes (E, rows, bytes) with scales (E, rows, groups), as `mxfp4.kept` makes them, and `skew` columns
    come before the first one. With K experts for each of m tokens: products (m * K, rows); vectors (m * K, columns), or
    (m, columns) that a token's experts share.
    """

    matrices: Array
    vectors: Array
    products: Array
    scales: Array | None = None
    skew: int = 0


def bound(triples: Sequence[tuple[Array, Array, Array]], scratch: Scratch | None = None) -> Callable[[], None]:
    """A call that does products (m, rows) = vectors (m, columns) @ matrix (rows, columns).T for each (matrix, vectors, products).

    Matrices are all float16, bfloat16 (`BFLOAT16`) or float32; vectors and products float32. Rows are contiguous. All arrays stay
    where they are.
    """
    dtype = triples[0][0].dtype
    table: _Table = (_Product * len(triples))()
    for entry, (matrix, vectors, products) in zip(table, triples, strict=True):
        assert matrix.dtype == dtype
        assert len(vectors) == len(products)
        _describe(entry, ExpertOperands(matrix[None], vectors, products))
        entry.matrix, entry.count = matrix.ctypes.data, len(vectors)
    multiply, most = _multiplier(dtype), max(matrix.shape[1] for matrix, _, _ in triples)
    room = _reserved(scratch, most, len(triples[0][1]))
    kept, num = triples, len(triples)  # the table knows addresses alone

    def run() -> None:
        assert kept
        multiply(table, num, room.address)

    return run


def bound_to_experts(operands: Sequence[ExpertOperands], scratch: Scratch | None = None) -> Callable[[Array], None]:
    """A call with the numbers (m, K) of the experts of m tokens: for each lane the products of these with their vectors.

    A matrix is read once, whoever has chosen it.
    """
    first = operands[0]
    num_slots, per_vector = len(first.products), len(first.products) // len(first.vectors)
    targets, sources = np.arange(num_slots, dtype=np.uint32), np.empty(num_slots, np.uint32)
    tables: list[_Table] = [(_Product * num_slots)() for _ in operands]
    for one, table in zip(operands, tables, strict=True):
        for entry in table:
            _describe(entry, one)
    bases = [(one.matrices.ctypes.data, one.matrices.strides[0], *_place(one.scales)) for one in operands]
    multiply = _multiplier(first.matrices.dtype)
    room = _reserved(scratch, first.vectors.shape[1] + first.skew, num_slots)
    kept, word, to, by = operands, targets.itemsize, targets.ctypes.data, sources.ctypes.data

    def run(chosen: Array) -> None:
        assert kept
        experts = chosen.reshape(-1)
        if len(chosen) > 1:
            targets[:] = np.argsort(experts, kind="stable")
        np.floor_divide(targets, per_vector, out=sources)
        ends = [*(np.flatnonzero(np.diff(experts[targets])) + 1).tolist(), num_slots]
        begins = [0, *ends[:-1]]
        numbers = experts[targets[begins]].tolist()
        for table, (matrices, stride, scales, scales_stride) in zip(tables, bases, strict=True):
            for entry, expert, begin, end in zip(table, numbers, begins, ends, strict=False):
                entry.matrix, entry.scales = matrices + expert * stride, scales + expert * scales_stride
                entry.sources, entry.targets, entry.count = by + begin * word, to + begin * word, end - begin
            multiply(table, len(numbers), room.address)

    return run


def _describe(entry: _Product, one: ExpertOperands) -> None:
    """All of an entry but its matrix and how many vectors there are."""
    vectors, products, columns = one.vectors, one.products, one.vectors.shape[1]
    assert vectors.dtype == products.dtype == np.float32
    assert one.matrices.flags.c_contiguous
    assert vectors.strides[1] == products.strides[1] == vectors.itemsize
    if one.scales is None:
        assert one.matrices.shape[1:] == (products.shape[1], columns)
    else:
        steps = -(-(columns + one.skew) // STEP)
        assert one.matrices.shape[1:] == (products.shape[1], steps * STEP // 2)
        assert one.scales.shape[1:] == (products.shape[1], steps * STEP // GROUP)
        assert one.scales.flags.c_contiguous
        assert columns % 8 == one.skew % 8 == 0
    entry.vectors, entry.products, entry.skew = vectors.ctypes.data, products.ctypes.data, one.skew
    entry.rows, entry.columns = products.shape[1], columns
    entry.vector_stride, entry.product_stride = (array.strides[0] // array.itemsize for array in (vectors, products))


def _place(scales: Array | None) -> tuple[int, int]:
    return (0, 0) if scales is None else (scales.ctypes.data, scales.strides[0])


def _multiplier(dtype: np.dtype[Any]) -> Callable[[_Table, int, int], None]:
    function, number = loaded().kog_products, _FORMATS[dtype]
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function.restype = None
    return lambda table, num, scratch: function(table, num, number, scratch)


def _reserved(scratch: Scratch | None, columns: int, count: int) -> Scratch:
    function = loaded().kog_products_scratch
    function.argtypes, function.restype = (ctypes.c_size_t,) * 2, ctypes.c_size_t
    room = scratch or Scratch()
    room.reserve(int(function(columns, count)))
    return room
