"""Logits processors inside the monokernel: the tokens and logprobs of the definition, masks, and how waits for them end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.masks import MaskWords, num_words
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.cuda.random_weights import random_weights
from tests.gpu.last_streams import published_streams, streams_in
from tests.gpu.processors_reference import Case, check, logprobs_of

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(200)]

SPEC = ModelSpec(
    hidden_size=256, num_layers=2, num_heads=16, num_kv_heads=8, intermediate_size=512, vocab_size=4001, max_context=512,
    num_lanes=8, delay=1, sliding_window=64, window_layers=(0,),
)  # fmt: skip
PROMPT = [(7 * i + 3) % SPEC.vocab_size for i in range(20)]
WAIT_S = 20.0
BIAS = tuple((id_, 4.0 * ((id_ % 7) - 3)) for id_ in range(0, 4000, 13))
WARM, HOT = SamplingParams(0.7, 5), SamplingParams(2.0, 2**63 - 11)
CASES: dict[str, Case] = {
    "penalties": (
        SamplingParams(),
        ProcessedRequest(SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)),
    ),
    "rewards": (WARM, ProcessedRequest(SamplingParams(repetition_penalty=0.8, frequency_penalty=-1.5, presence_penalty=-0.5))),
    "bias": (SamplingParams(), ProcessedRequest(SamplingParams(logit_bias=BIAS, logprobs=0))),
    "logprobs": (WARM, ProcessedRequest(SamplingParams(logprobs=20))),
    "top-p": (WARM, ProcessedRequest(SamplingParams(top_p=0.9, logprobs=5))),
    "half": (HOT, ProcessedRequest(SamplingParams(top_p=0.5))),
    "nearly nothing": (HOT, ProcessedRequest(SamplingParams(top_p=1e-6))),
    "best only": (HOT, ProcessedRequest(SamplingParams(top_k=1))),
    "top-k": (HOT, ProcessedRequest(SamplingParams(top_k=40, logprobs=1))),
    "top-k, top-p": (HOT, ProcessedRequest(SamplingParams(top_k=40, top_p=0.7, logprobs=3))),
    "many, top-p": (HOT, ProcessedRequest(SamplingParams(top_k=2500, top_p=0.6))),
    "all, top-p": (WARM, ProcessedRequest(SamplingParams(top_k=10**6, top_p=0.95))),
    "min-p": (WARM, ProcessedRequest(SamplingParams(min_p=0.1))),
    "everything": (
        HOT,
        ProcessedRequest(SamplingParams(
            top_k=30, top_p=0.8, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1,
            logit_bias=BIAS, min_tokens=3, logprobs=7)),
    ),
}  # fmt: skip


class Made:
    """A kernel, and the page with masks that it reads."""

    def __init__(self) -> None:
        self.shape = KernelShape(SPEC, range(SPEC.num_lanes))
        self.page = ControlPage.create(1, SPEC.max_context, vocab_size=SPEC.vocab_size)
        self.weights = random_weights(self.shape, 3)
        self.kernel = Monokernel(self.shape, self.weights, processors=True, masks=(self.page.masks,))
        self.epoch = 1

    def answer(self, case: Case, count: int, **options: Any) -> tuple[list[int], list[Any]]:
        found = self.kernel.generate(PROMPT, count, case[0], processed=case[1], **options)
        return found, logprobs_of(self.kernel, case[1], len(found))

    def masked(
        self, case: Case, masks: list[MaskWords], stop_ids: tuple[int, ...] = (), streams: LastStreams | None = None
    ) -> tuple[list[int], Finish]:
        """An answer whose masks are written one after the other, each when the token before it is there. With `streams` the cache
        holds the prompt.
        """
        first, self.epoch = self.epoch, self.epoch + 2 * SPEC.max_context
        kernel, found = self.kernel, list[int]()
        start = 0 if streams is None else len(PROMPT) - 1
        processed = replace(case[1], mask_epoch=first)
        kernel.begin(PROMPT, len(masks), case[0], stop_ids, first_position=start, processed=processed, streams=streams)
        kernel.launch(len(PROMPT) + len(masks))
        for index, mask in enumerate(masks):
            self.page.masks.put(first + index, mask)
            entry = self.entry(index)
            if entry.token_id != NO_TOKEN:
                found.append(entry.token_id)
            if entry.finish is not Finish.NONE:
                break
        kernel.finish()
        return found, entry.finish

    def entry(self, index: int) -> Any:
        deadline_s = time.monotonic() + WAIT_S
        while (entry := self.kernel.token(index)) is None:
            assert time.monotonic() < deadline_s, f"token {index} does not come"
            time.sleep(0)
        return entry


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    one = Made()
    yield one
    one.kernel.close()
    one.page.close()


def mask_of(ids: Any) -> MaskWords:
    bits = np.zeros(32 * num_words(SPEC.vocab_size), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_of_the_definition(made: Made, name: str) -> None:
    found, logprobs = made.answer(CASES[name], 24, stop_ids=[1])
    check(made.kernel, PROMPT, found, logprobs, CASES[name], stop_ids=[1])
    assert len(found) == 24 or found[-1] == 1


@pytest.mark.parametrize("name", ["top-p", "everything"])
def test_chunks_do_not_change_the_answer(made: Made, name: str) -> None:
    whole = made.answer(CASES[name], 60, chunk=200)
    assert len(whole[0]) == 60
    assert made.answer(CASES[name], 60, chunk=7) == whole
    made.kernel.generate(PROMPT, 30)
    assert made.answer(CASES[name], 60) == whole, "the plain build leaves no trace"


@pytest.mark.parametrize(
    "processors",
    [SamplingParams(top_p=1e-6), SamplingParams(top_k=3, top_p=0.5), SamplingParams(top_p=0.3), SamplingParams(min_p=0.5)],
)
def test_equal_logits_are_ordered_by_id(made: Made, processors: SamplingParams) -> None:
    weights = replace(made.weights, final_norm=made.weights.final_norm * 0)
    kernel, case = (
        Monokernel(made.shape, weights, processors=True),
        (HOT, ProcessedRequest(replace(processors, logprobs=20))),
    )
    found = kernel.generate(PROMPT, 12, case[0], processed=case[1])
    logprobs = logprobs_of(kernel, case[1], len(found))
    assert logprobs[0].top_ids == tuple(range(20))
    check(kernel, PROMPT, found, logprobs, case)


@pytest.mark.parametrize("name", ["penalties", "logprobs", "top-k, top-p"])
def test_masks_allow_what_they_say(made: Made, name: str) -> None:
    random = np.random.default_rng(4)
    masks = [mask_of(random.choice(SPEC.vocab_size, size, replace=False)) for size in (1, 2, 40, 2000, 4000) * 6]
    found, finish = made.masked(CASES[name], masks)
    assert (len(found), finish) == (30, Finish.LENGTH)
    logprobs = logprobs_of(made.kernel, CASES[name][1], 30)
    check(made.kernel, PROMPT, found, logprobs, CASES[name], masks=masks)


def test_end_ids_come_late_unless_nothing_else_is_left(made: Made) -> None:
    greedy = made.kernel.generate(PROMPT, 4)
    stops = (greedy[0], greedy[2], 77, 5)
    case = (SamplingParams(), ProcessedRequest(SamplingParams(min_tokens=6)))
    found = made.kernel.generate(PROMPT, 30, case[0], stops, processed=case[1])
    assert not set(found[:6]) & set(stops)
    check(made.kernel, PROMPT, found, [], case, stops)
    for sampling in (SamplingParams(), WARM):
        masks = [mask_of((9, 77, 12)), mask_of((77, 5)), mask_of(range(100))]
        found, finish = made.masked((sampling, ProcessedRequest(SamplingParams(min_tokens=6, top_k=2, top_p=0.9))), masks, stops)
        assert finish is Finish.STOP
        assert len(found) == 2
        case = (sampling, ProcessedRequest(SamplingParams(min_tokens=6, top_k=2, top_p=0.9)))
        check(made.kernel, PROMPT, found, [], case, stops, masks)


def test_masked_answers_begin_with_the_head(made: Made) -> None:
    made.kernel.prepare_head_start()
    case, masks = CASES["top-p"], [mask_of((5, 6, 900)), mask_of(range(400)), mask_of((1, 3999))]
    whole = made.masked(case, masks)
    made.kernel.generate(PROMPT, 1)
    memory = published_streams(made.kernel)
    for _ in range(2):
        assert made.masked(case, masks, streams=streams_in(memory)) == whole


def test_a_mask_that_allows_nothing_ends_the_answer(made: Made) -> None:
    found, finish = made.masked(CASES["top-p"], [mask_of((5, 6)), mask_of(()), mask_of((1,))])
    assert (len(found), finish) == (1, Finish.NO_MASK)
    assert made.kernel.generate(PROMPT, 4) == made.kernel.generate(PROMPT, 4)


def test_waits_for_a_mask_end(made: Made) -> None:
    """By its limit, by a cancel, and by an abort."""
    kernel = made.kernel
    for action, wanted, limit_s in ((None, Finish.NO_MASK, 3.0), (kernel.cancel, Finish.CANCELLED, 0.3)):
        made.epoch += 2
        kernel.begin(PROMPT, 8, SamplingParams(), processed=ProcessedRequest(mask_epoch=made.epoch))
        begin_s = time.monotonic()
        kernel.launch(40)
        if action is not None:
            action()
        entry = made.entry(0)
        assert (entry.token_id, entry.finish) == (NO_TOKEN, wanted)
        assert time.monotonic() - begin_s < limit_s
        kernel.finish()
    kernel.begin(PROMPT, 8, SamplingParams(), processed=ProcessedRequest(mask_epoch=made.epoch + 2))
    kernel.launch(40)
    kernel.abort()
    kernel.finish()
    assert kernel.token(0) is None
    kernel.recover()
    found, logprobs = made.answer(CASES["everything"], 8)
    check(kernel, PROMPT, found, logprobs, CASES["everything"])


def test_what_is_not_finite_is_a_fault(made: Made) -> None:
    bad = replace(made.weights, final_norm=made.weights.final_norm | np.uint16(0x7F80))
    kernel = Monokernel(made.shape, bad, processors=True)
    kernel.begin(PROMPT, 5, SamplingParams(), processed=ProcessedRequest(SamplingParams(logprobs=3)))
    kernel.launch(40)
    kernel.finish()
    entry = kernel.token(0)
    assert entry is not None
    assert (entry.token_id, entry.finish) == (NO_TOKEN, Finish.NUMERICAL_FAULT)
