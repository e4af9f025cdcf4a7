"""What the request of a decode slot has on a GPU and in page-locked memory of the host: prompt, state, token ring."""

from __future__ import annotations

import numpy as np

from kog_dist.cuda.device_array import DeviceStream
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.draft_builds import NOWHERE
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE, HOST_PAGE, OTHERS_WAIT_TAG
from kog_dist.workers.cuda.pinned import pinned
from kog_dist.workers.cuda.processors import ProcessedRequest, ProcessorsBuild

# Fields of a state that count over all requests: they go on in the state of whoever runs next.
_COUNTERS = ("epoch", "num_exchanges", "hash", "pass_epoch")


class DeviceSlot:
    """Memory of one request at a time, with a context of so many tokens. `number`: of the decode slot."""

    def __init__(self, number: int, context: int) -> None:
        import cupy

        self.number = number
        self.processors: ProcessorsBuild | None = None  # with this slot's memory, where there is such a build
        self.prompt = cupy.zeros(context, cupy.uint32)
        self.state = cupy.zeros(DECODE_STATE.size_bytes, cupy.uint8)
        self.staged_prompt = pinned(context * 4).view(np.uint32)
        self.staged_state = pinned(DECODE_STATE.size_bytes).view(DECODE_STATE.dtype)
        self.host = pinned(HOST_PAGE.size_bytes).view(HOST_PAGE.dtype)
        self.ring = pinned(context * 16).view(np.uint64)  # of each token its id and its finish, with the request's tag
        self.ring_words = self.ring.data  # numpy takes ten times as long for one of them
        self.forget()

    def forget(self) -> None:
        """There is no request."""
        self.tag, self.cache = 0, 0  # the request's, which entries of the ring carry; the KV cache that it has
        self.sampling, self.stop_ids = SamplingParams(), tuple[int, ...]()
        self.processed: ProcessedRequest | None = None
        self.has_drafts = self.has_undrafted = False  # `has_undrafted`: passes without drafts, which these do not know of
        self.begins_at_head = False  # the next launch
        self.stop_position = NOWHERE  # of the next launch: see `Monokernel.launch`
        self.left: np.void | None = None  # what the last launch left in `state`, once that was read

    def leave_early(self) -> None:
        """Let launches end behind a pass; the request that is to end goes on to be told so."""
        if self.host["cancelled_tag"].item() != self.tag:
            self.host["cancelled_tag"] = OTHERS_WAIT_TAG

    def goes_on(self) -> None:
        """Let the launches that follow have all of their passes."""
        if self.host["cancelled_tag"].item() == OTHERS_WAIT_TAG:
            self.host["cancelled_tag"] = 0

    def goes_on_from(self, other: DeviceSlot, stream: DeviceStream) -> None:
        """Queue that passes, exchanges and hashes are counted on from where the other slot's launches will have left them."""
        from cupy.cuda import runtime

        fields = DECODE_STATE.dtype.fields
        assert fields is not None
        for name in _COUNTERS:
            dtype, offset = fields[name][:2]
            to, source = self.state.data.ptr + offset, other.state.data.ptr + offset
            runtime.memcpyAsync(to, source, dtype.itemsize, runtime.memcpyDeviceToDevice, stream.ptr)
        self.left = None
