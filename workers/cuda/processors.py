"""The monokernel's build with processors: its kernel, and its memory beside that of `Monokernel`. See docs/sampling.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kog_dist.collectives.words import WORD_BYTES
from kog_dist.cuda.device_array import DeviceArray, DeviceStream
from kog_dist.cuda.driver import HostMapping, Kernel
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.sampling.logprobs import logprobs_of
from kog_dist.decode.sampling.processors import fixed_top_p, lowest_distance
from kog_dist.records import dataclass
from kog_dist.runtime.forced import ForcedSlot
from kog_dist.runtime.masks import MaskSlots, num_words
from kog_dist.sampling_params import GREEDY, SamplingParams
from kog_dist.workers.cuda.build import PROCESSORS_SOURCE, build
from kog_dist.workers.cuda.kernel_abi import FORCED_PARAMS, PROCESSOR_PARAMS, REPORT_WORDS, ProcessorFlag
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.pinned import pinned
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

IN_PROMPT = np.uint32(1 << 31)  # of the history
_FIRST_TOP = 4  # of a report: mass low, mass high, largest logit, chosen logit; then pairs of logit and id


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """What a request asks for besides temperature and seed, which come by themselves; as in `DecodeRequest`."""

    sampling: SamplingParams = GREEDY
    mask_epoch: int = 0


class ProcessorsBuild:
    """The kernel with the memory of one request at a time. `masks`, `forced`: where masks of its grammar and what it forces come
    from, mapped into the GPU's addresses until `close`. `words_ptr`: the words of the plain build, where exchanges have theirs.
    """

    def __init__(
        self, shape: KernelShape, kernel: Kernel, masks: MaskSlots | None, forced: ForcedSlot | None, words_ptr: int
    ) -> None:
        import cupy

        self._shape, self.kernel, context = shape, kernel, shape.spec.max_context
        self._first, last = shape.head.vocab_rows
        self._num_rows = last - self._first
        self._bias = cupy.zeros(self._num_rows, cupy.float32)
        self._history = cupy.zeros(self._num_rows, cupy.uint32)
        self._raw = cupy.zeros(self._num_rows, cupy.float32)
        self._staged_bias = pinned(self._num_rows * 4).view(np.float32)
        self._staged_history = pinned(self._num_rows * 4).view(np.uint32)
        self._reports = pinned(context * REPORT_WORDS * 8).view(np.uint64).reshape(context, REPORT_WORDS)
        has_masks = masks is not None and masks.vocab_size > 0
        self._masks = HostMapping(*masks.memory) if masks is not None and has_masks else None
        self._forced = HostMapping(*forced.memory) if forced is not None else None
        self._choices_ptr = words_ptr + WORD_BYTES * shape.words.offset_of("Choice")
        self._request, self._params = ProcessedRequest(), np.zeros((), PROCESSOR_PARAMS.dtype)

    def begin(self, request: ProcessedRequest, sampling: SamplingParams, prompt: Sequence[int], stream: DeviceStream) -> None:
        """Set up a request; no launch may be under way. Raises ValueError for a grammar if there are no masks."""
        if request.mask_epoch and self._masks is None:
            raise ValueError("this kernel was made without masks")
        self._request, self._params = request, request_params(self._shape, request, sampling)
        flags = ProcessorFlag(int(self._params["flags"]))
        if ProcessorFlag.BIASED in flags:
            self._staged_bias[:] = 0
            self._spread(self._staged_bias, *zip(*request.sampling.logit_bias, strict=True))
            self._upload(self._bias, self._staged_bias, stream)
        if ProcessorFlag.REMEMBERS in flags:
            self._staged_history[:] = 0
            self._spread(self._staged_history, prompt, IN_PROMPT)
            self._upload(self._history, self._staged_history, stream)
        arrays = {"bias": self._bias, "history": self._history, "raw": self._raw}
        for name, held in arrays.items():
            self._params[f"{name}_ptr"] = held.data.ptr
        self._params["report_ptr"] = self._reports.ctypes.data
        if self._masks is not None:
            self._params["mask_ptr"] = self._masks.device_ptr

    def _spread(self, rows: NDArray[np.generic], ids: Sequence[int], values: ArrayLike) -> None:
        """Set this rank's rows of some ids."""
        where = np.asarray(ids, np.int64) - self._first
        own = (where >= 0) & (where < self._num_rows)
        rows[where[own]] = np.broadcast_to(np.asarray(values, rows.dtype), where.shape)[own]

    def _upload(self, held: DeviceArray, staged: NDArray[np.generic], stream: DeviceStream) -> None:
        from cupy.cuda import runtime

        runtime.memcpyAsync(held.data.ptr, staged.ctypes.data, staged.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def params(self) -> bytes:
        """The request's `PROCESSOR_PARAMS`."""
        return bytes(self._params.tobytes())

    def forced_params(self, mask_wait: int) -> bytes:
        """The `FORCED_PARAMS` of builds with drafts, which take turns with each other. `mask_wait`: in parts of a pass."""
        assert self._forced is not None or not self._request.mask_epoch, "made without what grammars force"
        params = np.zeros((), FORCED_PARAMS.dtype)
        params["wait"] = mask_wait if self._request.mask_epoch else 0
        params["forced_ptr"] = 0 if self._forced is None else self._forced.device_ptr
        params["choices_ptr"] = self._choices_ptr
        return params.tobytes()

    def logprobs(self, index: int, tag: int) -> TokenLogprobs | None:
        """Of token `index` of the request with this tag; None while the kernel has not written them. Only on rank 0."""
        return read_report(self._reports[index], tag, min(self._request.sampling.logprobs or 0, self._shape.spec.vocab_size))

    def close(self) -> None:
        """Let go of the masks, and of what is forced; the kernel must have left."""
        for mapping in (self._masks, self._forced):
            if mapping is not None:
                mapping.close()
        self._masks = self._forced = None


def processors_builds(
    shape: KernelShape,
    kernel_name: str,
    masks: Sequence[MaskSlots | None],
    forced: Sequence[ForcedSlot | None],
    words_ptr: int,
) -> list[ProcessorsBuild]:
    """One for each decode slot, whose masks these are, and whose forced tokens. Raises CompileError or LaunchError."""
    kernel, made = Kernel(build(headers(shape), PROCESSORS_SOURCE).path, kernel_name, SHARED_BYTES), list[ProcessorsBuild]()
    try:
        for of_slot in zip(masks, forced, strict=True):
            made.append(ProcessorsBuild(shape, kernel, *of_slot, words_ptr))
    except BaseException:
        for one in made:  # whoever tries again maps the same memory of the host
            one.close()
        raise
    return made


def request_params(shape: KernelShape, request: ProcessedRequest, sampling: SamplingParams) -> NDArray[np.void]:
    """A `PROCESSOR_PARAMS` record of a request, without pointers."""
    asked, params = request.sampling, np.zeros((), PROCESSOR_PARAMS.dtype)
    filtered = sampling.temperature > 0 and asked.has_filters
    wanted = {
        ProcessorFlag.BIASED: bool(asked.logit_bias),
        ProcessorFlag.REMEMBERS: asked.has_penalties,
        ProcessorFlag.MASKED: request.mask_epoch != 0,
        ProcessorFlag.FILTERED: filtered,
        ProcessorFlag.TOP_P: filtered and asked.top_p < 1,
        ProcessorFlag.REPORTS: request.sampling.logprobs is not None,
    }
    params["flags"] = sum(flag for flag, is_wanted in wanted.items() if is_wanted)
    floats: dict[str, float | np.float32] = {
        "repetition": asked.repetition_penalty,
        "frequency": asked.frequency_penalty,
        "presence": asked.presence_penalty,
        "lowest": lowest_distance(asked.min_p),
    }
    for name, value in floats.items():
        params[f"{name}_bits"] = np.float32(value).view(np.uint32)
    params["top_p"] = fixed_top_p(asked.top_p) if asked.top_p < 1 else 0
    params["top_k"], params["min_tokens"], params["num_top"] = asked.top_k, asked.min_tokens, request.sampling.logprobs or 0
    params["mask_epoch"], params["num_mask_words"] = request.mask_epoch, num_words(shape.spec.vocab_size)
    for rank, of_rank in enumerate(shapes_of_ranks(shape)):
        params["first_ids"][rank], params["cta_rows"][rank] = of_rank.head.vocab_rows[0], of_rank.head.form.cta_rows
    return params


def read_report(report: NDArray[np.uint64], tag: int, num_top: int) -> TokenLogprobs | None:
    """What the kernel wrote about one token (REPORT_WORDS,) of the request with this tag; None when it is not all there."""
    entry = report[: _FIRST_TOP + 2 * num_top].copy()
    if (entry >> np.uint64(32) != tag).any():
        return None
    words = entry.astype(np.uint32)  # keeps the lower halves
    logits, total = words.view(np.float32), int(words[0]) | int(words[1]) << 32
    return logprobs_of(logits[2], total, logits[3], words[_FIRST_TOP + 1 :: 2], logits[_FIRST_TOP::2])


def shapes_of_ranks(shape: KernelShape) -> list[KernelShape]:
    """What the kernel of every rank is compiled for, given that of one; one rank may host some of the lanes."""
    if shape.num_ranks == 1:
        return [shape]
    lanes = (shape.spec.lanes_of_rank(rank, shape.num_ranks) for rank in range(shape.num_ranks))
    return [replace(shape, hosted_lanes=hosted) for hosted in lanes]
