"""Where the interpreter of one rank keeps the values of a plan: preallocated arrays, and which value each holds right now."""

from __future__ import annotations

from contextlib import suppress
from math import prod
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np

from kog_dist.decode.cpu.scratch import Scratch
from kog_dist.decode.plan.recipes import ByPosition, Recurrent, recipes, stream_lanes
from kog_dist.decode.plan.steps import NONE, Kind, Value, place
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.model.aligned import aligned_empty
from kog_dist.model.spec import HeadType, ModelSpec


class Memory:
    """Arrays of one rank, one for each `steps.place` and number of tokens of a pass. All lanes' values are one array.

    `keys` and `values` are lists over layers of lists over the KV caches, and so are `states`: of each the arrays of `Recurrent`.
    `drafts`: of each layer what changes a state by the `num_drafts`
    drafts of a pass, (own lanes, drafts, `Recurrent.replay`); they are of one pass, so all KV caches share them.
    """

    def __init__(
        self, spec: ModelSpec, lanes: tuple[int, ...], dtype: np.dtype[Any], num_kv_caches: int = 1, num_drafts: int = 0
    ) -> None:
        self.spec, self.lanes, self.dtype = spec, lanes, dtype
        self._arrays: dict[tuple[object, ...], Array] = {}
        self.scratch = Scratch()
        self.keys, self.values = (
            [[self._cache(mixer.state) for _ in range(num_kv_caches)] for mixer, _ in recipes(spec)] for _ in ("keys", "values")
        )
        self.states = [[self._state(mixer.state) for _ in range(num_kv_caches)] for mixer, _ in recipes(spec)]
        states = [mixer.state for mixer, _ in recipes(spec)]
        self.drafts = [
            self.empty(len(lanes), num_drafts, state.replay if isinstance(state, Recurrent) else 0) for state in states
        ]

    def _state(self, state: ByPosition | Recurrent | None) -> list[Array]:
        """What a layer keeps of all tokens together, (own lanes, ...) each; nothing where its mixer keeps nothing so."""
        shapes = state.arrays if isinstance(state, Recurrent) else ()
        return [self.empty(len(self.lanes), *shape) for shape in shapes]

    def _cache(self, state: ByPosition | Recurrent | None) -> Array:
        """Keys or values of all positions of a layer; nothing where its mixer keeps none."""
        shape = (state.num_heads, state.head_dim) if isinstance(state, ByPosition) else (0, 0)
        return self._zeros((len(self.lanes), shape[0], self.spec.max_context, shape[1]))

    def _zeros(self, shape: tuple[int, ...]) -> Array:
        """Zeros at the beginning of a page; the system hands out small pages, and only when a position is written.

        In huge pages the first token of each cache, layer and head would take 2 MiB.
        """
        if not prod(shape):
            return np.zeros(shape, self.dtype)
        mapping = mmap(-1, prod(shape) * self.dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(MADV_NOHUGEPAGE)
        return np.frombuffer(mapping, self.dtype).reshape(shape)

    def empty(self, *shape: int) -> Array:
        """Scratch of the interpreter's dtype, zeroed, at a multiple of 64 bytes."""
        array = aligned_empty(shape, self.dtype)
        array[...] = 0
        return array

    def rows(self, value: Value, num_tokens: int) -> Array:
        """The array of all lanes (own lanes, tokens, ...) that `value` is a row of, in passes of so many tokens.

        Without the first axis if the value has no lane.
        """
        shape = self._shape(value)
        key = (*place(value, self.spec.delay), value.lane != NONE, num_tokens, shape)
        if key not in self._arrays:
            lanes = () if value.lane == NONE else (len(self.lanes),)
            self._arrays[key] = self.empty(*lanes, num_tokens, *shape)
        return self._arrays[key]

    def row(self, value: Value) -> Array:
        """The array of one value of a pass of one token, for who looks at what a step left."""
        row: Array = self.of_lane(value, 1)[0]
        return row

    def of_lane(self, value: Value, num_tokens: int) -> Array:
        """The array (tokens, ...) of one value."""
        rows = self.rows(value, num_tokens)
        return rows if value.lane == NONE else rows[self.local(value.lane)]

    def local(self, lane: int) -> int:
        """Place of a lane among those of this rank. Raises PlanError if it is not hosted here."""
        if lane not in self.lanes:
            raise PlanError(f"the plan uses lane {lane} on a rank that hosts lanes {self.lanes}")
        return lane - self.lanes[0]

    def _shape(self, value: Value) -> tuple[int, ...]:
        spec, d, kind = self.spec, self.spec.hidden_size, value.kind
        of_layer = recipes(spec)[value.number] if 0 <= value.number < spec.num_layers else ()
        recipe = next((recipe for recipe in of_layer if kind in recipe.shapes), None)
        if recipe is not None:
            shape, has_lane = recipe.shapes[kind], kind not in recipe.of_rank
        else:
            shape, has_lane = self._common_shapes(d).get(kind, ()), kind in (Kind.PARTIAL, Kind.LOGITS)
            if kind is Kind.STREAM:
                has_lane = NONE not in stream_lanes(spec, self.lanes)
            elif kind is Kind.HEAD_INPUT:
                has_lane = value.lane != NONE  # of each lane, or of all
        if not shape or has_lane != (value.lane != NONE):
            raise PlanError(f"the plan keeps {value} in an array, which it has not")
        return shape

    def _common_shapes(self, d: int) -> dict[Kind, tuple[int, ...]]:
        """Of what is of no recipe."""
        spec = self.spec
        return {
            Kind.STREAM: (d,),
            Kind.PARTIAL: (d,),
            Kind.OWN_SUM: (d,),
            Kind.TOTAL: (d,),
            Kind.HEAD_INPUT: (d * (spec.num_lanes if spec.head_type is HeadType.LANE else 1),),
            Kind.LOGITS: (spec.vocab_slice(0)[1],),
            Kind.ALL_LOGITS: (spec.vocab_size,),
        }

    def num_bytes(self) -> int:
        """Memory of all arrays, the KV caches counted whole."""
        arrays = [*self._arrays.values(), *(cache for layer in (*self.keys, *self.values) for cache in layer)]
        arrays += [array for layer in self.states for cache in layer for array in cache]
        arrays += self.drafts
        return sum(prod(array.shape) * array.itemsize for array in arrays)
