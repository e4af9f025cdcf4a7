"""The gated delta rule of following tokens: in C (delta_rule.c) where there is a library and values are float32, else in NumPy.

A token's step is the same however many tokens a call has: the rule is never computed in blocks of tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kog_dist.decode.cpu import host_library, lane_math
from kog_dist.decode.cpu.scratch import Scratch
from kog_dist.late_numpy import Array
from kog_dist.model.layers import DeltaNet

_NORM_EPS = 1e-6  # under the root of the norms of queries and keys


class DeltaState(NamedTuple):
    """Of some lanes: `heads` (n, heads, key_dim, value_dim), and `past` (n, conv_width - 1, channels): the convolution's last
    inputs.
    """

    heads: Array
    past: Array


@dataclass(frozen=True)
class LaneNets:
    """The delta nets of some lanes. `taps` (n, channels, conv_width), of queries, keys and values in this order; `rates` and
    `dt_bias` (n, heads); `norm` (n, value_dim). `eps`: of the norm.
    """

    taps: Array
    rates: Array
    dt_bias: Array
    norm: Array
    key_heads: int
    key_dim: int
    eps: float

    @classmethod
    def of(cls, net: DeltaNet, num_lanes: int, lanes: Sequence[Mapping[str, Array]], eps: float) -> LaneNets:
        """Of the tensors of each lane, by name; the model has `num_lanes`."""
        taps = np.stack([np.concatenate([lane[f"conv_{name}"] for name in "qkv"]) for lane in lanes])
        decay, dt_bias, norm = (np.stack([lane[name] for lane in lanes]) for name in ("decay", "dt_bias", "norm.weight"))
        rates = -np.stack([np.exp(row) for row in decay])
        return cls(taps, rates, dt_bias, norm, net.num_key_heads // num_lanes, net.key_dim, eps)

    @property
    def num_heads(self) -> int:
        """Value heads of a lane."""
        return int(self.rates.shape[1])

    @property
    def value_dim(self) -> int:
        """Of a value head."""
        return int(self.norm.shape[1])

    @property
    def keys(self) -> int:
        """Values of a lane's key heads."""
        return self.key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Of a lane's convolution."""
        return int(self.taps.shape[1])


class DeltaOperands(NamedTuple):
    """`rows` (n, tokens, ...): of each token what goes through the convolution, gates (heads * value_dim), and a and b of each
    head. `mixed` (n, tokens, heads, value_dim) is the result; None: only the state is wanted, and rows have no gates.
    `states`: of each KV cache. All arrays are C-contiguous but for their first axis, and stay where they are.
    """

    rows: Array
    states: Sequence[DeltaState]
    mixed: Array | None


# With the number of a KV cache: tokens `first` .. `first + count` of the rows, behind the state of that cache, which is left
# behind the first `num_kept` of these. Results have the same places in `mixed`.
Advance = Callable[[int, int, int, int], None]


def bound(nets: LaneNets, operands: DeltaOperands, scratch: Scratch) -> Advance:
    """The call for these arrays."""
    if operands.rows.dtype == np.float32 and host_library.library() is not None:
        return _bound_in_c(nets, operands, scratch)
    return bound_in_numpy(nets, operands)


class _Net(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("rows", "taps", "rates", "dt_bias", "norm", "state", "past", "mixed"))


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("key_heads", "heads", "key_dim", "value_dim", "width", "gate_values")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


