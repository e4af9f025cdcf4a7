"""How much the pool of a CPU rank has room for: blocks of keys and values, and copies of a state that every token changes."""

from __future__ import annotations

from math import prod

from kog_dist.decode.plan.recipes import ByPosition, recipes, state_bytes
from kog_dist.model.spec import ModelSpec

BLOCK_TOKENS = 64
MOST_SLOTS, MOST_STATES = 4096, 1024
_STATES_SHARE = 75  # percent of the pool


def pool_slots(spec: ModelSpec, num_lanes: int, itemsize: int, num_bytes: int) -> tuple[int, int]:
    """Blocks, and copies of a state, of a rank with so many lanes that `num_bytes` have room for.

    Of a model with a state no blocks where there is no room for a copy of it: nobody could go on behind them.
    """
    of_state = state_bytes(spec) * num_lanes // spec.num_lanes
    states = states_within(num_bytes, of_state)
    if of_state and not states:
        return 0, 0
    return min(
        MOST_SLOTS, (num_bytes - states * of_state) // (prod(block_shape(spec, num_lanes, BLOCK_TOKENS)) * itemsize)
    ), states


def states_within(num_bytes: int, of_state: int) -> int:
    """Copies of a state of `of_state` bytes that a pool of so many bytes has room for; 0: or there is no state."""
    return min(MOST_STATES, num_bytes * _STATES_SHARE // 100 // of_state) if of_state else 0


def bytes_of_states(states: int, of_state: int) -> int:
    """Bytes of a pool that has room for so many copies of a state of `of_state` bytes."""
    return -(-100 * states * of_state // _STATES_SHARE)


def block_shape(spec: ModelSpec, num_lanes: int, block_tokens: int) -> tuple[int, ...]:
    """Keys and values; layers that keep them; lanes; heads; positions; dimensions."""
    num_layers = sum(isinstance(mixer.state, ByPosition) for mixer, _ in recipes(spec))
    return 2, num_layers, num_lanes, spec.lane_kv_heads, block_tokens, spec.head_dim
