"""What prefill of all models does alike, in plain array code."""

from __future__ import annotations

import numpy as np

from kog_dist.model.spec import ModelSpec
from kog_dist.workers.prefill.base.arrays import Array, float32_of, library_of


def multiply(x: Array, matrix: Array, out: Array) -> None:
    """out (L, size, rows) = x (L, size, K) times the transposed `matrix` (L, rows, K), summed in float64."""
    out[...] = x.astype(np.float64) @ matrix.astype(np.float64).swapaxes(1, 2)


def rotated(heads: Array, rope: Array, start: int) -> Array:
    """Heads (L, size, heads, head_dim) of the positions from `start` on: their first values, as many as `rope` has, are rotated.
    Padding may stand behind the last position of `rope`.
    """
    xp, width = library_of(heads), 2 * rope.shape[1]
    positions = xp.minimum(xp.arange(start, start + heads.shape[1]), len(rope) - 1)
    cos, sin = (rope[positions][:, None, :, part] for part in range(2))  # (size, 1, rotary_dim / 2)
    even, odd = heads[..., 0:width:2], heads[..., 1:width:2]
    turned: Array = xp.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1).reshape(*heads.shape[:-1], width)
    return turned if width == heads.shape[-1] else xp.concatenate([turned, heads[..., width:]], axis=-1)


def inverse_rms(values: Array, eps: float) -> Array:
    """1 / root of the mean square over the last dimension, (..., 1) float32."""
    squares = values.astype(np.float64) ** 2
    inverse: Array = (1 / library_of(values).sqrt(squares.mean(-1, keepdims=True) + eps)).astype(np.float32)
    return inverse


def silu(values: Array) -> Array:
    """Of float32 values."""
    quotient: Array = values / (1 + library_of(values).exp(-values))
    return quotient


def is_finite(values: Array) -> bool:
    """Whether all of them are."""
    return bool(library_of(values).isfinite(values).all())


def attend(
    spec: ModelSpec, query: Array, keys: Array, values: Array, start: int, window: int | None, sinks: Array | None = None
) -> Array:
    """Outputs (L, size, heads of a lane * head_dim) of `query` (size, L * heads, head_dim), whose rows stand at the positions
    from `start` on. A token sees itself and the `window` - 1 before it, or all, of `keys` and `values` (positions, KV heads,
    head_dim). `sinks`: float32 (L * heads), one more logit of each head.
    """
    xp, size = library_of(query), len(query)
    end = start + size
    positions = xp.arange(start, end)[:, None]
    first = 0 if window is None else max(0, start - window + 1)
    others = xp.arange(first, end)
    seen = others <= positions
    if window is not None:
        seen &= others > positions - window
    group = spec.lane_heads // spec.lane_kv_heads
    heads = query.astype(np.float64).reshape(size, -1, group, spec.head_dim).transpose(1, 2, 0, 3)
    k, v = (part[first:end].astype(np.float64).swapaxes(0, 1)[:, None] for part in (keys, values))
    scores = xp.where(seen, (heads @ k.swapaxes(2, 3)) * spec.head_dim**-0.5, -xp.inf)  # (KV heads, group, size, positions)
    top = scores.max(-1, keepdims=True)
    chances = xp.exp(scores - top)
    total = chances.sum(-1, keepdims=True)
    if sinks is not None:
        total += xp.exp(sinks.astype(np.float64).reshape(-1, group, 1, 1) - top)
    mixed = (chances / total @ v).astype(query.dtype)  # (KV heads, group, size, head_dim)
    by_lane = mixed.reshape(-1, spec.lane_heads, size, spec.head_dim)
    outputs: Array = by_lane.swapaxes(1, 2).reshape(len(by_lane), size, -1)
    return outputs


def tree_sum(partial: Array) -> Array:
    """Sum over the lanes (the first dimension), float32, as a binary tree of neighbours."""
    terms: Array = float32_of(partial)
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    total: Array = terms[0]
    return total
