"""Proves that words within a GPU may be written again, and that nobody takes an old word for a new one; or says where not.

Thread blocks exchange words: 64 bits with a value and a tag, written once and polled by their readers, in places that are used
again and again (docs/monokernel.md). Nothing tells a writer that its word was read. What makes that right is what the writer
itself had to wait for. Here that is followed through a few tokens, with a set of known events for each event: happens-before,
as Lamport's clocks have it, kept as sets since roles are symbolic.

**One event stands for all thread blocks that do the same.** So a known event says for which of its doers it is known, seen from
any doer of the event that knows it (`Scope`): the same thread block of the same rank, all thread blocks of the rank, the same
one of all ranks, or all of all ranks. Scopes are two bits, and two steps one after the other have the bits of both: what my own
earlier event knew of all, I know of all; what all whom I read knew of themselves, I know of all. The one exception: where not
every thread block has words of a vector, its readers learn nothing of the others but what the writers knew of all. Nothing is
assumed of how fast anybody is, so an empty list of findings is a proof for any order in which thread blocks run.

What was stored before, in program order or by a chain of words that were seen, counts as done before: the contract of words.cuh,
whose loads and stores are relaxed. It is not proved here.

The events are given in one order in which they can happen, the earliest possible of each role. What is read before its write in
that order has no writer, or waits for itself.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from kog_dist.records import dataclass

_MOST_FINDINGS = 20


class Scope(enum.IntEnum):
    """For which doers of an event something is known, or whose words are read: two bits."""

    SAME = 0
    BLOCKS = 1  # of all thread blocks, in place of the same one
    RANKS = 2  # of all ranks, in place of the same one
    ALL = 3


@dataclass(frozen=True, slots=True)
class WordKind:
    """One kind of words. `tag_bits`: of what a reader compares. `num_slots`: versions of a place that are kept side by side.

    `tags_go_on`: whether tags also advance in tokens that do not write a place; then nobody may wait for a word that may be
    older than a token, since tags come again. `owner_moves`: whether a word has another writer in another layer.
    """

    name: str
    tag_bits: int = 16
    num_slots: int = 1
    tags_go_on: bool = True
    owner_moves: bool = False


@dataclass(frozen=True, slots=True)
class Version:
    """What is written to a place (lane, head, ...) of a kind at a time; `tag` before it is cut to the kind's bits."""

    kind: WordKind
    place: tuple[Any, ...]
    tag: int
    slot: int = 0

    def __str__(self) -> str:
        place = "".join(f" {part}" for part in self.place)
        return f"{self.kind.name}{place} with tag {self.tag}"


@dataclass(frozen=True, slots=True)
class Read:
    """`scope`: whose words each doer reads. `teaches`: every doer reads words of every writer in that scope. `of_some`: of one of
    them at least, and so learns what writers knew of all.
    """

    version: Version
    scope: Scope = Scope.BLOCKS
    teaches: bool = True
    of_some: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    """`by_all`: every thread block that does the event has words of it."""

    version: Version
    by_all: bool = True


@dataclass(eq=False, slots=True)
class Event:
    """What a role of the thread blocks does at a time: read, and then write.

    `after`: what comes before without words: earlier events of the same thread block, or of those in the scope. `token`:
    counted over tokens that run layers. `start`: what every role of a thread block has waited for since the token began.
    `is_of_some`: not every thread block does it, and each that does has words of what it writes.
    """

    name: str
    token: int
    reads: tuple[Read, ...] = ()
    writes: tuple[Write, ...] = ()
    after: tuple[tuple[Event, Scope], ...] = ()
    start: Event | None = None
    is_of_some: bool = False
    bit: int = 0  # of itself, in what is known
    known: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # by scope: bits of events and writes

    def knows(self, bit: int, scope: int) -> bool:
        """Whether the event or write happened before, in at least this scope."""
        return self.known[scope] & bit != 0

    def learn(self, known: list[int], scope: int, *, of_all_only: bool = False) -> None:
        """What others in this scope know."""
        for which, bits in enumerate(known):
            if not of_all_only or which & Scope.BLOCKS:
                self.known[which | scope] |= bits
        self._close()

    def learn_of(self, bits: int, scope: int) -> None:
        """Events or writes."""
        self.known[scope] |= bits
        self._close()

    def _close(self) -> None:
        """What is known in a scope is known in those that it contains."""
        same, blocks, ranks, everybody = self.known
        self.known[:] = (same | blocks | ranks | everybody, blocks | everybody, ranks | everybody, everybody)


