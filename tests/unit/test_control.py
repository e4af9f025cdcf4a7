"""The control page: one writer per word, requests whole or not at all, first cause wins, everyone wakes up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.errors import LaunchError, ProtocolError, RequestError
from kog_dist.runtime import memfd
from kog_dist.runtime.abi import CONTROL_HEADER, LOGIT_BIAS, MOST_PARALLEL, REQUEST_BLOCK, WaitOp, WaitRecord
from kog_dist.runtime.control import COORDINATOR, NO_RANK, AbortCause, ControlPage, EpochWaits, KvLayout, RankState
from kog_dist.runtime.memfd import Segment, available_bytes
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.wait import Deadline, WaitResult
from kog_dist.sampling_params import SamplingParams

WORLD_SIZE, MAX_CONTEXT = 3, 40
REQUEST = DecodeRequest(
    (5, 6, 7), 10, SamplingParams(0.5, 2**64 - 1, top_k=5, top_p=0.25, logit_bias=((9, 1.5), (4, -2.0)), logprobs=0), (1, 2),
    ignore_eos=True, logit_digests=True,
)  # fmt: skip
RECORD = WaitRecord(2, WaitOp.COLLECT, 1, 3, 0, 4, 9, 8, 1_000_000, "mlp.1", stamp_ns=5)


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(WORLD_SIZE, MAX_CONTEXT, generation=7)
    yield page
    page.close()


@pytest.fixture
def other(page: ControlPage) -> Iterator[ControlPage]:
    """The same page as another process sees it."""
    other = ControlPage.from_fd(os.dup(page.fd))
    yield other
    other.close()


requests = st.builds(
    DecodeRequest,
    prompt=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_CONTEXT).map(tuple),
    max_tokens=st.integers(1, 2**32 - 1),
    stop_ids=st.lists(st.integers(0, 2**32 - 1), max_size=16).map(tuple),
    ignore_eos=st.booleans(),
    logit_digests=st.booleans(),
    sampling=st.builds(
        SamplingParams,
        temperature=st.just(0.0) | st.floats(0.001, 100),
        seed=st.integers(0, 2**64 - 1),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(1e-6, 1),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0.01, 100),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, 2**32 - 1), st.floats(-100, 100, width=32)).map(lambda d: tuple(d.items())),
        min_tokens=st.integers(0, 2**31 - 1),
        logprobs=st.none() | st.integers(0, 20),
    ),
    mask_epoch=st.integers(0, 2**64 - 1),
)


@given(st.lists(requests, min_size=1, max_size=4))
def test_requests_arrive_as_they_were_submitted(submitted: list[DecodeRequest]) -> None:
    page = ControlPage.create(WORLD_SIZE, MAX_CONTEXT)
    for number, request in enumerate(submitted, 1):
        assert page.doorbell() == number - 1
        assert page.submit(request) == number == page.doorbell()
        assert page.read_request(number) == request
        assert number == 1 or page.read_request(number - 1) == submitted[number - 2], "two blocks are used in turn"
    page.close()


def test_an_overwritten_request_is_refused(page: ControlPage, other: ControlPage) -> None:
    for _ in range(3):
        page.submit(REQUEST)
    assert other.read_request(3) == REQUEST
    for seq in (1, 4):
        with pytest.raises(ProtocolError, match=f"request {seq} was not complete"):
            other.read_request(seq)


def test_no_byte_of_a_request_can_change_unseen(page: ControlPage) -> None:
    seq = page.submit(REQUEST)
    raw = Segment.from_fd(os.dup(page.fd))
    words = raw.words()
    start = words[CONTROL_HEADER.word("request_offset")] + seq % 2 * words[CONTROL_HEADER.word("request_stride")]
    words.release()
    prompt_end = REQUEST_BLOCK.size_bytes + 4 * len(REQUEST.prompt)
    biases = REQUEST_BLOCK.size_bytes + 4 * MAX_CONTEXT
    for offset in (*range(prompt_end), *range(biases, biases + 2 * LOGIT_BIAS.size_bytes)):
        raw.buffer[start + offset] ^= 0x10
        with pytest.raises(ProtocolError):
            page.read_request(seq)
        raw.buffer[start + offset] ^= 0x10
    assert page.read_request(seq) == REQUEST
    raw.close()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ()}, {"prompt": (1,) * (MAX_CONTEXT + 1)}, {"max_tokens": 0},
        {"max_tokens": 2**32}, {"stop_ids": (1,) * 17}, {"stop_ids": (-1,)},
        {"mask_epoch": -1}, {"mask_epoch": 2**64},
        {"kv": KvUse(-1, 0)}, {"kv": KvUse(2**32, 0)}, {"kv": KvUse(0, -1)}, {"kv": KvUse(0, 2**32)},
        {"decode_slot": -1}, {"decode_slot": MOST_PARALLEL}, {"prediction": (1,) * (MAX_CONTEXT + 1)},
        {"sampling": SamplingParams(logit_bias=((2**32, 1.0),))},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_submitted(page: ControlPage, change: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="cannot submit") as caught:
        page.submit(replace(REQUEST, **change))  # type: ignore[arg-type]
    assert caught.value.code == "invalid_request"
    assert page.doorbell() == 0


def test_copies_alone_are_nobodys_newest_request() -> None:
    """A slot's stages and cancels are of the request that runs there, whatever is copied meanwhile."""
    page = ControlPage.create(1, MAX_CONTEXT, parallel=2)
    assert [page.newest(slot) for slot in range(2)] == [0, 0]
    running = replace(REQUEST, decode_slot=1)
    assert page.submit(running) == 1
    page.read_request(1)
    page.set_read(0, 1)
    assert page.submit(replace(running, only_copies=True)) == 2
    assert [page.newest(slot) for slot in range(2)] == [0, 1]
    page.close()


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_of_more_than_32_bits_makes_no_request(token_id: int) -> None:
    with pytest.raises(RequestError, match="does not fit into 32 bits") as caught:
        replace(REQUEST, prompt=(token_id,))
    assert caught.value.code == "invalid_request"


