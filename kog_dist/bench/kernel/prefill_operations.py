"""What a chunk of a prompt consists of, for `kog-bench prefill`: each operation alone, and whether bits depend on sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from kog_dist.model.layers import AttentionMixer, DeltaNet
from kog_dist.model.spec import ReduceMode
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.dense.device import DenseDeviceOperations
from kog_dist.workers.prefill.dense.operations import wide_product
from kog_dist.workers.prefill.gpu import GraphRunner
from kog_dist.workers.prefill.lanes.device import DeviceOperations

Case = tuple[str, Callable[[], object], int, int]  # name, what to run, its FLOP and bytes (0: not of interest)


def cases(runner: GraphRunner, size: int) -> Iterator[Case]:
    """The operations of a chunk of `size` tokens."""
    if isinstance(runner.layers.operations, DenseDeviceOperations):
        yield from _dense(runner, size)
        return
    yield from _products(runner, size)
    yield from _others(runner, size)


def _dense(runner: GraphRunner, size: int) -> Iterator[Case]:
    rows, do, mixers = runner.rows(size), runner.layers.operations, [layer.mixer for layer in runner.layers.spec.layers]
    attention = next(number for number, mixer in enumerate(mixers) if isinstance(mixer, AttentionMixer))
    matrices = runner.layers.matrices[attention]
    mixed = rows.query.reshape(size, len(rows.partial), -1).swapaxes(0, 1)
    yield "qkv", partial(wide_product, do, rows.x, matrices.wqkv, rows.qkv), 2 * size * matrices.wqkv.size, 0
    yield "out", partial(do.product, mixed, matrices.wo, rows.partial), 2 * size * matrices.wo.size, 0
    yield "qkv and append", partial(do.append, rows, matrices, attention), 2 * size * matrices.wqkv.size, 0
    if rows.nets is not None:
        yield from _delta_net(runner, rows, next(number for number, mixer in enumerate(mixers) if isinstance(mixer, DeltaNet)))
    if rows.experts is not None:
        yield from _experts(runner, rows, matrices)
    else:
        w13, w2 = matrices.w13, matrices.w2
        yield "gate_up", partial(wide_product, do, rows.x, w13, rows.gate_up), 2 * size * w13.size, 0
        yield "down", partial(do.product, rows.activation, w2, rows.partial), 2 * size * w2.size, 0
        yield "gate_up and swiglu", partial(do.gate, rows, matrices), 2 * size * w13.size, 0
    moved = rows.partial.nbytes + 2 * rows.stream.nbytes + rows.x.nbytes
    yield "residual", partial(do.residual, rows, 1.0, None, matrices.ffn_norm), 0, moved
    yield from _attention(runner, rows, ((attention, "first"),))


def _delta_net(runner: GraphRunner, rows: Any, layer: int) -> Iterator[Case]:
    """Of a chunk at the beginning of a prompt, whole; and each of its kernels."""
    do, matrices = runner.layers.operations, runner.layers.matrices[layer]
    assert isinstance(do, DenseDeviceOperations)
    assert do.nets is not None
    rows.place[0], runner.buffers.last_position[...] = 0, rows.size - 1
    flops = 2 * rows.size * matrices.wqkv.size
    yield "delta input", partial(wide_product, do, rows.x, matrices.wqkv, rows.nets.projected), flops, 0
    yield "delta net", partial(do.recur, rows, matrices, layer), flops, 0
    for name, call in do.nets.calls(rows, matrices, layer).items():
        yield name, call, 0, 0
    yield "keep_states", do.keep_states, 0, 2 * runner.buffers.states.nbytes


def _experts(runner: GraphRunner, rows: Any, matrices: Any) -> Iterator[Case]:
    """Of rows that are drawn, so that all experts are chosen about as often."""
    import cupy

    do, own, size = runner.layers.operations, rows.experts, rows.size
    assert isinstance(do, DenseDeviceOperations)
    assert do.experts is not None
    own.planes[...] = cupy.random.default_rng(3).standard_normal(own.planes.shape, dtype=np.float32)
    own.planes[1] = 0
    rows.place[0], runner.buffers.last_position[...] = 0, size - 1
    calls, flops = do.experts.calls(rows, own, matrices.router_bias, 0), 2 * rows.x.size * own.chosen.shape[1]
    flops *= runner.layers.spec.intermediate_size
    yield "router and experts", partial(do.mix, rows, matrices, 0), 3 * flops, 0
    times = {"gate_up": 2 * flops, "down": flops}
    for name, call in calls.items():
        yield name, call, times.get(name.rpartition("_")[0], 0), 0


def _attention(runner: GraphRunner, rows: Any, layers: Sequence[tuple[int, str]]) -> Iterator[Case]:
    """At the beginning of the context and at its end."""
    spec, size = runner.layers.spec, rows.size
    for layer, kind in layers:
        for start in (0, spec.max_context - size):
            rows.place[0], rows.place[2] = start, start + size
            seen = sum(min(position + 1, spec.window(layer) or position + 1) for position in range(start, start + size))
            flops = 4 * seen * rows.query.size // size
            attend = partial(runner.layers.operations.attend, rows, layer)
            yield f"attend of the {kind} layer at {start}", attend, flops, 0


def _products(runner: GraphRunner, size: int) -> Iterator[Case]:
    rows, do, matrices = runner.rows(size), runner.layers.operations, runner.layers.matrices[0]
    assert isinstance(do, DeviceOperations)
    mixed = rows.query.reshape(size, len(rows.stream), -1).swapaxes(0, 1)
    shapes: list[tuple[str, Array, Array, Array]] = [
        ("qkv", rows.stream, matrices.wqkv, rows.qkv),
        ("out", mixed, matrices.wo, rows.partials[0][0]),
        ("gate_up", rows.stream, matrices.w13, rows.gate_up),
        ("down", rows.activation, matrices.w2, rows.partials[0][0]),
        ("qkv of one stream", rows.shared.stream, matrices.wqkv, rows.qkv),
        ("gate_up of one stream", rows.shared.stream, matrices.w13, rows.gate_up),
    ]
    for name, x, matrix, out in shapes:
        yield name, partial(do.products, x, matrix, out), 2 * size * matrix.size, 0
    down = partial(do.product, rows.activation, matrices.w2, rows.partials[0][0])
    yield "down as in chunks", down, 2 * size * matrices.w2.size, 0
    yield "qkv and append", partial(do.append, rows, matrices, 0), 2 * size * matrices.wqkv.size, 0
    yield "gate_up and swiglu", partial(do.gate, rows, matrices.w13), 2 * size * matrices.w13.size, 0


def _others(runner: GraphRunner, size: int) -> Iterator[Case]:
    rows, do, spec = runner.rows(size), runner.layers.operations, runner.layers.spec
    now, past = rows.partials[0][0], rows.partials[0][-1]
    assert isinstance(do, DeviceOperations)
    yield "append", partial(do.append_product, rows, runner.layers.matrices[0], 0), 0, rows.qkv.nbytes * 3 // 2
    yield "swiglu", partial(do.swiglu, rows), 0, rows.gate_up.nbytes + rows.activation.nbytes
    if spec.delay:
        unscale = runner.layers.matrices[1].unscale
        residual = partial(do.residual, rows, rows, ReduceMode.DELAYED, now, past, None, None, unscale, None)
        yield "residual", residual, 0, 4 * rows.stream.nbytes
        for name, streams in (("of all lanes", rows), ("of one stream", rows.shared)):
            first = partial(do.residual, streams, streams, ReduceMode.BLOCKING, now, None, None, None, unscale, None)
            yield f"blocking residual {name}", first, 0, now.nbytes + 2 * streams.kept_stream.nbytes
    end = spec.max_context - 1
    yield f"load {end} positions", partial(do.load_cache, 0, end), 0, 0
    yield f"store {size} positions", partial(do.store_cache, 0, size), 0, 0
    yield from _attention(runner, rows, ((0, "first"), (spec.num_layers - 1, "last")))


def row_bits(runner: GraphRunner, sizes: Sequence[int]) -> dict[str, dict[str, bool]]:
    """Whether each product gives a row the same bits in a chunk of every size as in the largest one."""
    import cupy

    found: dict[str, dict[str, bool]] = {}
    is_dense = isinstance(runner.layers.operations, DenseDeviceOperations)
    for name in ("wqkv", "wo", "w13", "w2"):
        matrix = getattr(runner.layers.matrices[0], name)
        if matrix is None:  # experts
            continue
        if is_dense and name in ("wqkv", "w13"):
            matrix = matrix.reshape(1, -1, matrix.shape[2])
        lanes, out_rows, columns = matrix.shape
        random = np.random.default_rng(1).standard_normal((lanes, max(sizes), columns), np.float32)
        x, outputs = cupy.asarray(random.astype(np.float16)), {}
        for size in sizes:
            outputs[size] = cupy.empty((lanes, size, out_rows), np.float32 if name == "wqkv" else np.float16)
            runner.layers.operations.product(cupy.ascontiguousarray(x[:, :size]), matrix, outputs[size])
        largest = outputs[max(sizes)]
        found[name] = {str(size): bool((outputs[size] == largest[:, :size]).all()) for size in sizes}
    print(f"  rows have the bits of the largest chunk: {found}", flush=True)
    return found
