"""Streams for a first step that is an LM head alone, as the kernel has published them itself: bits are those of a whole step."""

from __future__ import annotations

from typing import Any

import numpy as np

from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.published import Published
from kog_dist.workers.prefill.base.arrays import address


def published_streams(kernel: Monokernel) -> Any:
    """What the layers of the last step left to the LM head, (lanes, hidden), and a row of zeros."""
    import cupy

    published = Published(kernel.shape, kernel.words.get(), int(kernel.state()["epoch"]) - 1)
    vectors = [published.stream(lane) for lane in range(kernel.shape.num_lanes)]
    assert all(vector.num_wrong_tags == 0 for vector in vectors)
    values = np.stack([*(vector.values for vector in vectors), np.zeros_like(vectors[0].values)])
    memory = cupy.asarray(values)
    cupy.cuda.Device().synchronize()
    return memory


def streams_in(memory: Any) -> LastStreams:
    return LastStreams(address(memory), address(memory[-1]))
