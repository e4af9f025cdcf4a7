"""The token ring: rank 0 writes what it generates, the coordinator reads it. Neither waits for the other.

Each decode slot has a ring, in which the requests of that slot have their entries one request after the other. Entry `index` of a
request has its fixed place, so a request of at most `max_context` tokens never laps itself. Every 64-bit word
of an entry carries the request's seq in its upper half. A reader takes a copy and accepts it only when all words carry the wanted
seq: an entry that is half written, or left from an earlier request, is never returned, whatever the order of the stores.
Log-probabilities, which few requests ask for, have entries of their own behind the tokens', with the same rules.
What this relies on: an aligned 8-byte word is written and read as one.
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Callable
from typing import Final, NamedTuple

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.records import dataclass
from kog_dist.runtime.abi import LOGPROB_ENTRY, RING_HEADER, TOKEN_ENTRY
from kog_dist.runtime.memfd import Segment, round_up
from kog_dist.runtime.wait import Deadline, FutexWord
from kog_dist.sampling_params import MAX_TOP_LOGPROBS

NO_TOKEN: Final = -1  # token_id of an entry that ends the answer without a token
DIGEST_BYTES: Final = 32

_LOW = 0xFFFFFFFF
_WORDS = TOKEN_ENTRY.size_bytes // 8
_DIGEST = TOKEN_ENTRY.word("digest")
_OF_PREDICTION = 16  # bits: what is above them in `drafted`
_DIGEST_WORDS, _NO_DIGEST = struct.Struct("<8I"), (0,) * 8
_HAS_DIGEST, _HAS_LOGPROBS = 1, 2
_LOGPROB_WORDS = LOGPROB_ENTRY.size_bytes // 8
_CHOSEN, _TOP_IDS, _TOP_LOGPROBS = (LOGPROB_ENTRY.word(name) for name in ("chosen", "top_ids", "top_logprobs"))


class Finish(enum.IntEnum):
    """Why an answer ended. An entry with anything but NONE is the last of its request."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    NUMERICAL_FAULT = 4
    NO_MASK = 5  # the grammar allowed nothing, or its mask did not come


class Drafted(NamedTuple):
    """Of one pass: tokens that were drafted, how many of them were right, and whether they are from the request's prediction."""

    num_tokens: int = 0
    num_right: int = 0
    is_predicted: bool = False


