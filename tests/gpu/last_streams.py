"""Streams for a first step that is an LM head alone, as the kernel has published them itself: bits are those of a whole step."""

from __future__ import annotations

import numpy as np
import torch

from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.published import Published


def published_streams(kernel: Monokernel) -> torch.Tensor:
    """What the layers of the last step left to the LM head, (lanes, hidden), and a row of zeros."""
    published = Published(kernel.shape, kernel.words.get(), int(kernel.state()["epoch"]) - 1)
    vectors = [published.stream(lane) for lane in range(kernel.shape.num_lanes)]
    assert all(vector.num_wrong_tags == 0 for vector in vectors)
    values = np.stack([*(vector.values for vector in vectors), np.zeros_like(vectors[0].values)])
    memory = torch.from_numpy(values).cuda()
    torch.cuda.synchronize()
    return memory


def streams_in(memory: torch.Tensor) -> LastStreams:
    return LastStreams(memory.data_ptr(), memory[-1].data_ptr())
