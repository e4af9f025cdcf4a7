"""The operations of a chunk on a GPU: products by kernels of our own, with what comes behind them, or by cuBLAS, where those do
not fit or are not worth it; attention of our own; and the fused kernels of prefill.cu for the rest.

All of it is queued on cupy's current stream and reads positions from device memory, so a chunk can be captured once and replayed
for any place in any prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.cuda.driver import Kernel
from kog_dist.model.spec import ReduceMode
from kog_dist.workers.prefill.attention.choice import attention_for
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.base.shared_abi import MAX_THREADS, UNIT, threads_for
from kog_dist.workers.prefill.buffers.lanes import Buffers, Rows
from kog_dist.workers.prefill.gemm.cublas_autotune import Products, algorithms_kept
from kog_dist.workers.prefill.gemm.gemm_abi import tile_shapes
from kog_dist.workers.prefill.gemm.hopper_gemm import Tiles, tiles_on_gpu
from kog_dist.workers.prefill.lanes.operations import wanted_rows
from kog_dist.workers.prefill.lanes.prefill_abi import APPEND_ROWS, PREFILL_PARAMS, prefill_header

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import LayerMatrices

_RESIDUALS = tuple(f"residual_{mode}" for mode in ("blocking", "blocking_alone", "delayed", "delayed_alone", "local"))
_KERNELS = (
    "begin", "load_cache", "store_cache", "embed", "embed_split", "append", "append_split", "lane_sum", "lane_sum_exact",
    "swiglu", "swiglu_exact", "take_last", "take_last_split", "take_last_exact", "give_streams",
    *(f"{name}{form}" for name in _RESIDUALS for form in ("", "_split", "_exact")),
)  # fmt: skip
_MOST_COPYING = 256  # thread blocks of a layer that copy keys and values between the caches
_MOST_APPENDING = 1024  # thread blocks of `append`: each waits for its first loads


class DeviceOperations:
    """`Operations` on a GPU. The products' type is binary16.

    `embedding` is (vocab, hidden) in `weight_dtype`; `cache` the monokernel's, of which `cache_number` says one, in
    `kv_dtype`. Raises CompileError or LaunchError.
    """

    def __init__(self, buffers: Buffers, embedding: Array, cache: Array, *, weight_dtype: str, kv_dtype: str) -> None:
        self.buffers, self.spec, self.layout = buffers, buffers.spec, buffers.layout
        header = prefill_header(self.layout, num_positions=buffers.keys.shape[1], weight_dtype=weight_dtype, kv_dtype=kv_dtype)
        cubin = compiled.build("prefill", header)
        self.build_log = cubin.log
        self.products = Products(algorithms_kept())
        self._bind(embedding, cache, {name: partial(compiled.launch, Kernel(cubin.path, name, 0)) for name in _KERNELS})
        self._attention, self._tiles = attention_for(self.layout), _tiles_for(self.layout, kv_dtype)

    def _bind(self, embedding: Array, cache: Array, launchers: Launchers) -> None:
        """`launchers`: see `KernelCalls`."""
        buffers = self.buffers
        arrays = {
            "prompt": buffers.prompt, "next_start": buffers.next_start, "overflow": buffers.overflow, "embedding": embedding,
            "rope": buffers.rope, "keys": buffers.keys, "values": buffers.values, "cache": cache,
            "cache_number": buffers.cache_number, "last_position": buffers.last_position, "last_streams": buffers.last_streams,
        }  # fmt: skip
        self._launch = KernelCalls(PREFILL_PARAMS, launchers, arrays)
        self._row_threads = threads_for(self.spec.hidden_size // UNIT)

    def begin(self, rows: Rows) -> None:
        """See `Operations`."""
        self._launch("begin", 1, 1, size=rows.size, place=rows.place)

    def embed(self, rows: Rows, scale: Array) -> None:
        """See `Operations`."""
        self._launch(
            "embed_split" if rows.is_split else "embed", rows.size, self._row_threads, size=rows.size, place=rows.place,
            stream=rows.stream, inverse_rms=rows.inverse_rms, scale=scale, num_written=len(rows.kept_stream),
        )  # fmt: skip

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """See `Operations`. That of `down` by our own kernel."""
        tiles = self._worthwhile("down", x.shape[1])
        if tiles is not None and tiles.fits(matrix) and out.dtype == x.dtype and out.flags.c_contiguous:
            tiles.run(x, matrix, out=out)
            return
        self.products(x, matrix, out)

    def gate(self, rows: Rows, matrix: Array) -> None:
        """See `Operations`. One kernel or two."""
        tiles = None if rows.is_exact else self._worthwhile("gate_up", rows.size)
        if tiles is not None:
            tiles.run(rows.gated, matrix, inverse_rms=rows.inverse_rms, out=rows.activation)
            return
        self.product(rows.gated, matrix, rows.gate_up)
        self.swiglu(rows)

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        """See `Operations`. One kernel or two."""
        tiles = self._worthwhile("qkv", rows.size) if queries and others and not rows.is_split else None
        if tiles is not None:
            tiles.run(
                rows.stream,
                matrices.wqkv,
                inverse_rms=rows.inverse_rms,
                rope=self.buffers.rope,
                place=rows.place,
                query=rows.query,
                keys=self.buffers.keys[layer],
                values=self.buffers.values[layer],
                overflow=self.buffers.overflow,
            )
            return
        rows_of = wanted_rows(self.spec, queries=queries, others=others)
        self.product(rows.stream, matrices.wqkv[:, rows_of], rows.qkv[:, :, rows_of])
        self.append_product(rows, matrices, layer, queries=queries, others=others)

    def _worthwhile(self, product: str, size: int) -> Tiles | None:
        """Our kernel, where it is faster than cuBLAS. Whether it is changes no bits, as far as cuBLAS sums as on an H200."""
        tiles = self._tiles.get(product)
        return tiles if tiles is not None and tiles.is_worth(self.layout.num_lanes, size) else None

    def append_product(
        self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True
    ) -> None:
        """What `append` does with `qkv`."""
        num_ctas = min(_MOST_APPENDING, self.layout.num_lanes * -(-rows.size // APPEND_ROWS))
        of_queries = self.spec.lane_heads * self.spec.head_dim // 4
        first, last = 0 if queries else of_queries, rows.qkv.shape[2] // 4 if others else of_queries
        self._launch(
            "append_split" if rows.is_split else "append", num_ctas, threads_for(last - first), early=True, size=rows.size,
            first=first, last=last, place=rows.place, qkv=rows.qkv, inverse_rms=rows.inverse_rms, query=rows.query,
            keys=self.buffers.keys[layer], values=self.buffers.values[layer],
        )  # fmt: skip

    def attend(self, rows: Rows, layer: int) -> Array:
        """See `Operations`."""
        keys, values = self.buffers.keys[layer], self.buffers.values[layer]
        return self._attention.run(rows.query, keys, values, rows.place, self.spec.window(layer))

    def lane_sum(self, rows: Rows, partial: Array, own_sum: Array) -> None:
        """See `Operations`."""
        kernel = "lane_sum_exact" if rows.is_exact else "lane_sum"
        self._launch(kernel, rows.size, self._row_threads, size=rows.size, partial=partial, own_sum=own_sum)

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Array,
        past: Array | None,
        total: Array | None,
        own_sum: Array | None,
        unscale: Array | None,
        scale: Array | None,
    ) -> None:
        """See `Operations`."""
        alone = "_alone" if total is None and mode is not ReduceMode.LOCAL else ""
        self._launch(
            f"residual_{mode.value}{alone}{_form(rows)}", rows.size, self._row_threads, size=rows.size, stream=rows.stream,
            inverse_rms=rows.inverse_rms, partial=partial, past=past, total=total, own_sum=own_sum, unscale=unscale, scale=scale,
            is_shared=int(rows.stream.strides[0] == 0), num_written=len(after.kept_stream),
            early=total is None,  # else it is not a product alone that comes before
            place=rows.place,
        )  # fmt: skip

    def swiglu(self, rows: Rows) -> None:
        """activation = silu(gate) * up, with 1 / rms applied to both."""
        self._launch(
            "swiglu_exact" if rows.is_exact else "swiglu",
            rows.size * self.layout.num_lanes,
            threads_for(self.spec.lane_ffn // UNIT),
            early=True,
            size=rows.size,
            inverse_rms=rows.inverse_rms,
            gate_up=rows.gate_up,
            activation=rows.activation,
        )

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Array, Array]]) -> None:
        """See `Operations`."""
        (partial, last_partial), (past, last_past) = (*pasts, (None, None), (None, None))[:2]
        self._launch(
            f"take_last{_form(rows)}", self.layout.num_lanes, self._row_threads, size=rows.size, place=rows.place,
            stream=rows.stream, inverse_rms=rows.inverse_rms, query=rows.query, last_place=last.place, last_stream=last.stream,
            last_inverse_rms=last.inverse_rms, last_query=last.query, partial=partial, past=past,
            last_partial=last_partial, last_past=last_past,
        )  # fmt: skip

    def give_streams(self, last: Rows) -> None:
        """See `Operations`."""
        self._launch("give_streams", self.layout.num_lanes, self._row_threads, stream=last.stream)

    def load_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        if last > first:
            self._copy("load_cache", first, last)

    def store_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        if last > first:
            self._copy("store_cache", first, last)

    def _copy(self, kernel: str, first: int, last: int) -> None:
        """As many thread blocks for each layer, whose threads have four neighbouring values of two positions at a time."""
        items = self.layout.heads * (last - first) * self.spec.head_dim // 8
        num_ctas = max(1, min(_MOST_COPYING, items // MAX_THREADS))
        self._launch(kernel, num_ctas * self.spec.num_layers, MAX_THREADS, first=first, last=last)


def _form(rows: Rows) -> str:
    return "_exact" if rows.is_exact else "_split" if rows.is_split else ""


def _tiles_for(layout: CacheLayout, kv_dtype: str) -> dict[str, Tiles]:
    """Products of our own, likewise. Not on one rank of several, where sums between GPUs take
    multiprocessors from products: these kernels give each as many tiles as any other.
    """
    if layout.num_lanes < layout.spec.num_lanes:
        return {}
    return {product: tiles_on_gpu(shape) for product, shape in tile_shapes(layout, kv_dtype).items()}


def observer(take: Callable[[str, Array], None], wants: Callable[[str], bool], weight_dtype: str) -> Callable[[str, Any], None]:
    """For `load_weights`: hands tensors of 16-bit words on the GPU (cupy) to `Matrices.take`, without a copy."""

    def observe(name: str, words: Any) -> None:
        if wants(name):
            take(name, words if weight_dtype == "bfloat16" else words.view(np.float16))

    return observe
