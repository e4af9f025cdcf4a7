"""Small models with delta nets or gated attention for tests of prefill: one rank on a CPU, and what the interpreter says."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.layout import EMBEDDING, head_name
from kog_dist.model.spec import ModelSpec
from kog_dist.model.weights import RankReader
from kog_dist.model.written_checkpoint import random_tensors
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.arrays import BFLOAT16, Array, float32_of, rounded
from kog_dist.workers.prefill.base.chunks import NO_LIMIT, Work
from kog_dist.workers.prefill.base.matrices import matrices_of
from kog_dist.workers.prefill.buffers.dense import DenseBuffers
from kog_dist.workers.prefill.delta.state_layout import StateLayout
from kog_dist.workers.prefill.dense.layers import DenseLayers
from kog_dist.workers.prefill.dense.operations import PlainDenseOperations
from kog_dist.workers.prefill.exchange.lane_sums import OneRank, SumExchange
from kog_dist.workers.prefill.experts.plain import plain_experts
from kog_dist.workers.prefill.prefill import HostRunner, Prefill
from tests.unit.prefill.models import CACHE_DTYPES, layout_of
from tests.unit.test_kinds_twin import Tensors

NUM_CTAS = 16  # of the monokernel: so a head of few lanes has several slices
NUM_CACHES = 2


class StoredRank:
    """Prefill of a model of bfloat16 values on one rank, with KV caches and states of its own. `lanes`: by default all."""

    def __init__(
        self, spec: ModelSpec, *, dtype: DTypeLike = np.float32, kv_dtype: str = "float16", sizes: tuple[int, ...] = (16, 64),
        work: Work = NO_LIMIT, lanes: range | None = None, exchange: SumExchange | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.kv_dtype, self.sizes = spec, kv_dtype, sizes
        lanes = lanes or range(spec.num_lanes)
        self.tensors = self.made_tensors()
        self.layout, self.delta = layout_of(spec, len(lanes), kv_dtype), DeltaShape.of(spec, len(lanes), NUM_CTAS, self.terms)
        self.cache: Array = np.zeros(NUM_CACHES * self.layout.num_values, CACHE_DTYPES[kv_dtype])
        num_values = 0 if self.delta is None else StateLayout(self.delta).num_values
        self.states = np.zeros(NUM_CACHES * num_values, np.float32)
        self.matrices = self.made_matrices(lanes, dtype)
        self.buffers = DenseBuffers(self.layout, dtype, max(sizes), "cpu", self.delta)
        layers = range(spec.num_layers if spec.experts is not None else 0)
        self.experts = [plain_experts(spec, layer, lanes, self.tensors.__getitem__) for layer in layers]
        self.operations = self.made_operations()
        self.layers = DenseLayers(spec, self.matrices, self.operations, exchange or OneRank())
        runner = HostRunner(self.layers, self.buffers, sizes)
        self.prefill = Prefill(runner, max_context=spec.max_context, sizes=sizes, work=work)

    terms = 1  # rows of codes that a factor of a head is

    def made_tensors(self) -> dict[str, Any]:
        of_seed = random_tensors(self.spec, 3).items()
        return {name: float32_of(rounded(np.asarray(values, np.float32), BFLOAT16)) for name, values in of_seed}

    def made_matrices(self, lanes: range, dtype: DTypeLike) -> list[Any]:
        return matrices_of(self.spec, lanes, self.tensors.__getitem__, dtype).layers()

    def made_operations(self) -> Any:
        return PlainDenseOperations(self.buffers, self.tensors[EMBEDDING], self.cache, self.experts, self.states)

    def run(self, ids: list[int], start: int = 0, cache: int = 0) -> int:
        return self.prefill.run(ids, start, should_stop=lambda: False, cache=cache)

    def logits(self) -> Any:
        """Of the prompt's last token, from its stream."""
        stream = self.buffers.last_streams[0].astype(np.float64)
        norm = self.tensors["model.norm.weight"] + self.spec.layers[0].norm.adds_one
        normed = stream / np.sqrt((stream**2).mean() + self.spec.norm_eps) * norm
        return self.tensors[head_name(self.spec)].astype(np.float64) @ normed

    def states_of(self, position: int, cache: int = 0) -> list[tuple[Any, Any]]:
        """State and last inputs of the convolution of all nets."""
        if self.delta is None:
            return []
        layout = StateLayout(self.delta)
        own = self.states[cache * layout.num_values :][: layout.num_values]
        return [layout.load(own, net, position) for net in range(len(self.delta.layers))]


class Wanted:
    """What the interpreter says in float64 of every position of a prompt."""

    def __init__(self, rank: StoredRank, ids: list[int], behind: tuple[int, ...] = ()) -> None:
        source: Any = Tensors(rank.spec, rank.tensors)
        lanes = tuple(range(rank.spec.num_lanes))
        weights = RankReader(source, lanes, lanes, np.dtype(np.float64)).read()
        engine = Interpreter(make_plan(rank.spec, 1), 0, weights, None, dtype=np.float64, kv_dtype=rank.kv_dtype)
        nets = [] if rank.delta is None else rank.delta.layers
        self.logits, self.states = list[Any](), dict[int, list[tuple[Any, Any]]]()
        for at, token in enumerate(ids):
            self.logits.append(engine.step(token, at, SamplingParams(), gather_logits=True).logits)
            if at + 1 in behind or at + 1 == len(ids):
                kept = [engine.memory.states[layer][0] for layer in nets]
                self.states[at + 1] = [(heads.copy(), past.copy()) for heads, past in kept]
