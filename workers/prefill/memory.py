"""How much GPU memory prefill takes, without making any of it (and without a GPU)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.recipes import layer_matrix_stages, layer_vectors, router_stage, share_stream
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.model_limits import untried_in_prefill
from kog_dist.workers.prefill.attention.choice import heads_of, is_wide
from kog_dist.workers.prefill.attention.hopper_attention import most_parts_bytes
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import EXACT_SIZE, SPLIT_SIZE, sizes_within
from kog_dist.workers.prefill.base.matrices import plain_ops
from kog_dist.workers.prefill.base.staging import NUM_FLAGS
from kog_dist.workers.prefill.buffers.dense import dense_buffer_bytes
from kog_dist.workers.prefill.buffers.lanes import stream_rows_of
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.exchange.peer_exchange import mailboxes
from kog_dist.workers.prefill.expand.expanded import matrix_shapes
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape

_SMS = 132  # of the GPUs that attention.cu is for
_BESIDES_BYTES = 256 << 20  # workspaces of libraries, temporary values within graphs


def obstacle_to_prefill(spec: ModelSpec, coding: Coding | None = None, kv_dtype: str = "") -> str:
    """Why ranks of this machine cannot go through prompts in chunks; empty if they can (as far as the model decides)."""
    if what := untried_in_prefill(spec):
        return f"the model has {what}, whose prompts no GPU has read by chunks yet"
    finding = misfit(spec, coding, kv_dtype)
    return f"the model has {finding}" if finding else ""


def prefill_bytes(shape: KernelShape) -> dict[str, int]:
    """GPU memory of a rank's prefill by use: the weights once more, of quantised ones one matrix at most; what it works in."""
    from kog_dist.collectives.mailbox import place

    sizes, sums = sizes_within(shape.spec), 0
    if shape.num_ranks > 1:
        boxes = place(mailboxes(shape.spec, max(sizes), shape.num_ranks), shape.num_ranks)
        sums = 8 * sum(box.num_words for box in boxes)
    layout = CacheLayout.of(shape)
    is_dense = share_stream(shape.spec)
    work = dense_buffer_bytes(layout, max(sizes), shape.delta) if is_dense else buffer_bytes(layout, sizes, EXACT_SIZE)
    heads = heads_of(layout)
    parts = 0 if is_wide(heads) else most_parts_bytes(heads, sizes, shape.spec.max_context, _SMS)
    parts += 2 * max(sizes) * heads.num_heads * heads.head_dim  # outputs
    weights = matrix_bytes(shape.spec, shape.num_lanes) if shape.attention_coding is None else expanded_bytes(shape)
    return {"prefill weights": weights, "prefill": work + sums + parts + _BESIDES_BYTES}


def matrix_bytes(spec: ModelSpec, num_lanes: int) -> int:
    """Of `Matrices` in 16 bit, which experts are not in."""
    stages = (stage for layer in range(spec.num_layers) for stage in layer_matrix_stages(spec, layer).values())
    of_matrices = 2 * num_lanes * sum(stage.num_rows * stage.num_columns for stage in stages)
    return of_matrices + _router_bytes(spec) + _vector_bytes(spec, num_lanes)


def expanded_bytes(shape: KernelShape) -> int:
    """Of `ExpandedMatrices`, as far as they are asked for, routers, what delta nets have in 16 bit, and the layers' vectors."""
    spec, places = shape.spec, 8 * 2 * 4 * shape.spec.num_layers * shape.num_lanes
    factors = 0 if share_stream(spec) else _norm_bytes(spec, shape.num_lanes)
    largest = 0 if is_multiplied_on_tape(shape) else 2 * max(map(prod, matrix_shapes(shape).values()))
    plain, nets = plain_ops(shape.attention_coding), () if shape.delta is None else shape.delta.layers
    stages = (layer_matrix_stages(spec, layer)[op] for layer in nets for op in plain)
    largest += 2 * shape.num_lanes * sum(stage.num_rows * stage.num_columns for stage in stages)
    return largest + places + factors + _router_bytes(spec) + _vector_bytes(spec, shape.num_lanes)


def _router_bytes(spec: ModelSpec) -> int:
    router = router_stage(spec)
    if router is None or spec.experts is None:
        return 0
    num_experts = spec.experts.num_experts  # a gate is float32
    return spec.num_layers * router.num_columns * (2 * num_experts + 4 * (router.num_rows - num_experts))


def _norm_bytes(spec: ModelSpec, num_lanes: int) -> int:
    """Two float32 vectors of a layer: norms, or scales and their inverses."""
    return 2 * 4 * spec.num_layers * (1 if spec.shared_norm_scale else num_lanes) * spec.hidden_size


def _vector_bytes(spec: ModelSpec, num_lanes: int) -> int:
    vectors = (one for layer in range(spec.num_layers) for one in layer_vectors(spec, layer).values())
    return _norm_bytes(spec, num_lanes) + 4 * sum(one.num_values * (num_lanes if one.is_by_lane else 1) for one in vectors)


def buffer_bytes(layout: CacheLayout, sizes: Sequence[int], exact_size: int, split_size: int = SPLIT_SIZE) -> int:
    """Of `Buffers` with the rows of all these chunks."""
    spec, largest = layout.spec, max(sizes)
    num_rows = spec.max_context + largest
    kept = 2 * 2 * spec.num_layers * num_rows * layout.heads * spec.head_dim
    rope, prompt, flags = 4 * spec.max_context * spec.head_dim, 4 * num_rows, 4 * NUM_FLAGS
    work = largest * _row_bytes(layout, planes=1, result=2) + (exact_size + 1) * _row_bytes(layout, planes=2, result=4)
    split = (stream_rows_of(largest, largest, split_size)[1] - largest) * _stream_bytes(layout)
    return kept + rope + prompt + flags + work + split + 4 * layout.num_lanes * spec.hidden_size


def _stream_bytes(layout: CacheLayout) -> int:
    """What one row of the streams and of what QKV gives takes."""
    spec = layout.spec
    return layout.num_lanes * (2 * spec.hidden_size + 4 * spec.lane_qkv_rows)


def _row_bytes(layout: CacheLayout, *, planes: int, result: int) -> int:
    """What one position takes of `Rows`; `result`: bytes of a product's value."""
    spec, lanes, slots = layout.spec, layout.num_lanes, 2 * (layout.spec.delay + 1)
    attention = spec.lane_heads * spec.head_dim
    of_plane = (2 * result + 2) * spec.lane_ffn + slots * result * spec.hidden_size
    return planes * _stream_bytes(layout) + lanes * (planes * of_plane + 4 + 2 * attention) + slots * 4 * spec.hidden_size
