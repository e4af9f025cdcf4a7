"""Masks in shared memory: whole or not there, and rank 0's wait for them ends well or says why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.sampling import Candidate
from kog_dist.errors import AbortedError
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.masks import MaskSlots, MaskWords, mask_bytes, num_words
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.topology import RankInfo
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines.cuda import CudaEngine
from kog_dist.workers.engines.root_choice import RootChoice

from .test_cuda_engine import ScriptedKernel

VOCAB_SIZE = 70
LOGITS = np.arange(VOCAB_SIZE, dtype=np.float32)
REQUEST = DecodeRequest((1,), 10, stop_ids=(69,), mask_epoch=8)


def only(*ids: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    mask = np.zeros(num_words(VOCAB_SIZE), np.uint32)
    for token_id in ids:
        mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return mask


@pytest.mark.parametrize("epoch", [1, 2, 2**32 - 2, 2**32 - 1, 2**32, 2 * (2**32 - 1)])
def test_memory_that_nobody_has_written_holds_no_mask(epoch: int) -> None:
    """Whatever the epoch's tag is."""
    segment = Segment.create("masks", mask_bytes(VOCAB_SIZE))
    slots = MaskSlots(segment, 0, VOCAB_SIZE)
    assert slots.get(epoch) is None
    slots.put(epoch, only(7))
    found = slots.get(epoch)
    assert found is not None
    assert found.tolist() == only(7).tolist()
    slots.close()
    segment.close()


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(1, 16, vocab_size=VOCAB_SIZE)
    yield page
    page.close()


def root_choice(page: ControlPage, request: DecodeRequest = REQUEST, *, step_timeout_s: float = 30.0) -> RootChoice:
    return RootChoice(page.submit(request), request, page, VOCAB_SIZE, step_timeout_s=step_timeout_s)


def choose(root: RootChoice) -> Candidate | None:
    assert root.choose is not None
    return root.choose(LOGITS, 0)


@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3))
def test_a_mask_comes_out_as_it_was_put(epoch: int, words: list[int]) -> None:
    segment = Segment.create("masks", 4096 + mask_bytes(VOCAB_SIZE))
    slots = MaskSlots(segment, 4096, VOCAB_SIZE)
    slots.put(epoch, np.array(words, np.uint32))
    found = slots.get(epoch)
    assert found is not None
    assert found.tolist() == words
    assert slots.get(epoch + 1) is None
    assert slots.get(epoch + 2) is None
    slots.put(epoch + 1, np.zeros(3, np.uint32))
    assert slots.get(epoch) is not None, "two slots are used in turn"
    slots.put(epoch + 2, np.zeros(3, np.uint32))
    assert slots.get(epoch) is None
    slots.close()
    segment.close()


def test_a_mask_that_is_half_written_is_not_there() -> None:
    """Replace the words of the slot one by one, in many orders: neither epoch is there before the last one is."""
    segment = Segment.create("masks", mask_bytes(VOCAB_SIZE))
    slots = MaskSlots(segment, 0, VOCAB_SIZE)
    words = segment.array(np.uint64, 3)
    slots.put(4, only(1, 40, 66))
    old = words.copy()
    slots.put(6, only(2, 41, 67))
    new = words.copy()
    random = np.random.default_rng(1)
    for _ in range(20):
        words[:] = old
        assert slots.get(4) is not None
        order = random.permutation(3)
        for word in order[:-1]:
            words[word] = new[word]
            assert slots.get(4) is None
            assert slots.get(6) is None
        words[order[-1]] = new[order[-1]]
        assert slots.get(6) is not None
    del words
    slots.close()
    segment.close()


def test_each_token_has_its_own_mask(page: ControlPage) -> None:
    root = root_choice(page)
    for index, allowed in enumerate([(3, 40), (7,), (69,)]):
        page.masks.put(REQUEST.mask_epoch + index, only(*allowed))
        found = choose(root)
        assert found is not None
        assert found.token_id == max(allowed)
    assert root.failure is Finish.NONE


def test_a_late_mask_is_waited_for(page: ControlPage) -> None:
    root = root_choice(page)
    writer = threading.Timer(0.05, lambda: page.masks.put(REQUEST.mask_epoch, only(5)))
    writer.start()
    found = choose(root)
    writer.join(10.0)
    assert found is not None
    assert found.token_id == 5


def test_a_mask_that_never_comes_ends_the_request(page: ControlPage) -> None:
    page.masks.put(REQUEST.mask_epoch - 2, only(5))
    root = root_choice(page, step_timeout_s=0.04)
    assert choose(root) is None
    assert root.failure is Finish.NO_MASK


def test_a_mask_that_allows_nothing_ends_the_request(page: ControlPage) -> None:
    page.masks.put(REQUEST.mask_epoch, only())
    root = root_choice(page)
    assert choose(root) is None
    assert root.failure is Finish.NO_MASK


def test_a_cancel_or_an_abort_ends_the_wait(page: ControlPage) -> None:
    root = root_choice(page)
    page.cancel(1)
    assert choose(root) is None
    assert root.failure is Finish.CANCELLED
    page.set_abort(AbortCause.SHUTDOWN)
    with pytest.raises(AbortedError):
        choose(root)


def test_masks_go_with_all_other_processors(page: ControlPage) -> None:
    request = replace(REQUEST, sampling=SamplingParams(logit_bias=((3, 100.0), (4, 100.0)), min_tokens=1))
    page.masks.put(request.mask_epoch, only(3, 5, 69))
    found = choose(root_choice(page, request))
    assert found is not None
    assert found.token_id == 3


@pytest.mark.parametrize("comes", [True, False])
def test_the_cuda_engine_waits_for_the_first_mask(page: ControlPage, comes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take longer to compile than a kernel should wait. One that never comes is the kernel's to report."""
    info = RankInfo(0, 1, 0, "test", 1, page.fd, page.fd)
    engine = CudaEngine(WorkerArgs(info, "model", "cuda:0", "bfloat16", True, 10.0, 0.1), page)
    kernel = ScriptedKernel()
    engine._gpu.loaded, engine._gpu.max_context = kernel, 16
    asked: list[int] = []

    def get(epoch: int) -> MaskWords | None:
        asked.append(epoch)
        if comes and len(asked) == 5:
            page.masks.put(4, only(1))
        return MaskSlots.get(page.masks, epoch)

    monkeypatch.setattr(page.masks, "get", get)
    request = replace(REQUEST, mask_epoch=4)
    seq = page.submit(request)
    assert engine.run(seq, request) is Finish.LENGTH
    assert kernel.processed == ProcessedRequest(mask_epoch=4)
    assert set(asked) == {4}
    assert (len(asked) == 5) is comes
