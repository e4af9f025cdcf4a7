"""The CUDA engine hands prompts to prefill and the last token's streams to the kernel; both are played by Python."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.decode.coding import Coding
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.errors import AbortedError
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.masks import num_words
from kog_dist.runtime.notes import NOTE
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.cuda_prompts import MIN_EXPANDED_TOKENS, MIN_PREFILL_TOKENS, MIN_TAPE_TOKENS
from tests.unit.test_cuda_engine import MAX_CONTEXT, ScriptedKernel, answer, request

BLOCK = 16


class ScriptedPrefill:
    """Chunks of 16 tokens. `gives_up`: it stores nothing."""

    streams = LastStreams(0x5000, 0x6000)

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []  # tokens, start
        self.caches: list[int] = []  # of each call
        self.forgotten: list[int] = []
        self.gives_up = False
        self.before_chunk: Callable[[], None] = lambda: None

    def steps(
        self,
        token_ids: Sequence[int],
        start: int,
        *,
        should_stop: Callable[[], bool],
        aborted: Callable[[], bool],
        on_progress: Callable[[int], None],
        on_queued: Callable[[], None],
        pauses: Callable[[], bool],
        cache: int = 0,
    ) -> Generator[None, None, int]:
        yield from ()
        self.calls.append((len(token_ids), start))
        self.caches.append(cache)
        position = start
        while position < len(token_ids) and not aborted() and not should_stop():
            self.before_chunk()
            position = min(position + BLOCK, len(token_ids))
            on_progress(position)
        if position == len(token_ids):
            on_queued()
        return start if self.gives_up else position

    def next_end(self, start: int, num_tokens: int) -> int:
        return min(start + BLOCK, num_tokens)

    def forget(self, position: int, cache: int = 0) -> None:
        self.forgotten.append(position)


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(1, MAX_CONTEXT)
    yield page
    page.close()


@pytest.fixture
def parts(control: ControlPage) -> tuple[CudaEngine, ScriptedKernel, ScriptedPrefill]:
    return parts_of(control)


def parts_of(control: ControlPage) -> tuple[CudaEngine, ScriptedKernel, ScriptedPrefill]:
    info = RankInfo(0, 1, 0, "test", 1, control.fd, control.fd)
    engine = CudaEngine(WorkerArgs(info, "model", "cuda:0", "bfloat16", True, 10.0, 10.0), control)
    kernel, prefill = ScriptedKernel(), ScriptedPrefill()
    engine._gpu.loaded, engine._gpu.prefill, engine._gpu.max_context = kernel, prefill, MAX_CONTEXT
    return engine, kernel, prefill


Parts = tuple[CudaEngine, ScriptedKernel, ScriptedPrefill]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_kernel_begins_with_the_head_of_the_last_token(control: ControlPage, parts: Parts, logprobs: int | None) -> None:
    engine, kernel, prefill = parts
    assert engine.run(1, request(num_prompt=100, max_tokens=5, sampling=SamplingParams(logprobs=logprobs))) is Finish.LENGTH
    assert prefill.calls == [(100, 0)]
    assert kernel.begun[0] == (100, 99)
    assert kernel.streams == prefill.streams
    assert [entry.token_id for entry in answer(control)] == [199, 200, 201, 202, 203]
    engine.run(2, request(num_prompt=150, max_tokens=5, kv=KvUse(num_cached=104), sampling=SamplingParams(logprobs=logprobs)))
    assert prefill.calls[1] == (150, 104)
    assert prefill.forgotten == [100, 150], "the kernel's own tokens come behind the prompt"
    assert control.progress(2) == 154


@pytest.mark.parametrize("is_there", [True, False])
def test_a_request_with_a_grammar_begins_with_the_head_once_its_mask_is_there(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:  # fmt: skip
    """Behind prefill if the mask has come by then, else after the host has waited for it."""
    page = ControlPage.create(1, MAX_CONTEXT, vocab_size=64)
    engine, kernel, prefill = parts_of(page)
    order: list[str] = []
    masks = engine._requests._masks
    begin, wait = kernel.begin, masks.may_begin
    mask = np.ones(num_words(64), np.uint32)

    def beginning(*arguments: Any, **options: Any) -> None:
        order.append(f"begin behind {prefill.forgotten}")
        begin(*arguments, **options)

    def waiting(*arguments: Any, **options: Any) -> bool:
        order.append(f"wait behind {prefill.forgotten}")
        page.masks.put(5, mask)
        return wait(*arguments, **options)

    monkeypatch.setattr(kernel, "begin", beginning)
    monkeypatch.setattr(masks, "may_begin", waiting)
    if is_there:
        page.masks.put(5, mask)
    assert engine.run(1, request(num_prompt=100, max_tokens=5, mask_epoch=5)) is Finish.LENGTH
    assert order == (["begin behind []"] if is_there else ["wait behind [100]", "begin behind [100]"])
    assert (prefill.calls, kernel.begun, kernel.streams) == ([(100, 0)], [(100, 99)], prefill.streams)
    page.close()


def test_every_stage_on_the_way_to_the_first_token_is_stamped(control: ControlPage, parts: Parts) -> None:
    engine, _, _ = parts
    engine.run(1, request(num_prompt=100, max_tokens=5))
    first, second = control.stages_ns(0), answer(control)[1]
    assert first[: RankStage.UPLOADED] == [0, 0], "the worker's"
    assert 0 < first[RankStage.UPLOADED] <= first[RankStage.LAUNCHED] <= first[RankStage.PREFILLED] <= first[RankStage.CHOSEN]
    assert first[RankStage.CHOSEN] < second.stamp_ns
    engine.run(2, request(num_prompt=101, max_tokens=2, kv=KvUse(num_cached=99)))
    later = control.stages_ns(0)
    assert all(later[stage] == first[stage] for stage in (RankStage.UPLOADED, RankStage.PREFILLED)), "no prefill"
    assert later[RankStage.CHOSEN] > first[RankStage.CHOSEN]


def test_the_coordinator_hears_of_the_launch_and_of_the_end_of_prefill(
    control: ControlPage, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, _ = parts
    at: list[int] = []
    monkeypatch.setattr(control.ring, "announce", lambda: at.append(control.stages_ns(0)[RankStage.PREFILLED]))
    engine.run(1, request(num_prompt=100, max_tokens=5))
    assert at == [0, control.stages_ns(0)[RankStage.PREFILLED]]
    engine.run(2, request(num_prompt=101, max_tokens=2, kv=KvUse(num_cached=99)))
    assert len(at) == 3, "there was no prefill"


def test_few_tokens_are_left_to_the_kernel(parts: Parts) -> None:
    engine, kernel, prefill = parts
    engine.run(1, request(num_prompt=MIN_PREFILL_TOKENS, max_tokens=2))
    engine.run(2, request(num_prompt=101, max_tokens=2, kv=KvUse(num_cached=99)))
    assert prefill.calls == []
    assert prefill.forgotten == [0, 99], "what stands in the cache from there on is the kernel's"
    assert kernel.begun == [(MIN_PREFILL_TOKENS, 0), (101, 99)]
    assert kernel.streams is None


CODING = Coding("E4M3", 1, "F32")


@pytest.mark.parametrize(
    ("coding", "on_tape", "least"),
    [(None, False, MIN_PREFILL_TOKENS), (CODING, True, MIN_TAPE_TOKENS), (CODING, False, MIN_EXPANDED_TOKENS)],
)
def test_more_tokens_are_few_where_weights_are_quantised(
    monkeypatch: pytest.MonkeyPatch, parts: Parts, coding: Coding | None, on_tape: bool, least: int
) -> None:
    engine, kernel, prefill = parts
    started = SimpleNamespace(load=lambda: (kernel, prefill))
    monkeypatch.setattr("kog_dist.workers.engines.cuda.Start", lambda *args, **options: started)
    monkeypatch.setattr("kog_dist.workers.engines.cuda_prompts.is_multiplied_on_tape", lambda shape: on_tape)
    shape: Any = SimpleNamespace(coding=coding)
    checkpoint: Any = None
    engine._load(checkpoint, shape)
    engine.run(1, request(num_prompt=least, max_tokens=2))
    engine.run(2, request(num_prompt=least + 1, max_tokens=2))
    assert prefill.calls == [(least + 1, 0)]


def test_a_cancel_during_prefill_ends_the_request(control: ControlPage, parts: Parts) -> None:
    engine, kernel, prefill = parts
    chunks: list[int] = []

    def cancel_in_the_second() -> None:
        chunks.append(1)
        if len(chunks) == 2:
            control.cancel(1)
            kernel.cancelled = True  # the scripted kernel runs whole launches at once; the real one looks while it runs

    prefill.before_chunk = cancel_in_the_second
    assert engine.run(1, DecodeRequest(prompt=tuple(range(100)), max_tokens=5)) is Finish.CANCELLED
    assert kernel.begun == [(100, 2 * BLOCK)]
    assert kernel.streams is None


class Rank0:
    """The peers of a rank that is told when to stop."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def share_choice(self, token_id: int, finish: Finish) -> tuple[int, Finish]:
        self.given.append(token_id)
        return int(len(self.given) == 2), finish


