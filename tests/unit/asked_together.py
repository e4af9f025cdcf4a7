"""Requests that come, run together and go, as a coordinator and grammar processes see them, for tests of engines in threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.masks import num_words
from kog_dist.runtime.ring import Drafted, Finish, TokenEntry
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.coordinator.decode_slot import DecodeSlot, DecodeSlots

PATIENCE_S = 60.0
GIVES_WAY_S = 20e-6  # a yield of the system's gives the core to other processes, and keeps Python's lock from threads of this one


@dataclass
class Asked:
    """A request, and what became of it."""

    request: DecodeRequest
    has_grammar: bool = False
    cancel_at: int | None = None  # once so many tokens are there
    entries: list[TokenEntry] = field(default_factory=list)

    def answer(self) -> list[TokenEntry]:
        return [replace(entry, seq=0, stamp_ns=0, drafted=Drafted()) for entry in self.entries]


class AskedTogether:
    """What a coordinator does with ranks that serve a control page. `is_broken`: one of them has failed, as `error` says."""

    has_hints = True  # whether requests with drafts and a grammar are told what is forced, right or wrong

    def __init__(self, control: ControlPage, slots: DecodeSlots, vocab: int) -> None:
        self.control, self.slots, self.vocab = control, slots, vocab
        self.epochs, self.is_broken, self.error = iter(range(1, 10**9, 1000)), threading.Event(), list[BaseException]()
        self._giving_way = patch("os.sched_yield", lambda: time.sleep(GIVES_WAY_S))
        self._giving_way.start()

    def run(self, asked: Sequence[Asked], chance: random.Random, *, reuse_kv: bool = True) -> None:
        """All of them, as many at a time as there are slots; they come after random numbers of tokens."""
        waiting, running, followers = list(asked), dict[DecodeSlot, Asked](), list[threading.Thread]()
        deadline = Deadline.after(PATIENCE_S)
        while waiting or running:
            assert not deadline.expired()
            assert not self.is_broken.is_set(), self.error
            while waiting and (free := self.slots.free()) and (not running or chance.random() < 0.5):
                one, slot = waiting.pop(0), chance.choice(free)
                request = one.request
                if one.has_grammar:
                    request = replace(request, mask_epoch=next(self.epochs))
                self.slots.submit(slot, request, reuse_kv=reuse_kv)
                running[slot] = one
                if one.has_grammar:
                    arguments = (slot.number, slot.seq, request.mask_epoch, request.drafts and self.has_hints)
                    followers.append(threading.Thread(target=self._follow, args=arguments))
                    followers[-1].start()
            self.slots.wait(0.01, lambda: False)
            for slot in list(running):
                one = running[slot]
                one.entries += slot.read()
                if one.cancel_at is not None and len(one.entries) >= one.cancel_at:
                    slot.cancel()
                if not slot.busy:
                    del running[slot]
        for follower in followers:
            follower.join(PATIENCE_S)
            assert not follower.is_alive()

    def hear(self, asked: Sequence[Asked], deadline: Deadline, poll_s: float = 0.01) -> None:
        """Wait for a moment, and take what slots have said of their requests."""
        assert not deadline.expired()
        assert not self.is_broken.is_set(), self.error
        self.slots.wait(poll_s, lambda: False)
        for slot, one in zip(self.slots.slots, asked, strict=True):
            one.entries += slot.read()

    def stop(self, threads: Sequence[threading.Thread]) -> None:
        """Let the threads of engines end."""
        self.control.set_abort(AbortCause.SHUTDOWN)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._giving_way.stop()

    def _follow(self, slot: int, seq: int, epoch: int, hints: bool) -> None:
        """What a grammar process does: masks that depend on all that was said; the first comes late. With `hints` something that
        is forced comes in front of each, right or wrong.
        """
        said: list[int] = []
        self.control.rings[slot].wait(seq, 0, Deadline.after(0.02), poll_s=0.001)
        while True:
            allowed = np.random.default_rng(sum(said) + len(said)).random(32 * num_words(self.vocab)) < 0.5
            if hints:
                self.control.forced_slots[slot].put(epoch + len(said), said[-5:])
            self.control.mask_slots[slot].put(epoch + len(said), np.packbits(allowed, bitorder="little").view(np.uint32))
            entry = self.control.rings[slot].wait(seq, len(said), Deadline.after(PATIENCE_S), poll_s=0.001)
            if entry is None or entry.finish is not Finish.NONE:
                return
            said.append(entry.token_id)
