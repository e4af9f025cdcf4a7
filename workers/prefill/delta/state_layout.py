"""Where the monokernel keeps the states of delta nets (phases/delta.cuh), for those who fill or read them from outside.

All of a sequence are float32: (nets, lanes, heads, slices) items. An item is a slice of the columns of a value head's state, four
columns of all keys together, and behind it the last inputs of the convolution: those of position p in row p % conv_width, of all
channels of the head's query and key, and of the slice's columns of the value.
"""

from __future__ import annotations

import numpy as np

from kog_dist.records import dataclass
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.arrays import Array, library_of

FOUR = 4  # columns of a state that stand together


@dataclass(frozen=True)
class StateLayout:
    """The states of one rank, with the place of each value. Arrays of them have `num_values` float32 for each KV cache."""

    shape: DeltaShape

    @property
    def num_values(self) -> int:
        """Of a sequence."""
        return self.shape.num_bytes // 4

    @property
    def columns(self) -> int:
        """Columns of a slice."""
        return self.shape.net.value_dim // self.shape.slices

    def net_of(self, layer: int) -> int:
        """The number of a layer's net among all nets."""
        return self.shape.layers.index(layer)

    def _items(self, states: Array, net: int) -> Array:
        """Items (lanes, heads, slices, values) of a net: a view."""
        shape = self.shape
        every = states.reshape(len(shape.layers), shape.num_lanes, shape.heads, shape.slices, shape.item_values)
        items: Array = every[net]
        return items

    def load(self, states: Array, net: int, position: int) -> tuple[Array, Array]:
        """Behind the first `position` tokens: the state (lanes, heads, key_dim, value_dim), and the last conv_width - 1 inputs of
        the convolution (lanes, conv_width - 1, channels), the oldest first. Zeros where there was no token.
        """
        xp, shape, net_shape = library_of(states), self.shape, self.shape.net
        lanes, heads, width = shape.num_lanes, shape.heads, net_shape.conv_width
        channels = 2 * shape.key_heads * net_shape.key_dim + heads * net_shape.value_dim
        past = xp.zeros((lanes, width - 1, channels), np.float32)
        if position == 0:
            return xp.zeros((lanes, heads, net_shape.key_dim, net_shape.value_dim), np.float32), past
        items = self._items(states, net)
        num_state = net_shape.key_dim * self.columns
        fours = items[..., :num_state].reshape(lanes, heads, shape.slices, self.columns // FOUR, net_shape.key_dim, FOUR)
        state = fours.transpose(0, 1, 4, 2, 3, 5).reshape(lanes, heads, net_shape.key_dim, net_shape.value_dim)
        inputs = items[..., num_state:].reshape(lanes, heads, shape.slices, width, shape.item_channels)
        for row in range(width - 1):
            back = width - 1 - row
            if position < back:
                continue
            slot = inputs[:, :, :, (position - back) % width]
            keys = net_shape.key_dim
            per_key_head = heads // shape.key_heads
            parts = [slot[:, ::per_key_head, 0, part * keys : (part + 1) * keys].reshape(lanes, -1) for part in range(2)]
            past[:, row] = xp.concatenate([*parts, slot[..., 2 * keys :].reshape(lanes, -1)], axis=1)
        return state, past

    def store(self, states: Array, net: int, position: int, state: Array, past: Array) -> None:
        """The same behind `position` tokens, as `load` gives it."""
        shape, net_shape = self.shape, self.shape.net
        lanes, heads, width, keys = shape.num_lanes, shape.heads, net_shape.conv_width, net_shape.key_dim
        items = self._items(states, net)
        num_state = keys * self.columns
        fours = state.reshape(lanes, heads, keys, shape.slices, self.columns // FOUR, FOUR).transpose(0, 1, 3, 4, 2, 5)
        items[..., :num_state] = fours.reshape(lanes, heads, shape.slices, num_state)
        inputs = items[..., num_state:].reshape(lanes, heads, shape.slices, width, shape.item_channels)
        of_keys, per_key_head = shape.key_heads * keys, heads // shape.key_heads
        for row in range(width - 1):
            back = width - 1 - row
            if position < back:
                continue
            slot = inputs[:, :, :, (position - back) % width]
            for part in range(2):
                by_head = past[:, row, part * of_keys : (part + 1) * of_keys].reshape(lanes, -1, keys)
                slot[..., part * keys : (part + 1) * keys] = by_head.repeat(per_key_head, axis=1)[:, :, None]
            slot[..., 2 * keys :] = past[:, row, 2 * of_keys :].reshape(lanes, heads, shape.slices, -1)
