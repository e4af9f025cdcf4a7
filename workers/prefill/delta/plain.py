"""Delta nets of a chunk of tokens in plain array code: what their operations mean, and what runs on a CPU.

The rule takes blocks of `BLOCK` tokens. With the decay D[i, j] from behind token j to behind token i, it solves what a block
changes, u = beta (v - S^T k) for each token, as one triangular system; then the block's outputs and the next state are products:

    A[i, j] = beta_i (k_i k_j) D[i, j] for j < i,    T = (1 + A)^-1
    P[i, j] = (q_i k_j) D[i, j] for j <= i
    u = T beta (v - D[., first] K S),    out = D[., first] Q S + P u,    S = D[last, first] S + (D[last, .] K)^T u
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kog_dist.model.layers import DeltaNet
from kog_dist.workers.prefill.base.arrays import Array, float32_of, library_of
from kog_dist.workers.prefill.base.delta_blocks import BLOCK
from kog_dist.workers.prefill.base.reference import inverse_rms, silu

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import DenseMatrices

LEAST_LOG = -30.0  # of a token's decay: 1e-13, of which nothing is left in float32
UNIT_EPS = 1e-6  # under the root of the norms of queries and keys


class DeltaInputs(NamedTuple):
    """What the rule takes of each token, float32: queries and keys (L, size, key heads, key_dim), values (L, size, heads,
    value_dim), logarithms of decays and betas (L, size, heads). Rows that are no tokens have zeros: they change no state.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array
    beta: Array


def inputs_of(
    net: DeltaNet, projected: Array, past: Array, matrices: DenseMatrices, num_tokens: int, terms: int = 1
) -> DeltaInputs:  # fmt: skip
    """Of `projected` (L, size, rows of a lane's input), float32, whose first `num_tokens` rows are tokens; `terms` of a row are
    one factor of a head. `past` (L, conv_width - 1, channels) are the convolution's inputs before it.
    """
    xp = library_of(projected)
    taps, factors = matrices.delta_taps, matrices.delta_factors
    assert taps is not None
    assert factors is not None
    lanes, size, _ = projected.shape
    heads = factors.shape[1] // 2
    key_heads = heads * net.num_key_heads // net.num_value_heads
    keys, channels = key_heads * net.key_dim, taps.shape[1]
    rows = xp.concatenate([past, projected[..., :channels]], axis=1)
    convolved = xp.zeros((lanes, size, channels), np.float32)
    for tap in range(net.conv_width):
        convolved += rows[:, tap : tap + size] * taps[:, None, :, tap]
    activated = silu(convolved)
    activated[:, num_tokens:] = 0
    query, key = (activated[..., first : first + keys].reshape(lanes, size, key_heads, -1) for first in (0, keys))
    query, key = (part * _inverse_length(part) for part in (query, key))
    of_factors = projected[..., -2 * heads * terms :].reshape(lanes, size, 2, heads, terms).sum(-1)
    a, b = of_factors[:, :, 0], of_factors[:, :, 1]
    log_decay = -xp.exp(factors[:, None, :heads]) * xp.logaddexp(np.float32(0), a + factors[:, None, heads:])
    log_decay, beta = xp.maximum(log_decay, np.float32(LEAST_LOG)), 1 / (1 + xp.exp(-b))
    log_decay[:, num_tokens:], beta[:, num_tokens:] = 0, 0
    value = activated[..., 2 * keys :].reshape(lanes, size, heads, -1)
    return DeltaInputs(query * np.float32(net.key_dim**-0.5), key, value, log_decay, beta)


def _inverse_length(values: Array) -> Array:
    squares = (values.astype(np.float64) ** 2).sum(-1, keepdims=True)
    inverse: Array = (1 / library_of(values).sqrt(squares + UNIT_EPS)).astype(np.float32)
    return inverse


def advance(state: Array, inputs: DeltaInputs) -> tuple[Array, Array]:
    """Outputs (L, size, heads, value_dim), and the state (L, heads, key_dim, value_dim) behind all tokens. Sums are float64, a
    state between blocks float32.
    """
    xp, group = library_of(state), inputs.value.shape[2] // inputs.query.shape[2]
    size = inputs.value.shape[1]
    outputs = xp.zeros(inputs.value.shape, np.float32)
    for first in range(0, size, BLOCK):
        block = slice(first, min(first + BLOCK, size))
        query, key = (float32_of(part[:, block]).astype(np.float64).swapaxes(1, 2).repeat(group, 1) for part in inputs[:2])
        value = float32_of(inputs.value[:, block]).astype(np.float64).swapaxes(1, 2)  # (L, heads, tokens, value_dim)
        logs, beta = (part[:, block].astype(np.float64).swapaxes(1, 2) for part in inputs[3:])
        logs = logs.cumsum(-1)
        decay, lower = xp.exp(logs[..., None]), xp.tril(xp.ones((logs.shape[-1],) * 2))
        between = xp.exp(xp.where(lower, logs[..., None] - logs[..., None, :], -np.inf))
        keys = key.swapaxes(2, 3)
        system = xp.tril(key @ keys * between, -1) * beta[..., None] + xp.eye(logs.shape[-1])
        change = xp.linalg.solve(system, beta[..., None] * (value - decay * (key @ state)))
        out = decay * (query @ state) + (query @ keys * between) @ change
        outputs[:, block] = out.swapaxes(1, 2)
        state = (decay[..., -1:, :] * state + keys @ (between[..., -1, :, None] * change)).astype(np.float32)
    return outputs, state


def gated(outputs: Array, gates: Array, weights: Array, eps: float) -> Array:
    """The norm of each head's outputs (L, size, heads, value_dim) times `weights` (value_dim,), times silu of `gates`."""
    normed: Array = outputs * inverse_rms(outputs, eps) * weights * silu(gates)
    return normed
