"""Streams that prefill has computed, for a launch of the monokernel that begins with the LM head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kog_dist.cuda.driver import Kernel
from kog_dist.workers.cuda.build import STREAMS_SOURCE, build
from kog_dist.workers.cuda.kernel_abi import STREAM_PARAMS, STREAM_THREADS
from kog_dist.workers.cuda.kernel_shape import KernelShape

KERNEL_NAME = "kog_publish_streams"


@dataclass(frozen=True, slots=True)
class LastStreams:
    """The streams of a prompt's last token behind the last layer, by GPU addresses. They may be made by what is queued still."""

    values_ptr: int  # float32 (hosted lanes, hidden)
    invalid_ptr: int  # int32: not 0 = there are none, and nothing of the prompt was stored


class StreamPublisher:
    """Makes them the words from which the LM head is computed, here and on the peers (kernels/last_streams.cu).

    `peers`: a `KogPeers`. Raises CompileError or LaunchError.
    """

    def __init__(self, shape: KernelShape, peers: bytes) -> None:
        self._peers = peers
        self._num_pairs = shape.num_lanes * shape.spec.hidden_size // 2
        self._kernel = Kernel(build(shape.headers(), STREAMS_SOURCE).path, KERNEL_NAME, 0)

    def publish(self, streams: LastStreams, words_ptr: int, state_ptr: int, stream_ptr: int) -> None:
        """Queue that, on a CUDA stream. If they are invalid, the launches behind it do nothing."""
        params = np.zeros((), STREAM_PARAMS.dtype)
        params["streams_ptr"], params["invalid_ptr"] = streams.values_ptr, streams.invalid_ptr
        params["words_ptr"], params["state_ptr"] = words_ptr, state_ptr
        num_ctas = -(-self._num_pairs // STREAM_THREADS)
        self._kernel.launch_grid(num_ctas, STREAM_THREADS, params.tobytes() + self._peers, stream_ptr)
