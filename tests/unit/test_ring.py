"""The token ring: what comes out is what was put in, whole, and never another request's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.runtime.abi import LOGPROB_ENTRY, RING_HEADER, TOKEN_ENTRY
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.ring import NO_TOKEN, Finish, TokenEntry, TokenRing, ring_bytes
from kog_dist.runtime.wait import Deadline

NUM_ENTRIES = 16


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create("ring", 4096 + ring_bytes(NUM_ENTRIES))
    yield segment
    segment.close()


@pytest.fixture
def ring(segment: Segment) -> Iterator[TokenRing]:
    ring = TokenRing(segment, 4096, NUM_ENTRIES)
    yield ring
    ring.close()


float32s = st.floats(max_value=0, width=32, allow_infinity=False, allow_nan=False)
logprobs = st.builds(
    lambda chosen, top: TokenLogprobs(chosen, tuple(i for i, _ in top), tuple(value for _, value in top)),
    float32s,
    st.lists(st.tuples(st.integers(0, 2**32 - 1), float32s), max_size=20),
)


@given(
    seq=st.integers(1, 2**32 - 1),
    index=st.integers(0, NUM_ENTRIES - 1),
    token_id=st.integers(-1, 2**32 - 2),
    stamp_ns=st.integers(0, 2**64 - 1),
    digest=st.none() | st.binary(min_size=32, max_size=32),
    finish=st.sampled_from(Finish),
    logprobs=st.none() | logprobs,
)
def test_round_trip(
    seq: int, index: int, token_id: int, stamp_ns: int, digest: bytes | None, finish: Finish, logprobs: TokenLogprobs | None
) -> None:
    segment = Segment.create("ring", ring_bytes(NUM_ENTRIES))
    writer, reader = TokenRing(segment, 0, NUM_ENTRIES), TokenRing(segment, 0, NUM_ENTRIES)
    writer.put(seq, index, token_id, stamp_ns, digest, finish, logprobs)
    assert reader.get(seq, index) == TokenEntry(seq, index, token_id, stamp_ns, digest, finish, logprobs)
    assert reader.get(seq - 1, index) is None or seq == 1
    assert [reader.get(seq, other) for other in range(NUM_ENTRIES) if other != index] == [None] * (NUM_ENTRIES - 1)
    writer.close()
    reader.close()
    segment.close()


def test_torn_entries_are_never_returned(segment: Segment, ring: TokenRing) -> None:
    """Replace the entry word by word, in many orders: before the last word is there, neither request's entry may come out."""
    num_words = TOKEN_ENTRY.size_bytes // 8
    words = segment.array(np.uint64, num_words, 4096 + RING_HEADER.size_bytes)
    ring.put(2, 0, 222, 2, b"2" * 32, Finish.STOP)
    new = words.copy()
    ring.put(1, 0, 111, 1, b"1" * 32, Finish.NONE)
    old = words.copy()
    random = np.random.default_rng(5)
    for _ in range(50):
        words[:] = old
        assert ring.get(1, 0) is not None
        order = random.permutation(num_words)
        for word in order[:-1]:
            words[word] = new[word]
            assert ring.get(1, 0) is None
            assert ring.get(2, 0) is None
        words[order[-1]] = new[order[-1]]
        assert ring.get(2, 0) == TokenEntry(2, 0, 222, 2, b"2" * 32, Finish.STOP)
    del words