def test_the_first_abort_stays(page: ControlPage, other: ControlPage) -> None:
    assert not other.aborted()
    assert other.abort() is None
    page.set_abort(AbortCause.RANK_DIED, 2)
    page.set_abort(AbortCause.SHUTDOWN)
    assert other.aborted()
    assert other.abort() == (AbortCause.RANK_DIED, 2)


@pytest.mark.parametrize(("cause", "rank"), [(AbortCause.SHUTDOWN, NO_RANK), (AbortCause.COORDINATOR_DIED, COORDINATOR)])
def test_an_abort_need_not_name_a_rank(page: ControlPage, cause: AbortCause, rank: int) -> None:
    page.set_abort(cause, rank)
    assert page.abort() == (cause, rank)


def test_ranks_ask_for_an_abort_with_their_record(page: ControlPage, other: ControlPage) -> None:
    assert page.abort_requests() == []
    other.request_abort(2, RECORD)
    other.request_abort(2, replace(RECORD, slot=9))  # the first one counts
    other.request_abort(0)
    assert page.abort_requests() == [(0, None), (2, RECORD)]
    assert not page.aborted(), "only the supervisor aborts"


def test_cancel_covers_earlier_requests(page: ControlPage, other: ControlPage) -> None:
    assert not other.cancelled(1)
    page.cancel(2)
    page.cancel(1)
    assert [other.cancelled(seq) for seq in (1, 2, 3)] == [True, True, False]


