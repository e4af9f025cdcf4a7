"""A prompt on its way to the device: one copy from page-locked memory brings its tokens and where prefill begins."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kog_dist.cuda.driver import copy_to_device
from kog_dist.workers.cuda.pinned import pinned

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NUM_FLAGS = 3
_FLAG_WORDS = 8  # the prompt begins at a multiple of 32 bytes


class Staging:
    """`prompt` (num_rows,) and `flags` (3,), int32 on `device`: position of the next chunk's first token; 1 if a value was not
    finite; position of the prompt's last token.
    """

    def __init__(self, num_rows: int, device: str) -> None:
        import torch

        self._is_cuda = device.startswith("cuda")
        self._on_device = torch.zeros(_FLAG_WORDS + num_rows, dtype=torch.int32, device=device)
        self._on_host = staged(_FLAG_WORDS + num_rows, torch.int32, is_cuda=self._is_cuda)
        self._words = self._on_host.numpy().view(np.uint32).data  # numpy itself takes several times as long for a few slices
        self._padding = memoryview(array("I", bytes(4 * num_rows)))
        self._read_back = staged(_NUM_FLAGS, torch.int32, is_cuda=self._is_cuda)
        self._flags_seen = self._read_back.numpy()
        self.flags, self.prompt = self._on_device[:_NUM_FLAGS], self._on_device[_FLAG_WORDS:]
        self._device_ptr, self._host_ptr = self._on_device.data_ptr(), self._on_host.data_ptr()

    def load(self, token_ids: Sequence[int], start: int, num_padding: int, stream_ptr: int) -> None:
        """Queue a prompt on a CUDA stream, from whose position `start` on chunks begin; at most `num_padding` rows behind it are
        looked at. The copy before must have ended.
        """
        ids, words = token_ids if isinstance(token_ids, array) else array("I", token_ids), self._words
        end = _FLAG_WORDS + len(ids)
        last = min(end + num_padding, len(words))
        words[0], words[1], words[2] = start, 0, len(ids) - 1
        words[_FLAG_WORDS:end] = memoryview(ids)
        words[end:last] = self._padding[: last - end]  # any token will do
        if self._is_cuda:
            copy_to_device(self._device_ptr, self._host_ptr, last * words.itemsize, stream_ptr)
        else:
            self._on_device[:last].copy_(self._on_host[:last])

    def read_back(self) -> None:
        """Queue on torch's current stream that the host gets the flags."""
        self._read_back.copy_(self.flags, non_blocking=True)

    @property
    def has_overflown(self) -> bool:
        """Whether a value was not finite, as `read_back` has found."""
        return bool(self._flags_seen[1])


def staged(count: int, dtype: torch.dtype, *, is_cuda: bool) -> Tensor:
    """Zeros on the host, page-locked if a GPU copies them.

    Not torch's own page-locked memory: when it is freed, torch records an event on every stream that has copied it, and the
    monokernel's stream may be gone by then, which ends the process.
    """
    import torch

    if not is_cuda:
        return torch.zeros(count, dtype=dtype)
    return torch.from_numpy(pinned(count * dtype.itemsize)).view(dtype)