def test_log_probabilities_are_whole_or_the_entry_is_not_there(segment: Segment, ring: TokenRing) -> None:
    """Take any used word of the entry beside the token's back to an earlier request: nothing comes out."""
    found = TokenLogprobs(-0.5, (7, 8, 9), (-0.5, -1.5, -2.5))
    ring.put(1, 2, 7, 1, None, Finish.NONE, TokenLogprobs(-9.0, tuple(range(20)), (-9.0,) * 20))
    offset = 4096 + RING_HEADER.size_bytes + NUM_ENTRIES * TOKEN_ENTRY.size_bytes + 2 * LOGPROB_ENTRY.size_bytes
    words = segment.array(np.uint64, LOGPROB_ENTRY.size_bytes // 8, offset)
    old = words.copy()
    ring.put(2, 2, 7, 1, None, Finish.NONE, found)
    new = words.copy()
    top_ids, top_logprobs = LOGPROB_ENTRY.word("top_ids"), LOGPROB_ENTRY.word("top_logprobs")
    used = [0, 1, *range(top_ids, top_ids + 3), *range(top_logprobs, top_logprobs + 3)]
    for word in range(len(words)):
        words[word] = old[word]
        entry = ring.get(2, 2)
        assert (entry is None) == (word in used)
        assert entry is None or entry.logprobs == found
        words[word] = new[word]
    del words


@pytest.mark.parametrize("num_top", [0, 1, 19, 20])
def test_as_many_alternatives_as_a_request_may_ask_for_come_with_their_token(ring: TokenRing, num_top: int) -> None:
    found = TokenLogprobs(-0.25, tuple(range(num_top)), tuple(-0.5 * place for place in range(num_top)))
    ring.put(3, 1, 7, 1, None, Finish.NONE, found)
    assert ring.get(3, 1) == TokenEntry(3, 1, 7, 1, None, Finish.NONE, found)


def test_fresh_memory_holds_nothing(ring: TokenRing) -> None:
    assert all(ring.get(seq, index) is None for seq in (1, 2, 2**32 - 1) for index in range(NUM_ENTRIES))


def test_an_entry_without_a_token(ring: TokenRing) -> None:
    ring.put(1, 3, NO_TOKEN, 5, None, Finish.CANCELLED)
    assert ring.get(1, 3) == TokenEntry(1, 3, NO_TOKEN, 5, None, Finish.CANCELLED)


def test_bad_arguments_write_nothing(ring: TokenRing) -> None:
    for index in (-1, NUM_ENTRIES):
        with pytest.raises(IndexError, match=f"entry {index}"):
            ring.put(1, index, 5, 5, None, Finish.NONE)
        with pytest.raises(IndexError, match=f"entry {index}"):
            ring.get(1, index)
    with pytest.raises(ValueError, match="32 bytes"):
        ring.put(1, 0, 5, 5, b"short", Finish.NONE)
    with pytest.raises(ValueError, match="at most 20"):
        ring.put(1, 0, 5, 5, None, Finish.NONE, TokenLogprobs(0.0, tuple(range(21)), (0.0,) * 21))
    with pytest.raises(ValueError, match="alternatives"):
        ring.put(1, 0, 5, 5, None, Finish.NONE, TokenLogprobs(0.0, (1, 2), (0.0,)))
    assert ring.get(1, 0) is None


def test_wait_returns_none_at_the_deadline(ring: TokenRing) -> None:
    ring.put(1, 0, 5, 5, None, Finish.NONE)
    assert ring.wait(1, 1, Deadline.after(0.002)) is None
    assert ring.wait(1, 0, Deadline(0.0)) is not None


def test_a_reader_follows_a_writer_through_many_requests() -> None:
    """The writer is paced only by the reader's end of each request, so most reads race with the write of the same entry."""
    num_requests = 40
    segment = Segment.create("ring", ring_bytes(NUM_ENTRIES))
    writer, reader = TokenRing(segment, 0, NUM_ENTRIES), TokenRing(segment, 0, NUM_ENTRIES)
    turn = threading.Semaphore(1)

    def write() -> None:
        for seq in range(1, num_requests + 1):
            assert turn.acquire(timeout=30.0)
            for index in range(NUM_ENTRIES):
                finish = Finish.LENGTH if index == NUM_ENTRIES - 1 else Finish.NONE
                writer.put(seq, index, 1000 * seq + index, time.monotonic_ns(), bytes([seq]) * 32, finish)
                if index % 3 == seq % 3:
                    os.sched_yield()

    thread = threading.Thread(target=write)
    thread.start()
    deadline = Deadline.after(60.0)
    for seq in range(1, num_requests + 1):
        stamps = []
        for index in range(NUM_ENTRIES):
            entry = reader.wait(seq, index, deadline)
            assert entry is not None
            assert (entry.token_id, entry.digest) == (1000 * seq + index, bytes([seq]) * 32)
            assert (entry.finish is Finish.LENGTH) == (index == NUM_ENTRIES - 1)
            stamps.append(entry.stamp_ns)
        assert stamps == sorted(stamps)
        turn.release()
    thread.join(30.0)
    assert not thread.is_alive()
    writer.close()
    reader.close()
    segment.close()