NOT_DRAFTED: Final = Drafted()


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One generated token. `token_id` is NO_TOKEN when the entry only ends the answer; `stamp_ns` is on the monotonic clock."""

    seq: int
    index: int
    token_id: int
    stamp_ns: int
    digest: bytes | None
    finish: Finish
    logprobs: TokenLogprobs | None = None
    drafted: Drafted = NOT_DRAFTED  # of the pass whose last token this is


def ring_bytes(num_entries: int) -> int:
    """Bytes that a ring takes in a segment."""
    return RING_HEADER.size_bytes + round_up(num_entries * (TOKEN_ENTRY.size_bytes + LOGPROB_ENTRY.size_bytes))


class TokenRing:
    """A view of the ring inside `segment`, at `offset` bytes; `close` before the segment is closed."""

    def __init__(self, segment: Segment, offset: int, num_entries: int, header_offset: int | None = None) -> None:
        """`header_offset`: of the RingHeader, where it is that of another ring; a reader waits for entries of all its rings."""
        header_offset = offset if header_offset is None else header_offset
        self.num_entries = num_entries
        first, end = (offset + RING_HEADER.size_bytes) // 8, (offset + ring_bytes(num_entries)) // 8
        with segment.words() as every_word:  # NumPy would take three times as long for an entry
            self._header = every_word[header_offset // 8 : header_offset // 8 + 1]
            self._entries = every_word[first : first + num_entries * _WORDS]
            self._logprobs = every_word[first + num_entries * _WORDS : end]
        self._futex = FutexWord(segment.buffer, header_offset)

    def put(
        self,
        seq: int,
        index: int,
        token_id: int,
        stamp_ns: int,
        digest: bytes | None,
        finish: Finish,
        logprobs: TokenLogprobs | None = None,
        drafted: Drafted = NOT_DRAFTED,
    ) -> None:
        """Write entry `index` of request `seq` and wake the reader. Only rank 0 calls this; it never waits.

        `digest` is 32 bytes or None. Raises IndexError when `index` is outside the ring, ValueError for a digest of another size
        or too many alternatives.
        """
        if not 0 <= index < self.num_entries:
            raise IndexError(f"entry {index} of request {seq} is outside the token ring of {self.num_entries} entries")
        flags = _HAS_DIGEST * (digest is not None) | _HAS_LOGPROBS * (logprobs is not None)
        if digest is not None and len(digest) != DIGEST_BYTES:
            raise ValueError(f"a digest of the logits has {DIGEST_BYTES} bytes, got {len(digest)}")
        digest_words = _NO_DIGEST if digest is None else _DIGEST_WORDS.unpack(digest)
        if logprobs is not None:
            self._put_logprobs(seq, index, logprobs)
        tag = (seq & _LOW) << 32
        drafts = drafted.num_tokens | drafted.is_predicted << _OF_PREDICTION, drafted.num_right
        payloads = (token_id & _LOW, index, int(finish), flags, stamp_ns & _LOW, stamp_ns >> 32, *drafts, *digest_words)
        self._entries[index * _WORDS : (index + 1) * _WORDS] = array("Q", [tag | payload for payload in payloads])
        self._header[0] += 1  # after the entry: x86 keeps stores in order; elsewhere a late wake costs a poll
        self._futex.wake()

    def announce(self) -> None:
        """Wake the reader though nothing was put: the next entry comes soon. Only rank 0 calls this."""
        self._header[0] += 1
        self._futex.wake()

    def _put_logprobs(self, seq: int, index: int, logprobs: TokenLogprobs) -> None:
        num_top = len(logprobs.top_ids)
        if not num_top == len(logprobs.top_logprobs) <= MAX_TOP_LOGPROBS:
            raise ValueError(f"a token has at most {MAX_TOP_LOGPROBS} alternatives, got {num_top}")
        entry, tag = [0] * _LOGPROB_WORDS, (seq & _LOW) << 32
        entry[0] = num_top
        entry[_TOP_IDS : _TOP_IDS + num_top] = logprobs.top_ids
        bits = array("I", array("f", (logprobs.chosen, *logprobs.top_logprobs)).tobytes())
        entry[_CHOSEN], entry[_TOP_LOGPROBS : _TOP_LOGPROBS + num_top] = bits[0], bits[1:]
        self._logprobs[index * _LOGPROB_WORDS : (index + 1) * _LOGPROB_WORDS] = array("Q", [tag | word for word in entry])

    def _get_logprobs(self, seq: int, index: int) -> TokenLogprobs | None:
        entry = self._logprobs[index * _LOGPROB_WORDS : (index + 1) * _LOGPROB_WORDS].tolist()
        num_top = entry[0] & _LOW
        if num_top > MAX_TOP_LOGPROBS:
            return None
        ids, values = entry[_TOP_IDS : _TOP_IDS + num_top], entry[_TOP_LOGPROBS : _TOP_LOGPROBS + num_top]
        if any(word >> 32 != seq & _LOW for word in (entry[0], entry[_CHOSEN], *ids, *values)):
            return None
        chosen, *logprobs = array("f", array("I", [word & _LOW for word in (entry[_CHOSEN], *values)]).tobytes())
        return TokenLogprobs(chosen, tuple(word & _LOW for word in ids), tuple(logprobs))

    def get(self, seq: int, index: int) -> TokenEntry | None:
        """Entry `index` of request `seq` (from 1), or None when it is not completely there. Never waits."""
        if not 0 <= index < self.num_entries:
            raise IndexError(f"entry {index} of request {seq} is outside the token ring of {self.num_entries} entries")
        tag, first = seq & _LOW, index * _WORDS
        if self._entries[first] >> 32 != tag:
            return None  # so it is almost each time
        entry = self._entries[first : first + _WORDS].tolist()  # what is checked is what is used
        for word in entry:
            if word >> 32 != tag:
                return None
        token_id, _, finish, flags, low, high, drafted, right = (word & _LOW for word in entry[:_DIGEST])
        logprobs = self._get_logprobs(seq, index) if flags & _HAS_LOGPROBS else None
        if flags & _HAS_LOGPROBS and logprobs is None:
            return None
        return TokenEntry(
            seq=seq,
            index=index,
            token_id=NO_TOKEN if token_id == _LOW else token_id,
            stamp_ns=low | high << 32,
            digest=_DIGEST_WORDS.pack(*(word & _LOW for word in entry[_DIGEST:])) if flags & _HAS_DIGEST else None,
            finish=Finish(finish),
            logprobs=logprobs,
            drafted=_drafted(drafted, right) if drafted else NOT_DRAFTED,
        )

    def is_begun(self, seq: int, index: int) -> bool:
        """Whether some of the entry is there, so that `get` is worth asking."""
        return bool(self._entries[index * _WORDS] >> 32 == seq & _LOW)

    def wait(
        self, seq: int, index: int, deadline: Deadline, *, poll_s: float = 0.05, interrupted: Callable[[], bool] = lambda: False
    ) -> TokenEntry | None:
        """Block in the kernel until the entry is there; None when the deadline came first, or when `interrupted` was true.

        Looks again every `poll_s`, and after each `announce`: writers that cannot wake anybody (a GPU) need a small one. The
        coordinator checks for aborts between calls, so give it short deadlines.
        """
        while True:
            num_put = self._header[0]  # read before the entry: a put in between changes the word, and the wait returns
            entry = self.get(seq, index)
            if entry is not None or deadline.expired() or interrupted():
                return entry
            self._futex.wait(num_put, min(poll_s, deadline.remaining_s()))

    def close(self) -> None:
        """Let go of the segment."""
        self._futex.close()
        for words in (self._header, self._entries, self._logprobs):
            words.release()


def _drafted(word: int, num_right: int) -> Drafted:
    return Drafted(word & (1 << _OF_PREDICTION) - 1, num_right, bool(word >> _OF_PREDICTION))
