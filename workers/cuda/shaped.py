"""The monokernel's build for shaped requests: its kernel, and its memory beside that of `Monokernel`. See docs/sampling.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kog_dist.cuda.driver import HostMapping, Kernel
from kog_dist.decode.masks import MaskSlots, num_words
from kog_dist.decode.sampling import UNSHAPED, Sampling, Shaping, TokenLogprobs
from kog_dist.decode.sampling.logprobs import logprobs_of
from kog_dist.decode.sampling.shaping import fixed_top_p, lowest_distance
from kog_dist.workers.cuda.build import SHAPED_SOURCE, build
from kog_dist.workers.cuda.kernel_abi import REPORT_WORDS, SHAPING_PARAMS, ShapingFlag
from kog_dist.workers.cuda.kernel_shape import SHARED_BYTES, KernelShape
from kog_dist.workers.cuda.pinned import pinned

_IN_PROMPT = np.uint32(1 << 31)
_FIRST_TOP = 4  # of a report: mass low, mass high, largest logit, chosen logit; then pairs of logit and id


@dataclass(frozen=True, slots=True)
class ShapedRequest:
    """What a request asks for besides temperature and seed; as in `DecodeRequest`."""

    shaping: Shaping = UNSHAPED
    logprobs: int | None = None
    mask_epoch: int = 0


class ShapedBuild:
    """The kernel with its memory. `masks`: where masks of grammars come from, mapped into the GPU's addresses until `close`."""

    def __init__(self, shape: KernelShape, kernel_name: str, masks: MaskSlots | None) -> None:
        import cupy

        self._shape, context = shape, shape.spec.max_context
        self.kernel = Kernel(build(shape.headers(), SHAPED_SOURCE).path, kernel_name, SHARED_BYTES)
        self._first, last = shape.vocab_rows
        self._num_rows = last - self._first
        self._bias = cupy.zeros(self._num_rows, cupy.float32)
        self._history = cupy.zeros(self._num_rows, cupy.uint32)
        self._raw = cupy.zeros(self._num_rows, cupy.float32)
        self._maxima = cupy.zeros((shape.num_ctas, shape.num_ranks * shape.num_ctas), cupy.uint64)
        self._staged_bias = pinned(self._num_rows * 4).view(np.float32)
        self._staged_history = pinned(self._num_rows * 4).view(np.uint32)
        self._reports = pinned(context * REPORT_WORDS * 8).view(np.uint64).reshape(context, REPORT_WORDS)
        has_masks = masks is not None and masks.vocab_size > 0
        self._masks = HostMapping(*masks.memory) if masks is not None and has_masks else None
        self._request, self._flags = ShapedRequest(), ShapingFlag(0)

    def begin(self, request: ShapedRequest, sampling: Sampling, prompt: Sequence[int], stream: Any) -> None:
        """Set up a request; no launch may be under way. Raises ValueError for a grammar if there are no masks."""
        shaping, flags = request.shaping, ShapingFlag(0)
        if shaping.logit_bias:
            flags |= ShapingFlag.BIASED
            self._staged_bias[:] = 0
            self._spread(self._staged_bias, *zip(*shaping.logit_bias, strict=True))
            self._upload(self._bias, self._staged_bias, stream)
        if shaping.has_penalties():
            flags |= ShapingFlag.REMEMBERS
            self._staged_history[:] = 0
            self._spread(self._staged_history, prompt, _IN_PROMPT)
            self._upload(self._history, self._staged_history, stream)
        if sampling.temperature > 0 and shaping.has_filters():
            flags |= ShapingFlag.FILTERED
            if shaping.top_p < 1:
                flags |= ShapingFlag.TOP_P
        if request.logprobs is not None:
            flags |= ShapingFlag.REPORTS
        if request.mask_epoch:
            if self._masks is None:
                raise ValueError("this kernel was made without masks")
            flags |= ShapingFlag.MASKED
        self._request, self._flags = request, flags

    def _spread(self, rows: Any, ids: Sequence[int], values: Any) -> None:
        """Set this rank's rows of some ids."""
        where = np.asarray(ids, np.int64) - self._first
        own = (where >= 0) & (where < self._num_rows)
        rows[where[own]] = np.broadcast_to(np.asarray(values, rows.dtype), where.shape)[own]

    def _upload(self, held: Any, staged: Any, stream: Any) -> None:
        from cupy.cuda import runtime

        runtime.memcpyAsync(held.data.ptr, staged.ctypes.data, staged.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def params(self) -> bytes:
        """A `SHAPING_PARAMS` record of the request."""
        shape, shaping = self._shape, self._request.shaping
        params = np.zeros((), SHAPING_PARAMS.dtype)
        arrays = {"bias": self._bias, "history": self._history, "raw": self._raw, "maxima": self._maxima}
        for name, held in arrays.items():
            params[f"{name}_ptr"] = held.data.ptr
        params["report_ptr"] = self._reports.ctypes.data
        if self._masks is not None:
            params["mask_ptr"], params["num_mask_words"] = self._masks.device_ptr, num_words(shape.spec.vocab_size)
        params["mask_epoch"], params["flags"] = self._request.mask_epoch, self._flags
        params["top_p"] = fixed_top_p(shaping.top_p) if shaping.top_p < 1 else 0
        floats: dict[str, Any] = {
            "repetition": shaping.repetition_penalty, "frequency": shaping.frequency_penalty,
            "presence": shaping.presence_penalty, "lowest": lowest_distance(shaping.min_p),
        }  # fmt: skip
        for name, value in floats.items():
            params[f"{name}_bits"] = np.float32(value).view(np.uint32)
        params["top_k"], params["min_tokens"] = shaping.top_k, shaping.min_tokens
        params["num_top"] = self._request.logprobs or 0
        for rank, of_rank in enumerate(shapes_of_ranks(shape)):
            params["first_ids"][rank], params["cta_rows"][rank] = of_rank.vocab_rows[0], of_rank.head.cta_rows
        return params.tobytes()

    def logprobs(self, index: int, tag: int) -> TokenLogprobs | None:
        """Of token `index` of the request with this tag; None while the kernel has not written them. Only on rank 0."""
        num_top = min(self._request.logprobs or 0, self._shape.spec.vocab_size)
        entry = self._reports[index, : _FIRST_TOP + 2 * num_top].copy()
        if (entry >> np.uint64(32) != tag).any():
            return None
        words = entry.astype(np.uint32)  # keeps the lower halves
        logits = words.view(np.float32)
        total, top = int(words[0]) | int(words[1]) << 32, slice(_FIRST_TOP, None, 2)
        return logprobs_of(logits[2], total, logits[3], words[_FIRST_TOP + 1 :: 2], logits[top])

    def close(self) -> None:
        """Let go of the masks; the kernel must have left."""
        if self._masks is not None:
            self._masks.close()
            self._masks = None


def shapes_of_ranks(shape: KernelShape) -> list[KernelShape]:
    """What the kernel of every rank is compiled for, given that of one; one rank may host some of the lanes."""
    if shape.num_ranks == 1:
        return [shape]
    lanes = (shape.spec.lanes_of_rank(rank, shape.num_ranks) for rank in range(shape.num_ranks))
    return [replace(shape, hosted_lanes=hosted) for hosted in lanes]
