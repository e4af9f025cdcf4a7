"""A prompt goes to the device in one copy, from page-locked memory that is used again for the next one."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import pytest

from kog_dist.workers.prefill.base import staging
from kog_dist.workers.prefill.base.staging import Staging

NUM_ROWS, PADDING, STREAM = 20, 6, 7


@pytest.mark.parametrize("prompt", [(5, 6, 7), array("I", (5, 6, 7))])
def test_tokens_and_flags_are_where_chunks_look_for_them(prompt: Sequence[int]) -> None:
    held = Staging(NUM_ROWS, "cpu")
    held.load(range(100, 115), 0, PADDING, 0)
    held.load(prompt, 2, PADDING, 0)
    assert held.flags.tolist() == [2, 0, 2, 0]
    assert held.prompt.tolist() == [5, 6, 7, *[0] * 6, *range(109, 115), *[0] * 5]


def test_padding_ends_where_the_memory_does() -> None:
    held = Staging(NUM_ROWS, "cpu")
    held.load(range(1, NUM_ROWS + 1), 0, PADDING, 0)
    assert held.prompt.tolist() == list(range(1, NUM_ROWS + 1))


def test_a_gpu_gets_all_of_it_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    held, copies = Staging(NUM_ROWS, "cpu"), []

    def copy(target_ptr: int, source_ptr: int, num_bytes: int, stream_ptr: int) -> None:
        copies.append((num_bytes, stream_ptr))
        ctypes.memmove(target_ptr, source_ptr, num_bytes)

    monkeypatch.setattr(staging, "copy_to_device", copy)
    monkeypatch.setattr(staging, "copy_to_host", copy)
    held._is_cuda = True
    held.load((5, 6, 7), 1, PADDING, STREAM, 3)
    assert copies == [(4 * (8 + 3 + PADDING), STREAM)]
    assert held.flags.tolist() == [1, 0, 2, 3]
    assert held.prompt.tolist()[:4] == [5, 6, 7, 0]
    held.flags[1] = 1
    held.read_back(STREAM)
    assert copies[1:] == [(16, STREAM)]
    assert held.has_overflown


def test_what_has_overflown_is_seen_once_it_was_read() -> None:
    held, seen = Staging(NUM_ROWS, "cpu"), []
    held.flags[1] = 1
    seen.append(held.has_overflown)
    held.read_back(0)
    seen.append(held.has_overflown)
    held.load((1,), 0, PADDING, 0)
    held.read_back(0)
    seen.append(held.has_overflown)
    assert seen == [False, True, False]