def test_states_beats_and_done(page: ControlPage, other: ControlPage) -> None:
    for rank in range(WORLD_SIZE):
        assert page.state(rank) is RankState.STARTING
        other.set_state(rank, RankState(rank + 1))
    assert [page.state(rank) for rank in range(WORLD_SIZE)] == [RankState(1), RankState(2), RankState(3)]
    for rank in (*range(WORLD_SIZE), COORDINATOR):
        before = page.beat_age_s(rank)
        assert 0 <= before < 60, "heartbeats start with the page"
        other.beat(rank)
        assert 0 <= page.beat_age_s(rank) < 60
    other.set_read(0, 4)
    other.set_read(1, 5)
    assert not page.all_read(4)
    other.set_read(2, 4)
    assert page.all_read(4)
    assert not page.all_read(5)
    for rank in (-1, WORLD_SIZE):
        with pytest.raises(IndexError, match=f"rank {rank} is not one of the 3"):
            page.beat(rank)


def test_epoch_waits_of_ranks_that_count_them(page: ControlPage, other: ControlPage) -> None:
    other.set_epoch_waits(1, EpochWaits(0, 0))
    other.set_epoch_waits(2, EpochWaits(7, 2**40))
    assert [page.epoch_waits(rank) for rank in range(WORLD_SIZE)] == [None, EpochWaits(0, 0), EpochWaits(7, 2**40)]


def test_writers_do_not_touch_each_other(page: ControlPage, other: ControlPage) -> None:
    """Every word keeps its value while all others are written."""
    page.set_abort(AbortCause.RANK_STALLED, 1)
    page.set_drain()
    page.submit(REQUEST)
    page.submit(replace(REQUEST, prompt=tuple(range(MAX_CONTEXT))))
    page.cancel(1)
    for rank in range(WORLD_SIZE):
        page.set_state(rank, RankState.RUNNING)
        page.set_read(rank, 11 + rank)
        page.set_progress(rank, 2, 5)
        page.set_kv_layout(rank, KvLayout(3, 128))
        page.set_epoch_waits(rank, EpochWaits(20 + rank, 30 + rank))
        assert not other.has_prefill(), "some ranks are not all"
        page.set_prefill(rank)
        page.request_abort(rank, replace(RECORD, rank=rank))
    for index in range(MAX_CONTEXT):
        page.ring.put(2, index, index, index, bytes([index]) * 32, Finish.NONE)
    assert other.abort() == (AbortCause.RANK_STALLED, 1)
    assert other.draining()
    assert (other.doorbell(), other.cancelled(1), other.cancelled(2)) == (2, True, False)
    assert other.read_request(1) == REQUEST
    assert list(other.read_request(2).prompt) == list(range(MAX_CONTEXT))
    assert [other.state(rank) for rank in range(WORLD_SIZE)] == [RankState.RUNNING] * WORLD_SIZE
    assert other.all_read(11)
    assert not other.all_read(12)
    assert other.has_prefill()
    assert (other.progress(2), other.kv_layout()) == (5, KvLayout(3, 128))
    assert [other.epoch_waits(rank) for rank in range(WORLD_SIZE)] == [EpochWaits(20 + r, 30 + r) for r in range(WORLD_SIZE)]
    assert other.abort_requests() == [(rank, replace(RECORD, rank=rank)) for rank in range(WORLD_SIZE)]
    for index in range(MAX_CONTEXT):
        entry = other.ring.get(2, index)
        assert entry is not None
        assert (entry.token_id, entry.digest) == (index, bytes([index]) * 32)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda page: page.submit(REQUEST), WaitResult.OK),
        (lambda page: page.set_abort(AbortCause.SHUTDOWN), WaitResult.ABORT),
    ],
)
def test_an_idle_rank_wakes_up(
    page: ControlPage, other: ControlPage, act: Callable[[ControlPage], object], expected: WaitResult
) -> None:
    results: list[WaitResult] = []
    waiter = threading.Thread(target=lambda: results.append(other.wait_doorbell(1, 0, Deadline.after(60))))
    waiter.start()
    act(page)
    waiter.join(30)
    assert results == [expected]


