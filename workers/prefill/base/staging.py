"""A prompt on its way to the device: one copy from page-locked memory brings its tokens and where prefill begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.cuda.driver import copy_to_device, copy_to_host
from kog_dist.late_numpy import Array
from kog_dist.workers.cuda.pinned import pinned
from kog_dist.workers.prefill.base.arrays import address, library

NUM_FLAGS = 4
_FLAG_WORDS = 8  # the prompt begins at a multiple of 32 bytes


class Staging:
    """`prompt` (num_rows,) and `flags` (4,), int32 on `device`: position of the next chunk's first token; 1 if a value was not
    finite; position of the prompt's last token; which of the monokernel's KV caches it goes to.
    """

    def __init__(self, num_rows: int, device: str) -> None:
        self._is_cuda = device != "cpu"
        self._on_device = library(device).zeros(_FLAG_WORDS + num_rows, np.int32)
        self._on_host = staged(_FLAG_WORDS + num_rows, np.int32, is_cuda=self._is_cuda)
        self._words = self._on_host.view(np.uint32).data  # numpy itself takes several times as long for a few slices
        self._padding = memoryview(array("I", bytes(4 * num_rows)))
        self._flags_seen = staged(NUM_FLAGS, np.int32, is_cuda=self._is_cuda)
        self.flags, self.prompt = self._on_device[:NUM_FLAGS], self._on_device[_FLAG_WORDS:]
        self._device_ptr, self._host_ptr = address(self._on_device), address(self._on_host)

    def load(self, token_ids: Sequence[int], start: int, num_padding: int, stream_ptr: int, cache: int = 0) -> None:
        """Queue a prompt for a KV cache on a CUDA stream, from whose position `start` on chunks begin; at most `num_padding` rows
        behind it are looked at. The copy before must have ended.
        """
        ids, words = token_ids if isinstance(token_ids, array) else array("I", token_ids), self._words
        end = _FLAG_WORDS + len(ids)
        last = min(end + num_padding, len(words))
        words[0], words[1], words[2], words[3] = start, 0, len(ids) - 1, cache
        words[_FLAG_WORDS:end] = memoryview(ids)
        words[end:last] = self._padding[: last - end]  # any token will do
        if self._is_cuda:
            copy_to_device(self._device_ptr, self._host_ptr, last * words.itemsize, stream_ptr)
        else:
            self._on_device[:last] = self._on_host[:last]

    def read_back(self, stream_ptr: int) -> None:
        """Queue on a CUDA stream that the host gets the flags."""
        if self._is_cuda:
            copy_to_host(address(self._flags_seen), self._device_ptr, self._flags_seen.nbytes, stream_ptr)
        else:
            self._flags_seen[:] = self.flags

    @property
    def has_overflown(self) -> bool:
        """Whether a value was not finite, as `read_back` has found."""
        return bool(self._flags_seen[1])


def staged(count: int, dtype: DTypeLike, *, is_cuda: bool) -> Array:
    """Zeros on the host, page-locked if a GPU copies them."""
    return pinned(count * np.dtype(dtype).itemsize).view(dtype) if is_cuda else np.zeros(count, dtype)