@dataclass(slots=True)
class _Held:
    """A version that was written."""

    version: Version
    event: Event
    bit: int
    by_all: bool
    readers: list[tuple[Event, Scope]] = field(default_factory=list)


class WordCheck:
    """Follows events; `findings` says what is wrong, in words."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self._held: dict[tuple[object, ...], list[_Held]] = {}  # of each place and slot, oldest first
        self._num_bits = 0

    def run(self, events: Iterable[Event]) -> list[str]:
        """Findings; none accepts the events."""
        for event in events:
            self._do(event)
            if len(self.findings) >= _MOST_FINDINGS:
                break
        return self.findings

    def _bit(self) -> int:
        self._num_bits += 1
        return 1 << self._num_bits

    def _do(self, event: Event) -> None:
        for before, scope in event.after:
            event.learn(before.known, scope)
        event.bit = self._bit()
        for read in event.reads:
            self._read(event, read)
        event.learn_of(event.bit, Scope.SAME)
        for write in event.writes:
            self._write(event, write)

    def _read(self, event: Event, read: Read) -> None:
        version = read.version
        history = self._held.get((version.kind.name, version.place, version.slot), [])
        if len(history) == 1 and version.tag % (1 << version.kind.tag_bits) == 0:
            self.findings.append(f"{event.name} may take memory that nobody wrote yet for {version}: its tag is 0")
        if not history or history[-1].version.tag != version.tag:
            there = f"{history[-1].version} is there" if history else "nothing was written there"
            self.findings.append(f"{event.name} waits for {version}, which nobody has written by then: {there}")
            return
        held = history[-1]
        self.findings += self._old_words(event, read, history)
        held.readers.append((event, read.scope))
        if read.teaches:
            event.learn_of(held.bit | (held.event.bit if held.event.is_of_some else 0), read.scope)
        if read.teaches or read.of_some:
            of_all_only = read.of_some or not held.by_all or held.event.is_of_some
            event.learn(held.event.known, read.scope, of_all_only=of_all_only)

    @staticmethod
    def _old_words(event: Event, read: Read, history: list[_Held]) -> Iterator[str]:
        """Older words that may still be there when a reader looks first, which is not before its token began."""
        version, modulus = read.version, 1 << read.version.kind.tag_bits
        known = 0 if event.start is None else event.start.known[read.scope]  # bits, of what has come before the token
        if known & history[-1].bit:
            return  # the version itself has come before
        oldest = None
        for held in reversed(history[:-1]):
            if (version.tag - held.version.tag) % modulus == 0:
                yield f"{event.name} may take {held.version} for {version}: their tags are equal in {version.kind.tag_bits} bits"
            oldest = held
            if known & held.bit:
                break
        is_new = event.start is None or (oldest is None and event.token == 0)
        if version.kind.tags_go_on and not is_new and (oldest is None or oldest.event.token < event.token - 1):
            seen = f"{oldest.version}" if oldest else "what was there before all tokens"
            yield f"{event.name} waits for {version} where {seen} may have stood for any number of tokens: tags come again"

    def _write(self, event: Event, write: Write) -> None:
        version, bit = write.version, self._bit()
        history = self._held.setdefault((version.kind.name, version.place, version.slot), [])
        if history:
            old = history[-1]
            if version.tag <= old.version.tag:
                self.findings.append(f"{event.name} writes {version} behind {old.version}")
            if not event.knows(old.bit, Scope.BLOCKS if version.kind.owner_moves else Scope.SAME):
                self.findings.append(f"{event.name} writes {version}, and {old.version} may be written later ({old.event.name})")
            for reader, scope in old.readers:
                if not event.knows(reader.bit, scope):
                    self.findings.append(f"{event.name} writes {version}, and {reader.name} may not have read {old.version} yet")
            if len(history) > 1 and all(held.event.token < event.token - 1 for held in history[:2]):
                del history[0]  # of an earlier token than anybody asks for
        event.learn_of(bit, Scope.SAME)
        history.append(_Held(version, event, bit, write.by_all))
