"""How the coordinator waits for the ranks' tokens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage, KvLayout
from kog_dist.runtime.ring import NO_TOKEN, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.wait import POLLS_PER_CHECK, Deadline, FutexWord
from kog_dist.workers.coordinator import decode_slot
from kog_dist.workers.coordinator.decode_slot import DecodeSlots

LONG_S = 60.0
Waits = list[float]


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(1, 16)
    page.set_kv_layout(0, KvLayout(1))
    yield page
    page.close()


@pytest.fixture
def slots(control: ControlPage) -> DecodeSlots:
    slots = DecodeSlots(control, None)
    slots.submit(slots.slots[0], DecodeRequest((1, 2, 3), 4), reuse_kv=True)
    return slots


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Seconds of each wait in the kernel; none of them lasts."""
    found: Waits = []

    def wait(word: FutexWord, expected: int, timeout_s: float) -> bool:
        found.append(timeout_s)
        return False

    monkeypatch.setattr(FutexWord, "wait", wait)
    return found


def after(count: int) -> Callable[[], bool]:
    """True from the call `count` on."""
    calls = iter(range(1, 10**9))
    return lambda: next(calls) >= count


@pytest.mark.parametrize(("have_own_cores", "poll_s"), [(True, 0.002), (False, 0.005)])
def test_a_message_ends_the_wait_soon(
    control: ControlPage, slots: DecodeSlots, waits: Waits, have_own_cores: bool, poll_s: float
) -> None:
    if have_own_cores:
        control.heed_rousing(0)
    slots.wait(LONG_S, after(4))
    assert waits == [poll_s] * 3


@pytest.mark.parametrize("stage", [RankStage.LAUNCHED, RankStage.PREFILLED])
def test_the_first_token_is_looked_for_once_it_must_come(
    control: ControlPage, slots: DecodeSlots, waits: Waits, monkeypatch: pytest.MonkeyPatch, stage: RankStage
) -> None:
    control.stamp(0, RankStage.READ)
    monkeypatch.setattr(decode_slot, "LOOKS_S", {stage: 1e9})
    slots.wait(LONG_S, after(2))
    assert len(waits) == 1, "it does not come yet"
    control.stamp(0, stage)
    slots.wait(LONG_S, after(3))
    assert len(waits) == 1, "it looks, until something else is to be done"
    monkeypatch.setattr(decode_slot, "LOOKS_S", {stage: 0.0})
    slots.wait(LONG_S, after(2))
    assert len(waits) == 2, "the token did not come in time, and sleeping goes on"


