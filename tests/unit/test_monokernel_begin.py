"""What the host hands to the monokernel at the beginning of a request; cupy is played, with host memory in the GPU's place."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.sampling import Sampling
from kog_dist.workers.cuda.kernel_abi import DECODE_STATE
from kog_dist.workers.cuda.monokernel import Monokernel

CONTEXT, STREAM = 16, 7


class Memory:
    """An array of cupy."""

    def __init__(self, count: int, dtype: Any) -> None:
        self.array = np.zeros(count, dtype)
        self.num_reads = 0  # by the host
        self.data = SimpleNamespace(ptr=self.array.ctypes.data)

    def get(self, stream: Any) -> Any:
        self.num_reads += 1
        return self.array.copy()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Monokernel:
    def copy(to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert (kind, stream) == (1, STREAM), "copies must be in order with the launches"
        ctypes.memmove(to, source, num_bytes)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpyHostToDevice=1)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(runtime=runtime))
    made = Monokernel.__new__(Monokernel)
    made._tag, made._left, made.stream = 0, None, SimpleNamespace(ptr=STREAM)
    made._prompt, made._state = Memory(CONTEXT, np.uint32), Memory(DECODE_STATE.size_bytes, np.uint8)
    made._staged_prompt, made._staged_state = np.zeros(CONTEXT, np.uint32), np.zeros(1, DECODE_STATE.dtype)
    return made


def test_only_the_tokens_that_the_kernel_will_read_are_copied(kernel: Monokernel) -> None:
    kernel.begin((5, 6, 7), 4, Sampling())
    assert kernel._prompt.array.tolist() == [5, 6, 7, *[0] * 13]
    kernel._state.array.view(DECODE_STATE.dtype)["epoch"] = 99
    kernel._state.array.view(DECODE_STATE.dtype)["abort_mirror"] = 1
    kernel.begin([1, 2, 3, 4, 8], 6, Sampling(), first_position=3)
    assert kernel._prompt.array.tolist() == [5, 6, 7, 4, 8, *[0] * 11]
    state = kernel.state()
    assert [int(state[name]) for name in ("token", "position", "num_prompt", "max_tokens", "epoch")] == [4, 3, 5, 6, 99]
    assert int(state["abort_mirror"]) == 0, "nothing else of the request before is left"
    assert kernel._tag == 2


def test_what_the_last_request_left_is_read_once(kernel: Monokernel) -> None:
    kernel.begin([1, 2, 3], 4, Sampling())
    state: Any = kernel._state
    state.array.view(DECODE_STATE.dtype)["epoch"] = 7  # the kernel
    for _ in range(2):
        assert int(kernel.state()["epoch"]) == 7
    num_reads = state.num_reads
    kernel.begin([4, 5], 4, Sampling())
    assert state.num_reads == num_reads, "nothing ran since"
    assert int(kernel.state()["epoch"]) == 7
    assert int(kernel.state()["token"]) == 4, "what was read before the request is not taken for its own"
    assert state.num_reads == num_reads + 1