def _bound_in_c(nets: LaneNets, operands: DeltaOperands, scratch: Scratch) -> Advance:
    rows, mixed, num_lanes = operands.rows, operands.mixed, len(nets.taps)
    taps = np.ascontiguousarray(nets.taps.swapaxes(1, 2))
    gate_values = 0 if mixed is None else nets.num_heads * nets.value_dim
    shape = _Shape(
        nets.key_heads,
        nets.num_heads,
        nets.key_dim,
        nets.value_dim,
        nets.taps.shape[2],
        gate_values,
        nets.eps,
        nets.key_dim**-0.5,
    )
    kept = [rows, taps, nets.rates, nets.dt_bias, nets.norm, *([] if mixed is None else [mixed])]
    kept += [array for state in operands.states for array in state]
    assert all(array.dtype == np.float32 and array[0].flags.c_contiguous and len(array) == num_lanes for array in kept)
    assert rows.shape[2] == nets.channels + gate_values + 2 * nets.num_heads
    tables = []
    for state in operands.states:
        table: ctypes.Array[_Net] = (_Net * num_lanes)()
        for lane, entry in enumerate(table):
            entry.rows, entry.taps, entry.rates, entry.dt_bias, entry.norm, entry.state, entry.past = (
                array[lane].ctypes.data for array in (rows, taps, nets.rates, nets.dt_bias, nets.norm, *state)
            )
            entry.mixed = None if mixed is None else mixed[lane].ctypes.data
        tables.append(table)
    library = host_library.loaded()
    needed, function = library.kog_delta_scratch, library.kog_delta
    needed.argtypes, needed.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, *(ctypes.c_size_t,) * 3, ctypes.c_void_p)
    function.restype = None
    scratch.reserve(int(needed(ctypes.addressof(shape), rows.shape[1])))

    def advance(cache: int, first: int, count: int, num_kept: int) -> None:
        assert kept  # tables know addresses alone
        function(tables[cache], num_lanes, ctypes.addressof(shape), first, count, num_kept, scratch.address)

    return advance


def bound_in_numpy(nets: LaneNets, operands: DeltaOperands) -> Advance:
    """The same in NumPy."""
    rows, mixed = operands.rows, operands.mixed
    n, heads, key_heads, key_dim, value_dim = len(rows), nets.num_heads, nets.key_heads, nets.key_dim, nets.value_dim
    channels, keys, width, repeat = nets.channels, nets.keys, nets.taps.shape[2], nets.num_heads // nets.key_heads
    scale = rows.dtype.type(key_dim**-0.5)
    of_ab = channels + (0 if mixed is None else heads * value_dim)

    def step(row: Array, state: DeltaState, out_row: Array | None) -> None:
        inputs = np.concatenate((state.past, row[:, None, :channels]), axis=1)
        state.past[...] = inputs[:, 1:]
        conv = inputs[:, 0] * nets.taps[:, :, 0]
        for tap in range(1, width):
            conv = conv + inputs[:, tap] * nets.taps[:, :, tap]
        activated = np.empty_like(conv)
        lane_math.silu(conv[:, None], activated[:, None])
        both = activated[:, : 2 * keys].reshape(n, 2 * key_heads, key_dim)  # query heads, then key heads
        value = activated[:, 2 * keys :].reshape(n, heads, value_dim)
        both = both / np.sqrt(np.vecdot(both, both)[..., None] + _NORM_EPS)
        query, key = (np.repeat(part, repeat, axis=1) for part in (both[:, :key_heads] * scale, both[:, key_heads:]))
        a, b = row[:, of_ab : of_ab + heads], row[:, of_ab + heads :]
        decay = np.stack([np.exp(one) for one in nets.rates * _softplus(a + nets.dt_bias)])
        beta = np.empty_like(b)
        lane_math.sigmoid(b[:, None], beta[:, None])
        state.heads[...] *= decay[:, :, None, None]
        change = (value - np.matmul(key[:, :, None], state.heads)[:, :, 0]) * beta[:, :, None]
        state.heads[...] += key[..., None] * change[:, :, None]
        if out_row is None:
            return
        out = np.matmul(query[:, :, None], state.heads)[:, :, 0]
        lane_math.rms_norm(out, nets.norm[:, None], nets.eps, np.empty_like(out[..., :1]), out)
        gates = np.empty_like(row[:, None, channels:of_ab])
        lane_math.silu(row[:, None, channels:of_ab], gates)
        out_row[...] = out * gates.reshape(out.shape)

    def advance(cache: int, first: int, count: int, num_kept: int) -> None:
        state = operands.states[cache]
        for number in range(count):
            if number == num_kept:
                state = DeltaState(*(array.copy() for array in state))
            step(rows[:, first + number], state, None if mixed is None else mixed[:, first + number])

    return advance


def _softplus(values: Array) -> Array:
    """log(1 + exp(values)) of each lane's (n, heads)."""
    return np.stack([np.logaddexp(0, row) for row in values]).astype(values.dtype)