def test_looking_ends_after_its_time(control: ControlPage, slots: DecodeSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it has looked by then."""
    control.stamp(0, RankStage.LAUNCHED)
    launched_ns = control.stages_ns(0)[RankStage.LAUNCHED]
    monkeypatch.setattr(decode_slot, "LOOKS_S", {RankStage.LAUNCHED: 0.1})
    looks = 0

    def look(seq: int, index: int) -> bool:
        nonlocal looks
        looks += 1
        return False

    monkeypatch.setattr(control.ring, "is_begun", look)
    slots.wait(LONG_S, lambda: False)
    assert time.monotonic_ns() - launched_ns >= 100_000_000
    assert looks > POLLS_PER_CHECK
    monkeypatch.setattr(decode_slot, "LOOKS_S", {RankStage.LAUNCHED: 1e9})
    slots.wait(0.0, lambda: False)
    assert looks < 10**6, "at most as long as it was told to wait"


def test_later_tokens_and_launches_of_other_requests_are_slept_for(control: ControlPage, waits: Waits) -> None:
    control.stamp(0, RankStage.LAUNCHED)
    slots = DecodeSlots(control, None)
    slots.submit(slots.slots[0], DecodeRequest((1, 2, 3), 4), reuse_kv=True)
    slots.wait(LONG_S, after(2))
    assert len(waits) == 1
    control.stamp(0, RankStage.LAUNCHED)
    control.ring.put(1, 0, 7, 1, None, Finish.NONE)
    assert [entry.token_id for entry in slots.slots[0].read()] == [7]
    slots.wait(LONG_S, after(2))
    assert len(waits) == 2


def test_an_announcement_wakes_the_reader(control: ControlPage, slots: DecodeSlots) -> None:
    other = ControlPage.from_fd(os.dup(control.fd))
    begun, is_over = threading.Event(), threading.Event()

    def interrupted() -> bool:
        begun.set()
        return is_over.is_set()

    deadline = Deadline.after(LONG_S)
    reader = threading.Thread(target=lambda: control.ring.wait(1, 0, deadline, poll_s=LONG_S, interrupted=interrupted))
    reader.start()
    assert begun.wait(LONG_S)
    is_over.set()
    other.ring.announce()
    reader.join(LONG_S / 2)
    assert not reader.is_alive()
    other.close()


def test_nothing_is_waited_for_when_ranks_are_idle(control: ControlPage, waits: Waits) -> None:
    DecodeSlots(control, None).wait(LONG_S, lambda: False)
    assert waits == []


def test_after_a_fault_of_the_numbers_nothing_is_kept(control: ControlPage) -> None:
    """The ranks clear all their caches, not that of the request alone: what others left there is gone, too."""
    control.set_kv_layout(0, KvLayout(2))
    slots = DecodeSlots(control, None)
    slot = slots.slots[0]
    first, second = tuple(range(1, 9)), tuple(range(21, 29))
    for prompt, finish in (
        (first, Finish.LENGTH),
        (second, Finish.LENGTH),
        (first, Finish.NUMERICAL_FAULT),
        (second, Finish.LENGTH),
    ):
        num_cached = slots.submit(slot, DecodeRequest(prompt, 1), reuse_kv=True).kv.num_cached
        assert slot.seq is not None
        control.set_progress(0, slot.seq, len(prompt))
        control.ring.put(slot.seq, 0, 5, 1, None, finish)
        slot.read()
        control.set_read(0, slot.seq or control.doorbell())
        if prompt == first:
            assert num_cached == (7 if finish is Finish.NUMERICAL_FAULT else 0)
    assert num_cached == 0


def test_each_slot_has_its_own_ring_and_cancel() -> None:
    page = ControlPage.create(1, 16, parallel=2)
    page.set_kv_layout(0, KvLayout(2))
    slots = DecodeSlots(page, None)
    first, second = slots.free()
    slots.submit(first, DecodeRequest((1, 2), 4), reuse_kv=True)
    slots.submit(second, DecodeRequest((3, 4), 4), reuse_kv=True)
    assert slots.free() == [], "both are taken, and no rank has read the first block"
    assert (page.read_request(1).decode_slot, page.read_request(2).decode_slot) == (0, 1)
    assert page.read_request(1).kv.cache != page.read_request(2).kv.cache
    second.cancel()
    assert (page.cancelled(1, 0), page.cancelled(2, 1)) == (False, True)
    page.set_progress(0, 2, 2, 1)
    page.rings[1].put(2, 0, NO_TOKEN, 1, None, Finish.CANCELLED)
    page.rings[0].put(1, 0, 9, 1, None, Finish.NONE)
    assert [entry.token_id for entry in first.read()] == [9]
    assert [entry.finish for entry in second.read()] == [Finish.CANCELLED]
    assert (slots.busy, second.busy) == ([first], False)
    page.close()


def test_copies_to_the_pool_come_before_the_next_request() -> None:
    """Their block may not be free yet; what is submitted behind them would overwrite what they copy."""
    page = ControlPage.create(1, 256, parallel=2)
    page.set_kv_layout(0, KvLayout(2, block_tokens=64, num_slots=8))
    slots = DecodeSlots(page, None)
    first, second = slots.free()
    slots.submit(first, DecodeRequest(tuple(range(1, 100)), 4), reuse_kv=True)
    slots.submit(second, DecodeRequest((3, 4), 4), reuse_kv=True)
    page.set_progress(0, 1, 99)
    page.rings[0].put(1, 0, 5, 1, None, Finish.LENGTH)
    first.read()
    assert (page.doorbell(), slots.free()) == (2, []), "request 1 is in the block that the copies will have"
    page.set_read(0, 1)
    assert slots.free() == [], "the copies are handed over, and their block is not read yet"
    assert page.read_request(3).only_copies
    page.set_read(0, 2)
    assert slots.free() == [first]
    page.close()


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_prompt_waits_for_a_running_request_that_still_reads_its_beginning(is_recurrent: bool) -> None:
    """Not where what is read cannot be gone on behind at any place."""
    page = ControlPage.create(1, 512, parallel=2)
    page.set_kv_layout(0, KvLayout(2))
    slots, read = DecodeSlots(page, None, is_recurrent=is_recurrent), tuple(range(200))
    another = (*read[:150], 7, 8, 9)
    assert not slots.is_being_read(another, "mine", {}), "nobody runs"
    slots.submit(slots.slots[0], DecodeRequest(read, 4), reuse_kv=True, scope="mine")
    seq, commons = slots.slots[0].seq, dict[int, int]()
    assert seq is not None
    for position, is_left in ((0, True), (86, True), (87, False), (199, False)):  # 150 - 86 = 64
        page.set_progress(0, seq, position)
        assert slots.is_being_read(another, "mine", commons) is (is_left and not is_recurrent), position
    assert commons == ({} if is_recurrent else {seq: 150}), "counted once"
    page.set_progress(0, seq, 0)
    assert not slots.is_being_read(another, "another's", {})
    assert not slots.is_being_read(another[140:], "mine", {})
    assert slots.is_being_read(read, "mine", {}) is not is_recurrent, "the same prompt"
    page.close()
