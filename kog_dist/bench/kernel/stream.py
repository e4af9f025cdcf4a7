"""How long reading a kernel's tape takes, with nothing else: the ceiling of a shape and a machine."""

from __future__ import annotations

import itertools

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.cuda.build import Cubin
from kog_dist.cuda.driver import Kernel
from kog_dist.workers.cuda.build import build
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES


def stream_cubin(shape: KernelShape) -> Cubin:
    """What reads the tape of this shape and does nothing else, from the cache or built now."""
    in_flight = shape.ring.num_pieces * (shape.ring.num_slots - 2)
    return build(headers(TrialShape.of(shape, pieces_in_flight=in_flight)), "stream.cu")


def stream_us(kernel: Monokernel, num_steps: int) -> float:
    """Microseconds per token that reading the tape of a kernel takes."""
    import cupy

    shape, reader = kernel.shape, Kernel(stream_cubin(kernel.shape).path, "kog_stream", SHARED_BYTES)
    params = kernel._params(num_steps).tobytes()
    events = [cupy.cuda.Event() for _ in range(4)]
    for event in events:  # the first launch warms up
        reader.launch(shape.num_ctas, shape.num_threads, params, kernel.stream.ptr)
        event.record(kernel.stream)
    kernel.stream.synchronize()
    times = [cupy.cuda.get_elapsed_time(a, b) for a, b in itertools.pairwise(events)]
    return 1000.0 * float(min(times)) / num_steps
