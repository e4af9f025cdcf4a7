"""The books of the ranks' copies of states: behind which beginnings of sequences a request can go on that has a state.

A state that every token changes cannot be taken back, so ranks copy it, while they read a prompt and while they answer, into
slots of the pool beside its blocks. `places` says where: behind whole STEPs of a prompt (fewer of a long one, but always the
last), behind its end, where it leaves what others have begun with, behind whole STEPs of the answer, of which the last two stay,
and behind its end. The least recently used copies make room. Behind a `stem` several conversations go on: a copy there is used by
all that pass it, and stays as long as it is among the last so used ones of a fourth of the slots.

Prefill on GPUs takes a prompt in strides of 64 tokens, and gives the same bits wherever it goes on, as long as that is between
two of them. So places in a prompt lie whole strides behind where its request goes on (`strided`): what it is answered depends
neither on which copies it makes nor on which of them another one finds.

Behind the slots of a GPU there may be some in the host's memory. When a request has ended, the copies that would make room next
move there (`spill`), while nobody waits; one that is asked for again comes from there. Nothing else is put there.

Whose a slot is. Ranks do what they are told in the order in which they are told it: a copy is loaded when its request begins,
and one behind a whole sequence (`end`) is made before whatever comes next. So the books know what stands in a slot by then. But
the copies at `places` are made while their request runs beside others, at times that the books do not know. From `reserve` to
`release` their slots are that request's alone: `find` says nothing of what stands there, and nobody else is told to put anything
there. They are released once the request is known to have come so far, or to have ended; then `made` says what it has made, and
in slots that it did not come to the old copies still are. It goes on behind a copy before it makes any, and in another slot
(`spared`). Its own state is in its KV cache, never in a slot, so it needs none: where others have them all, it makes fewer
copies, or none.

A copy is found by a digest of scope and tokens before it, whatever KV cache or blocks hold the keys and values of these.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence

from kog_dist.late_numpy import np
from kog_dist.records import dataclass

STEP = 512  # tokens: so many at most are read anew in front of the newest that two prompts share
_SHARE_OF_SLOTS = 4  # a fourth of them at most for whole STEPs of one prompt, and as many for stems
_NUM_OF_ANSWER = 2
_AHEAD = 8  # slots that are to be free for the copies of the next request, where those that were there can move
_OPENING = 32  # tokens that open an answer, at most


def of_messages(prompt: array[int]) -> tuple[int, int]:
    """Where a chat's second message begins and where its last one does, which opens the answer; 0: there is none.

    At the second agents part that have the same system prompt and tools, at the last the next turn leaves this prompt. Messages
    begin with the token that the prompt begins with, as Qwen's do.
    """
    starts = np.flatnonzero(np.frombuffer(prompt, np.uint32) == prompt[0]).tolist() if prompt else []
    last = starts[-1] if len(starts) > 1 and len(prompt) - starts[-1] <= _OPENING else 0
    return starts[1] if len(starts) > 2 and starts[1] >= STEP else 0, last


@dataclass(slots=True)
class _Copy:
    """In a slot. `last_used` 0: nothing is."""

    scope: str = ""
    position: int = 0
    digest: bytes = b""
    last_used: int = 0
    is_stem: bool = False


class KeptStates:
    """See the top of this file. `num_host_slots` slots, behind the `num_slots` of the device, are the host's."""

    def __init__(self, num_slots: int, stride: int = 1, num_host_slots: int = 0) -> None:
        self.num_slots, self.num_host_slots, self._stride, self._uses = num_slots, num_host_slots, stride, 0
        self._reserved = set[int]()  # by requests that run, whatever else is forgotten
        self.clear()

    def clear(self) -> None:
        """Nothing is kept any more."""
        self._copies = [_Copy() for _ in range(self.num_slots + self.num_host_slots)]
        self._slots: dict[str, dict[int, dict[bytes, int]]] = {}  # by scope, position, digest

    @property
    def num_used(self) -> int:
        """Slots that are taken, of the host, too."""
        return sum(copy.last_used > 0 for copy in self._copies)

    def find(self, scope: str, tokens: array[int]) -> dict[int, int]:
        """The slots of copies behind beginnings of `tokens`, by their positions."""
        by_position, found = self._slots.get(scope, {}), dict[int, int]()
        positions = sorted(position for position in by_position if position <= len(tokens))
        for position, digest in zip(positions, _digests(tokens, positions), strict=True):
            slot = by_position[position].get(digest)
            if slot is not None and slot not in self._reserved:
                found[position] = slot
        return found

    def use(self, passed: Mapping[int, int], slot: int | None, stems: Collection[int]) -> None:
        """A request goes on behind the copy in `slot` now, if in any. Its prompt passes those of `passed`, slots by position, of
        which those at `stems` are known to be such from now on.
        """
        self._uses += 1
        for at, other in passed.items():
            copy = self._copies[other]
            copy.is_stem |= at in stems
            if copy.is_stem or other == slot:
                copy.last_used = self._uses

    def strided(self, position: int, first: int) -> int:
        """The last place at or before a position that lies whole strides behind `first`."""
        return position - (position - first) % self._stride

    def places(
        self,
        num_cached: int,
        end: int,
        num_answer: int,
        parts: Sequence[int],
        known: Collection[int],
        spared: int | None,
        *,
        shares: bool = False,
    ) -> list[tuple[int, int]]:
        """Of a request: positions behind which its state is to be copied, in order, and the slots.

        Of its prompt tokens `num_cached` .. `end` are read; then that which is left, and the answer's but for the last of at most
        `num_answer`. At `parts` other requests do or may go on otherwise, the likeliest first; there are copies behind its first
        `known` ones. What stands in the slot `spared` stays. `shares`: others may begin while it runs, and half of the slots that
        can make room are left to them.
        """
        every = STEP
        while end // every - num_cached // every > max(self.num_slots // _SHARE_OF_SLOTS, 1):
            every *= 2
        steps = range((num_cached // every + 1) * every, end, every)
        wanted = [end, end // STEP * STEP, *parts, *sorted(steps, reverse=True)]  # the first of them before others
        last, *others = (self.strided(at, num_cached) for at in wanted)
        of_prompt = [at for at in dict.fromkeys((last, *others)) if at and (at == last or num_cached < at < last)]
        of_prompt = [at for at in of_prompt if at not in known]
        slots = self._oldest(spared)
        if shares:
            slots = slots[: -(-len(slots) // 2)]
        of_answer = range((end // STEP + 1) * STEP, end + num_answer + 1, STEP)
        num_of_answer = min(len(of_answer), _NUM_OF_ANSWER, max(len(slots) - 1, 0))
        own = slots[:num_of_answer]
        found = sorted(zip(of_prompt, slots[num_of_answer:], strict=False))
        return found + [(at, own[number % num_of_answer]) for number, at in enumerate(of_answer)] if num_of_answer else found

    def _oldest(self, spared: int | None = None) -> list[int]:
        """Slots in the order in which they make room, without those that do not."""
        stems = [slot for slot in range(self.num_slots) if self._copies[slot].is_stem]
        stems.sort(key=lambda slot: (-self._copies[slot].last_used, self._copies[slot].position))  # of one path the shortest
        staying = {spared, *stems[: self.num_slots // _SHARE_OF_SLOTS], *self._reserved}
        slots = [slot for slot in range(self.num_slots) if slot not in staying]
        return sorted(slots, key=lambda slot: self._copies[slot].last_used)

    def reserve(self, slots: Iterable[int]) -> None:
        """A request that runs from now on puts copies there: they are its own."""
        self._reserved.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """It puts none there any more; what it has made `made` says next."""
        self._reserved.difference_update(slots)

    def made(self, scope: str, tokens: array[int], places: Iterable[tuple[int, int]], stems: Collection[int] = ()) -> None:
        """The state of a sequence has been copied at these positions, to these slots, in this order."""
        by_slot = {slot: position for position, slot in places}  # of a slot that was used again the last
        positions = sorted(set(by_slot.values()))
        digests = dict(zip(positions, _digests(tokens, positions), strict=True))
        self._uses += 1
        for slot, position in sorted(by_slot.items(), key=lambda item: item[1]):
            self._drop(slot)
            is_stem = position in stems
            if (twin := self._slots.get(scope, {}).get(position, {}).get(digests[position])) is not None:
                is_stem |= self._copies[twin].is_stem
                self._drop(twin)
            self._put(slot, _Copy(scope, position, digests[position], self._uses, is_stem))

    def end(self, scope: str, tokens: array[int]) -> int | None:
        """The slot for a copy behind a whole sequence, which is made now; None if there is one, or no room."""
        if not self.num_slots or len(tokens) in self.find(scope, tokens) or not tokens:
            return None
        slot = next(iter(self._oldest()), None)
        if slot is not None:
            self.made(scope, tokens, [(len(tokens), slot)])
        return slot

    def spill(self) -> list[tuple[int, int]]:
        """Copies that move to the host now: from which slot to which one."""
        moves, of_host = list[tuple[int, int]](), range(self.num_slots, self.num_slots + self.num_host_slots)
        num_ahead = min(_AHEAD, -(-self.num_slots // 2))
        for slot in self._oldest()[:num_ahead] if of_host else ():
            copy, to = self._copies[slot], min(of_host, key=lambda host: self._copies[host].last_used)
            if copy.last_used > self._copies[to].last_used:  # what was used later stays
                for one in (slot, to):
                    self._drop(one)
                self._put(to, copy)
                moves.append((slot, to))
        return moves

    def _put(self, slot: int, copy: _Copy) -> None:
        self._copies[slot] = copy
        self._slots.setdefault(copy.scope, {}).setdefault(copy.position, {})[copy.digest] = slot

    def _drop(self, slot: int) -> None:
        copy = self._copies[slot]
        if copy.last_used:
            by_position = self._slots[copy.scope]
            del by_position[copy.position][copy.digest]
            if not by_position[copy.position]:
                del by_position[copy.position]
            if not by_position:  # scopes come without end
                del self._slots[copy.scope]
        self._copies[slot] = _Copy()


def _digests(tokens: array[int], positions: Sequence[int]) -> list[bytes]:
    """Of the first so many tokens, for ascending numbers of them."""
    digest, found, last = hashlib.blake2b(digest_size=16), list[bytes](), 0
    for position in positions:
        digest.update(tokens[last:position].tobytes())
        found.append(digest.digest())
        last = position
    return found
