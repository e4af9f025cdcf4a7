"""What prefill of a rank is compiled from."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.cuda.build import Program
from kog_dist.decode.plan.recipes import share_stream
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.attention.choice import heads_of, is_wide
from kog_dist.workers.prefill.attention.wide_abi import wide_header
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import sizes_within
from kog_dist.workers.prefill.base.compiled import program
from kog_dist.workers.prefill.delta.delta_abi import delta_header
from kog_dist.workers.prefill.dense.dense_abi import dense_header
from kog_dist.workers.prefill.dense.gates_abi import gates_header
from kog_dist.workers.prefill.exchange.sums_abi import sums_header
from kog_dist.workers.prefill.expand.expand_abi import expand_header
from kog_dist.workers.prefill.experts.experts_abi import experts_header
from kog_dist.workers.prefill.gemm.gemm_abi import tile_shapes
from kog_dist.workers.prefill.lanes.prefill_abi import prefill_header
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape, tape_header


def programs(shape: KernelShape, most_rows: int = 0) -> Iterator[Program]:
    """Each device program that `gpu.runner_for` asks for. `most_rows`: of its largest chunk; 0: as engines have it."""
    return (program(stem, header) for stem, header in headers_of(shape, most_rows))


def headers_of(shape: KernelShape, most_rows: int = 0) -> Iterator[tuple[str, str]]:
    """The same as names of sources and their generated headers."""
    spec, layout, heads = shape.spec, CacheLayout.of(shape), heads_of(CacheLayout.of(shape))
    if share_stream(spec):
        yield "dense", dense_header(layout, weight_dtype=shape.weight_dtype, kv_dtype=shape.kv_dtype)
        yield from _of_mixers(shape)
        if spec.experts is not None:
            yield "experts", experts_header(shape)
        if is_multiplied_on_tape(shape):
            yield "tape", tape_header(shape)
    else:
        rows = spec.max_context + (most_rows or max(sizes_within(spec)))
        yield "prefill", prefill_header(layout, num_positions=rows, weight_dtype=shape.weight_dtype, kv_dtype=shape.kv_dtype)
        if shape.num_ranks == 1:
            yield from ((tile.kernel, tile.header()) for tile in tile_shapes(layout, shape.kv_dtype).values())
    if shape.attention_coding is not None:
        yield "expand", expand_header(shape.attention_coding, shape.tape.scale_rows)
    yield ("wide_attention", wide_header(heads)) if is_wide(heads) else ("attention", heads.header())
    if shape.num_ranks > 1:
        yield "allreduce", sums_header(shape.num_ranks)


def _of_mixers(shape: KernelShape) -> Iterator[tuple[str, str]]:
    """What layers of several kinds have besides."""
    if shape.spec.mixed_layers:
        yield "gates", gates_header(shape.spec, shape.num_lanes, shape.delta)
    if shape.delta is not None:
        header = delta_header(shape.delta, shape.spec.norm_eps)
        yield from (("delta", header), ("rule", header))
