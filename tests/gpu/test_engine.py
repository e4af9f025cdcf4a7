"""The CUDA engine with the real kernel, as a worker drives it: requests through the control page, tokens through the ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import AbortedError
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.cuda import CudaEngine

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(200)]

DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"
MAX_CONTEXT = 2048
PROMPT = (17, 300, 42, 7, 99, 1024)


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(1, MAX_CONTEXT)
    yield page
    page.close()


@pytest.fixture
def engine(control: ControlPage) -> Iterator[CudaEngine]:
    info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
    made = CudaEngine(WorkerArgs(info, str(DEMO), "cuda:0", "bfloat16", True, 60.0, 10.0, prefill="on"), control)
    made.startup()
    yield made
    made.close()


def request(max_tokens: int, **options: Any) -> DecodeRequest:
    values = {"prompt": PROMPT, "ignore_eos": True, **options}
    return DecodeRequest(max_tokens=max_tokens, **values)


def answer(control: ControlPage, seq: int) -> list[Any]:
    entries: list[Any] = []
    while (entry := control.ring.get(seq, len(entries))) is not None:
        entries.append(entry)
        if entry.finish is not Finish.NONE:
            break
    return entries


def test_answers_digests_and_restarts(control: ControlPage, engine: CudaEngine) -> None:
    assert engine.run(1, request(300)) is Finish.LENGTH
    whole = answer(control, 1)
    assert len(whole) == 300
    assert engine.run(2, request(20, logit_digests=True)) is Finish.LENGTH
    slow = answer(control, 2)
    assert [entry.token_id for entry in slow] == [entry.token_id for entry in whole[:20]]
    assert len({entry.digest for entry in slow}) == 20
    assert engine.run(3, request(20, logit_digests=True)) is Finish.LENGTH
    assert [entry.digest for entry in answer(control, 3)] == [entry.digest for entry in slow]
    assert engine.run(4, request(300, ignore_eos=False, stop_ids=(whole[30].token_id,))) is Finish.STOP


def test_cancel_ends_a_request_and_the_next_one_is_unharmed(control: ControlPage, engine: CudaEngine) -> None:
    engine.run(1, request(50))
    before = [entry.token_id for entry in answer(control, 1)]

    def cancel_soon() -> None:
        deadline = time.monotonic() + 30.0
        while control.ring.get(2, 20) is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        control.cancel(2)

    thread = threading.Thread(target=cancel_soon)
    thread.start()
    finish = engine.run(2, request(2000))
    thread.join()
    entries = answer(control, 2)
    assert finish is Finish.CANCELLED
    assert 20 < len(entries) < 2000
    assert entries[-1].token_id == NO_TOKEN
    assert engine.run(3, request(50)) is Finish.LENGTH
    assert [entry.token_id for entry in answer(control, 3)] == before
    common = min(len(entries) - 1, 50)
    assert [entry.token_id for entry in entries[:common]] == before[:common]


def test_an_abort_ends_a_running_request_at_once(control: ControlPage, engine: CudaEngine) -> None:
    aborted_at = 0.0

    def abort_soon() -> None:
        nonlocal aborted_at
        deadline = time.monotonic() + 30.0
        while control.ring.get(1, 20) is None and time.monotonic() < deadline:
            time.sleep(0.0005)
        aborted_at = time.monotonic()
        control.set_abort(AbortCause.RANK_DIED, 0)

    thread = threading.Thread(target=abort_soon)
    thread.start()
    with pytest.raises(AbortedError):
        engine.run(1, request(2000))
    ended_after_s = time.monotonic() - aborted_at
    thread.join()
    assert ended_after_s < 0.1


def test_requests_allocate_no_gpu_memory(control: ControlPage, engine: CudaEngine) -> None:
    """All of it is taken before an engine is ready, so that no request can fail for want of it."""
    import cupy

    def taken() -> tuple[int, int]:
        free, total = cupy.cuda.runtime.memGetInfo()
        return total - free, cupy.get_default_memory_pool().total_bytes()

    sampled = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=1)
    for seq in (1, 2):  # of each kind one: lazily loaded kernels are no request's memory
        engine.run(seq, request(20, sampling=sampled if seq == 2 else SamplingParams()))
    before = taken()
    for seq in range(3, 43):
        prompt = tuple(range(1, 2 + 40 * (seq % 20)))
        assert engine.run(seq, request(20, prompt=prompt, sampling=sampled if seq % 2 else SamplingParams())) is Finish.LENGTH
    assert taken() == before
