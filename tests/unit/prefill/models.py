"""Small models for the tests of prefill: everything of one rank on a CPU, and the interpreter that goes on from its cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import Checkpoint
from kog_dist.model.layout import EMBEDDING
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import MAX_CTAS
from kog_dist.workers.prefill.base.arrays import BFLOAT16, Array, float32_of, rounded
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import NO_LIMIT, Work
from kog_dist.workers.prefill.base.matrices import matrices_of
from kog_dist.workers.prefill.buffers.dense import DenseBuffers
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.dense.layers import DenseLayers
from kog_dist.workers.prefill.dense.operations import PlainDenseOperations
from kog_dist.workers.prefill.exchange.lane_sums import OneRank, SumExchange
from kog_dist.workers.prefill.experts.plain import plain_experts
from kog_dist.workers.prefill.lanes.layers import Layers
from kog_dist.workers.prefill.lanes.operations import PlainOperations
from kog_dist.workers.prefill.prefill import HostRunner, Prefill

SPLITS = 8
SIZES = (8, 16)
CACHE_DTYPES: dict[str, DTypeLike] = {"bfloat16": BFLOAT16, "float16": np.float16, "fp8": np.uint8, "int4": np.uint8}
SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_layers": 5, "num_heads": 16, "num_kv_heads": 8, "intermediate_size": 128, "vocab_size": 97,
    "max_context": 256, "num_lanes": 4, "delay": 2, "sliding_window": 37, "window_layers": (0, 1, 3),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "delayed": {},
    "delay 1, norm scales per lane": {"delay": 1, "shared_norm_scale": False},
    "delay beyond the layers": {"delay": 9, "early_comm": False},
    "no early communication": {"early_comm": False},
    "no attention communication": {"attention_comm": False},
    "all blocking": {"delay": 0, "num_lanes": 2},
    "biases, normed heads": {"delay": 0, "own_head_dim": 8, "qkv_bias": True, "qk_norm": True},
    "one lane, no windows": {"num_lanes": 1, "delay": 0, "sliding_window": None, "window_layers": ()},
    "many query heads per KV head": {"num_kv_heads": 4},
}  # fmt: skip


def layout_of(
    spec: ModelSpec, num_lanes: int, kv_dtype: str = "bfloat16", *, whole_windows: bool = False, splits: int = SPLITS
) -> CacheLayout:  # fmt: skip
    """As `KernelShape` has it."""
    return CacheLayout(spec, num_lanes, kv_dtype, splits, MAX_CTAS, whole_windows=whole_windows)


class Rank:
    """One rank's prefill, with its own copy of the monokernel's cache."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        lanes: range | None = None,
        dtype: DTypeLike = np.float32,
        kv_dtype: str = "bfloat16",
        exchange: SumExchange | None = None,
        sizes: tuple[int, ...] = SIZES,
        exact_size: int = 0,
        split_size: int = SIZES[0],
        work: Work = NO_LIMIT,
        whole_windows: bool = False,
    ) -> None:
        self.spec, self.checkpoint = checkpoint.spec, checkpoint
        self.lanes = lanes or range(self.spec.num_lanes)
        self.kv_dtype = kv_dtype
        self.layout = layout_of(self.spec, len(self.lanes), self.kv_dtype, whole_windows=whole_windows)
        self.cache: Array = np.zeros(self.layout.num_values, CACHE_DTYPES[kv_dtype])
        self.matrices = matrices_of(self.spec, self.lanes, self.tensor, dtype).layers()
        self.buffers: Any
        self.layers: Any
        if self.spec.has_one_stream:
            exact_size = 0
            self.buffers = DenseBuffers(self.layout, dtype, max(sizes), "cpu")
            layers = range(self.spec.num_layers if self.spec.experts is not None else 0)
            self.experts = [plain_experts(self.spec, layer, self.lanes, self.tensor) for layer in layers]
            of_dense = PlainDenseOperations(self.buffers, self.tensor(EMBEDDING), self.cache, self.experts)
            self.layers = DenseLayers(self.spec, self.matrices, of_dense, exchange or OneRank())
        else:
            self.buffers = Buffers(self.layout, dtype, max(*sizes, exact_size), "cpu", split_size=split_size)
            operations = PlainOperations(self.buffers, self.tensor(EMBEDDING), self.cache)
            self.layers = Layers(self.spec, self.matrices, operations, exchange or OneRank())
        runner = HostRunner(self.layers, self.buffers, sizes, exact_size=exact_size)
        self.prefill = Prefill(runner, max_context=self.spec.max_context, sizes=sizes, exact_size=exact_size, work=work)

    def tensor(self, name: str) -> Array:
        return self.checkpoint.tensor(name)

    def embedding(self) -> Array:
        """As the kernels have it: in bfloat16."""
        return rounded(self.tensor(EMBEDDING), BFLOAT16)

    def run(self, ids: list[int], start: int = 0) -> int:
        return self.prefill.run(ids, start, should_stop=lambda: False)

    def interpreter(self, num_tokens: int) -> Interpreter:
        """An interpreter whose KV cache holds what the monokernel's does, as far as windowed layers still have it."""
        engine = interpreter(self.checkpoint, self.kv_dtype)
        for layer in range(self.spec.num_layers):
            first = self.layout.first_kept(layer, num_tokens)
            for part, kept in zip(
                self.layout.load(self.cache, layer, first, num_tokens), (engine.memory.keys, engine.memory.values), strict=True
            ):
                by_lane = float32_of(part).swapaxes(0, 1).reshape(len(self.lanes), -1, num_tokens - first, self.spec.head_dim)
                kept[layer][0][:, :, first:num_tokens] = by_lane
        engine._cursor.held[0] = num_tokens
        return engine


def interpreter(checkpoint: Checkpoint, kv_dtype: str) -> Interpreter:
    """All lanes on one CPU rank."""
    spec = checkpoint.spec
    return Interpreter(make_plan(spec, 1), 0, checkpoint.rank_weights(range(spec.num_lanes)), None, kv_dtype=kv_dtype)


def token_ids(spec: ModelSpec, count: int) -> list[int]:
    """A prompt."""
    ids: list[int] = np.random.default_rng(1).integers(0, spec.vocab_size, count).tolist()
    return ids


def relative_error(found: Any, wanted: Any) -> float:
    """|found - wanted| / |wanted|."""
    a, b = (np.asarray(part, np.float64) for part in (found, wanted))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def ordered(values: Array) -> Array:
    """Columns in the order of products: of each 32 the pairs of the same place in a unit of eight together."""
    units = values.reshape(*values.shape[:-1], -1, 4, 4, 2)[
        ..., [0, 2, 1, 3], :
    ]  # thread, pair: the second and third change places
    return np.ascontiguousarray(np.swapaxes(units, -2, -3)).reshape(values.shape)
