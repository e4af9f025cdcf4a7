"""First steps of requests whose prompts prefill has run through all layers: the LM head alone, from the last token's streams."""

from __future__ import annotations

import numpy as np

from kog_dist.cuda.driver import Kernel
from kog_dist.records import dataclass
from kog_dist.workers.cuda.build import PLAIN_HEAD_SOURCE, PROCESSORS_HEAD_SOURCE, STREAMS_SOURCE, build
from kog_dist.workers.cuda.kernel_abi import STREAM_PARAMS, STREAM_THREADS
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

STREAMS_KERNEL_NAME = "kog_publish_streams"


@dataclass(frozen=True, slots=True)
class LastStreams:
    """The streams of a prompt's last token behind the last layer, by GPU addresses. They may be made by what is queued still."""

    values_ptr: int  # float32 (hosted lanes, hidden); the first one counts where all lanes share it
    invalid_ptr: int  # int32: not 0 = there are none, and nothing of the prompt was stored


class HeadStart:
    """The builds of the monokernel that run one LM head (kernels/head.cu), and what gives it its input (last_streams.cu).

    `peers`: a `KogPeers`. `kernel_name`: the monokernel's. Raises CompileError or LaunchError.
    """

    def __init__(self, shape: KernelShape, peers: bytes, kernel_name: str, *, processors: bool) -> None:
        sources = headers(shape)
        self._peers, self._num_pairs = peers, shape.num_streams * shape.spec.hidden_size // 2
        self._publisher = Kernel(build(sources, STREAMS_SOURCE).path, STREAMS_KERNEL_NAME, 0)
        self.plain = Kernel(build(sources, PLAIN_HEAD_SOURCE).path, kernel_name, SHARED_BYTES)
        self.processors = Kernel(build(sources, PROCESSORS_HEAD_SOURCE).path, kernel_name, SHARED_BYTES) if processors else None

    def publish(self, streams: LastStreams, words_ptr: int, state_ptr: int, stream_ptr: int) -> None:
        """Queue on a CUDA stream that these become the words from which the LM head is computed, here and on the peers.

        If they are invalid, the launches behind it do nothing.
        """
        params = np.zeros((), STREAM_PARAMS.dtype)
        params["streams_ptr"], params["invalid_ptr"] = streams.values_ptr, streams.invalid_ptr
        params["words_ptr"], params["state_ptr"] = words_ptr, state_ptr
        num_ctas = -(-self._num_pairs // STREAM_THREADS)
        self._publisher.launch_grid(num_ctas, STREAM_THREADS, params.tobytes() + self._peers, stream_ptr)