def test_only_ranks_that_heed_it_are_roused(page: ControlPage, other: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[int] = []
    monkeypatch.setattr(page._doorbell_futex, "wake", lambda: wakes.append(1))
    page.rouse()
    assert not wakes
    other.heed_rousing(0)
    page.rouse()
    assert len(wakes) == 1


def test_a_roused_rank_without_a_request_sleeps_again(
    page: ControlPage, other: ControlPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeps: list[int] = []
    roused: list[int] = []

    def woken(expected: int, timeout_s: float) -> bool:
        sleeps.append(expected)
        if len(sleeps) == 3:
            page.submit(REQUEST)
        return True

    monkeypatch.setattr(other._doorbell_futex, "wait", woken)
    result = other.wait_doorbell(1, 0, Deadline.after(60), when_roused=lambda: roused.append(1))
    assert (result, sleeps) == (WaitResult.OK, [0, 0, 0])
    assert len(roused) == 2, "a request that is there is not kept waiting"


def test_doorbell_wait_ends_at_its_deadline_and_beats(page: ControlPage) -> None:
    before = page.beat_age_s(1)
    assert page.wait_doorbell(1, 0, Deadline.after(0.1)) is WaitResult.TIMEOUT
    assert page.beat_age_s(1) < before + 0.1
    page.submit(REQUEST)
    assert page.wait_doorbell(1, 0) is WaitResult.OK
    assert page.wait_doorbell(1, 1, Deadline(0.0)) is WaitResult.TIMEOUT
    page.set_abort(AbortCause.SHUTDOWN)
    assert page.wait_doorbell(1, 0) is WaitResult.ABORT, "aborted goes before a new request"


def test_another_process_maps_the_inherited_page(page: ControlPage) -> None:
    seq = page.submit(REQUEST)
    program = (
        "import sys; from kog_dist.runtime.control import *; page = ControlPage.from_fd(int(sys.argv[1]))\n"
        "page.request_abort(1); page.set_state(2, RankState.READY); print(page.read_request(int(sys.argv[2])), page.generation)"
    )
    command = [sys.executable, "-c", program, str(page.fd), str(seq)]
    run = subprocess.run(command, pass_fds=(page.fd,), check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == f"{REQUEST} 7"
    assert page.abort_requests() == [(1, None)]
    assert page.state(2) is RankState.READY
    assert not os.get_inheritable(page.fd), "only those who are given the page get it"


def test_foreign_memory_is_refused() -> None:
    with open(os.devnull, "rb") as file, pytest.raises(LaunchError, match="not shared memory of this engine"):
        ControlPage.from_fd(os.dup(file.fileno()))
    plain = os.memfd_create("plain")
    with pytest.raises(LaunchError, match="not shared memory of this engine"):
        ControlPage.from_fd(plain)
    os.close(plain)
    segment = Segment.create("other", 8192)
    with pytest.raises(LaunchError, match="not a control page of this build"):
        ControlPage(segment)
    segment.close()


def test_another_build_is_refused(page: ControlPage) -> None:
    segment = Segment.from_fd(os.dup(page.fd))
    words = segment.words()
    words[CONTROL_HEADER.word("abi_digest")] ^= 1
    words.release()
    with pytest.raises(LaunchError, match="not a control page of this build"):
        ControlPage.from_fd(os.dup(page.fd))
    segment.close()


def test_segments_cannot_shrink_under_a_reader() -> None:
    segment = Segment.create("sealed", 5000)
    assert segment.size_bytes == 8192
    assert not any(segment.buffer[:])
    for size in (0, 4096, 16384):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(segment.fd, size)
    segment.close()


def test_memory_that_is_not_there_is_refused_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes() > 4096
    monkeypatch.setattr(memfd, "available_bytes", lambda: 8191)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("must not allocate"))
    with pytest.raises(LaunchError, match="cannot get 8192 bytes of shared memory for big: only 8191 bytes are available"):
        Segment.create("big", 8192)


def test_a_failed_allocation_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LaunchError, match="for full: No space left on device"):
        Segment.create("full", 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_everything_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        page = ControlPage.create(2, 16)
        other = ControlPage.from_fd(os.dup(page.fd))
        other.close()
        page.close()
    assert len(os.listdir("/proc/self/fd")) == before