def test_ranks_stop_at_the_chunk_that_rank_0_names(control: ControlPage, parts: Parts) -> None:
    engine, kernel, prefill = parts
    peers: Any = Rank0()
    engine._gpu.peers, kernel.cancelled = peers, True
    prefill.before_chunk = lambda: control.cancel(1)  # this rank sees it first
    assert engine.run(1, DecodeRequest(prompt=tuple(range(100)), max_tokens=5)) is Finish.CANCELLED
    assert kernel.begun == [(100, 2 * BLOCK)]
    assert peers.given == [1, 1], "the first chunk is not asked about"


def test_the_kernel_takes_what_prefill_gives_up(control: ControlPage, parts: Parts) -> None:
    engine, kernel, prefill = parts
    prefill.gives_up = True
    assert engine.run(1, request(num_prompt=100, max_tokens=5, kv=KvUse(num_cached=7))) is Finish.LENGTH
    assert kernel.begun == [(100, 99), (100, 7)], "what was queued behind prefill does nothing"
    assert kernel.streams is None
    assert len(answer(control)) == 5


def test_an_abort_during_prefill_ends_the_request(control: ControlPage, parts: Parts) -> None:
    engine, kernel, prefill = parts
    chunks: list[int] = []

    def abort_in_the_second() -> None:
        chunks.append(1)
        if len(chunks) == 2:
            control.set_abort(AbortCause.SHUTDOWN)

    prefill.before_chunk = abort_in_the_second
    with pytest.raises(AbortedError, match="left request 1"):
        engine.run(1, request(num_prompt=100, max_tokens=5))
    assert len(chunks) == 2
    assert kernel.begun == []
    assert kernel.aborted
    assert answer(control) == []


def test_what_prefill_gives_up_is_said_once(parts: Parts, capfd: pytest.CaptureFixture[str]) -> None:
    engine, _, prefill = parts
    prefill.gives_up = True
    for seq in (1, 2):
        engine.run(seq, request(num_prompt=100, max_tokens=5))
    assert capfd.readouterr().err == (
        f"{NOTE}a value of request 1 left the range of prefill's binary16; such prompts go token by token\n"
    )


def test_a_cancel_before_the_first_chunk_is_no_overflow(
    control: ControlPage, parts: Parts, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, kernel, _ = parts
    kernel.cancelled = True
    control.cancel(1)
    assert engine.run(1, request(num_prompt=100, max_tokens=5)) is Finish.CANCELLED
    assert capfd.readouterr().err == ""
