"""The CUDA engine's part on the host, with a kernel that is played by Python."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kog_dist.control import AbortCause, ControlPage, DecodeRequest
from kog_dist.decode.ring import NO_TOKEN, Finish
from kog_dist.decode.sampling import Sampling
from kog_dist.errors import AbortedError, LaunchError, RequestFailed
from kog_dist.topology import RankInfo
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines import cuda
from kog_dist.workers.engines.cuda import CudaEngine, device_index

MAX_CONTEXT = 400


@dataclass(frozen=True)
class Entry:
    token_id: int
    finish: Finish


class Event:
    done = True


class Stream:
    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel

    def record(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


class Logits:
    """The logits of the newest answer token: its index, as float32."""

    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel

    def get(self, *, stream: Stream) -> Any:
        return np.array([len(self.kernel.entries) - 1], np.float32)


class ScriptedKernel:
    """Runs every launch at once; token i of the answer is 100 + i. Ends as the real one does."""

    def __init__(self) -> None:
        self.stream, self.logits = Stream(self), Logits(self)
        self.launches: list[int] = []
        self.entries: list[Entry] = []
        self.cancelled = self.aborted = False
        self.recovered = 0
        self.fault_at = self.silent_from = 10**9

    def begin(self, prompt: tuple[int, ...], max_tokens: int, sampling: Sampling, stop_ids: tuple[int, ...] = ()) -> None:
        self.prompt_left, self.max_tokens, self.stop_ids = len(prompt) - 1, max_tokens, stop_ids
        self.entries, self.launches, self.ended = [], [], False

    def launch(self, num_steps: int) -> None:
        self.launches.append(num_steps)
        for _ in range(num_steps):
            if self.ended:
                return
            if self.prompt_left:
                self.prompt_left -= 1
                continue
            index = len(self.entries)
            if index >= self.silent_from:
                continue
            finish = Finish.NONE
            if self.cancelled:
                finish = Finish.CANCELLED
            elif index == self.fault_at:
                finish = Finish.NUMERICAL_FAULT
            elif 100 + index in self.stop_ids:
                finish = Finish.STOP
            elif index + 1 == self.max_tokens:
                finish = Finish.LENGTH
            has_token = finish not in (Finish.CANCELLED, Finish.NUMERICAL_FAULT)
            self.entries.append(Entry(100 + index if has_token else NO_TOKEN, finish))
            self.ended = finish is not Finish.NONE

    def token(self, index: int) -> Entry | None:
        return self.entries[index] if index < len(self.entries) else None

    def cancel(self) -> None:
        self.cancelled = True

    def abort(self) -> None:
        self.aborted = True

    def finish(self) -> None:
        pass

    def recover(self) -> None:
        self.recovered += 1


@pytest.fixture
def control() -> Any:
    page = ControlPage.create(1, MAX_CONTEXT)
    yield page
    page.close()


@pytest.fixture
def kernel() -> ScriptedKernel:
    return ScriptedKernel()


@pytest.fixture
def engine(control: ControlPage, kernel: ScriptedKernel) -> CudaEngine:
    info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
    engine = CudaEngine(WorkerArgs(info, "model", "cuda:0", "bfloat16", True, 10.0, 10.0), control)
    engine._kernel, engine._max_context = kernel, MAX_CONTEXT
    return engine


def request(num_prompt: int = 3, max_tokens: int = 200, **options: Any) -> DecodeRequest:
    values = {"temperature": 0.0, "seed": 0, "stop_ids": (), "ignore_eos": False, "logit_digests": False, **options}
    return DecodeRequest(prompt=tuple(range(num_prompt)), max_tokens=max_tokens, **values)


def answer(control: ControlPage, seq: int = 1) -> list[Any]:
    entries: list[Any] = []
    while (entry := control.ring.get(seq, len(entries))) is not None:
        entries.append(entry)
        if entry.finish is not Finish.NONE:
            break
    return entries


def test_tokens_go_to_the_ring_in_chunks(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    assert engine.run(1, request()) is Finish.LENGTH
    entries = answer(control)
    assert [entry.token_id for entry in entries] == list(range(100, 300))
    assert [entry.finish for entry in entries] == [Finish.NONE] * 199 + [Finish.LENGTH]
    assert kernel.launches == [64, 64, 64, 10]  # two prompt steps and 200 tokens


def test_an_answer_ends_at_the_end_of_the_context(control: ControlPage, engine: CudaEngine) -> None:
    assert engine.run(1, request(num_prompt=MAX_CONTEXT - 5, max_tokens=300)) is Finish.LENGTH
    assert len(answer(control)) == 5


@pytest.mark.parametrize(("ignore_eos", "length"), [(False, 8), (True, 20)])
def test_stop_ids(control: ControlPage, engine: CudaEngine, ignore_eos: bool, length: int) -> None:
    finish = engine.run(1, request(max_tokens=20, stop_ids=(107,), ignore_eos=ignore_eos))
    assert finish is (Finish.LENGTH if ignore_eos else Finish.STOP)
    assert len(answer(control)) == length


def test_every_digest_is_of_its_own_token(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    engine.run(1, request(num_prompt=70, max_tokens=9, logit_digests=True))
    wanted = [hashlib.sha256(np.array([index], "<f4").tobytes()).digest() for index in range(9)]
    assert [entry.digest for entry in answer(control)] == wanted
    assert kernel.launches == [64, 5, *[1] * 9]


def test_cancel_ends_the_request(control: ControlPage, engine: CudaEngine, kernel: ScriptedKernel) -> None:
    kernel.silent_from = 0
    control.cancel(1)
    kernel_cancel = kernel.cancel

    def cancel() -> None:
        kernel_cancel()
        kernel.silent_from = 10**9

    kernel.cancel = cancel  # type: ignore[method-assign]
    assert engine.run(1, request()) is Finish.CANCELLED
    assert [entry.token_id for entry in answer(control)] == [NO_TOKEN]


def test_a_fault_is_no_token_and_the_kernel_forgets_its_state(
    control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine
) -> None:
    kernel.fault_at = 4
    assert engine.run(1, request()) is Finish.NUMERICAL_FAULT
    assert [entry.token_id for entry in answer(control)] == [100, 101, 102, 103, NO_TOKEN]
    assert kernel.recovered == 1


def test_an_abort_publishes_nothing(control: ControlPage, kernel: ScriptedKernel, engine: CudaEngine) -> None:
    control.set_abort(AbortCause.RANK_DIED, 0)
    with pytest.raises(AbortedError, match="rank 0 left request 1"):
        engine.run(1, request())
    assert kernel.aborted
    assert answer(control) == []


def test_a_kernel_that_ends_without_its_tokens_is_an_error(kernel: ScriptedKernel, engine: CudaEngine) -> None:
    kernel.silent_from = 5
    with pytest.raises(RequestFailed, match="the kernel ended without token 5 of request 1"):
        engine.run(1, request())


def test_errors_of_the_libraries_become_ours() -> None:
    class CUDARuntimeError(Exception):
        pass

    CUDARuntimeError.__module__ = "cupy_backends.cuda.api.runtime"
    for text, wanted in (
        ("driver version is insufficient", "no NVIDIA driver"),
        ("cudaErrorLaunchFailure", "start the engine again"),
    ):
        with pytest.raises(LaunchError, match=wanted), cuda.translated_errors("cuda:1"):
            raise CUDARuntimeError(text)
    with pytest.raises(ZeroDivisionError), cuda.translated_errors("cuda:1"):
        raise ZeroDivisionError


def test_device_names() -> None:
    assert [device_index(name) for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
