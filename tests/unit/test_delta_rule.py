"""The delta rule in C: its values, and that nothing but a token and the state before it decides about its bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from kog_dist.decode.cpu import delta_rule, host_library
from kog_dist.decode.cpu.delta_rule import DeltaOperands, DeltaState, LaneNets
from kog_dist.decode.cpu.scratch import Scratch
from tests.unit.host_builds import MARCHES, has_instructions

Array = NDArray[Any]
pytestmark = pytest.mark.skipif(host_library.library() is None, reason="needs a C compiler, and a cache of one's own")


class Shape(NamedTuple):
    num_lanes: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int


SHAPES = (
    Shape(1, 1, 1, 1, 1, 2),
    Shape(2, 1, 3, 6, 10, 4),
    Shape(2, 2, 4, 17, 50, 3),
    Shape(1, 2, 2, 128, 128, 4),
    Shape(3, 1, 17, 9, 33, 5),
)
NUM_TOKENS = 41


def drawn(shape: Shape, dtype: Any = np.float32) -> tuple[LaneNets, Array]:
    """Nets, and rows of tokens with their gates. Every value is one of float32."""
    n, key_heads, heads, key_dim, value_dim, width = shape
    rng = np.random.default_rng(3)

    def normal(*of: int) -> Array:
        return rng.standard_normal(of).astype(np.float32).astype(dtype)

    channels = 2 * key_heads * key_dim + heads * value_dim
    rates = -np.exp(np.abs(normal(n, heads)).astype(np.float32)).astype(dtype)
    nets = LaneNets(normal(n, channels, width), rates, normal(n, heads) - 2, normal(n, value_dim), key_heads, key_dim, 1e-6)
    rows = normal(n, NUM_TOKENS, channels + heads * value_dim + 2 * heads)
    rows[0, 0, -2 * heads :] = 60  # a state that is all but gone, and one that takes everything
    rows[0, 1, -2 * heads :] = -60
    return nets, rows


def empty_state(shape: Shape, dtype: Any = np.float32) -> DeltaState:
    n, key_heads, heads, key_dim, value_dim, width = shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    return DeltaState(np.zeros((n, heads, key_dim, value_dim), dtype), np.zeros((n, width - 1, channels), dtype))


def passes(
    shape: Shape, sizes: list[int], form: Callable[..., Any] | None = None, dtype: Any = np.float32
) -> tuple[bytes, bytes]:
    """What tokens in passes of these sizes give, and the state that they leave."""
    mixed, state = run(shape, sizes, form, dtype)
    return mixed.tobytes(), b"".join(array.tobytes() for array in state)


def run(
    shape: Shape, sizes: list[int], form: Callable[..., Any] | None = None, dtype: Any = np.float32
) -> tuple[Array, DeltaState]:
    nets, rows = drawn(shape, dtype)
    state, mixed = empty_state(shape, dtype), []
    for first, stop in pairwise(np.cumsum([0, *sizes]).tolist()):
        part = np.ascontiguousarray(rows[:, first:stop])
        out = np.full((shape.num_lanes, stop - first, shape.heads, shape.value_dim), np.nan, dtype)
        advance = (form or delta_rule.bound)(nets, DeltaOperands(part, [state], out), Scratch())
        advance(0, 0, stop - first, stop - first)
        mixed.append(out)
    return np.concatenate(mixed, axis=1), state


def in_numpy(nets: LaneNets, operands: DeltaOperands, scratch: Scratch) -> Any:
    return delta_rule.bound_in_numpy(nets, operands)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape: Shape) -> None:
    expected, state = run(shape, [NUM_TOKENS], in_numpy, np.float64)
    for form in (None, in_numpy):
        found, left = run(shape, [NUM_TOKENS], form)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
        assert all(np.abs(a - b).max() < 2e-6 * np.abs(b).max() for a, b in zip(left, state, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_passes(shape: Shape) -> None:
    one_by_one = passes(shape, [1] * NUM_TOKENS)
    for sizes in ([NUM_TOKENS], [2, 3, 16, 1, 19], [20, 21]):
        assert passes(shape, sizes) == one_by_one
        assert passes(shape, sizes, in_numpy) == passes(shape, [1] * NUM_TOKENS, in_numpy)


def test_bits_do_not_depend_on_other_lanes() -> None:
    shape = Shape(3, 1, 4, 9, 33, 4)
    nets, rows = drawn(shape)
    together = run(shape, [NUM_TOKENS])[0]
    for lane in range(3):
        own = slice(lane, lane + 1)
        one = LaneNets(nets.taps[own], nets.rates[own], nets.dt_bias[own], nets.norm[own], nets.key_heads, nets.key_dim, nets.eps)
        mixed = np.empty_like(together[own])
        operands = DeltaOperands(rows[own], [empty_state(shape._replace(num_lanes=1))], mixed)
        delta_rule.bound(one, operands, Scratch())(0, 0, NUM_TOKENS, NUM_TOKENS)
        assert np.array_equal(mixed, together[own])


@pytest.mark.parametrize("form", [None, in_numpy], ids=["C", "NumPy"])
@pytest.mark.parametrize("num_kept", [1, 2, 5])
def test_drafts_change_nothing_until_they_are_replayed(num_kept: int, form: Callable[..., Any] | None) -> None:
    """A pass of five tokens leaves the state of its first; some of the others follow from their inputs alone."""
    shape = Shape(2, 2, 4, 17, 50, 4)
    bind = form or delta_rule.bound
    nets, rows = drawn(shape)
    gates = slice(nets.channels, nets.channels + shape.heads * shape.value_dim)
    inputs = np.ascontiguousarray(np.delete(rows, np.r_[gates], axis=2))
    state, mixed = empty_state(shape), np.zeros((2, NUM_TOKENS, shape.heads, shape.value_dim), np.float32)
    expected, _ = run(shape, [NUM_TOKENS], form)
    advance, replay = (
        bind(nets, operands, Scratch())
        for operands in (DeltaOperands(rows, [state], mixed), DeltaOperands(inputs, [state], None))
    )
    for first in (0, num_kept):
        mixed[...] = 0
        advance(0, first, 5, 1)
        assert np.array_equal(mixed[:, first : first + 5], expected[:, first : first + 5])
        assert not np.delete(mixed, np.s_[first : first + 5], axis=1).any()
        if num_kept > 1:
            replay(0, first + 1, num_kept - 1, num_kept - 1)
    kept = run(shape, [2 * num_kept], form)[1]
    assert all(np.array_equal(a, b) for a, b in zip(state, kept, strict=True))


@pytest.mark.parametrize("march", MARCHES)
def test_every_instruction_set_gives_the_same_bits(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_instructions(march):
        pytest.skip(f"this processor does not run {march}")
    own = [passes(shape, [NUM_TOKENS]) for shape in SHAPES]
    monkeypatch.setattr(host_library, "SOURCES", ("delta_rule.c",))
    path = host_library.built("cc", (*host_library.OPTIONS, "-O1", f"-march={march}"), tmp_path)
    monkeypatch.setattr(host_library, "loaded", lambda: ctypes.CDLL(str(path)))
    assert [passes(shape, [NUM_TOKENS]) for shape in SHAPES] == own
