"""Attention of CPU ranks in C (attention.c): the bits of a token do not depend on how many tokens one call has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kog_dist.decode.cpu.host_library import loaded
from kog_dist.decode.cpu.scratch import Scratch
from kog_dist.late_numpy import Array


class _Lane(ctypes.Structure):
    _fields_ = (
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("mixed", ctypes.c_void_p),
        ("kv_heads", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("dim", ctypes.c_uint64),
        ("capacity", ctypes.c_uint64),
    )


class AttentionOperands(NamedTuple):
    """Of some lanes: queries (n, tokens, heads, dim), scaled by dim ** -0.5; keys and values of each KV cache, (n, kv_heads,
    positions, dim); sinks (n, heads) or None: one more logit of each head, from which nothing is mixed; mixed, as queries.
    """

    queries: Array
    keys: Sequence[Array]
    values: Sequence[Array]
    sinks: Array | None
    mixed: Array


def bound(operands: AttentionOperands, window: int, scratch: Scratch | None = None) -> Callable[[int, int, int, int], None]:
    """A call with the number of a KV cache, the first token's position, its number in the queries, and how many tokens there are:
    softmax attention of following tokens.

    Each sees `window` positions at most, its own the last. All arrays are float32, C-contiguous, and stay where they are.
    """
    tables = [_table(operands, cache) for cache in range(len(operands.keys))]
    num_lanes, num_tokens, heads, dim = operands.queries.shape
    room = scratch or Scratch()
    room.reserve(_num_scratch(num_tokens, heads // operands.keys[0].shape[1], dim))
    function = loaded().kog_attend
    function.argtypes = (ctypes.c_void_p, *(ctypes.c_size_t,) * 5, ctypes.c_void_p)
    function.restype = None
    kept = operands  # tables know addresses alone

    def run(cache: int, position: int, first: int, count: int) -> None:
        assert kept
        function(tables[cache], num_lanes, first, position, count, window, room.address)

    return run


def _table(operands: AttentionOperands, cache: int) -> ctypes.Array[_Lane]:
    queries, keys, values = operands.queries, operands.keys[cache], operands.values[cache]
    num_lanes, _, heads, dim = queries.shape
    _, kv_heads, capacity, _ = keys.shape
    arrays = [queries, keys, values, operands.mixed, *([] if operands.sinks is None else [operands.sinks])]
    assert all(array.dtype == np.float32 and array.flags.c_contiguous and len(array) == num_lanes for array in arrays)
    assert keys.shape == values.shape
    assert queries.shape == operands.mixed.shape
    table: ctypes.Array[_Lane] = (_Lane * num_lanes)()
    for lane, entry in enumerate(table):
        entry.queries, entry.keys, entry.values = (array[lane].ctypes.data for array in (queries, keys, values))
        entry.sinks = None if operands.sinks is None else operands.sinks[lane].ctypes.data
        entry.mixed = operands.mixed[lane].ctypes.data
        entry.kv_heads, entry.group, entry.dim, entry.capacity = kv_heads, heads // kv_heads, dim, capacity
    return table


def _num_scratch(num_tokens: int, group: int, dim: int) -> int:
    function = loaded().kog_attention_scratch
    function.argtypes, function.restype = (ctypes.c_size_t,) * 3, ctypes.c_size_t
    return int(function(num_tokens, group, dim))
